"""`eagle` in real processes ends in one sentence, by the status of its processes, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from trained import ROOT, prepared

pytestmark = pytest.mark.slow
# run as `eagle`, by an interpreter that Ctrl-C interrupts: a shell's background job ignores it
EAGLE = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    "from eagle.__main__ import main; main()"
)
PATIENCE = 200  # seconds
# words of accelerate's and torch's own reports
FOREIGN = ("ChildFailedError", "torch.distributed", "accelerate config", "elastic", "SignalExc")


class Command:
    """A command of several processes in a session of its own, as a terminal starts it, and all that it prints."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        command = [sys.executable, "-c", EAGLE, *arguments]
        with log.open("w") as file:
            self.started = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=ROOT, start_new_session=True
            )

    def until(self, happened: Callable[[], object]) -> None:
        """Wait for something while the command runs."""
        end = time.monotonic() + PATIENCE
        while not happened():
            assert self.started.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def interrupt(self) -> None:
        """Press Ctrl-C, which a terminal sends to all processes of the command."""
        os.killpg(self.started.pid, signal.SIGINT)

    def ended(self) -> tuple[int, str]:
        """Return its status and what it printed, in which there is no traceback and nothing of a launcher."""
        try:
            status = self.started.wait(PATIENCE)
        finally:
            if self.started.poll() is None:
                os.killpg(self.started.pid, signal.SIGKILL)
                self.started.wait()
        output = self.log.read_text()
        assert [word for word in ("Traceback", *FOREIGN) if word in output] == [], output
        return status, output


@pytest.fixture
def train(tiny_target_dir: Path, tmp_path: Path) -> Callable[..., Command]:
    """Start `eagle train` on a small store, on so many processes and with these overrides."""
    recipe = prepared(tiny_target_dir, tmp_path)
    recipe += [f"train.out={tmp_path / 'run'}", "train.checkpoint_every=1", "train.epochs=3000"]

    def start(count: int, *overrides: str) -> Command:
        words = ["train", *recipe, "--processes", str(count), *overrides]
        return Command(tmp_path / "log", *words)

    return start


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("train.processes=3", "error: asked for 3 processes"),  # known after the launch
        ("train.lear=3", "unknown key train.lear"),  # known before it
    ],
)
def test_what_all_processes_refuse_is_told_once(
    override: str,
    sentence: str,
    train: Callable[..., Command],
) -> None:
    """Two processes print one error."""
    status, output = train(2, override).ended()
    assert status == 1
    assert output.count("error: ") == 1
    assert sentence in output


@pytest.mark.parametrize("count", [1, 2])
def test_ctrl_c_is_told_once(count: int, train: Callable[..., Command], tmp_path: Path) -> None:
    """Status 130 and where the run goes on, or that it can be given again where it had not begun."""
    command = train(count)
    checkpoints = tmp_path / "run/checkpoints"
    command.until(lambda: list(checkpoints.glob("step-?")))
    command.interrupt()
    status, output = command.ended()
    assert status == 130
    # what is half written ends in .part
    newest = max(int(path.name[5:]) for path in checkpoints.glob("step-*[0-9]"))
    assert output.count(f"stopped; the same command goes on from step {newest}\n") == 1
    for seconds in (0.5, 4):  # while the processes import, and find one another
        command = train(count, f"train.out={tmp_path / 'early'}")
        time.sleep(seconds)
        command.interrupt()
        status, output = command.ended()
        assert status == 130
        assert output.count("stopped; ") == 1, output


LAUNCH = """
from eagle.log import script
from eagle.shipped import RECIPES
from eagle.training.launch import launch_processes
options = ["--num_processes=2", "--main_process_port=0", f"--config_file={RECIPES}/accelerate/ddp.yaml"]
script(lambda _: launch_processes(options, ["program.py"]), [])
"""
# what process 1 does, and the lines that are printed beside a traceback
PROGRAMS = {
    "raise KeyError('planted')": [
        "KeyError: 'planted'",
        "error: process 1 failed: what it printed says why",
    ],
    "os.kill(os.getpid(), signal.SIGKILL)": [
        "error: process 1 was ended by SIGKILL; so a system ends what takes too much memory"
    ],
    "from eagle.log import script; script(lambda _: exit('no data'), [])": ["error: no data"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_of_two_processes_fails(program: str, tmp_path: Path) -> None:
    """A bug shows its own traceback; a kill is named; a sentence is told."""
    # process 0 would go on, and is ended
    text = f"import os, signal\nif os.environ['RANK'] == '1':\n    {program}\n"
    (tmp_path / "program.py").write_text(text)
    command = [sys.executable, "-c", LAUNCH]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=PATIENCE,
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not line.startswith((" ", "Traceback"))]
    for line, expected in zip(lines, PROGRAMS[program], strict=True):
        assert line.startswith(expected), done.stderr
