"""Ctrl-C ends a command with a sentence and status 130."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trained import finished

PLAIN = """
import os, signal
from eagle.log import script

def main(argv):
    os.kill(os.getpid(), signal.SIGINT)

script(main)
"""
HINTED = """
import os, signal
from eagle.interrupts import interrupted_by_user
from eagle.log import script

def hint():
    os.kill(os.getpid(), signal.SIGINT)  # as a launcher does, while the first one is handled
    return "step 3 is kept"

def main(argv):
    with interrupted_by_user(hint):
        os.kill(os.getpid(), signal.SIGINT)

script(main)
"""
# Python only prints what is raised in a destructor, and the command would go on
IN_A_DESTRUCTOR = """
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
# as code that runs within an import of an extension module
SWALLOWED = """
import os, signal, time
from eagle import interrupts
from eagle.log import script

interrupts.LOST_AFTER = 0.2

def main(argv):
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(50)
    except BaseException:
        pass
    time.sleep(50)

script(main)
"""
# Ctrl-C comes when the second process was started a moment ago: its interpreter has not reached the program
STARTING = """
import os, signal, subprocess, sys
from eagle.interrupts import children_start_with_sigint_blocked

started = []
try:
    with children_start_with_sigint_blocked():
        started.append(subprocess.Popen([sys.executable, "child.py"]))
        os.killpg(0, signal.SIGINT)
        started[0].wait(20)
except KeyboardInterrupt:
    print("interrupted", started[0].wait(20))
print("blocked", signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))
"""
CHILD = """
import time
from eagle.log import script

script(lambda _: time.sleep(50), [])
"""
AGAIN = "give the same command again"


@pytest.mark.parametrize(
    ("program", "hint"),
    [(PLAIN, AGAIN), (HINTED, "step 3 is kept"), (IN_A_DESTRUCTOR, AGAIN), (SWALLOWED, AGAIN)],
    ids=["plain", "hinted", "in a destructor", "swallowed"],
)
def test_ctrl_c_ends_a_command_in_a_sentence(program: str, hint: str, tmp_path: Path) -> None:
    """Wherever it comes, with the inner hint if there is one; a second Ctrl-C meanwhile changes nothing."""
    path = tmp_path / "program.py"
    path.write_text(program)
    done = finished([sys.executable, str(path)], seconds=60)
    assert done.returncode == 130
    assert done.stdout == f"\nstopped; {hint}\n"


def test_a_process_that_is_starting_handles_ctrl_c(tmp_path: Path) -> None:
    """It ends like any other, and the process that starts it receives the signal at once."""
    for name, program in {"parent.py": STARTING, "child.py": CHILD}.items():
        (tmp_path / name).write_text(program)
    # a session of its own, as the program sends the signal to all processes of its group
    done = subprocess.run(
        [sys.executable, "parent.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        start_new_session=True,
    )
    assert done.stdout == "interrupted 130\nblocked False\n", done.stderr
    assert done.stderr == f"\nstopped; {AGAIN}\n"
