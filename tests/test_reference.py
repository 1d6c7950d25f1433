"""The pages of reference are those that the types and the parsers make."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import Field

from docs_build import commands, recipe_keys
from docs_build.comments import read_field_comment
from eagle.__main__ import VERBS, overview
from eagle.recipe import Section

ROOT = Path(__file__).parent.parent


def test_the_page_of_recipe_keys_is_that_of_the_types() -> None:
    """A new key, default or comment needs `python -m docs_build.recipe_keys`."""
    assert recipe_keys.PAGE.read_text() == recipe_keys.page()


@pytest.mark.slow
def test_every_key_has_a_meaning() -> None:
    """Each comes from the comment behind the field."""
    lines = recipe_keys.page().splitlines()
    assert [line for line in lines if line.startswith("- `") and not line.partition("): ")[2]] == []


class Example(Section):
    """A section."""

    number: int | None = Field(3, ge=1)  # how many
    words: tuple[str, ...] = ("a",)


class Further(Example):
    """A section made from another."""

    words: tuple[str, ...] = ("b",)  # which


def test_a_key_is_described() -> None:
    """Type, bounds, default and meaning; a class made from another describes the keys of both."""
    # optional, bounded, with a default and a comment
    number = "- `x.number` (integer ≥ 1; default `3`): how many"
    assert recipe_keys.key_lines(Example, "x.") == [
        number,
        '- `x.words` (list of text; default `["a"]`)',
    ]
    assert recipe_keys.key_lines(Further, "x.") == [
        number,
        '- `x.words` (list of text; default `["b"]`): which',
    ]


def test_the_page_of_commands_has_every_verb() -> None:
    """In the order of `eagle --help`, with the line that stands there."""
    text = commands.PAGE.read_text()
    headings = [
        line.removeprefix("### eagle ") for line in text.splitlines() if line.startswith("### ")
    ]
    assert headings == list(VERBS)
    assert f"```text\n{overview()}\n```" in text


@pytest.mark.slow
@pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="argparse prints options otherwise since Python 3.13"
)
def test_the_page_of_commands_is_what_help_prints() -> None:
    """A new option needs `python -m docs_build.commands`."""
    subprocess.run([sys.executable, "-m", "docs_build.commands", "--check"], cwd=ROOT, check=True)


def test_the_comment_of_a_field_is_on_its_line_or_above() -> None:
    """Both are read, a longer one above whole, and none of a neighbour's."""
    # comments of one line, of several above, and none
    lines = [
        "one: int  # of one",
        "# of two,",
        "# and more",
        "two: int = (",
        "    2",
        ")",
        "three: int",
    ]
    found = [read_field_comment(lines, *span) for span in ((1, 1), (4, 6), (7, 7))]
    assert found == ["of one", "of two, and more", ""]
