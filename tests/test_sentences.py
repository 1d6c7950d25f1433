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

from eagle.disk import open_tensors, replacing, write_text
from eagle.log import ProgressLines, describe_error, progress, script
from eagle.recipe import Recipe


def write_to_full_disk(path: Path) -> None:
    """Fail as the system does: without the name of a file."""
    with replacing(path):
        raise OSError(errno.ENOSPC, "No space left on device")


def load_with(override: str) -> None:
    """Load a right recipe with a wrong override."""
    Recipe.load("tiny/eagle1", [override])


# in a folder with a torn `config.json` and `x.safetensors`, and the recipes `torn.yaml` and `empty.yaml`
FAULTS: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "nothing").read_text(), "nothing: No such file .*: check the path"),
    (lambda folder: folder.read_text(), "it is a folder: name a file"),
    (lambda folder: write_text(folder / "torn.yaml/x", ""), "a file is where a folder should be"),
    (lambda folder: write_to_full_disk(folder / "x.html"), r"x\.html: No space left .*: make room"),
    (lambda folder: load_file(folder / "x.safetensors"), "a safetensors file cannot be read"),
    (
        lambda folder: open_tensors(folder / "x.safetensors").__enter__(),
        r"x\.safetensors is no whole safe",
    ),
    (lambda folder: AutoConfig.from_pretrained(folder / "gone"), r"no folder at .*gone: expected"),
    (lambda folder: AutoConfig.from_pretrained(folder), "cannot be loaded: .* save_p"),
    (lambda folder: Recipe.load(folder / "torn.yaml"), r"torn\.yaml is no YAML: .*line 2"),
    (lambda folder: Recipe.load(folder / "empty.yaml"), r"empty\.yaml holds an empty file"),
    (lambda _: load_with("train.lr=[1"), r"'train\.lr=\[1': its value is no YAML"),
    (lambda _: load_with("train=null"), "tiny/eagle1: train: got nothing; "),
    (lambda _: load_with("train={lr: 1}"), r"train\.out: got the keys lr; Field required"),
    (lambda _: load_with("regenerate.endpoint=http://user:key@host/v1"), "before its @"),
]


@pytest.mark.parametrize(("fail", "sentence"), FAULTS, ids=[sentence for _, sentence in FAULTS])
def test_a_fault_of_the_input_is_a_sentence(
    fail: Callable[[Path], Any],
    sentence: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the file, and what to do."""
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "x.safetensors").write_text("\x00\x01")
    (tmp_path / "torn.yaml").write_text("target: [\n")
    (tmp_path / "empty.yaml").touch()
    with pytest.raises(Exception, match=r".") as raised:
        fail(tmp_path)
    # as if the calls above were the project's own
    ours = {"eagle", "data_prep", "eval", "recipes", "test_sentences", "tests"}
    with monkeypatch.context() as patch:
        patch.setattr("eagle.log.OURS", ours)
        described = describe_error(raised.value)
    assert described is not None
    assert re.search(sentence, described), described


@pytest.mark.parametrize(
    "fail", [lambda _: json.loads("{"), lambda _: {}["a key"], lambda _: "a" + 1]
)  # type: ignore
def test_a_bug_keeps_its_traceback(fail: Callable[[list[str]], Any]) -> None:
    """Of the standard library's checks, and of Python's."""
    with pytest.raises((ValueError, KeyError, TypeError)):
        script(fail, [])


@pytest.mark.parametrize(
    ("code", "status", "printed"), [(3, 3, ""), ("no data", 1, "error: no data\n")]
)
def test_a_status_is_kept_and_a_text_gets_the_prefix(
    code: int | str,
    status: int,
    printed: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Where a command ends by itself."""
    with pytest.raises(SystemExit) as ended:
        script(lambda _: exit(code), [])
    assert ended.value.code == status
    assert capsys.readouterr().err == printed


@pytest.mark.parametrize("width", [80, 120])
def test_a_bar_stays_on_one_line(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with the words that training adds."""
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True)
    monkeypatch.setattr("eagle.log.Console", lambda **_: console)
    note = "loss 1.240, 3,560 tokens/s, 1.1 GB"
    for _ in progress(range(3), "train", 3, unit="steps", note=lambda: note):
        pass
    # what stands there until the cursor is shown again
    lines = out.getvalue().split("\x1b[?25h")[0].strip().splitlines()
    assert note in lines[-1]
    assert any("steps/s" in line for line in lines)
    assert not any(line.strip() in ("steps/s", "0:00:00") for line in lines), lines


class Log(io.StringIO):
    """A log file with an event that is set when a line has come."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def write(self, text: str) -> int:
        """Write a text and set the event."""
        self.written.set()
        return super().write(text)


def test_a_log_file_gets_lines_while_an_item_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Work that shows a bar in a terminal logs its first line before the first item is done."""
    out = Log()
    monkeypatch.setattr("eagle.log.Console", lambda **_: Console(file=out))
    monkeypatch.setattr("eagle.log.ProgressLines", partial(ProgressLines, every=0.001))
    for index in progress(range(2), "extract", 94_370, unit="tokens", size=lambda _: 40_000):
        if not index:
            assert out.written.wait(60)
    lines = out.getvalue().splitlines()
    assert re.fullmatch(r"extract: 0 of 94,370 \(0%\) tokens, [\d:]+ elapsed", lines[0])
    assert re.fullmatch(r"extract: 80,000 of 94,370 \(85%\) tokens, .* left", lines[-1])


@pytest.mark.parametrize(
    ("seconds", "done", "line"),
    [
        (60, 5_662_200, "(57%) tokens, 94,370 tokens/s, 0:01:00 elapsed, 0:00:46 left, loss 1"),
        (600, 50, "(0%) tokens, 5.0 tokens/min, 0:10:00 elapsed, 1388 days, 21:10:00 left, loss 1"),
        (7200, 10, "(0%) tokens, 5.0 tokens/h, 2:00:00 elapsed, 83333 days, 6:00:00 left, loss 1"),
        (60, 10_000_000, "(100%) tokens, 166,667 tokens/s, 0:01:00 elapsed, loss 1"),
        (60, 0, "(0%) tokens, 0:01:00 elapsed, loss 1"),
    ],
)
def test_a_line_of_progress_tells_rate_and_time_left(seconds: int, done: int, line: str) -> None:
    """By a clock that is given."""
    # read once at the start, and once for the line
    clock = iter([0.0, float(seconds)])
    lines = ProgressLines(
        "train", "tokens", 10_000_000, note=lambda: "loss 1", clock=lambda: next(clock)
    )
    lines.done = done
    assert lines.describe() == f"train: {done:,} of 10,000,000 {line}"


def test_work_that_goes_on_is_not_counted_again() -> None:
    """The rate is that of this run; no share is given of work whose length nobody knows."""
    clock = iter([0.0, 10.0])
    lines = ProgressLines(
        "measure",
        "answers",
        None,
        1000,
        clock=lambda: next(clock),
    )
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
        # as an import of a package may do
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
    assert ended.value.code == 130
    assert "stopped; give the same command again" in capsys.readouterr().err
