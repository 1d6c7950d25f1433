"""Ctrl-C ends a command with a sentence and status 130."""

from __future__ import annotations

import sys
from pathlib import Path

from trained import finished

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
