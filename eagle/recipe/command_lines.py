"""Command lines of the stages: a recipe, and overrides of its keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from eagle.recipe import OTHER_NAMES, Recipe, type_of_key


class RecipeParser(argparse.ArgumentParser):
    """A parser of options and of `section.key=value`, which explains a recipe's key that is given as an option."""

    def __init__(self, *args: Any, sections: Mapping[str, Iterable[str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.sections = sections
        self.words: list[str] = []

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse, and remember the words for what `error` says of them."""
        self.words = list(args or ())
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with usage and the message; of an unknown option with the override that it may stand for."""
        # argparse has no other hook for what it did not recognise
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if unknown != message.split() and unknown[0].startswith("--"):
            near = " or ".join(self._overrides_for(unknown[0]))
            options = get_close_matches(unknown[0], self._option_string_actions, n=1)
            if options and not near:
                near = options[0]
            message += (
                f": did you mean {near}?"
                if near
                else ": keys of the recipe are given as section.key=value"
            )
        super().error(message)

    def _overrides_for(self, option: str) -> Iterator[str]:
        """Yield the overrides that an option may stand for: `--lr 1e-3` and `--train.lr=1e-3` for `train.lr=1e-3`."""
        name, equals, value = option.removeprefix("--").partition("=")
        if not equals:
            # the value is the next word, unless that is an option too
            value = "VALUE"
            if option in self.words[:-1]:
                following = self.words[self.words.index(option) + 1]
                if not following.startswith("-"):
                    value = following
        name = name.replace("-", "_")
        for section, keys in self.sections.items():
            for key in keys:
                if name in (key, f"{section}.{key}") or OTHER_NAMES.get(name) == key:
                    yield f"{section}.{key}={value}"


class ProgramOption(argparse.Action):
    """An option by which `eagle` chooses another program: parsers tell it in their help, and never meet it there."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        """End with usage: the option is abbreviated, or the program was started without `eagle`."""
        words = " ".join([parser.prog, *self.option_strings[:1], *([values] if values else [])])
        parser.error(f"got {option_string}, expected `{words} ...`, written in full")


def recipe_parser(program: str, about: str | None) -> RecipeParser:
    """Return a parser without arguments, which explains a recipe's key that is given as an option."""
    sections = {name: type_of_key(Recipe, name).model_fields for name in Recipe.model_fields}
    return RecipeParser(prog=program, description=about, sections=sections)


def refuse_option(
    program: str, usage: str, options: Iterable[str], argv: Sequence[str], word: str
) -> NoReturn:
    """End as the parser of a program would that knows these options, and not this word of its command line."""
    parser = argparse.ArgumentParser(prog=program, add_help=False)
    if "RECIPE" in usage:
        parser = recipe_parser(program, None)
        parser.words = list(argv)
    # what argparse shows as it is, but for its own placeholders
    parser.usage = usage.removeprefix("usage: ").replace("%", "%%")
    for option in options:
        if option != "--help":
            # its usage is shown, never its help page
            parser.add_argument(option, help=argparse.SUPPRESS)
    parser.error(f"unrecognized arguments: {word}")


def command_line(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser that all stages share, of a recipe and its overrides."""
    parser = recipe_parser(program, about)
    parser.add_argument(
        "recipe", metavar="RECIPE", help="a file, or a name that `eagle recipes` lists"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="laid over the recipe")
    return parser


def parse_train(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `eagle train`; `recipe` is None where the command line names none."""
    # a word with an equals sign is an override, and without a recipe the tiny one is meant
    words = [word for word in argv if not word.startswith("-")]
    has_recipe = bool(words) and "=" not in words[0]
    parser = command_line("eagle train", None)
    parser.usage = "eagle train [RECIPE] [key=value ...] [--check] [options]"
    parser.add_argument(
        "--check", action="store_true", help="try every stage on two batches, and stop"
    )
    parser.add_argument(
        "--estimate", action=ProgramOption, nargs=0, help="compute memory, disk and hours"
    )
    args = parser.parse_intermixed_args(argv if has_recipe else ["", *argv])
    args.recipe = args.recipe or None
    return args
