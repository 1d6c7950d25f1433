"""Command lines of the stages: a recipe, and overrides of its keys."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from eagle.recipe import OTHER_NAMES, Recipe, type_of_key


class RecipeParser(argparse.ArgumentParser):
    """A parser of options and `section.key=value`, whose errors explain a recipe's key that was given as an option."""

    def __init__(self, *args: Any, sections: Mapping[str, Iterable[str]], **options: Any) -> None:
        """Make a parser like `ArgumentParser`; `sections` has the keys of every section of a recipe."""
        super().__init__(*args, **options)
        self.sections = sections
        self.words: list[str] = []  # of the command line that is parsed

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse as argparse does, and remember the words of the command line, which `error` needs to explain them."""
        self.words = list(args or ())
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with usage and the message; for an unknown option, add the override or option that may be meant."""
        # argparse tells what it did not recognise in this message alone
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if unknown != message.split() and unknown[0].startswith("--"):
            near = " or ".join(self._overrides_for(unknown[0]))
            options = get_close_matches(unknown[0], self._option_string_actions, n=1)
            if options and not near:
                near = options[0]
            hint = ": keys of the recipe are given as section.key=value"
            if near:
                hint = f": did you mean {near}?"
            message += hint
        super().error(message)

    def _overrides_for(self, option: str) -> Iterator[str]:
        """Yield the overrides `section.key=value` of a recipe that an unknown option may mean.

        `--lr 1e-3`, `--train.lr=1e-3` and `--learning-rate 1e-3` (a name of other trainers) all mean `train.lr=1e-3`.
        """
        name, equals, value = option.removeprefix("--").partition("=")
        if not equals:
            # the value is the next word of the command line, unless that is an option, too
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
    """An option by which `eagle` starts another program than the one that parses here.

    `eagle` takes it off the command line. It is added to this parser to be in its help, so being called is an error.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        """End with usage: the option was abbreviated, or the program was started directly and not by `eagle`."""
        words = [parser.prog, *self.option_strings[:1]]
        if values:
            words.append(values)
        parser.error(f"got {option_string}, expected `{' '.join(words)} ...`, written in full")


def recipe_parser(program: str, about: str | None) -> RecipeParser:
    """Return a `RecipeParser` without arguments yet.

    Args:
        program: The command, as usage shows it.
        about: The description in its help; None for no description.
    """
    sections = {name: type_of_key(Recipe, name).model_fields for name in Recipe.model_fields}
    return RecipeParser(prog=program, description=about, sections=sections)


def refuse_option(
    program: str, usage: str, options: Iterable[str], argv: Sequence[str], word: str
) -> NoReturn:
    """End with the error of an unknown option, as the program's own parser would, but without importing the program.

    Args:
        program: The command, as usage shows it.
        usage: Its usage line, which shows whether it takes a recipe.
        options: The options that it has.
        argv: The words of the command line.
        word: The unknown option.
    """
    parser = argparse.ArgumentParser(prog=program, add_help=False)
    if "RECIPE" in usage:
        parser = recipe_parser(program, None)
        parser.words = list(argv)
    # argparse would take a % for the beginning of a placeholder
    parser.usage = usage.removeprefix("usage: ").replace("%", "%%")
    for option in options:
        if option != "--help":
            # only the usage is shown, never the help page
            parser.add_argument(option, help=argparse.SUPPRESS)
    parser.error(f"unrecognized arguments: {word}")


def command_line(program: str, about: str | None) -> argparse.ArgumentParser:
    """Return the parser that the commands of all stages share: of a recipe and its overrides."""
    parser = recipe_parser(program, about)
    parser.add_argument("recipe", metavar="RECIPE", help="a file, or the name of a shipped recipe")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="override a key of the recipe"
    )
    return parser


def parse_train(argv: Sequence[str]) -> argparse.Namespace:
    """Return the arguments of `eagle train`; `recipe` is None if the command line names none: the tiny one is meant."""
    # the first word that is no option is the recipe, unless its equals sign shows an override
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
    # the parser takes the first word for the recipe: "" stands for a missing one
    args = parser.parse_intermixed_args(argv if has_recipe else ["", *argv])
    args.recipe = args.recipe or None
    return args
