"""Files that a disk, a copy or an editor has spoilt are named in a sentence; what can be made again is made again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from data_prep.parts import begin, is_whole, read_parts
from eagle.drafters.lookup.counts import save_tables
from eagle.training.resume import MARK, Checkpoints
from eval.report import main as report
from eval.result_files.write_results import ResultsWriter, read_stored
from recipes.tiny.make_target import read_report
from tests.engines.compare_engines import merge_rows
from tests.tables import some_tables

ANSWER = {
    "drafter": "none",
    "temperature": 0,
    "tokens": 2,
    "seconds": 1.0,
    "cycles": 2,
    "committed": 2,
    "loops": False,
    "identical": True,
}
# what a disk, a copy or an editor leaves in place of a line or a file
SPOILT = {
    "not JSON": b"{",
    "not text": b"\xff\xfe\x00",
    "null": b"null",
    "a number": b"3",
    "a list": b"[1]",
    "empty": b"{}",
}


@pytest.mark.parametrize("line", SPOILT.values(), ids=SPOILT.keys())
def test_a_damaged_row_is_named_by_its_line(line: bytes, tmp_path: Path) -> None:
    """By the report, and by a run that would go on in the file, which it leaves as it is."""
    path = tmp_path / "results.jsonl"
    whole = json.dumps(ANSWER).encode()
    path.write_bytes(b"\n".join([whole, line, whole]) + b"\n")
    words = r"results\.jsonl:2 is (not JSON|no answer).* remove that line or measure"

    for options in ([], ["--markdown"]):
        with pytest.raises(ValueError, match=words):
            report([str(path), *options])
    with pytest.raises(ValueError, match=r"results\.jsonl:2 is"):
        ResultsWriter(read_stored(path), {})
    assert [file.name for file in tmp_path.iterdir()] == ["results.jsonl"]


@pytest.mark.parametrize("line", SPOILT.values(), ids=SPOILT.keys())
def test_a_damaged_line_of_a_part_is_answered_again(
    line: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The damaged line is named; settings that cannot be read are not taken for the same ones."""
    out = tmp_path / "answers.jsonl"
    begin(out, {})
    whole = json.dumps({"id": "a", "record": None, "notes": [], "tokens": 0}).encode()
    part = tmp_path / "answers.jsonl.parts/part-00000.jsonl"
    part.write_bytes(b"\n".join([line, whole, b""]))

    assert list(read_parts(out)) == ["a"]
    assert "line 1 is damaged" in capsys.readouterr().out

    Path(f"{out}.settings").write_bytes(line)
    with pytest.raises(ValueError, match=r"is damaged|was made with other settings"):
        is_whole(out, {"sampling": 1})


@pytest.mark.parametrize(
    "text",
    [*SPOILT.values(), b'{"files": {"a": 1}, "state": {}}', b'{"files": {}, "state": {"step": 1}}'],
)
def test_a_damaged_mark_of_a_checkpoint_is_passed_over(
    text: bytes,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A run goes on from the checkpoint before, which is whole."""
    accelerator = Accelerator(cpu=True)
    # a checkpoint needs something that was prepared
    accelerator.prepare(torch.nn.Linear(1, 1))
    checkpoints = Checkpoints(accelerator, tmp_path, 2)
    state = {"step": 1, "best": 0.0, "skipped": 0, "run": {"processes": 1}}

    for step in (1, 2):
        assert checkpoints.write(step, {**state, "step": step}) is None

    # the newest, which a killed run wrote last
    (tmp_path / "step-2" / MARK).write_bytes(text)
    assert checkpoints.load({"processes": 1}) == state
    assert f"step-2 is passed over: {MARK} is missing or damaged" in capsys.readouterr().out


@pytest.mark.parametrize("text", SPOILT.values(), ids=SPOILT.keys())
def test_other_damaged_files(text: bytes, tmp_path: Path) -> None:
    """A damaged report of a target is none; results of engines and configs are not overwritten."""
    (tmp_path / "target_report.json").write_bytes(text)
    assert read_report(tmp_path, {}) is None

    engines = tmp_path / "engines.json"
    # an empty object would be an empty file of results
    engines.write_bytes(text if text != b"{}" else b"[{}]")
    keys = ("head", "target", "engine", "dtype", "draft", "prompts", "new_tokens")
    with pytest.raises(ValueError, match=r"engines\.json holds no rows of tests\.engines"):
        merge_rows([dict.fromkeys(keys, 0)], engines)

    config = tmp_path / "config.json"
    config.write_bytes(text)
    with pytest.raises(ValueError, match="which tables of counts would overwrite"):
        save_tables(tmp_path, some_tables(3), "bigram")
    assert config.read_bytes() == text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("none.jsonl", "no results at"),
        (".", "no results at"),
        ("empty.jsonl", "no answers in"),
    ],
)
def test_missing_results_are_named(
    path: str,
    words: str,
    tmp_path: Path,
) -> None:
    """No file, a folder, a file without answers."""
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match=words):
        report([str(tmp_path / path)])
