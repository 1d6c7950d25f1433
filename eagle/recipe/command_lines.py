"""A parser of command lines that tells how a recipe's key is written where it was given as an option."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from eagle.recipe.mistakes import OTHER_NAMES


class RecipeParser(argparse.ArgumentParser):
    """A parser of options and of `key.sub=value`; `sections` are the keys of a recipe by section."""

    def __init__(self, *args: Any, sections: Mapping[str, Iterable[str]], **options: Any) -> None:
        super().__init__(*args, **options)
        self.sections = sections
        self.given: list[str] = []

    def parse_known_intermixed_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse, and remember the words for what `error` says of them."""
        self.given = list(args or ())
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """End with usage and the message; of an unknown option with the override that it may stand for."""
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if unknown != message.split() and unknown[0].startswith("--"):
            near = " or ".join(self._overrides_for(unknown[0]))
            message += f": did you mean {near}?" if near else ": keys of the recipe are given as section.key=value"
        super().error(message)

    def _overrides_for(self, option: str) -> Iterator[str]:
        """The overrides that an option may stand for: `--lr 1e-3` and `--train.lr=1e-3` for `train.lr=1e-3`."""
        name, equals, value = option.removeprefix("--").partition("=")
        behind = self.given[self.given.index(option) + 1 :] if option in self.given else []
        if not equals:
            value = behind[0] if behind and not behind[0].startswith("-") else "VALUE"
        key = name.replace("-", "_")
        for section, keys in self.sections.items():
            for known in keys:
                if key in (known, f"{section}.{known}") or OTHER_NAMES.get(key) == known:
                    yield f"{section}.{known}={value}"
