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

from eagle.conformance import drafting, learning, shipping
from eagle.conformance.own_answers import make_letters, make_model, reference
from eagle.conformance.trial import Fault, describe_budget, describe_sampling, make_head
from eagle.core.arguments import nearest
from eagle.core.budget import Budget
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, collate
from eagle.core.verify import Sampling
from eagle.data.features import LiveFeatures, taps_of
from eagle.disk import write_tensors
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.export import EXPORTERS
from eagle.target.target import Target

GREEDY = drafting.SAMPLINGS[0]
WARM = drafting.SAMPLINGS[2]
# token ids, of three lengths; two prompts repeat themselves, so that lookup methods draft
PROMPTS = [
    [11, 24, 7, 24, 7, 31, 5],
    [9, 40, 41, 42, 40, 41, 42, 40, 13, 6],
    [50, 8, 17],
]


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
    """Return the class of a method, by its name or `PATH.py:CLASS`; refuse one that cannot be made without files."""
    method = DRAFTERS.find(kind)
    if method is None:
        names = ", ".join([*DRAFTERS, *DRAFTERS.offered()])
        raise ValueError(
            f"no method {kind!r}{nearest(kind, DRAFTERS)}: expected PATH.py:CLASS, or one of {names}"
        )
    if method.stored_as == "files":
        raise ValueError(
            f"{kind} is read from files of its own, expected a method that can be made without any"
        )
    return method


class Trial:
    """A method with a tiny target, and what its checks read of both."""

    def __init__(self, kind: str, folder: Path, device: torch.device | str = "cpu") -> None:
        """Make the tiny target, and write its files below `folder`, from which exports are read back."""
        self.method = find_method(kind)  # the class
        self.name = DRAFTERS.registered_name(kind)
        self.folder = folder
        model: Any = make_model()  # transformers leaves `to` without types
        model.config.save_pretrained(folder / "target")
        write_tensors(folder / "target/model.safetensors", model.state_dict())
        self.target = Target(model.to(device))

    @property
    def is_trained(self) -> bool:
        """Whether it has weights."""
        return issubclass(self.method, TrainableDrafter)

    def make(self) -> Any:
        """Make a drafter for the target."""
        return self.make_for(self.target)

    def make_for(self, target: Target) -> Any:
        """Make a drafter for a target: an untrained head bound to it, or a method without weights."""
        return make_head(self.name, target).bind(target.head) if self.is_trained else self.method()

    def make_head(self) -> Any:
        """Make an untrained head, not bound to its target."""
        return make_head(self.name, self.target)

    @property
    def taps(self) -> list[int]:
        """The target's layer inputs that it is trained on, by index (taps), and -1, the input of the LM head."""
        settings = settings_of({"kind": self.name}, self.name)
        return sorted({*taps_of(settings, self.target.config), -1})

    @cached_property
    def examples(self) -> LiveFeatures:
        """Two random sequences; the target's states are computed when they are read."""
        return learning.make_examples(self.target, self.taps)

    def batch(self, *indices: int) -> Batch:
        """Return these of the two sequences, both by default, as one batch."""
        batch = collate(self.examples.read(list(indices or (0, 1))), self.examples.taps)
        return batch.to(self.target.device)

    def answers(self) -> Batch:
        """Return a batch of two sequences that begin at random and go on with the target's greedy answer."""
        answers = learning.make_examples(self.target, self.taps, answered=True)
        return collate(answers.read([0, 1]), answers.taps).to(self.target.device)

    def checks(self) -> Iterator[Check]:
        """Yield all checks, the fastest first; the last ones are for methods with weights.

        A check is a sentence on what must hold, and a function that raises a `Fault` where it does not.
        """
        make = self.make
        target = self.target
        prompt = PROMPTS[0]
        for budget in [*drafting.RANKED, *drafting.DRAWN]:
            about = f"a tree is rooted and within {describe_budget(budget)}"
            yield Check(about, partial(drafting.check_tree, make, target, budget))
        for sampling in drafting.SAMPLINGS:
            about = f"the output is the untouched model's own, {describe_sampling(sampling)}"
            yield Check(
                about, partial(self._check_output, sampling), is_slow=sampling not in (GREEDY, WARM)
            )
        for sampling in (GREEDY, WARM):
            how = describe_sampling(sampling)
            check = partial(drafting.check_begin, make, target, PROMPTS[1], prompt, sampling)
            yield Check(f"begin forgets the sequence before, {how}", check)
            check = partial(drafting.check_side_by_side, make, target, PROMPTS, sampling)
            yield Check(f"sequences side by side are drafted as each alone, {how}", check)
        # a drafter that reads the target's own KV cache (`reads.kv_cache`) has no state of a sequence to be copied
        if not self.method.reads.kv_cache:
            check = partial(drafting.check_fork, make, target, drafting.DYNAMIC[0])
            yield Check("a sequence that is forked is drafted for as two", check)
        if self.is_trained:
            yield from self._checks_of_heads()

    def _check_output(self, sampling: Sampling) -> None:
        """Check that the output is the untouched model's own, with all budgets that promise that.

        A budget says how large a draft is, and how its tokens are chosen: ranked or sampled.
        """
        budgets = drafting.RANKED if self.is_trained else drafting.DYNAMIC
        # above temperature 0 sampled drafts keep the target's distribution, but not the tokens of its noise
        if self.is_trained and sampling.temperature == 0:
            budgets = budgets + drafting.DRAWN
        expected = reference(self.target, PROMPTS[0], sampling, count=12)
        drafting.check_output(self.make, self.target, PROMPTS[0], sampling, budgets, expected)

    def _checks_of_heads(self) -> Iterator[Check]:
        """Yield the checks of a head that is trained: its loss, validation, drafts, file and exports."""
        head = self.make_head
        target = self.target
        # batches are made inside a check, so that an error of the method in making one fails that check alone
        for about, check in (
            ("the loss falls on one batch", learning.check_loss_falls),
            (
                "the loss counts supervised tokens alone, and sees no future",
                learning.check_supervised_alone,
            ),
            ("the loss depends on what is supervised", learning.check_supervised_counts),
            ("the loss follows the run's progress only where it says so", learning.check_progress),
        ):
            # a default argument, as a lambda would see the loop's last check
            yield Check(about, lambda check=check: check(head, target, self.batch()))  # type: ignore[misc]
        yield Check(
            "validation adds up",
            lambda: learning.check_validation(head, target, self.batch(), self.batch),
        )
        yield Check(
            "drafts are accepted as far as validation says",
            lambda: learning.check_drafted_as_validated(head, target, self.answers()),
        )
        yield Check(
            "each level of a draft uses the noise of its own position",
            partial(drafting.check_noise, self.make, target),
        )
        yield Check(
            "a head from disk drafts as before",
            lambda: shipping.check_saved(head(), target, PROMPTS[0], self.folder / "head"),
        )
        yield Check("every export holds all weights, or is refused", self._check_exports)
        for sampling in drafting.LAW_SAMPLINGS:
            for budget in drafting.LAW_BUDGETS:
                how = f"{describe_sampling(sampling)}, {describe_budget(budget)}"
                about = f"sampled drafts keep the target's distribution, {how}"
                yield Check(about, partial(self._check_law, sampling, budget), is_slow=True)

    def _check_exports(self) -> str:
        """Check the export to every engine; return a note on which engines take the head.

        An engine that cannot serve the head must refuse it; that is no fault.
        """
        takers = []
        for engine in EXPORTERS:
            refusal = shipping.check_export(
                self.name,
                self.make_head,
                engine,
                target=self.target,
                folder=self.folder / "target",
                out=self.folder / f"exported-{engine}",
            )
            if refusal is None:
                takers.append(engine)
        return f"written for {', '.join(takers)}" if takers else "refused by all, in a sentence"

    def _check_law(self, sampling: Sampling, budget: Budget) -> None:
        """Check the distribution of the output on a target of four tokens, so that answers can be counted."""
        letters = make_letters(self.target.device)
        drafting.check_law(partial(self.make_for, letters), letters, sampling, budget)


def run_checks(
    kind: str, *, fast: bool = False, device: torch.device | str = "cpu"
) -> Iterator[Outcome]:
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
    """Run one check; its fault is a sentence, even where the method raises any other error."""
    try:
        # a check may return a note on what it has found to hold
        note = check.run()
    except Fault as fault:
        return Outcome(check.about, str(fault))
    except Exception as error:  # raised inside the method
        inner = extract_tb(error.__traceback__)[-1]
        where = f"{Path(inner.filename).name}, line {inner.lineno}"
        return Outcome(check.about, f"{type(error).__name__}: {error} ({where})")
    return Outcome(check.about, note=note or "")
