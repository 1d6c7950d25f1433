"""A comparison file: arms with their recipes and training budgets, and what is measured of each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from eagle.core.budget import Budget
from eagle.data.identity import fingerprint
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.outside import describe_code
from eagle.formats.checkpoint import check_options, method_without_files
from eagle.recipe import BudgetSection, Recipe, Section, parse_section
from eagle.recipe.values import lay_over, read_yaml
from eagle.shipped import find_recipe
from eagle.training.about import decisive_settings
from eagle.training.launch import resolve_dtype
from eval.load_run import budget_of

OF_AN_ARM = ("drafter", "features", "train")  # what counts of a recipe that one arm names
OF_ALL = ("target", "eval")  # what arms share, else their figures cannot be compared
BUDGETS = ("tokens", "seconds", "as_long_as")
Count = Annotated[int, Field(ge=1)]


class ArmSection(Section):
    """One way to a drafter: a method, its data, and how long it is trained."""

    base: str | None = None  # a recipe file whose drafter, features and train sections this arm takes
    recipe: dict[str, Any] = Field({})  # laid over the recipe of the comparison, for this arm alone
    untrained: str | None = None  # a drafter that is not trained here: a method without weights, a folder, a hub id
    options: dict[str, Any] = Field({})  # of an untrained method, as `load_drafter` takes them
    start: str | None = None  # the arm whose head this one goes on from
    tokens: Count | tuple[Count, ...] | None = None  # supervised, its start's included; several are a curve
    seconds: float | None = Field(None, gt=0)  # of training, its start's included
    as_long_as: str | None = None  # the arm whose seconds of training this one has


class ComparisonSection(Section):
    """Arms, and what they have in common."""

    out: str  # the folder of the comparison
    prepare: dict[str, str] = Field({})  # a file or folder that is needed, and the Python command that makes it
    base: str | None = None  # a recipe file that all arms share
    recipe: dict[str, Any] = Field({})  # sections laid over it, or the whole recipe
    seeds: tuple[int, ...] = Field((0,), min_length=1)  # each arm is trained once for each seed
    tokens: Count | tuple[Count, ...] | None = None  # of each arm that names no budget of its own
    seconds: float | None = Field(None, gt=0)  # of training, of each arm that names no budget of its own
    clock_steps: int = Field(20, ge=1)  # steps in which arms with a budget of time are timed, in turns
    shapes: dict[str, BudgetSection] = Field(min_length=1)  # draft trees to measure, by name
    arms: dict[str, ArmSection] = Field(min_length=1)  # what is compared, by name
    compare: tuple[tuple[str, str], ...] | None = None  # second minus first; by default all minus the first arm


@dataclass(frozen=True)
class Arm:
    """One arm with its whole recipe."""

    name: str
    section: ArmSection
    recipe: Recipe
    start: Arm | None
    as_long_as: Arm | None
    digest: str  # of everything that decides its head, but for the seed
    curve: str | None = None  # the arm of the file, of which this is one count of tokens
    stem: Arm | None = None  # the count before, whose steps before its rate fell are not made again

    @property
    def is_trained(self) -> bool:
        """Whether the comparison trains it."""
        return self.section.untrained is None

    def line(self) -> list[Arm]:
        """The arms that this arm's head is trained through, in order; this arm is the last."""
        return [*(self.start.line() if self.start else []), self]

    def for_seed(self, folder: Path, seed: int) -> Recipe:
        """The recipe of one training run."""
        train = {"out": str(self.folder(folder, seed)), "seed": seed, "decode": 0}
        if self.start is not None:
            train["init"] = str(self.start.folder(folder, seed) / "last")
        if self.stem is not None and (stem := self.stem.folder(folder, seed)).joinpath("stem").is_dir():
            train["stem"] = str(stem)
        return self.recipe.model_copy(update={"train": self.recipe.train.model_copy(update=train)})

    def folder(self, folder: Path, seed: int) -> Path:
        """Where a training run of this arm lies."""
        return folder / "runs" / f"{re.sub('[^A-Za-z0-9]+', '-', self.name)}-{seed}-{self.digest}"


class Comparison:
    """A comparison file, checked."""

    def __init__(self, section: ComparisonSection, source: str) -> None:
        self.section, self.source, self.folder = section, source, Path(section.out)
        self.shared = _merge_sections(_read_yaml(section.base), section.recipe)
        self.recipe = self._recipe_of("", ArmSection.model_validate({}))
        self.shapes: dict[str, Budget] = {}
        for name, shape in section.shapes.items():
            try:
                self.shapes[name] = budget_of(shape)
            except ValueError as error:
                raise ValueError(f"{source}: shapes.{name}: {error}") from None

    @classmethod
    def load(cls, path: str | Path, overrides: Sequence[str] = ()) -> Comparison:
        """A comparison from YAML, with `key.sub=value` laid over it; every mistake is named before anything runs."""
        values = _read_yaml(str(path))
        for override in overrides:
            lay_over(values, override)
        comparison = cls(parse_section(ComparisonSection, values, str(path)), str(path))
        comparison.check()
        return comparison

    def check(self) -> None:
        """Refuse arms, pairs and budgets that contradict each other, and recipes that no method takes."""
        names = list(self.section.arms)
        for place, (name, section) in enumerate(self.section.arms.items()):
            self._check_arm(f"{self.source}: arms.{name}", section, names[:place])
        for name in {name for pair in self.section.compare or () for name in pair} - set(names):
            raise ValueError(f"{self.source}: compare names {name!r}, expected one of the arms: {', '.join(names)}")
        if self.section.tokens is not None and self.section.seconds is not None:
            raise ValueError(f"{self.source} has tokens and seconds, expected one budget for all arms")
        trained = [arm for arm in self.arms.values() if arm.is_trained]
        for arm in trained:
            settings_of(arm.recipe.drafter.model_dump(), f"{self.source}: arms.{arm.name}")
        if len(dtypes := {arm.recipe.train.dtype for arm in trained}) > 1:
            raise ValueError(f"{self.source}: arms train in {' and '.join(sorted(dtypes))}, expected one train.dtype")

    def _check_arm(self, place: str, arm: ArmSection, before: Sequence[str]) -> None:
        for key in ("start", "as_long_as"):
            other = getattr(arm, key)
            if other is not None and (other not in before or self.section.arms[other].untrained):
                raise ValueError(f"{place}.{key} is {other!r}, expected a trained arm that comes before")
        budgets = [key for key in BUDGETS if getattr(arm, key) is not None]
        if len(budgets) > 1:
            raise ValueError(f"{place} has {' and '.join(budgets)}, expected one budget")
        related = [self.section.arms[other] for other in (arm.start, arm.as_long_as) if other is not None]
        if related and any(self._is_curve(other) for other in (arm, *related)):
            raise ValueError(f"{place} starts from an arm, or is timed by one, expected one count of tokens of both")
        if arm.untrained is not None and (arm.start or budgets or arm.recipe or arm.base):
            raise ValueError(f"{place} is untrained, expected no other key beside it but options")
        if arm.options and arm.untrained is None:
            raise ValueError(f"{place} is trained and has options, expected settings: name them in recipe.drafter")
        if arm.untrained is not None:
            check_options(arm.untrained, arm.options)
        if shared := [key for key in OF_ALL if key in arm.recipe]:
            raise ValueError(
                f"{place}.recipe names {' and '.join(shared)}, expected sections that arms may differ in: name those "
                "in the recipe of the comparison"
            )

    def _is_curve(self, arm: ArmSection) -> bool:
        own = any(getattr(arm, key) is not None for key in BUDGETS)
        return isinstance(arm.tokens if own else self.section.tokens, tuple)

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """The arms by name; one that starts from another or is timed by it comes after it."""
        arms: dict[str, Arm] = {}
        for name, section in self.section.arms.items():
            if section.untrained is None and all(getattr(section, key) is None for key in BUDGETS):
                shared = {key: getattr(self.section, key) for key in ("tokens", "seconds")}
                section = section.model_copy(update=shared)
            recipe = resolve_dtype(self._recipe_of(name, section))
            if isinstance(section.tokens, tuple):
                arms |= self._list_points(name, section, recipe)
                continue
            start, as_long_as = arms.get(section.start or ""), arms.get(section.as_long_as or "")
            digest = digest_of(_decisive(recipe, section), start and start.digest, as_long_as and as_long_as.digest)
            arms[name] = Arm(name, section, recipe, start, as_long_as, digest)
        return arms

    def _list_points(self, name: str, section: ArmSection, recipe: Recipe) -> dict[str, Arm]:
        """The arms of a curve, from few tokens to many, trained with a rate that falls at the end of each."""
        train = recipe.train.model_copy(update={"schedule": "wsd"})
        if 0 < train.warmup < 1:
            raise ValueError(
                f"{self.source}: arms.{name} is a curve and train.warmup is {train.warmup:g}, expected a number of "
                "steps, which all counts of tokens have in common"
            )
        recipe, stem = recipe.model_copy(update={"train": train}), None
        points: dict[str, Arm] = {}
        for count in sorted(section.tokens):  # type: ignore[arg-type]
            part = section.model_copy(update={"tokens": count})
            digest, label = digest_of(_decisive(recipe, part), None, None), f"{name}, {count:,} tokens"
            points[label] = stem = Arm(label, part, recipe, None, None, digest, name, stem)
        return points

    @cached_property
    def curves(self) -> dict[str, list[Arm]]:
        """The arms of every curve, from few tokens to many."""
        curves: dict[str, list[Arm]] = {}
        for arm in self.arms.values():
            if arm.curve is not None:
                curves.setdefault(arm.curve, []).append(arm)
        return curves

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Which arms are compared, the second with the first; curves at every count that both have."""
        first, *others = self.section.arms
        named = self.section.compare if self.section.compare is not None else [(first, other) for other in others]
        return [
            (one.name, other.name)
            for less, more in named
            for one, other in product(*(self.curves.get(name) or [self.arms[name]] for name in (less, more)))
            if one.curve is None or other.curve is None or one.section.tokens == other.section.tokens
        ]

    @property
    def answer_digest(self) -> str:
        """A digest of what determines the target's answers, apart from weights, prompt, temperature and seed."""
        data = self.recipe.data
        return digest_of(data.template, data.template_kwargs, self.recipe.eval.max_new_tokens)

    def row_digest(self, arm: Arm, shape: str) -> str:
        """A digest of what determines an arm's cycles in this shape."""
        return digest_of(self.answer_digest, arm.digest, repr(self.shapes[shape]))

    def _recipe_of(self, name: str, arm: ArmSection) -> Recipe:
        """The comparison's recipe, with the sections that an arm's own recipe file has, and what is laid over both."""
        values = dict(self.shared)
        if arm.base is not None:
            arm_recipe = _read_yaml(arm.base)
            values |= {key: arm_recipe[key] for key in OF_AN_ARM if key in arm_recipe}
            values = _merge_sections(
                values, {key: self.section.recipe.get(key, {}) for key in OF_AN_ARM if key != "drafter"}
            )
        source = f"{self.source}: arms.{name}" if name else self.source
        return Recipe.parse(_merge_sections(values, arm.recipe), source)


def _merge_sections(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Nested values with changes laid over them; a drafter section that names its kind replaces the other whole."""
    merged = dict(values)
    for key, value in changes.items():
        below = merged.get(key)
        replaces = key == "drafter" and isinstance(value, dict) and "kind" in value
        nested = isinstance(value, dict) and isinstance(below, dict) and not replaces
        merged[key] = _merge_sections(below, value) if nested else value  # type: ignore[arg-type]
    return merged


def _decisive(recipe: Recipe, section: ArmSection) -> list[Any]:
    """The settings that determine an arm's head."""
    if section.untrained is not None:
        folders = [Path(name) for name in section.untrained.split(",")]
        weights = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
        options = [section.options] if section.options else []
        options += _codes(*map(method_without_files, section.untrained.split(",")))
        return [section.untrained, *options, *([fingerprint(weights)] if weights else [])]
    values = recipe.model_dump(mode="json", exclude={"eval", "regenerate"})
    free = {"seed", "init"} if section.start else {"seed"}
    values["train"] = {key: value for key, value in decisive_settings(values["train"]).items() if key not in free}
    code = _codes(DRAFTERS.find(recipe.drafter.kind))
    return [values, {key: getattr(section, key) for key in ("tokens", "seconds")}, *code]


def _codes(*methods: type[Any] | None) -> list[dict[str, str]]:
    """The code of methods that are not the package's own: a file that was edited makes another arm."""
    return [code for method in methods if method is not None and (code := describe_code(method)) is not None]


def digest_of(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    return read_yaml(find_recipe(path))
