"""Record `eagle chat` on what `eagle demo` leaves, for its page in docs: `python -m docs_build.terminal`."""

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
PAGE, PICTURE = ROOT / "docs/chat.md", ROOT / "docs/images/chat.svg"
BEGIN, END = "<!-- written by `python -m docs_build.terminal` -->\n", "<!-- end -->\n"
COMMAND = "eagle chat runs/demo/eagle1/head --target runs/demo/target --dtype float32"
QUESTION = "What do you know about otters?"
TYPED = [QUESTION, "/plain", "/reset", QUESTION, "/draft", "How do I make apple pie?"]
COLUMNS, ROWS = 100, 40
# makes the terminal the one that sends Ctrl-C to a command, then becomes that command
CONTROLLED = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); os.execvp(sys.argv[1], sys.argv[1:])"
)
SECONDS = 300  # without a word, after which a program is taken to hang
CTRL_C = "\x03"
AGAIN = 10  # seconds without a word, after which Ctrl-C is pressed once more
EDITING = re.compile(r"\x1b\[\?\d+[hl]")  # a line editor asks for brackets around pasted text
Step = tuple[str, str]  # what to wait for, and what to type then


def run_in_terminal(command: Sequence[str], steps: Sequence[Step]) -> tuple[str, int]:
    """All that a terminal is sent by a command, which is typed to step by step; and the command's status."""
    terminal, end = pty.openpty()
    fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    colours = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    child = subprocess.Popen(
        [sys.executable, "-c", CONTROLLED, *command],
        stdin=end,
        stdout=end,
        stderr=end,
        env={**colours, "TERM": "xterm-256color"},
        start_new_session=True,
    )
    os.close(end)
    sent, place, waiting = b"", 0, list(steps)
    typed, quiet = "", 0
    while quiet < SECONDS:
        if not select.select([terminal], [], [], AGAIN)[0]:
            quiet += AGAIN
            if typed == CTRL_C:  # Python heeds none that comes between a prompt and its wait for a key
                os.write(terminal, typed.encode())
            continue
        quiet = 0
        try:
            sent += os.read(terminal, 1 << 16)
        except OSError:  # the command has ended
            break
        while waiting and (found := sent.find(waiting[0][0].encode(), place)) >= 0:
            place = found + len(waiting[0][0].encode())
            typed = waiting.pop(0)[1]
            os.write(terminal, typed.encode())
    else:
        child.kill()
    os.close(terminal)
    return EDITING.sub("", sent.decode(errors="replace")).replace("\r\n", "\n"), child.wait()


def record() -> str:
    """What the terminal shows from the command on, with its colours."""
    steps = [("> ", f"{line}\n") for line in TYPED] + [("> ", "\x04")]
    text, status = run_in_terminal([sys.executable, "-m", *COMMAND.split()], steps)
    if status:
        raise ValueError(f"{COMMAND} ended with status {status} (does runs/demo exist? `eagle demo` makes it): {text}")
    return f"$ {COMMAND}\n{text[text.index('/help lists') :].rstrip()}\n"


def draw(text: str) -> str:
    """A picture of the terminal; it asks for no font of another machine."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(text))
    form = re.sub(r"@font-face \{\{.*?\}\}\s*|<!--.*?-->\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title="eagle chat", code_format=form, unique_id="chat")


def write() -> None:
    """Record once; write the picture, and the text into the page."""
    text = record()
    PICTURE.write_text(draw(text))
    before, _, rest = PAGE.read_text().partition(BEGIN)
    plain = Text.from_ansi(text).plain.rstrip()
    PAGE.write_text(f"{before}{BEGIN}```text\n{plain}\n```\n{END}{rest.partition(END)[2]}")
    print(f"{PICTURE} and {PAGE}")


if __name__ == "__main__":
    write()
