"""What a user can mend ends a command in a sentence; a bug keeps its traceback."""

from __future__ import annotations

import errno
import io
import json
import re
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from safetensors.torch import load_file
from transformers import AutoConfig

from eagle.disk import open_tensors, write_text
from eagle.log import ProgressLines, describe_error, progress, script
from eagle.recipe import Recipe


def write_to_full_disk(path: Path) -> None:
    """As the system refuses it: without the name of a file."""
    from eagle.disk import replacing

    with replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")


def torn(path: Path, text: str = "\x00\x01") -> Path:
    """A file that is no safetensors file, no YAML and no config."""
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("fail", "sentence"),
    [
        (
            lambda folder: (folder / "nothing").read_text(),
            r"nothing: No such file or directory: check the path",
        ),
        (lambda folder: folder.read_text(), r"Is a directory: it is a folder: name a file"),
        (
            lambda folder: write_text(torn(folder / "file") / "x", ""),
            r"File exists: a file is where a folder should be",
        ),
        (
            lambda folder: write_to_full_disk(folder / "x.html"),
            r"x\.html: No space left on device: make room, or",
        ),
        (
            lambda folder: load_file(torn(folder / "x.safetensors")),
            "a safetensors file cannot be read",
        ),
        (
            lambda folder: open_tensors(torn(folder / "y.safetensors")).__enter__(),
            r"y\.safetensors is no whole safe",
        ),
        (
            lambda folder: AutoConfig.from_pretrained(folder / "gone"),
            r"no folder at .*gone: expected a model",
        ),
        (
            lambda folder: AutoConfig.from_pretrained(folder),
            r".* cannot be loaded: .* Expected a folder that save_p",
        ),
        (
            lambda folder: Recipe.load(torn(folder / "r.yaml", "target: [\n")),
            r"r\.yaml is no YAML: .*line 2",
        ),
        (
            lambda folder: Recipe.load(torn(folder / "r.yaml", "")),
            r"r\.yaml holds an empty file, expected keys",
        ),
        (
            lambda folder: Recipe.load("tiny/eagle1", ["train.lr=[1"]),
            r"override 'train\.lr=\[1': its value is no YAML",
        ),
        (
            lambda folder: Recipe.load("tiny/eagle1", ["train=null"]),
            r"tiny/eagle1: train: got nothing; ",
        ),
        (
            lambda folder: Recipe.load("tiny/eagle1", ["train={lr: 1}"]),
            r"train\.out: got the keys lr; Field required",
        ),
        (
            lambda folder: Recipe.load(
                "tiny/eagle1", ["regenerate.endpoint=http://user:key@host/v1"]
            ),
            r"regenerate: got the keys [\w, ]*; regenerate\.endpoint holds a user or a key before its @",
        ),
    ],
)
def test_a_fault_of_the_input_is_a_sentence(
    fail: Callable[[Path], Any], sentence: str, tmp_path: Path
) -> None:
    """With the file, and what to do."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(Exception, match=r".") as raised:
        fail(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "eagle.log.OURS", {"eagle", "data_prep", "eval", "recipes", "test_sentences", "tests"}
        )

        told = describe_error(raised.value)
    assert told is not None and re.search(sentence, told), told


@pytest.mark.parametrize(
    "fail", [lambda _: json.loads("{"), lambda _: {}["a key"], lambda _: "a" + 1]
)  # type: ignore
def test_a_bug_keeps_its_traceback(fail: Callable[[list[str]], Any]) -> None:
    """Of the standard library's checks, and of Python's."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        script(fail, [])


def test_a_status_is_kept_and_a_text_gets_the_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    """What ends a command by itself."""
    for code, status, printed in (
        (3, 3, ""),
        ("nothing to learn from", 1, "error: nothing to learn from\n"),
    ):
        with pytest.raises(SystemExit) as ended:
            script(lambda _, code=code: (_ for _ in ()).throw(SystemExit(code)), [])
        assert (ended.value.code, capsys.readouterr().err) == (status, printed)


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_stays_on_one_line(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside the words that training adds."""
    out = io.StringIO()
    made = Console(file=out, width=width, force_terminal=True)
    monkeypatch.setattr("eagle.log.Console", lambda **_: made)
    note = "loss 1.240, 3,560 tokens/s, 1.1 GB"
    for _ in progress(range(3), "train", 3, unit="steps", note=lambda: note):
        pass
    last = out.getvalue().split("\x1b[?25h")[0].strip().splitlines()
    assert note in last[-1] and len([line for line in last if "steps/s" in line]) >= 1
    assert not any(line.strip() in ("steps/s", "0:00:00") for line in last), last


class Log(io.StringIO):
    """A log file that tells when a line has come."""

    def __init__(self) -> None:
        super().__init__()
        self.told = threading.Event()

    def write(self, text: str) -> int:
        self.told.set()
        return super().write(text)


def test_a_log_file_gets_lines_while_an_item_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of work that shows a bar in a terminal; the first comes before the first item is done."""
    out = Log()
    monkeypatch.setattr("eagle.log.Console", lambda **_: Console(file=out))
    monkeypatch.setattr("eagle.log.ProgressLines", partial(ProgressLines, every=0.001))
    for number in progress(range(2), "extract", 94_370, unit="tokens", size=lambda _: 40_000):
        if not number:
            assert out.told.wait(60)
    first, last = out.getvalue().splitlines()[0], out.getvalue().splitlines()[-1]
    assert re.fullmatch(r"extract: 0 of 94,370 \(0%\) tokens, [\d:]+ elapsed", first)
    assert last.startswith("extract: 80,000 of 94,370 (85%) tokens, ") and last.endswith(" left")


@pytest.mark.parametrize(
    ("seconds", "done", "line"),
    [
        (
            60,
            5_662_200,
            "5,662,200 of 10,000,000 (57%) tokens, 94,370 tokens/s, 0:01:00 elapsed, 0:00:46 left, loss 1",
        ),
        (
            600,
            50,
            "50 of 10,000,000 (0%) tokens, 5.0 tokens/min, 0:10:00 elapsed, 1388 days, 21:10:00 left, loss 1",
        ),
        (
            7200,
            10,
            "10 of 10,000,000 (0%) tokens, 5.0 tokens/h, 2:00:00 elapsed, 83333 days, 6:00:00 left, loss 1",
        ),
        (
            60,
            10_000_000,
            "10,000,000 of 10,000,000 (100%) tokens, 166,667 tokens/s, 0:01:00 elapsed, loss 1",
        ),
        (60, 0, "0 of 10,000,000 (0%) tokens, 0:01:00 elapsed, loss 1"),
    ],
)
def test_a_line_of_progress_tells_rate_and_time_left(seconds: int, done: int, line: str) -> None:
    """By a clock that is given; what was done before does not count for the rate."""
    clock = iter([0.0, float(seconds)])
    lines = ProgressLines(
        "train", "tokens", 10_000_000, note=lambda: "loss 1", clock=lambda: next(clock)
    )
    lines.done = done
    assert lines.describe() == f"train: {line}"


def test_work_that_goes_on_is_not_counted_again() -> None:
    """Nor is a share given of work whose length nobody knows."""
    clock = iter([0.0, 10.0])
    lines = ProgressLines("measure", "answers", None, 1000, clock=lambda: next(clock))
    lines.done += 25
    assert lines.describe() == "measure: 1,025 answers, 2.5 answers/s, 0:00:10 elapsed"


def test_ctrl_c_is_no_bug_where_an_import_makes_another_error_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same error without Ctrl-C stays one; the handler is the interpreter's again."""

    def import_badly(argv: list[str]) -> None:
        try:
            if argv:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass
        raise ModuleNotFoundError("planted")

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ModuleNotFoundError):
            script(import_badly, [])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(SystemExit) as ended:
            script(import_badly, ["interrupted"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (
        ended.value.code == 130
        and "stopped; give the same command again" in capsys.readouterr().err
    )
