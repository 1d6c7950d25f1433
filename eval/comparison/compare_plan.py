"""Read a comparison file: arms with their recipes and training budgets, and what is measured of each."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from eagle.core.budget import Budget
from eagle.data.identity import fingerprint
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import check_options, method_without_files
from eagle.recipe import BudgetSection, Recipe, Section, parse_section
from eagle.recipe.plain_yaml import lay_over, read_yaml
from eagle.shipped import find_recipe
from eagle.training.launch import resolve_dtype
from eagle.training.resume import decisive_settings
from eval.load_run import budget_of, codes_of

# sections that count of a recipe file that one arm names
OF_AN_ARM = ("drafter", "features", "train")
# sections that arms share, else their figures cannot be compared
OF_ALL = ("target", "eval")
BUDGETS = ("tokens", "seconds", "as_long_as")
Count = Annotated[int, Field(ge=1)]


class ArmSection(Section):
    """A drafter with its settings, data and training budget."""

    base: str | None = None  # a recipe whose drafter, features and train sections this arm uses
    recipe: dict[str, Any] = Field({})  # sections that override the shared recipe for this arm
    # a drafter that is only measured: a method without weights, a head's folder or a hub id
    untrained: str | None = None
    options: dict[str, Any] = Field({})  # options of an untrained drafter, as for `load_drafter`
    start: str | None = None  # an earlier arm; this arm continues training its head
    # supervised training tokens, including those of the `start` arm; a list gives a learning curve
    tokens: Count | tuple[Count, ...] | None = None
    # training time in seconds, including that of the `start` arm
    seconds: float | None = Field(None, gt=0)
    as_long_as: str | None = None  # another arm; this arm trains for the same time


class ComparisonSection(Section):
    """The arms, and the settings that they share."""

    out: str  # folder for everything that the comparison writes
    # files to create before the run, as PATH: COMMAND; Python runs the command if the file is missing
    prepare: dict[str, str] = Field({})
    base: str | None = None  # the recipe that all arms share
    # sections that override `base` for all arms, or without `base` the whole recipe
    recipe: dict[str, Any] = Field({})
    seeds: tuple[int, ...] = Field((0,), min_length=1)  # each arm is trained once per seed
    # supervised training tokens, for arms without a separate budget
    tokens: Count | tuple[Count, ...] | None = None
    # training time in seconds, for arms without a separate budget
    seconds: float | None = Field(None, gt=0)
    # number of training steps that are timed per arm, to turn a time budget into a number of steps
    clock_steps: int = Field(20, ge=1)
    shapes: dict[str, BudgetSection] = Field(min_length=1)  # draft trees to measure, by name
    arms: dict[str, ArmSection] = Field(min_length=1)  # the drafters to compare, by name
    # pairs of arms; the table shows the second minus the first; by default each arm against the first
    compare: tuple[tuple[str, str], ...] | None = None


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
        """Return whether the comparison trains it."""
        return self.section.untrained is None

    def line(self) -> list[Arm]:
        """Return the arms that this arm's head is trained through, in order; this arm is the last."""
        if self.start is None:
            return [self]
        return [*self.start.line(), self]

    def for_seed(self, folder: Path, seed: int) -> Recipe:
        """Return the recipe of one training run."""
        train = {"out": str(self.folder(folder, seed)), "seed": seed, "decode": 0}
        if self.start is not None:
            train["init"] = str(self.start.folder(folder, seed) / "last")
        if self.stem is not None:
            stem = self.stem.folder(folder, seed)
            # a stem that training has not left, or that was cleared, is made again
            if (stem / "stem").is_dir():
                train["stem"] = str(stem)
        return with_train(self.recipe, train)

    def folder(self, folder: Path, seed: int) -> Path:
        """Return where a training run of this arm lies."""
        name = re.sub("[^A-Za-z0-9]+", "-", self.name)
        return folder / "runs" / f"{name}-{seed}-{self.digest}"


class Comparison:
    """A comparison file, checked."""

    def __init__(self, section: ComparisonSection, source: str) -> None:
        self.section = section
        self.source = source
        self.folder = Path(section.out)
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
        """Load a comparison from YAML, and name every mistake before anything runs.

        Args:
            path: A file, or the name of a comparison that comes with eagle.
            overrides: Values that are laid over the file's, as `key=value`.

        Raises:
            ValueError: A key is unknown, or arms, pairs and budgets contradict each other.
        """
        values = _read_yaml(str(path))
        for override in overrides:
            lay_over(values, override)
        comparison = cls(parse_section(ComparisonSection, values, str(path)), str(path))
        comparison.check()
        return comparison

    def check(self) -> None:
        """Refuse arms, pairs and budgets that contradict each other, and recipes that no method takes."""
        names = list(self.section.arms)
        for i, (name, section) in enumerate(self.section.arms.items()):
            self._check_arm(f"{self.source}: arms.{name}", section, names[:i])
        compared = set[str]().union(*(self.section.compare or ()))
        for name in compared - set(names):
            raise ValueError(
                f"{self.source}: compare names {name!r}, expected one of the arms: {', '.join(names)}"
            )
        if self.section.tokens is not None and self.section.seconds is not None:
            raise ValueError(
                f"{self.source} has tokens and seconds, expected one budget for all arms"
            )

        dtypes = set()
        for arm in self.arms.values():
            if arm.is_trained:
                settings_of(arm.recipe.drafter.model_dump(), f"{self.source}: arms.{arm.name}")
                dtypes.add(arm.recipe.train.dtype)
        # seconds of training would not be comparable
        if len(dtypes) > 1:
            raise ValueError(
                f"{self.source}: arms train in {' and '.join(sorted(dtypes))}, expected one train.dtype"
            )

    def _check_arm(self, key: str, arm: ArmSection, earlier: Sequence[str]) -> None:
        """Refuse an arm whose keys contradict each other; `earlier` names the arms before it."""
        related = []
        for relation in ("start", "as_long_as"):
            name = getattr(arm, relation)
            if name is not None:
                # arms are trained in the order of the file
                if name not in earlier or self.section.arms[name].untrained:
                    raise ValueError(
                        f"{key}.{relation} is {name!r}, expected a trained arm that comes before"
                    )
                related.append(self.section.arms[name])

        budgets = _budgets(arm)
        if len(budgets) > 1:
            raise ValueError(f"{key} has {' and '.join(budgets)}, expected one budget")
        if related and any(self._is_curve(section) for section in (arm, *related)):
            raise ValueError(
                f"{key} starts from an arm, or is timed by one, expected one count of tokens of both"
            )
        if arm.untrained is not None:
            if arm.start or budgets or arm.recipe or arm.base:
                raise ValueError(f"{key} is untrained, expected no other key beside it but options")
            check_options(arm.untrained, arm.options)
        elif arm.options:
            raise ValueError(
                f"{key} is trained and has options, expected settings: name them in recipe.drafter"
            )
        shared = [name for name in OF_ALL if name in arm.recipe]
        if shared:
            raise ValueError(
                f"{key}.recipe names {' and '.join(shared)}, expected sections that arms may differ in: name those "
                "in the recipe of the comparison"
            )

    def _is_curve(self, arm: ArmSection) -> bool:
        tokens = arm.tokens if _budgets(arm) else self.section.tokens
        return isinstance(tokens, tuple)

    @cached_property
    def arms(self) -> dict[str, Arm]:
        """Return the arms by name; one that starts from another or is timed by it comes after it."""
        arms: dict[str, Arm] = {}
        for name, section in self.section.arms.items():
            if section.untrained is None and not _budgets(section):
                # the budget that all arms have in common
                shared = {"tokens": self.section.tokens, "seconds": self.section.seconds}
                section = section.model_copy(update=shared)
            recipe = resolve_dtype(self._recipe_of(name, section))
            # a curve is one arm of the file, and several here
            if isinstance(section.tokens, tuple):
                arms |= self._list_points(name, section, recipe)
                continue
            start = arms.get(section.start or "")
            as_long_as = arms.get(section.as_long_as or "")
            digest = digest_of(
                _decisive(recipe, section), start and start.digest, as_long_as and as_long_as.digest
            )
            arms[name] = Arm(
                name=name,
                section=section,
                recipe=recipe,
                start=start,
                as_long_as=as_long_as,
                digest=digest,
            )
        return arms

    def _list_points(self, name: str, section: ArmSection, recipe: Recipe) -> dict[str, Arm]:
        """Return the arms of a curve, from few tokens to many."""
        train = recipe.train
        if 0 < train.warmup < 1:
            raise ValueError(
                f"{self.source}: arms.{name} is a curve and train.warmup is {train.warmup:g}, expected a number of "
                "steps, which all counts of tokens have in common"
            )

        # warm-up, stable, decay: the points share the steps before each one's rate falls
        recipe = with_train(recipe, {"schedule": "wsd"})
        points: dict[str, Arm] = {}
        stem = None
        for count in sorted(section.tokens):  # type: ignore[arg-type]
            point = section.model_copy(update={"tokens": count})
            stem = Arm(
                name=f"{name}, {count:,} tokens",
                section=point,
                recipe=recipe,
                start=None,
                as_long_as=None,
                digest=digest_of(_decisive(recipe, point), None, None),
                curve=name,
                stem=stem,
            )
            points[stem.name] = stem
        return points

    @cached_property
    def curves(self) -> dict[str, list[Arm]]:
        """Return the arms of every curve, from few tokens to many."""
        curves: dict[str, list[Arm]] = {}
        for arm in self.arms.values():
            if arm.curve is not None:
                curves.setdefault(arm.curve, []).append(arm)
        return curves

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Return which arms are compared, the second with the first."""
        compared = self.section.compare
        if compared is None:
            first, *others = self.section.arms
            compared = tuple((first, other) for other in others)
        pairs = []
        for less, more in compared:
            for one, other in product(self._points(less), self._points(more)):
                # two curves are compared at every count that both have
                both_curves = one.curve is not None and other.curve is not None
                if not both_curves or one.section.tokens == other.section.tokens:
                    pairs.append((one.name, other.name))
        return pairs

    def _points(self, name: str) -> list[Arm]:
        return self.curves.get(name) or [self.arms[name]]

    @property
    def answer_digest(self) -> str:
        """Return a digest of what determines the target's answers, but for weights, prompt, temperature and seed."""
        data = self.recipe.data
        return digest_of(data.template, data.template_kwargs, self.recipe.eval.max_new_tokens)

    def row_digest(self, arm: Arm, shape: str) -> str:
        """Return a digest of what determines an arm's cycles in this shape."""
        return digest_of(self.answer_digest, arm.digest, repr(self.shapes[shape]))

    def _recipe_of(self, name: str, arm: ArmSection) -> Recipe:
        """Return the comparison's recipe with the sections of an arm's recipe file, and the changes of both over it."""
        values = dict(self.shared)
        if arm.base is not None:
            arm_recipe = _read_yaml(arm.base)
            values |= {key: arm_recipe[key] for key in OF_AN_ARM if key in arm_recipe}
            # what the comparison sets for all arms goes before an arm's file, but for the method
            changes = {
                key: self.section.recipe.get(key, {}) for key in OF_AN_ARM if key != "drafter"
            }
            values = _merge_sections(values, changes)
        source = f"{self.source}: arms.{name}" if name else self.source
        return Recipe.parse(_merge_sections(values, arm.recipe), source)


def with_train(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """Return a recipe with other settings of training."""
    return recipe.model_copy(update={"train": recipe.train.model_copy(update=changes)})


def _budgets(arm: ArmSection) -> list[str]:
    """Return the names of the budgets that an arm has of its own."""
    return [key for key in BUDGETS if getattr(arm, key) is not None]


def _merge_sections(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge changes into nested values."""
    merged = dict(values)
    for key, value in changes.items():
        below = merged.get(key)
        nested = isinstance(value, dict) and isinstance(below, dict)
        # a drafter section that names its kind has other settings, and replaces the whole
        if key == "drafter" and nested and "kind" in value:
            nested = False
        merged[key] = _merge_sections(below, value) if nested else value  # type: ignore[arg-type]
    return merged


def _decisive(recipe: Recipe, section: ArmSection) -> list[Any]:
    """Return the settings that determine an arm's head."""
    if section.untrained is not None:
        return _decisive_untrained(section.untrained, section.options)
    values = recipe.model_dump(mode="json", exclude={"eval", "regenerate"})
    train = decisive_settings(values["train"])
    # the seed is in the folder's name, and the start's digest stands for its path
    train.pop("seed", None)
    if section.start:
        train.pop("init", None)
    values["train"] = train
    budget = {"tokens": section.tokens, "seconds": section.seconds}
    return [values, budget, *codes_of(DRAFTERS.find(recipe.drafter.kind))]


def _decisive_untrained(untrained: str, options: dict[str, Any]) -> list[Any]:
    """Return the names, options, code and weights of drafters that are not trained here."""
    names = untrained.split(",")
    decisive: list[Any] = [untrained]
    if options:
        decisive.append(options)
    decisive += codes_of(*map(method_without_files, names))
    weights: list[Path] = []
    for name in names:
        weights += sorted(Path(name).glob("*.safetensors"))
    if weights:
        decisive.append(fingerprint(weights))
    return decisive


def digest_of(*parts: Any) -> str:
    """Return a short digest of values that JSON can hold."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:8]


def _read_yaml(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    return read_yaml(find_recipe(path))
