"""No damage takes a good record with it, and a file that lost much is refused unless the recipe allows it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from data_prep.conversations import Tally, main, read_conversations
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.data.identity import data_identity
from eagle.recipe import Recipe
from tests.chats import changed
from tests.data_prep.test_conversations import A, B, C, read_ids, record_of

CUT = "the file ends in the middle of a record"
FUZZ = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def lines_of(*records: Any) -> bytes:
    """Return JSON lines."""
    lines = [json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records]
    return b"".join(lines)


def read_bytes(folder: Path, content: bytes) -> tuple[list[str], Tally]:
    """Return the ids of what is kept of a file with this content, and the counts."""
    tally = Tally()
    (folder / "x.jsonl").write_bytes(content)
    return read_ids(
        folder / "x.jsonl",
        tally,
        allow_broken=True,
    ), tally


LINES = lines_of(A, B, C)
ARRAY = json.dumps([A, B, C]).encode()
INDENTED = json.dumps([A, B, C], indent=2).encode()
NESTED = json.dumps({"version": "1", "data": [A, B, C]}).encode()
QUOTED = lines_of({"context": "a text", "qas": [{"question": "what?", "answer": "this"}]})

# fmt: off
WHOLE = {
    "byte order mark, \\r\\n": b"\xef\xbb\xbf" + LINES.replace(b"\n", b"\r\n"),
    "empty lines": b"\n\n" + LINES.replace(b"\n", b"  \n\n"),
    "UTF-16": LINES.decode().encode("utf-16"),
    "two records on a line": LINES.replace(b"\n", b"", 1),
    "array": ARRAY,
    "indented array": INDENTED,
    "a line an item": b" \n[\n" + LINES.strip().replace(b"\n", b",\n") + b"\n]\n",
    "two arrays": json.dumps([A, B]).encode() + b"\n" + json.dumps([C]).encode(),
    "indented records": "\n".join(json.dumps(record, indent=1) for record in (A, B, C)).encode(),
    "in an object": NESTED,
}
DAMAGED = [
    (b"", "", {}),
    (LINES.replace(b"\n", b"\n<html>429</html>\n", 1), "abc", {"not JSON": 1}),
    (b"<html>429</html>\n" + LINES, "abc", {"not JSON": 1}),
    (lines_of(A, "text", 3, [1, 2], None, B), "ab", {"not an object": 4}),
    (lines_of(A) + b'{"id": "\xe9"}\n' + lines_of(B), "ab", {"not UTF-8": 1}),
    (LINES[:-9], "ab", {CUT: 1}),
    # cut in the middle of a character
    (lines_of(A, record_of("b", "\u00e9"))[:-6], "a", {CUT: 1}),
    (lines_of(A)[:-9] + b"\n" + lines_of(B), "b", {"not JSON": 1}),
    (lines_of(A)[:-9] + lines_of(B, C), "bc", {"not JSON": 1}),
    (lines_of(A) + b"[" * 100_000 + b"\n" + lines_of(B), "ab", {"nested too deeply": 1}),
    (json.dumps([A, 7, "x", B]).encode(), "ab", {"not an object": 2}),
    (NESTED[:-12], "ab", {CUT: 2}),
    (ARRAY[:-12], "ab", {CUT: 1}),
    (ARRAY.replace(b'"b"', b'"b'), "ac", {"not JSON": 1}),
    (INDENTED.replace(b'"b"', b"<?>"), "ac", {"not JSON": 1}),
    (ARRAY.replace(b'"b"', b'"\xff"'), "ac", {"not UTF-8": 1}),
    (b"[1, 2", "", {"not an object": 2}),
    (QUOTED * 2, "", {"unknown layout: keys context, qas": 2}),
]
# fmt: on


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_every_layout_of_a_file_is_read(tmp_path: Path, content: bytes) -> None:
    """Lines, arrays and objects, in any encoding, plain and compressed."""
    for data in (content, gzip.compress(content)):
        ids, tally = read_bytes(tmp_path, data)
        assert ids == ["a", "b", "c"]
        assert not tally.dropped


@pytest.mark.parametrize(("content", "kept", "dropped"), DAMAGED)
def test_a_damaged_file_keeps_its_good_records(
    tmp_path: Path,
    content: bytes,
    kept: str,
    dropped: dict[str, int],
) -> None:
    """Each damage is a counted drop, in plain and compressed files; an empty file is noted."""
    ids, tally = read_bytes(tmp_path, content)
    assert ids == list(kept)
    assert tally.kept == len(kept)
    assert dict(tally.dropped) == dropped
    assert tally.noted == ({} if content else {"a file without records": 1})
    assert read_bytes(tmp_path, gzip.compress(content)) == (ids, tally)


@pytest.mark.parametrize("damage", ["half", "no end", "wrong checksum", "changed", "longer"])
@pytest.mark.parametrize("is_array", [False, True])
def test_a_broken_gzip_keeps_what_came_before(
    tmp_path: Path,
    damage: str,
    is_array: bool,
) -> None:
    """The records before the break are kept, and the break itself is one drop."""
    records = []
    for number in range(400):
        # text that compresses badly, so that the file is longer than what is read at once
        letters = [chr(97 + number * k % 26) for k in range(300)]
        records.append(record_of(str(number), "".join(letters)))
    # the two layouts are parsed by different code
    zipped = gzip.compress(json.dumps(records).encode() if is_array else lines_of(*records))
    content = {
        "half": zipped[: len(zipped) // 2],
        "no end": zipped[:-8],
        "wrong checksum": zipped[:-8] + bytes(8),
        "changed": zipped[:3000] + b"\xff" * 99 + zipped[3099:],
        "longer": zipped + b"tail",
    }[damage]
    ids, tally = read_bytes(tmp_path, content)
    # after the damage gzip may repeat what it had
    assert ids[:100] == [str(number) for number in range(100)]
    what = "ends early" if damage in ("half", "no end") else "is damaged"
    assert tally.dropped[f"the compressed file {what}"] == 1


@pytest.mark.slow
def test_long_records_cross_the_pieces_that_are_read(tmp_path: Path) -> None:
    """Records longer than what is read at once are read in every layout of the file."""
    records = [record_of(str(number), "\u00e9{" * 400_000) for number in range(4)]
    array = json.dumps(records).encode()
    indented = json.dumps(records, indent=1).encode()
    for content in (lines_of(*records), array, indented):
        ids, tally = read_bytes(tmp_path, content)
        assert ids == ["0", "1", "2", "3"]
        assert not tally.dropped


def test_strict_names_file_line_and_reason(tmp_path: Path) -> None:
    """The first drop is an error."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines_of(A) + b"\n<html>\n" + lines_of(B))
    with pytest.raises(ValueError, match=r"x\.jsonl:3 .*not JSON.*correct or remove it"):
        list(read_conversations(path, strict=True))


HUNDRED = [lines_of(record_of(str(number))) for number in range(100)]
LONG_ARRAY = json.dumps([json.loads(line) for line in HUNDRED], indent=1).encode()
HALF = LONG_ARRAY[: len(LONG_ARRAY) // 2]


def damage_lines(*numbers: int) -> bytes:
    """Return a hundred lines, of which these are no JSON."""
    lines = list(HUNDRED)
    for number in numbers:
        lines[number] = b"<html>\n"
    return b"".join(lines)


# content, records that can be read, and the error: more than one line in a hundred, or nobody knows how many
BROKEN = {
    "half": (HALF, 50, rf"is damaged at line \d{{3}}, at its record 51: {CUT}"),
    "middle": (
        LONG_ARRAY.replace(
            b'"1"',
            b'"1',
            1,
        ),
        99,
        r"at line 1\d, at its record 2: not JSON",
    ),
    "unclosed": (b"[" + HUNDRED[0] + HUNDRED[1], 2, None),
    "two lines": (damage_lines(3, 7), 98, "2 of 100 lines of .* are damaged, the first is line 4"),
    "a line": (damage_lines(3), 99, None),
    "cut": (b"".join(HUNDRED)[:-9], 99, None),
    "gzip": (gzip.compress(b"".join(HUNDRED))[:-9], 100, "the compressed file ends early"),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_file_is_refused(tmp_path: Path, damage: str) -> None:
    """Where it is allowed, the rest is read and all is counted."""
    # reading goes on in any case, to count what is there
    content, kept, error = BROKEN[damage]
    path = tmp_path / "x.json"
    path.write_bytes(content)
    tally = Tally()
    assert (
        len(
            read_ids(
                path,
                tally,
                allow_broken=True,
            )
        )
        == tally.kept
        == kept
    )
    if error is None:
        assert not tally.broken
        assert len(read_ids(path)) == kept
        return
    assert len(tally.broken) == 1
    with pytest.raises(ValueError, match=error) as refused:
        read_ids(path)
    assert "set data.allow_broken=true" in str(refused.value)
    assert "x.json" in str(refused.value)


def test_what_precedes_the_damage_may_be_enough(tmp_path: Path) -> None:
    """A limit that is met before the damage ends the reading."""
    (tmp_path / "x.json").write_bytes(HALF)
    assert len(read_ids(tmp_path / "x.json", limit=10)) == 10


def test_a_table_that_breaks_off_is_refused(tmp_path: Path) -> None:
    """Parquet files are refused as JSON is."""
    (tmp_path / "x.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(ValueError, match="the rest of the parquet file cannot be read"):
        read_ids(tmp_path / "x.parquet")


def test_a_recipe_may_allow_it(recipe: Recipe, tmp_path: Path) -> None:
    """The same data have the same identity either way."""
    path = tmp_path / "half.json"
    path.write_bytes(HALF)
    # an identity that differed would make features stale
    refusing = changed(recipe, train=str(path))
    allowing = changed(refusing, allow_broken=True)
    tokenizer = load_tokenizer(refusing)
    with pytest.raises(ValueError, match=r"half\.json is damaged at line"):
        tokenize_data(refusing, tokenizer)
    assert len(tokenize_data(allowing, tokenizer)[0]) == 50
    assert data_identity(allowing) == data_identity(refusing)


def test_the_counts_are_shown_before_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script that counts a source shows what can be read before it fails."""
    (tmp_path / "x.json").write_bytes(HALF)
    with pytest.raises(SystemExit, match=r"x\.json is damaged .*\nno stage reads such files"):
        main([str(tmp_path / "x.json")])
    assert "kept" in capsys.readouterr().out


SHELLS = {
    "lines": (b"", b"\n", b"\n"),
    "array": (b"[", b", ", b"]"),
    "spaced": (b"[\n", b",\n", b"\n]\n"),
}
ODD = [
    "a \u2028 \u2029 \x85 \x0c",
    "\u200f\u0627\u0644 \U0001f600",
    "{{name}} <think>",
    "a\0 <b>\t",
]
TEXTS = [lines_of(record_of(str(number), ODD[number % 4])).strip() for number in range(8)]
# by record: at which share of it how many bytes are lost, and what stands there instead
DAMAGES = st.dictionaries(
    st.integers(1, 7),
    st.tuples(
        st.floats(0, 1),
        st.integers(0, 200),
        st.binary(max_size=6),
    ),
    max_size=4,
)


@given(
    DAMAGES,
    st.permutations(range(8)),
    st.sampled_from([*SHELLS]),
    st.booleans(),
)
@FUZZ
def test_damage_anywhere_loses_no_whole_record(
    tmp_path: Path,
    damages: dict[int, Any],
    order: list[int],
    shell: str,
    zipped: bool,
) -> None:
    """Bytes may be lost, changed or added: the whole records are kept, in their order."""
    texts = []
    for number in order:
        text = TEXTS[number]
        if number in damages:
            share, lost, instead = damages[number]
            start = int(share * len(text))
            text = text[:start] + instead + text[start + lost :]
        texts.append(text)
    # records are joined in each layout that a file may have
    begin, between, end = SHELLS[shell]
    content = begin + between.join(texts) + end
    # such a beginning would make it another kind of file
    assume(content[:2] not in (b"\x1f\x8b", b"\xff\xfe", b"\xfe\xff"))
    ids, tally = read_bytes(tmp_path, gzip.compress(content) if zipped else content)
    whole = [str(number) for number in order if number not in damages]
    assert [name for name in ids if name in whole] == whole
    assert tally.kept == len(ids)
    visible = sum(bool(text.strip(b" \t\r\n\x0b\x0c,[]")) for text in texts)
    assert tally.dropped or len(ids) >= visible


@given(st.integers(0, len(b"\n".join(TEXTS))), st.booleans())
@FUZZ
def test_a_file_cut_anywhere_keeps_what_precedes_the_cut(
    tmp_path: Path,
    end: int,
    is_array: bool,
) -> None:
    """All whole records before the cut are kept, and the cut one is one drop."""
    begin, between, _ = SHELLS["array" if is_array else "lines"]
    ids, tally = read_bytes(tmp_path, (begin + between.join(TEXTS))[:end])
    start = len(begin)
    whole = []
    dropped = {}
    for number, text in enumerate(TEXTS):
        if start + len(text) <= end:
            whole.append(str(number))
        elif start < end:
            dropped = {CUT: 1}
        start += len(text) + len(between)
    assert ids == whole
    assert dict(tally.dropped) == dropped
