"""Write the page of the command line from what `--help` prints: `python -m docs_build.commands`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout

from eagle.__main__ import GROUPS, OLD_VERBS, VERBS, overview, run_verb
from eagle.shipped import HELP_PAGE as PAGE

INTRODUCTION = """# Command line

<!-- written by `python -m docs_build.commands` from what `--help` prints -->

These are the help texts of all commands. `eagle VERB ...` is the same as `python -m eagle VERB ...`.

- RECIPE is a file, or the name of a shipped recipe. `eagle recipes` lists the shipped ones.
- `key=value` overrides a [key of the recipe](recipes.md), for example `train.lr=1e-3`.
"""
OLD_NAMES = """## Old names

The old names still work, with the same arguments.

| old | now |
|---|---|"""


def print_help(verb: str) -> str:
    """Return what `eagle VERB --help` prints, by its own parser, for a terminal of 80 columns."""
    out = io.StringIO()
    # argparse asks it for the width
    os.environ["COLUMNS"] = "80"
    with redirect_stdout(out), redirect_stderr(out):
        try:
            run_verb(verb, VERBS[verb], ["--help"])
        except SystemExit as ended:
            if ended.code:
                raise ValueError(
                    f"eagle {verb} --help ended with {ended.code}: {out.getvalue()}"
                ) from None
    return out.getvalue().strip()


def page() -> str:
    """Return the whole page."""
    sections = [INTRODUCTION, f"```text\n{overview()}\n```\n"]
    for title, verbs in GROUPS.items():
        sections.append(f"## {title}\n")
        for name, verb in verbs.items():
            about = verb.about[0].upper() + verb.about[1:]
            sections.append(f"### eagle {name}\n\n{about}.\n\n```text\n{print_help(name)}\n```\n")
    rows = [f"| `eagle {old}` | `eagle {new}` |" for old, new in OLD_VERBS.items()]
    sections.append("\n".join([OLD_NAMES, *rows, ""]))
    return "\n".join(sections)


def write() -> None:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(prog="python -m docs_build.commands", description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; end with status 1 if the page differs"
    )
    args = parser.parse_args()
    text = page()
    if not args.check:
        PAGE.write_text(text)
    elif PAGE.read_text() != text:
        sys.exit(f"{PAGE} is not what --help prints: run `python -m docs_build.commands`")


if __name__ == "__main__":
    write()
