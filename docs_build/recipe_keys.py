"""Write the page of all recipe keys from the types that read them: `python -m docs_build.recipe_keys`."""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import re
import textwrap
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from docs_build.comments import read_field_comment
from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS
from eagle.recipe import BudgetSection, MeasuredSection, OnPolicySection, Recipe
from eagle.recipe.mixes import SourceSection
from eval.comparison.compare_plan import ArmSection, ComparisonSection

PAGE = Path(__file__).parent.parent / "docs/reference/recipes.md"
INTRODUCTION = """# Recipe keys

<!-- written by `python -m docs_build.recipe_keys` from the types that read recipes -->

A recipe is a YAML file with one section for each part of a run. To override a value, add `section.key=value` after the
recipe's name on the command line. If a key does not exist, the error message names the most similar key.

- The [glossary](../quickstart.md#glossary) explains target, features, taps, level, supervised tokens and draft tree.
- A *slot* is a position of a training batch from which the head predicts a token.
- The comments in the shipped recipes give the source of each value.
"""
NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "any value",
    NoneType: "null",
}
BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def comments_of(model: type) -> dict[str, str]:
    """Return the comment of each field, on its line or above it; those of the base classes included."""
    comments: dict[str, str] = {}
    for owner in reversed(model.__mro__):
        if not issubclass(owner, BaseModel) or owner is BaseModel:
            continue
        source = textwrap.dedent(inspect.getsource(owner))
        lines = source.splitlines()
        (parsed,) = ast.parse(source).body
        assert isinstance(parsed, ast.ClassDef)
        for field in parsed.body:
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and field.end_lineno
            ):
                name = field.target.id
                comment = read_field_comment(lines, field.lineno, field.end_lineno)
                # a class may set another default without saying again what the key means
                comments[name] = comment or comments.get(name, "")
    return comments


def describe_type(annotation: Any) -> str:
    """Return a type in words."""
    origin = get_origin(annotation)
    args = get_args(annotation)
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in args)
    if origin in (Union, UnionType):
        return " or ".join(describe_type(arg) for arg in args if arg is not NoneType)
    if origin is tuple:
        kind = describe_type(args[0])
        return f"list of {kind}" if args[-1] is ... else f"{len(args)} of {kind}"
    if origin is dict:
        return f"map of {describe_type(args[1])}"
    if origin is not None and args:
        # Annotated, whose limits `describe_bounds` tells
        return describe_type(args[0])
    return NAMES.get(annotation) or _name_section(annotation)


def _name_section(annotation: type) -> str:
    name = re.sub(r"\B(?=[A-Z])", "-", annotation.__name__.removesuffix("Section")).lower()
    return name if name == "window" else f"[{name}](#{name})"


def describe_bounds(field: FieldInfo) -> str:
    """Return the limits of a number, as ` ≥ 1`."""
    text = ""
    for bound in field.metadata:
        for name, sign in BOUNDS.items():
            limit = getattr(bound, name, None)
            if limit is not None:
                text += f" {sign} {limit:g}"
    return text


def describe_default(field: FieldInfo) -> str:
    """Return the default as a recipe would write it, or that there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    text = json.dumps(value, default=lambda section: section.__dict__).strip('"')
    return f"default `{text}`"


def key_lines(model: type[BaseModel], prefix: str) -> list[str]:
    """Return a list item for each key: its name, type, default and meaning."""
    comments = comments_of(model)
    lines = []
    for name, field in model.model_fields.items():
        # the heading says the kind of a drafter
        if name == "kind" and not field.is_required():
            continue
        kind = describe_type(field.annotation) + describe_bounds(field)
        meaning = comments.get(name, "")
        lines.append(
            f"- `{prefix}{name}` ({kind}; {describe_default(field)}): {meaning}".rstrip(": ")
        )
    return lines


def section(title: str, model: type[BaseModel], prefix: str) -> str:
    """Return a heading, what the section is, and its keys."""
    about = inspect.cleandoc(model.__doc__ or "").splitlines()[0]
    return "\n".join([title, "", about, "", *key_lines(model, prefix), ""])


def method_section(kind: str, method: type[Any]) -> str:
    """Return the keys of a method's `drafter` section."""
    module = inspect.getmodule(method)
    about = inspect.cleandoc(module.__doc__ or "").splitlines()[0] if module else ""
    return "\n".join([f"### `{kind}`", "", about, "", *key_lines(method.Settings, "drafter."), ""])


def page() -> str:
    """Return the whole page."""
    sections = [INTRODUCTION]
    for name, field in Recipe.model_fields.items():
        # an optional section is a union with None
        types = (field.annotation, *get_args(field.annotation))
        model = next(kind for kind in types if hasattr(kind, "model_fields"))
        optional = "" if field.is_required() else " (optional)"
        sections.append(section(f"## {name}{optional}", model, f"{name}."))
    sections.append(section("## Mix", SourceSection, ""))
    sections.append(section("## On-policy", OnPolicySection, "train.on_policy."))
    sections.append(section("## Measured", MeasuredSection, "eval.drafters.NAME."))
    sections.append(section("## Budget", BudgetSection, "budget."))
    sections.append("## Methods\n\nThe keys of `drafter` for each `drafter.kind`.\n")
    for kind, method in DRAFTERS.items():
        if issubclass(method, TrainableDrafter):
            sections.append(method_section(kind, method))
    sections.append(
        "## Comparison files\n\nThe keys of a file for [`eagle compare`](../compare.md).\n"
    )
    sections.append(section("### Top level", ComparisonSection, ""))
    sections.append(section("### Arm", ArmSection, "arms.NAME."))
    return "\n".join(sections)


def main() -> None:
    """Write the page."""
    argparse.ArgumentParser(
        prog="python -m docs_build.recipe_keys", description=__doc__
    ).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
