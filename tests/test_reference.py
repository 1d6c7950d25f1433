"""The pages of reference are those that the types and the parsers make."""

from __future__ import annotations

from pydantic import Field

from docs_build import recipe_keys
from eagle.recipe import Section


def test_the_page_of_recipe_keys_is_that_of_the_types() -> None:
    """A new key, default or comment needs `python -m docs_build.recipe_keys`."""
    assert recipe_keys.PAGE.read_text() == recipe_keys.page()


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
    number = "- `x.number` (integer ≥ 1; default `3`): how many"
    assert recipe_keys.key_lines(Example, "x.") == [number, '- `x.words` (list of text; default `["a"]`)']
    assert recipe_keys.key_lines(Further, "x.") == [number, '- `x.words` (list of text; default `["b"]`): which']
