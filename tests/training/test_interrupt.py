"""Ctrl-C ends a command with a sentence and status 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from trained import ROOT, finished, launched, prepared

PROGRAM = """
import os, signal
from eagle.log import interrupted_by_user, script

def hint():
    os.kill(os.getpid(), signal.SIGINT)  # as a launcher does, while the first one is handled
    return "step 3 is kept"

def main(argv):
    with interrupted_by_user(hint) if argv else open(os.devnull):
        os.kill(os.getpid(), signal.SIGINT)

script(main)
"""


def test_ctrl_c_ends_a_command_in_a_sentence(tmp_path: Path) -> None:
    """With the inner hint, else that of every command; a second Ctrl-C while it is printed changes nothing."""
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    for arguments, hint in ([], "give the same command again"), (["hinted"], "step 3 is kept"):
        done = finished([*command, *arguments], seconds=60)
        assert (done.returncode, done.stdout) == (130, f"\nstopped; {hint}\n")


LOST = """
import os, signal, time
from eagle.log import script

class Dying:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        len("a call, before which Python looks for signals")

def main(argv):
    Dying()
    time.sleep(50)

script(main)
"""


def test_ctrl_c_inside_a_destructor_is_not_lost(tmp_path: Path) -> None:
    """Python only prints what is raised there, and the command would go on."""
    (tmp_path / "program.py").write_text(LOST)
    done = finished([sys.executable, str(tmp_path / "program.py")], seconds=40)
    assert (done.returncode, done.stdout) == (130, "\nstopped; give the same command again\n")


SWALLOWED = """
import os, signal, time
from eagle import log

log.LOST_AFTER = 0.2

def main(argv):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(50)
    except BaseException:
        pass  # as code that runs within an import of an extension module
    time.sleep(50)

log.script(main)
"""


def test_ctrl_c_that_is_swallowed_comes_again(tmp_path: Path) -> None:
    """A library that catches everything does not keep a command going."""
    (tmp_path / "program.py").write_text(SWALLOWED)
    done = finished([sys.executable, str(tmp_path / "program.py")], seconds=40)
    assert (done.returncode, done.stdout) == (130, "\nstopped; give the same command again\n")


@pytest.mark.slow
@pytest.mark.parametrize("config", [None, "ddp"])
def test_ctrl_c_in_training_says_where_it_goes_on(
    config: str | None, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """One sentence, of however many processes; the same command goes on from that step."""
    asked = [
        *prepared(tiny_target_dir, tmp_path),
        f"train.out={tmp_path / 'run'}",
        "train.checkpoint_every=1",
    ]
    script = [str(ROOT / "recipes/train_eagle.py"), *asked, "train.epochs=200"]
    command = launched(config, *script) if config else [sys.executable, *script]
    log = tmp_path / "log"
    with log.open("w") as file:
        started = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT, start_new_session=True
        )
    try:
        until = time.monotonic() + 200
        while not list((tmp_path / "run/checkpoints").glob("step-1?")):
            assert started.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.01)
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does
        status = started.wait(100)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
            started.wait()
    newest = max(
        int(path.name[5:])
        for path in (tmp_path / "run/checkpoints").glob("step-*")
        if path.suffix != ".part"
    )
    output = log.read_text()
    assert output.count(f"stopped; the same command goes on from step {newest}\n") == 1, output
    if config is None:
        assert status == 130 and "Traceback" not in output
