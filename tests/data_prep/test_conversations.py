"""Every record is kept or dropped for a named reason, and no damage takes a good record with it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data_prep.conversations import Tally, main, read_conversations
from tests.data_prep.test_records import record, turns, wrong_with

MESSY = Path(__file__).parents[3] / "shared/data/messy"
FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
CUT = "the file ends in the middle of a record"


def lines(*records: Any) -> bytes:
    """JSONL."""
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def read(folder: Path, content: bytes, name: str = "x.jsonl") -> tuple[list[str], Tally]:
    """Ids of what is kept of a file, and the tally."""
    tally, path = Tally(), folder / name
    path.write_bytes(content)
    return [
        conversation.id for conversation in read_conversations(path, tally, allow_broken=True)
    ], tally


ODD = [
    "a \u2028 \u2029 \x85 \x0c",
    "\u200f\u0627\u0644 \U0001f600",
    "{{name}} <|im_end|> <think>",
    "a\u0000 <b>\t",
]


def test_odd_characters_part_no_line(tmp_path: Path) -> None:
    """A line ends at a newline only; reading by `splitlines` would tear these records."""
    content = lines(*(record(str(number), text) for number, text in enumerate(ODD)))
    assert len(content.decode().splitlines()) > len(ODD)
    path = tmp_path / "odd.jsonl"
    path.write_bytes(content)
    assert [conversation.messages[1]["content"] for conversation in read_conversations(path)] == ODD


A, B, C = record("a"), record("b"), record("c")
LINES = lines(A, B, C)
Q = {"id": "q", "prompt": "how?", "completion": "fine"}
QUOTED = {"context": "a text", "qas": [{"question": "what?", "answer": "this"}]}


# fmt: off
FILES = [
    (b"", "", {}),
    (b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"), "abc", {}),
    (b"\n\n" + lines(A) + b"  \n\n" + lines(B), "ab", {}),
    (LINES.decode().encode("utf-16"), "abc", {}),
    (lines(A) + b"<html>429</html>\n" + lines(B), "ab", {"not JSON": 1}),
    (b"<html>429</html>\n" + lines(A, B), "ab", {"not JSON": 1}),
    (lines(A, "text", 3, [1, 2], None) + lines(B), "ab", {"not an object": 4}),
    (lines(A) + b'{"id": "\xe9"}\n' + lines(B), "ab", {"not UTF-8": 1}),
    (LINES[:-9], "ab", {CUT: 1}),
    (lines(A, record("b", "\u00e9"))[:-6], "a", {CUT: 1}),
    (lines(A)[:-9] + b"\n" + lines(B), "b", {"not JSON": 1}),
    (lines(A)[:-9] + lines(B, C), "bc", {"not JSON": 1}),
    (lines(A)[:-1] + lines(B, C), "abc", {}),
    (lines(A) + b"[" * 100_000 + b"\n" + lines(B), "ab", {"nested too deeply": 1}),
    (json.dumps([A, B, C]).encode(), "abc", {}),
    (json.dumps([A, B, C], indent=2).encode(), "abc", {}),
    (b" \n[\n" + b",\n".join(lines(record).strip() for record in (A, B, C)) + b"\n]\n", "abc", {}),
    (json.dumps([A, 7, "x", B]).encode(), "ab", {"not an object": 2}),
    (json.dumps([A, B]).encode() + b"\n" + json.dumps([C]).encode(), "abc", {}),
    ("\n".join(json.dumps(record, indent=1) for record in (A, B, C)).encode(), "abc", {}),
    (json.dumps({"version": "1", "data": [A, B, C]}, indent=1).encode(), "abc", {}),
    (json.dumps({"version": "1", "data": [A, B, C]}).encode(), "abc", {}),
    (json.dumps({"version": "1", "data": [A, B, C]}).encode()[:-12], "ab", {CUT: 2}),
    (json.dumps([A, B, C]).encode()[:-12], "ab", {CUT: 1}),
    (json.dumps([A, B, C]).replace('"b"', '"b').encode(), "ac", {"not JSON": 1}),
    (json.dumps([A, B, C], indent=2).replace('"b"', "<?>").encode(), "ac", {"not JSON": 1}),
    (json.dumps([A, B, C]).encode().replace(b'"b"', b'"\xff"'), "ac", {"not UTF-8": 1}),
    (b"[1, 2", "", {"not an object": 2}),
    (json.dumps({"data": [Q, Q]}, indent=1).encode(), "qq", {}),
    (lines(QUOTED, QUOTED), "", {"unknown layout: keys context, qas": 2}),
    (json.dumps([A, {"tools": 1, "call": {"query": "x"}}, Q]).replace("1,", "1").encode(), "aq", {"not JSON": 1}),
]
# fmt: on


@pytest.mark.parametrize(("content", "kept", "dropped"), FILES)
def test_a_damaged_file_keeps_its_good_records(
    tmp_path: Path, content: bytes, kept: str, dropped: dict[str, int]
) -> None:
    """Each damage is a counted drop beside records that stay, plain and compressed alike."""
    ids, tally = read(tmp_path, content)
    assert ("".join(ids), dict(tally.dropped)) == (kept, dropped)
    assert read(tmp_path, gzip.compress(content)) == (ids, tally)
    assert tally.kept == len(kept) and (tally.noted == {}) is bool(content)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda zipped: zipped[: len(zipped) // 2], "the compressed file ends early"),
        (lambda zipped: zipped[:-8], "the compressed file ends early"),
        (lambda zipped: zipped[:-8] + bytes(8), "the compressed file is damaged"),
        (
            lambda zipped: zipped[:3000] + b"\xff" * 99 + zipped[3099:],
            "the compressed file is damaged",
        ),
        (lambda zipped: zipped + b"tail", "the compressed file is damaged"),
    ],
)
@pytest.mark.parametrize("array", [False, True])
def test_a_broken_gzip_keeps_what_came_before(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str, array: bool
) -> None:
    """The records before the break are kept, the break itself is one drop."""
    records = [
        record(str(number), "".join(chr(97 + number * k % 26) for k in range(300)))
        for number in range(400)
    ]
    content = json.dumps(records).encode() if array else lines(*records)
    ids, tally = read(tmp_path, damage(gzip.compress(content)))
    assert ids[:100] == [
        str(number) for number in range(100)
    ]  # after the damage gzip may repeat what it had
    assert tally.dropped[reason] == 1


@pytest.mark.slow
def test_long_records_cross_the_pieces_that_are_read(tmp_path: Path) -> None:
    """Records that are longer than what is read at once, in every layout of the file."""
    records = [record(str(number), "\u00e9{" * 400_000) for number in range(4)]
    for content in (
        lines(*records),
        json.dumps(records).encode(),
        json.dumps(records, indent=1).encode(),
    ):
        ids, tally = read(tmp_path, content)
        assert ids == ["0", "1", "2", "3"] and not tally.dropped


def test_reading_is_lazy_and_stops_at_the_limit(tmp_path: Path) -> None:
    """What stands after the last conversation asked for is not looked at."""
    tally, path = Tally(), tmp_path / "x.jsonl"
    path.write_bytes(LINES + b"garbage\n")
    assert [conversation.id for conversation in read_conversations(path, tally, limit=2)] == [
        "a",
        "b",
    ]
    assert (tally.kept, sum(tally.dropped.values())) == (2, 0)


def test_strict_names_file_line_and_reason(tmp_path: Path) -> None:
    """The first drop is an error; what came before it was read."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(A) + b"\n<html>\n" + lines(B))
    with pytest.raises(ValueError, match=r"x\.jsonl:3 .*not JSON.*correct or remove it"):
        list(read_conversations(path, strict=True))


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    """JSON and tables side by side; what is no data is left alone, and an id names file and line."""
    import pyarrow as pa
    from pyarrow import parquet

    (tmp_path / "b.jsonl").write_bytes(lines({"conversations": A["conversations"]}))
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps([A]).encode()))
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "c.csv").write_text("instruction,input,output\nhow?,,fine\nhow?,,\n")
    parquet.write_table(pa.Table.from_pylist([B, {**C, "tools": None}]), tmp_path / "d.parquet")
    (tmp_path / "e.parquet").write_bytes((tmp_path / "d.parquet").read_bytes()[:-20])
    tally = Tally()
    names = [
        conversation.id for conversation in read_conversations(tmp_path, tally, allow_broken=True)
    ]
    assert names == ["a", "b.jsonl:1", "c.csv:1", "b", "c"]
    assert dict(tally.dropped) == {
        "no answer": 1,
        "the rest of the parquet file cannot be read: ArrowInvalid": 1,
    }


@pytest.mark.parametrize(
    ("split", "files", "ids", "left_out"),
    [
        (
            "train",
            ["train-00000-of-00001.jsonl", "test-00000-of-00001.jsonl"],
            "0",
            "test-00000-of-00001.jsonl",
        ),
        ("train", ["chats.train.jsonl", "chats.dev.jsonl", "more.jsonl"], "02", "chats.dev.jsonl"),
        (
            "test",
            ["train.jsonl", "eval.jsonl", "validation.jsonl"],
            "1",
            "train.jsonl, validation.jsonl",
        ),
        (
            "train_sft",
            ["train_sft-0.jsonl", "train_gen-0.jsonl", "test_sft-0.jsonl"],
            "0",
            "test_sft-0.jsonl, train_gen",
        ),
        ("train+test[:9]", ["train.jsonl", "test.jsonl", "val.jsonl"], "01", "val.jsonl"),
        ("train", ["trained.jsonl", "contest.jsonl"], "01", ""),
    ],
)
def test_a_folder_gives_the_files_of_its_split(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    split: str,
    files: list[str],
    ids: str,
    left_out: str,
) -> None:
    """Files that are named after another split are left out, and named."""
    for number, name in enumerate(files):
        (tmp_path / name).write_bytes(lines(record(str(number))))
    assert sorted(
        conversation.id for conversation in read_conversations(tmp_path, split=split)
    ) == list(ids)
    errors = capsys.readouterr().err
    assert left_out in errors and bool(errors) == bool(left_out)


def test_a_folder_without_the_split_is_refused(tmp_path: Path) -> None:
    """With what is there."""
    (tmp_path / "test.jsonl").write_bytes(LINES)
    with pytest.raises(
        ValueError,
        match=r"no file of the split train in the folder .*holds test\.jsonl: name one of",
    ):
        read_conversations(tmp_path)
    assert len(list(read_conversations(tmp_path / "test.jsonl"))) == 3


@pytest.mark.parametrize(
    "source", ["nowhere.jsonl", "./nowhere", "/nowhere", "a/b/c", "nowhere.json.gz", "n.parquet"]
)
def test_a_missing_path_is_named(source: str) -> None:
    """What can be no hub dataset is not looked up there."""
    with pytest.raises(ValueError, match="no file or folder at"):
        read_conversations(source)


def test_other_names_are_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked for the split and the revision, streaming; what it answers is named."""
    import datasets

    def hub(name: str, split: str, revision: str | None, streaming: bool) -> list[dict[str, Any]]:
        if (name, split, revision, streaming) != ("someone/chats-v1.0", "test", "v2", True):
            raise FileNotFoundError("no such dataset")
        return [A, {"conversations": B["conversations"]}]

    monkeypatch.setattr(datasets, "load_dataset", hub)
    read = read_conversations("someone/chats-v1.0", split="test", revision="v2")
    assert [conversation.id for conversation in read] == ["a", "chats-v1.0:2"]
    with pytest.raises(ValueError, match=r"someone/else: no file or folder.*no such dataset"):
        list(read_conversations("someone/else"))
    with pytest.raises(ValueError, match="no data in the folder"):
        read_conversations(tmp_path)


def test_the_table_says_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept, dropped and noted with their counts, the most frequent first; an empty file is no silence."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines(A, 1, {}, 2, {"conversations": turns("gpt: z", "human: a", "gpt: b")}))
    main([str(path)])
    counts, names = capsys.readouterr().out.split("\n\n")
    rows = [line.rsplit(maxsplit=1) for line in counts.splitlines()]
    assert [(" ".join(words.split()), int(count)) for words, count in rows] == [
        ("kept", 2),
        ("dropped", 3),
        ("dropped not an object", 2),
        ("dropped unknown layout: keys", 1),
        ("noted leading assistant turns cut", 1),
    ]
    assert names.splitlines()[1:] == [
        f"not an object: {path}:2, {path}:4",
        f"unknown layout: keys : {path}:3",
    ]
    assert read(tmp_path, b"\n")[1].noted == {"a file without records": 1}


def test_the_first_records_of_each_reason_are_named(tmp_path: Path) -> None:
    """File and line of as many as can be read at a glance; where there are more it says so."""
    path, tally = tmp_path / "x.jsonl", Tally()
    path.write_bytes(lines(A, *range(9), {"prompt": "a"}))
    assert len(list(read_conversations(path, tally))) == 1
    assert tally.where() == [
        f"not an object: {', '.join(f'{path}:{line}' for line in (2, 3, 4))} ...",
        f"no answer: {path}:11",
    ]
    questions = Tally()
    assert len(list(read_conversations(path, questions, answered=False))) == 2
    assert questions.noted == {"a question without an answer": 1}


SHELLS = {
    "lines": (b"", b"\n", b"\n"),
    "array": (b"[", b", ", b"]"),
    "spaced": (b"[\n", b",\n", b"\n]\n"),
}
RECORDS = [record(str(number), ODD[number % len(ODD)]) for number in range(8)]
DAMAGES = st.dictionaries(  # of which record, at which place of it, how much is lost, and what stands there instead
    st.integers(1, 7),
    st.tuples(st.floats(0, 1), st.integers(0, 200), st.binary(max_size=6)),
    max_size=4,
)


def damage_texts(
    order: list[int], damages: dict[int, tuple[float, int, bytes]]
) -> tuple[list[bytes], list[str]]:
    """The records as JSON in that order, some damaged; and the ids of the whole ones."""
    texts = []
    for number in order:
        text = lines(RECORDS[number]).strip()
        if number in damages:
            share, lost, instead = damages[number]
            place = int(share * len(text))
            text = text[:place] + instead + text[place + lost :]
        texts.append(text)
    return texts, [str(number) for number in order if number not in damages]


@given(DAMAGES, st.permutations(range(8)), st.sampled_from([*SHELLS]), st.booleans())
@FUZZ
def test_damage_anywhere_loses_no_whole_record(
    tmp_path: Path, damages: dict[int, Any], order: list[int], kind: str, zipped: bool
) -> None:
    """Bytes lost, changed or put in, in lines and in arrays: the whole records are kept, in their order."""
    texts, whole = damage_texts(order, damages)
    begin, between, end = SHELLS[kind]
    content = begin + between.join(texts) + end
    assume(
        content[:2] not in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff")
    )  # which would make it another kind of file
    ids, tally = read(tmp_path, gzip.compress(content) if zipped else content)
    assert [name for name in ids if name in whole] == whole
    left = sum(bool(text.strip(b" \t\r\n\x0b\x0c,[]")) for text in texts)
    assert tally.kept == len(ids) and bool(tally.dropped) >= (len(ids) < left)


@given(st.dictionaries(st.integers(1, 7), st.floats(0.01, 0.99)), st.permutations(range(8)))
@FUZZ
def test_every_line_cut_short_is_one_drop(
    tmp_path: Path, cuts: dict[int, float], order: list[int]
) -> None:
    """Kept and dropped add up to the lines that a naive count finds."""
    texts = [lines(RECORDS[number]).strip() for number in order]
    texts = [
        text[: int(len(text) * cuts.get(number, 1))]
        for number, text in zip(order, texts, strict=True)
    ]
    ids, tally = read(tmp_path, b"\n".join(texts))
    assert ids == [str(number) for number in order if number not in cuts]
    assert tally.kept + sum(tally.dropped.values()) == sum(bool(text) for text in texts)


@given(st.integers(0, len(lines(*RECORDS))), st.booleans())
@FUZZ
def test_a_file_cut_anywhere_keeps_what_stands_before(
    tmp_path: Path, place: int, array: bool
) -> None:
    """All whole records before the cut are kept, and the cut one is one drop."""
    texts = [lines(record).strip() for record in RECORDS]
    begin, between = (b"[", b", ") if array else (b"", b"\n")
    content = (begin + between.join(texts))[:place]
    ids, tally = read(tmp_path, content)
    ends = [len(begin + between.join(texts[: number + 1])) for number in range(8)]
    starts = [end - len(text) for end, text in zip(ends, texts, strict=True)]
    assert ids == [str(number) for number in range(8) if ends[number] <= place]
    assert dict(tally.dropped) == (
        {CUT: 1} if any(s < place < e for s, e in zip(starts, ends, strict=True)) else {}
    )


@pytest.mark.skipif(not MESSY.is_dir(), reason="no real messy data beside the checkout")
@pytest.mark.parametrize("name", ["records_only.jsonl", "file_level", "messy.jsonl"])
def test_real_mess_goes_through(name: str, tmp_path: Path) -> None:
    """Nothing crashes, and kept and dropped add up to what a naive count finds."""
    tally, path = Tally(), MESSY / name
    if name == "messy.jsonl":
        records = [
            json.loads(line)["record"] for line in path.read_bytes().split(b"\n") if line.strip()
        ]
        path = tmp_path / "unwrapped.json"
        path.write_text(json.dumps(records, indent=1))
    kept = list(read_conversations(path, tally))
    assert not [fault for conversation in kept for fault in wrong_with(conversation)]
    files = path.iterdir() if path.is_dir() else [path]
    assert tally.kept + sum(tally.dropped.values()) == sum(map(naive_count, files))


def naive_count(path: Path) -> int:
    """How many records a file was meant to hold: lines with something on them, or the items of a whole array."""
    content = path.read_bytes()
    content = gzip.decompress(content) if path.suffix == ".gz" else content
    return (
        len(json.loads(content))
        if path.suffix == ".json"
        else sum(bool(x.strip()) for x in content.split(b"\n"))
    )
