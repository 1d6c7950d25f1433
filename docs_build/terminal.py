"""Record a conversation with `eagle generate` for its page in docs: `python -m docs_build.terminal`.

It needs what `eagle demo --tiny` leaves.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from pathlib import Path

from rich.console import CONSOLE_SVG_FORMAT, Console
from rich.text import Text

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/chat.md"
PICTURE = ROOT / "docs/images/chat.svg"
BEGIN = "<!-- written by `python -m docs_build.terminal` -->\n"
END = "<!-- end -->\n"
COMMAND = "eagle generate runs/demo/eagle1/head --target runs/demo/target --dtype float32"
QUESTION = "What do you know about otters?"
TYPED = [QUESTION, "/plain", "/reset", QUESTION, "/draft", "How do I make apple pie?"]
COLUMNS = 100
ROWS = 40
# makes the terminal the one that sends Ctrl-C to a command, then becomes that command
CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
SECONDS = 300  # without a word, after which a program is taken to hang
CTRL_C = "\x03"
AGAIN = 10  # seconds without a word, after which Ctrl-C is pressed once more
EDITING = re.compile(r"\x1b\[\?\d+[hl]")  # a line editor asks for brackets around pasted text
Step = tuple[str, str]  # what to wait for, and what to type then


def run_in_terminal(command: Sequence[str], steps: Sequence[Step]) -> tuple[str, int]:
    """Return all that a terminal is sent by a command, which is typed to step by step, and the command's status."""
    terminal, child = _start(command)
    pending = list(steps)
    output = b""
    offset = 0  # of what was not searched for a step yet
    typed = ""
    quiet_seconds = 0
    while quiet_seconds < SECONDS:
        if not select.select([terminal], [], [], AGAIN)[0]:
            quiet_seconds += AGAIN
            # Python heeds none that comes between a prompt and its wait for a key
            if typed == CTRL_C:
                os.write(terminal, typed.encode())
            continue
        quiet_seconds = 0
        try:
            output += os.read(terminal, 1 << 16)
        except OSError:
            # the command has ended
            break
        while pending:
            prompt = pending[0][0].encode()
            begin = output.find(prompt, offset)
            if begin < 0:
                break
            offset = begin + len(prompt)
            typed = pending.pop(0)[1]
            os.write(terminal, typed.encode())
    else:
        child.kill()
    os.close(terminal)
    text = EDITING.sub("", output.decode(errors="replace")).replace("\r\n", "\n")
    return text, child.wait()


def _start(command: Sequence[str]) -> tuple[int, subprocess.Popen[bytes]]:
    """Start a command in a terminal of its own; return the terminal's file descriptor and the process."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    # the picture shows colours, whatever the caller prefers
    env = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    child = subprocess.Popen(
        [sys.executable, "-c", CONTROLLED, *command],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**env, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(end)
    return terminal, child


def record() -> str:
    """Return what the terminal shows from the command on, with its colours."""
    steps = [("> ", f"{line}\n") for line in TYPED] + [("> ", "\x04")]
    text, status = run_in_terminal([sys.executable, "-m", *COMMAND.split()], steps)
    if status:
        raise ValueError(
            f"{COMMAND} ended with status {status} (does runs/demo exist? `eagle demo --tiny` makes it): {text}"
        )
    return f"$ {COMMAND}\n{text[text.index('/help lists') :].rstrip()}\n"


def draw(text: str) -> str:
    """Return a picture of the terminal; it asks for no font of another machine."""
    console = Console(
        record=True,
        width=COLUMNS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(Text.from_ansi(text))
    template = re.sub(
        r"@font-face \{\{.*?\}\}\s*|<!--.*?-->\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
    )
    return console.export_svg(title="eagle generate", code_format=template, unique_id="chat")


def write() -> None:
    """Record once; write the picture, and the text into the page."""
    text = record()
    PICTURE.write_text(draw(text))
    # what stands around the recorded text stays
    before, _, rest = PAGE.read_text().partition(BEGIN)
    plain = Text.from_ansi(text).plain.rstrip()
    PAGE.write_text(f"{before}{BEGIN}```text\n{plain}\n```\n{END}{rest.partition(END)[2]}")
    print(f"{PICTURE} and {PAGE}")


if __name__ == "__main__":
    write()
