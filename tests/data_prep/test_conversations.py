"""Files, folders and hub datasets are read as conversations, and what is kept and dropped is counted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pytest
from pyarrow import parquet

from data_prep.conversations import Tally, main, read_conversations
from tests.data_prep.chats.test_records import find_faults, turns_of
from tests.data_prep.stub_servers import write_records

MESSY = Path(__file__).parents[3] / "shared/data/messy"


def record_of(name: str, text: str = "fine") -> dict[str, Any]:
    """Return a record with nothing wrong."""
    return {"id": name, "conversations": turns_of(f"human: how? / gpt: {text}")}


A = record_of("a")
B = record_of("b")
C = record_of("c")


def read_ids(source: Path | str, tally: Tally | None = None, **options: Any) -> list[str]:
    """Return the ids of a source's conversations."""
    conversations = read_conversations(
        source,
        tally or Tally(),
        **options,
    )
    return [conversation.id for conversation in conversations]


def test_odd_characters_part_no_line(tmp_path: Path) -> None:
    """A line ends at a newline only; reading by `splitlines` would tear these records."""
    texts = ["a \u2028 \u2029 \x85 \x0c", "\u200f\u0627\u0644 \U0001f600", "<|im_end|> a\0 <b>\t"]
    # line and paragraph separators, a next line, a form feed, text to the left
    lines = [json.dumps(record_of("x", text), ensure_ascii=False) for text in texts]
    content = "\n".join(lines)
    assert len(content.splitlines()) > len(texts)
    (tmp_path / "odd.jsonl").write_text(content, encoding="utf-8")
    read = read_conversations(tmp_path / "odd.jsonl")
    assert [conversation.messages[1]["content"] for conversation in read] == texts


def test_a_folder_is_its_files_by_name(tmp_path: Path) -> None:
    """JSON and tables are read in one order, other files are left alone, and an id names file and line."""
    write_records(tmp_path / "b.jsonl", [{"conversations": A["conversations"]}])
    (tmp_path / "a.json.gz").write_bytes(gzip.compress(json.dumps([A]).encode()))
    # a name that is no data
    (tmp_path / "README.md").write_text("not data")
    (tmp_path / "c.csv").write_text("instruction,input,output\nhow?,,fine\nhow?,,\n")
    table = tmp_path / "d.parquet"
    parquet.write_table(pa.Table.from_pylist([B, {**C, "tools": None}]), table)
    # a download that broke off
    (tmp_path / "e.parquet").write_bytes(table.read_bytes()[:-20])
    tally = Tally()
    names = read_ids(tmp_path, tally, allow_broken=True)
    assert names == ["a", "b.jsonl:1", "c.csv:1", "b", "c"]
    broken = "the rest of the parquet file cannot be read: ArrowInvalid"
    assert dict(tally.dropped) == {"no answer": 1, broken: 1}


@pytest.mark.parametrize(
    ("split", "files", "ids", "left_out"),
    [
        ("train", "train-00000-of-00001 test-00000-of-00001", "0", "test-00000-of-00001.jsonl"),
        ("train", "chats.train chats.dev more", "02", "chats.dev.jsonl"),
        ("test", "train eval validation", "1", "train.jsonl, validation.jsonl"),
        ("train_sft", "train_sft-0 train_gen-0 test_sft-0", "0", "test_sft-0.jsonl, train_gen"),
        ("train+test[:9]", "train test val", "01", "val.jsonl"),
        ("train", "trained contest", "01", ""),
    ],
)
def test_a_folder_gives_the_files_of_its_split(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    split: str,
    files: str,
    ids: str,
    left_out: str,
) -> None:
    """Files named after another split are left out, and printed."""
    for number, name in enumerate(files.split()):
        write_records(tmp_path / f"{name}.jsonl", [record_of(str(number))])
    assert sorted(read_ids(tmp_path, split=split)) == list(ids)
    errors = capsys.readouterr().err
    assert left_out in errors
    assert bool(errors) == bool(left_out)


def test_a_folder_without_the_split_is_refused(tmp_path: Path) -> None:
    """The error names what is there; a file may be read by its own name."""
    path = write_records(tmp_path / "test.jsonl", [A])
    message = r"no file of the split train in the folder .*holds test\.jsonl: name one of"
    with pytest.raises(ValueError, match=message):
        read_conversations(tmp_path)
    assert read_ids(path) == ["a"]


@pytest.mark.parametrize("source", ["nowhere.jsonl", "./nowhere", "/nowhere", "a/b/c", "n.parquet"])
def test_a_missing_path_is_named(source: str) -> None:
    """What can be no hub dataset is not looked up on the hub."""
    with pytest.raises(ValueError, match="no file or folder at"):
        read_conversations(source)


def test_other_names_are_hub_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub is asked for the split and the revision, streaming; its own error is quoted."""

    def load_dataset(name: str, **options: Any) -> list[dict[str, Any]]:
        # no network: what the hub would answer
        if name != "someone/chats-v1.0":
            raise FileNotFoundError("no such dataset")
        assert options == {
            "split": "test",
            "revision": "v2",
            "streaming": True,
        }
        return [A, {"conversations": B["conversations"]}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    names = read_ids("someone/chats-v1.0", split="test", revision="v2")
    assert names == ["a", "chats-v1.0:2"]
    with pytest.raises(ValueError, match=r"someone/else: no file or folder.*no such dataset"):
        list(read_conversations("someone/else"))
    with pytest.raises(ValueError, match="no data in the folder"):
        read_conversations(tmp_path)


def test_the_table_shows_all_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kept, dropped and noted stand with their counts, the most frequent first."""
    # a record that is kept and noted
    leading = {"conversations": turns_of("gpt: z / human: a / gpt: b")}
    path = write_records(tmp_path / "x.jsonl", [A, 1, {}, 2, leading])
    main([str(path)])
    counts, names = capsys.readouterr().out.split("\n\n")
    assert [line.split() for line in counts.splitlines()] == [
        ["kept", "2"],
        ["dropped", "3"],
        ["dropped", "not", "an", "object", "2"],
        ["dropped", "unknown", "layout:", "keys", "1"],
        ["noted", "leading", "assistant", "turns", "cut", "1"],
    ]
    assert names.splitlines()[1:] == [
        f"not an object: {path}:2, {path}:4",
        f"unknown layout: keys : {path}:3",
    ]


def test_the_first_records_of_each_reason_are_named(tmp_path: Path) -> None:
    """File and line of the first three are named, and dots stand for more."""
    tally = Tally()
    path = write_records(tmp_path / "x.jsonl", [A, *range(9), {"prompt": "a"}])
    assert read_ids(path, tally) == ["a"]
    first_lines = f"{path}:2, {path}:3, {path}:4"
    assert tally.where() == [f"not an object: {first_lines} ...", f"no answer: {path}:11"]
    # regeneration takes questions alone
    questions = Tally()
    assert len(read_ids(path, questions, answered=False)) == 2
    assert questions.noted == {"a question without an answer": 1}


def count_naively(path: Path) -> int:
    """Return how many records a file was meant to hold: the items of an array, or lines with something on them."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if path.suffix == ".json":
        return len(json.loads(content))
    return sum(bool(line.strip()) for line in content.split(b"\n"))


@pytest.mark.skipif(not MESSY.is_dir(), reason="no real messy data beside the checkout")
@pytest.mark.parametrize("name", ["records_only.jsonl", "file_level", "messy.jsonl"])
def test_real_mess_is_read(name: str, tmp_path: Path) -> None:
    """Nothing crashes, and kept and dropped add up to a naive count."""
    tally = Tally()
    path = MESSY / name
    if name == "messy.jsonl":
        lines = path.read_bytes().split(b"\n")
        records = [json.loads(line)["record"] for line in lines if line.strip()]
        path = tmp_path / "unwrapped.json"
        path.write_text(json.dumps(records, indent=1))
    for conversation in read_conversations(path, tally):
        assert not find_faults(conversation)
    files = path.iterdir() if path.is_dir() else [path]
    assert tally.kept + sum(tally.dropped.values()) == sum(map(count_naively, files))
