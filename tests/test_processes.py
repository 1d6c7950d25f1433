"""`eagle train` on several real processes ends in one sentence, by the status of its processes, without a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
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


class Command:
    """A command of several processes in a session of its own, as a terminal starts it, and all that it prints."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self.log = log
        with log.open("w") as file:
            self.started = subprocess.Popen(
                [sys.executable, "-c", EAGLE, *arguments],
                stdout=file,
                stderr=file,
                cwd=ROOT,
                start_new_session=True,
            )

    def until(self, happened: Callable[[], bool]) -> None:
        """Wait for something while the command runs."""
        end = time.monotonic() + PATIENCE
        while not happened():
            assert self.started.poll() is None and time.monotonic() < end, self.log.read_text()
            time.sleep(0.01)

    def interrupt(self) -> None:
        """Ctrl-C, which a terminal sends to all processes of the command."""
        os.killpg(self.started.pid, signal.SIGINT)

    def ended(self) -> tuple[int, str]:
        """Its status and what it printed; no launcher's traceback is in it, nor advice on accelerate."""
        try:
            status = self.started.wait(PATIENCE)
        finally:
            if self.started.poll() is None:
                os.killpg(self.started.pid, signal.SIGKILL)
                self.started.wait()
        output = self.log.read_text()
        for foreign in (
            "ChildFailedError",
            "torch.distributed",
            "accelerate config",
            "elastic",
            "SignalException",
        ):
            assert foreign not in output, output
        return status, output


@pytest.fixture
def trained_by(tiny_target_dir: Path, tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Starts `eagle train` on a small store, with these further words."""
    recipe = [
        *prepared(tiny_target_dir, tmp_path),
        f"train.out={tmp_path / 'run'}",
        "train.checkpoint_every=1",
    ]
    yield lambda *words: Command(tmp_path / "log", "train", *recipe, "train.epochs=300", *words)


def count_steps(tmp_path: Path) -> int:
    """How many checkpoints a run has kept."""
    return len(list((tmp_path / "run/checkpoints").glob("step-?")))


@pytest.mark.parametrize("count", [1, 2, pytest.param(8, marks=pytest.mark.long)])
def test_what_all_processes_refuse_is_told_once(
    count: int, trained_by: Callable[..., Command], tmp_path: Path
) -> None:
    """After the launch, where the recipe asks for another number of processes; before it, where a key is unknown."""
    status, output = trained_by("--processes", str(count), "train.processes=3").ended()
    assert (
        status == 1
        and output.count("error: asked for 3 processes") == 1
        and "Traceback" not in output
    ), output
    status, output = trained_by("--processes", str(count), "train.lear=3").ended()
    assert status == 1 and output.count("error: ") == 1 and "unknown key train.lear" in output, (
        output
    )


@pytest.mark.parametrize("count", [1, 2, pytest.param(8, marks=pytest.mark.long)])
def test_ctrl_c_is_told_once(
    count: int, trained_by: Callable[..., Command], tmp_path: Path
) -> None:
    """Status 130 and where the run goes on, or that it can be given again where it had not begun."""
    command = trained_by("--processes", str(count))
    command.until(lambda: count_steps(tmp_path) > 0)
    command.interrupt()
    status, output = command.ended()
    assert status == 130 and output.count("stopped; the same command goes on from step") == 1, (
        output
    )
    assert "Traceback" not in output, output
    for seconds in (0.5, 3, 6):  # while they import, find one another, read the data
        command = trained_by(
            "--processes", str(count), f"train.out={tmp_path / 'early'}", "train.epochs=3000"
        )
        time.sleep(seconds)
        command.interrupt()
        status, output = command.ended()
        assert status == 130 and output.count("stopped; ") == 1 and "Traceback" not in output, (
            seconds,
            output,
        )


def test_a_process_that_is_killed_is_named(
    trained_by: Callable[..., Command], tmp_path: Path
) -> None:
    """As by a system whose memory ran out; the others end with it."""
    command = trained_by("--processes", "2")
    command.until(lambda: count_steps(tmp_path) > 0)
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(command.started.pid)], capture_output=True, text=True
    )
    os.kill(max(map(int, children.stdout.split())), signal.SIGKILL)
    status, output = command.ended()
    assert (
        status == 1
        and "was ended by SIGKILL; so a system ends what takes too much memory" in output
    ), output


LAUNCH = """
from eagle.log import script
from eagle.shipped import RECIPES
from eagle.training.launch import launch_processes
options = ["--num_processes=2", "--main_process_port=0", f"--config_file={RECIPES}/accelerate/ddp.yaml"]
script(lambda _: launch_processes(options, ["program.py"]), [])
"""
PROGRAMS = {
    "raise KeyError('planted')": [
        "KeyError: 'planted'",
        "error: process 1 failed: what it printed says why",
    ],
    "os.kill(os.getpid(), signal.SIGKILL)": [
        "error: process 1 was ended by SIGKILL; so a system ends what takes too"
    ],
    "from eagle.log import script; script(lambda _: exit('no data'), [])": ["error: no data"],
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_one_of_two_processes_fails(program: str, tmp_path: Path) -> None:
    """A bug shows its own traceback; a kill is named; a sentence is told."""
    (tmp_path / "program.py").write_text(
        f"import os, signal\nif os.environ['RANK'] == '1':\n    {program}\n"
    )
    command = [sys.executable, "-c", LAUNCH]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=PATIENCE)
    lines = [line for line in done.stderr.splitlines() if not line.startswith((" ", "Traceback"))]
    assert (done.returncode, lines[-len(PROGRAMS[program]) :]) == (1, lines) and len(lines) == len(
        PROGRAMS[program]
    )
    for line, expected in zip(lines, PROGRAMS[program], strict=True):
        assert line.startswith(expected), done.stderr
