"""All checks of a method in turn, each with the fault that it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from traceback import extract_tb
from typing import Any

import torch

from eagle.conformance import agreeing, drafting, learning, shipping
from eagle.conformance.own_answers import make_letters, make_model, reference
from eagle.conformance.trial import Fault, Make, describe_budget, describe_sampling, make_head
from eagle.core.arguments import nearest
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, collate
from eagle.core.verify import Sampling
from eagle.data.features import LiveFeatures, taps_of
from eagle.disk import write_tensors
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.export import EXPORTERS
from eagle.target.target import Target

GREEDY, WARM = drafting.SAMPLINGS[0], drafting.SAMPLINGS[2]
PROMPTS = [[11, 24, 7, 24, 7, 31, 5], [9, 40, 41, 42, 40, 41, 42, 40, 13, 6], [50, 8, 17]]  # of three lengths


@dataclass(frozen=True)
class Outcome:
    """A check, and the fault that it found; None where the method holds it."""

    about: str
    fault: str | None = None
    note: str = ""


@dataclass(frozen=True)
class Check:
    """What a method must hold."""

    about: str
    run: Callable[[], Any]
    is_slow: bool = False


def find_method(kind: str) -> type[Any]:
    """A method that can be made without files, by its name or `PATH.py:CLASS`."""
    method = DRAFTERS.find(kind)
    if method is None:
        names = ", ".join([*DRAFTERS, *DRAFTERS.offered()])
        raise ValueError(f"no method {kind!r}{nearest(kind, DRAFTERS)}: expected PATH.py:CLASS, or one of {names}")
    if method.stored_as == "files":
        raise ValueError(f"{kind} is read from files of its own, expected a method that can be made without any")
    return method


class Trial:
    """A method with a tiny target, and what its checks read of both."""

    def __init__(self, kind: str, folder: Path, device: torch.device | str = "cpu") -> None:
        self.method, self.name, self.folder = find_method(kind), DRAFTERS.registered_name(kind), folder
        model: Any = make_model()  # transformers leaves `to` without types
        model.config.save_pretrained(folder / "target")
        write_tensors(folder / "target/model.safetensors", model.state_dict())
        self.target = Target(model.to(device))

    @property
    def is_trained(self) -> bool:
        """Whether it has weights."""
        return issubclass(self.method, TrainableDrafter)

    @property
    def make(self) -> Make:
        """Makes a drafter for the target."""
        return self.make_for(self.target)

    def make_for(self, target: Target) -> Make:
        """Makes a drafter for a target."""
        if not self.is_trained:
            return self.method
        return lambda: make_head(self.name, target).bind(target.head)

    @property
    def make_head(self) -> Make:
        """Makes an untrained head, not bound to its target."""
        return partial(make_head, self.name, self.target)

    @property
    def taps(self) -> list[int]:
        """The states that it is trained on."""
        return sorted({*taps_of(settings_of({"kind": self.name}, self.name), self.target.config), -1})

    @cached_property
    def examples(self) -> LiveFeatures:
        """Two texts at random."""
        return learning.make_examples(self.target, self.taps)

    def batch(self, *places: int) -> Batch:
        """These texts in one."""
        batch = collate(self.examples.read(list(places)), self.examples.taps)
        return batch.to(self.target.device)

    def answers(self) -> Batch:
        """Two texts that go on as the target does."""
        answers = learning.make_examples(self.target, self.taps, answered=True)
        return collate(answers.read([0, 1]), answers.taps).to(self.target.device)

    def _check_exports(self) -> str:
        """Check every exporter; who takes the head."""
        files, takers = self.folder / "target", []
        for engine in EXPORTERS:
            out = self.folder / f"exported-{engine}"
            if shipping.check_export(self.name, self.make_head, engine, self.target, files, out) is None:
                takers.append(engine)
        return f"written for {', '.join(takers)}" if takers else "refused by all, in a sentence"

    def checks(self) -> Iterator[Check]:
        """All checks, those that take least first."""
        make, target, prompt = self.make, self.target, PROMPTS[0]
        budgets = [*drafting.RANKED, *drafting.DRAWN] if self.is_trained else drafting.DYNAMIC
        for budget in [*drafting.RANKED, *drafting.DRAWN]:
            yield Check(
                f"a tree is rooted and within {describe_budget(budget)}",
                partial(drafting.check_tree, make, target, budget),
            )
        for sampling in drafting.SAMPLINGS:
            drawn_too = sampling.temperature == 0  # what is drawn above it has the target's law, not its tokens
            ranked = [budget for budget in budgets if drawn_too or budget.draw != "sampled"]
            expected = partial(reference, target, prompt, sampling, 12)
            about = f"the output is the untouched model's own, {describe_sampling(sampling)}"

            def check(sampling: Sampling = sampling, ranked: Any = ranked, expected: Any = expected) -> None:
                drafting.check_output(make, target, prompt, sampling, ranked, expected())

            yield Check(about, check, is_slow=sampling in (drafting.SAMPLINGS[1], *drafting.SAMPLINGS[3:]))
        for sampling in (GREEDY, WARM):
            how = describe_sampling(sampling)
            forgets = partial(drafting.check_begin, make, target, PROMPTS[1], prompt, sampling)
            yield Check(f"begin forgets the text before, {how}", forgets)
            beside = partial(drafting.check_side_by_side, make, target, PROMPTS, sampling)
            yield Check(f"texts side by side are drafted as each alone, {how}", beside)
        if not self.method.reads.texts:
            fork = partial(drafting.check_fork, make, target, drafting.DYNAMIC[0])
            yield Check("a text that is forked is drafted for as two", fork)
        if self.is_trained:
            yield from self._checks_of_heads()

    def _checks_of_heads(self) -> Iterator[Check]:
        head, target, batch = self.make_head, self.target, partial(self.batch, 0, 1)
        for about, check in (
            ("the loss falls on one batch", learning.check_loss_falls),
            ("the loss counts supervised tokens alone, and sees no future", learning.check_supervised_alone),
            ("the loss depends on what is supervised", learning.check_supervised_counts),
            ("the loss follows the run's progress only where it says so", learning.check_progress),
        ):
            yield Check(about, partial(_run_on, check, head, target, batch))
        yield Check(
            "validation adds up",
            lambda: learning.check_validation(head, target, batch(), lambda place: self.batch(place)),
        )
        yield Check(
            "what is drafted is what training and validation read",
            lambda: agreeing.check_drafted_as_validated(head, target, self.answers()),
        )
        yield Check("noise is that of the places drafted for", partial(drafting.check_noise, self.make, target))
        yield Check(
            "a head from disk drafts as before",
            lambda: shipping.check_saved(head(), target, PROMPTS[0], self.folder / "head"),
        )
        yield Check("every export holds all weights, or is refused", self._check_exports)
        for sampling in drafting.SAMPLINGS[2:4]:
            for budget in drafting.DRAWN[:2]:
                about = f"drawn drafts keep the target's law, {describe_sampling(sampling)}, {describe_budget(budget)}"
                yield Check(about, partial(self._check_law, sampling, budget), is_slow=True)

    def _check_law(self, sampling: Sampling, budget: Any) -> None:
        letters = make_letters(self.target.device)
        drafting.check_law(self.make_for(letters), letters, sampling, budget)


def _run_on(
    check: Callable[[Make, Target, Batch], None], head: Make, target: Target, batch: Callable[[], Batch]
) -> None:
    """Run a check of a head on a batch, which is made when it is needed."""
    check(head, target, batch())


def run_checks(kind: str, *, fast: bool = False, device: torch.device | str = "cpu") -> Iterator[Outcome]:
    """Yield the outcome of every check of a method in turn.

    Args:
        kind: The name of a method, or `PATH.py:CLASS`.
        fast: Whether to leave out the slow checks.
        device: Where the target and the heads are.
    """
    with TemporaryDirectory() as folder:
        for check in Trial(kind, Path(folder), device).checks():
            if not (fast and check.is_slow):
                yield run_check(check)


def run_check(check: Check) -> Outcome:
    """One check, with its fault in a sentence, whatever the method runs into."""
    try:
        note = check.run()
    except Fault as fault:
        return Outcome(check.about, str(fault))
    except Exception as error:  # of the method's own
        inner = extract_tb(error.__traceback__)[-1]
        return Outcome(
            check.about, f"{type(error).__name__}: {error} ({Path(inner.filename).name}, line {inner.lineno})"
        )
    return Outcome(check.about, note=note or "")
