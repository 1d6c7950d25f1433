"""What every registered method must hold; registering it is what puts it under this test."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from eagle import Budget, Sampling, Target, Trace, load_drafter
from eagle.conformance import drafting, learning, shipping
from eagle.conformance.learning import TREES as TREES
from eagle.conformance.own_answers import chi_square_p, make_letters
from eagle.conformance.own_answers import reference as own_reference
from eagle.conformance.trial import make_head
from eagle.conformance.trial import trees_of as trees_of
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, collate
from eagle.data.features import LiveFeatures, taps_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.counts import CountDrafter
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS
from tests.tables import some_tables
from tests.trained import fixture_seed

TRAINED = [name for name, method in DRAFTERS.items() if issubclass(method, TrainableDrafter)]
COUNTED = [name for name, method in DRAFTERS.items() if issubclass(method, CountDrafter)]
LAWFUL = [*TRAINED, *COUNTED, "early_exit", "sparse_kv"]  # which grow trees of their own law
DYNAMIC, RANKED, DRAWN, SAMPLINGS = (
    drafting.DYNAMIC,
    drafting.RANKED,
    drafting.DRAWN,
    drafting.SAMPLINGS,
)
ASKED = "What does copy do?"


def new_head(name: str, target: Target) -> Any:
    """An untrained head, the same every time."""
    return make_head(name, target, fixture_seed())


def drafter_of(name: str, target: Target) -> Any:
    """A drafter ready to draft."""
    if name in COUNTED:
        return DRAFTERS[name](some_tables(target.vocab_size))
    return (
        new_head(name, target).bind(target.head) if name in TRAINED else load_drafter(name, target)
    )


@cache
def reference(target: Target, prompt: tuple[int, ...], sampling: Sampling, count: int) -> list[int]:
    """The untouched model's own uncached continuation, warped by transformers, with the noise of the place at T > 0."""
    return own_reference(target, prompt, sampling, count)


@pytest.fixture(scope="session")
def examples(tiny_target: Target) -> LiveFeatures:
    """Two short texts of different length with the target's features at all taps."""
    read = [taps_of(settings_of({"kind": name}, "test"), tiny_target.config) for name in TRAINED]
    taps = sorted({tap for taps in read for tap in taps})
    return learning.make_examples(tiny_target, taps)


@pytest.fixture(scope="session")
def batch(examples: LiveFeatures) -> Batch:
    """Both texts in one."""
    return collate(examples.read([0, 1]), examples.taps)


FEWER = [
    pytest.param(sampling, marks=pytest.mark.slow)
    for sampling in (SAMPLINGS[1], SAMPLINGS[2], SAMPLINGS[4])
]


@pytest.mark.quick(
    "none-greedy",
    "ngram-greedy",
    "ngram-top-p",
    "sparse_kv-greedy",
    "unigram-greedy",
    "draft_model-greedy",
    "eagle1-greedy",
    "medusa-greedy",
    "falcon-greedy",
    "spire-greedy",
    "dspark-greedy",
)
@pytest.mark.parametrize(
    "sampling",
    [SAMPLINGS[0], SAMPLINGS[3], *FEWER],
    ids=["greedy", "top-p", "T=0.5", "T=1", "top-k"],
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_the_untouched_models_own(
    name: str, sampling: Sampling, tiny_target: Target
) -> None:
    """Whatever is drafted, in whatever tree, the output is plain decoding's; drawn drafts keep its law alone."""
    prompt, make = tiny_target.chat(ASKED), partial(drafter_of, name, tiny_target)
    expected = reference(tiny_target, tuple(prompt), sampling, 12)
    drawn_too = (
        sampling.temperature == 0
    )  # what is drawn above it has the target's law, not its tokens
    budgets = RANKED + DRAWN * drawn_too if name in LAWFUL else DYNAMIC
    drafting.check_output(make, tiny_target, prompt, sampling, budgets, expected)


@pytest.fixture(scope="module")
def letters() -> Target:
    """A target of four tokens, whose laws are neither flat nor certain."""
    return make_letters()


@pytest.mark.slow
@pytest.mark.not_long("*-published-top-p", "eagle1-*", "eagle3-*", "early_exit-*")
@pytest.mark.parametrize("sampling", SAMPLINGS[2:4], ids=["T=1", "top-p"])
@pytest.mark.parametrize("budget", DRAWN[:2], ids=["chain", "published"])
@pytest.mark.parametrize("name", LAWFUL)
def test_drawn_drafts_have_the_targets_law(
    name: str, budget: Budget, sampling: Sampling, letters: Target
) -> None:
    """The first three tokens of 600 requests, against the law by which the untouched model says them."""
    drafting.check_law(partial(drafter_of, name, letters), letters, sampling, budget)


@pytest.mark.parametrize("freedom", [1, 2, 5, 12, 40])
def test_the_probability_of_counts_is_that_of_scipy(freedom: int) -> None:
    """The tail that laws are checked with, from likely counts to those that are refused."""
    for distance in (0.3, 1.0, 2.0, 3.0, 4.0, 6.0):
        due = [20.0] * (freedom + 1)
        seen = [20 + (-1) ** place * (20 * distance) ** 0.5 for place in range(freedom + 1)]
        statistic = sum((count - 20) ** 2 / 20 for count in seen)
        expected = float(scipy.stats.chi2.sf(statistic, freedom))
        assert chi_square_p(seen, due) == pytest.approx(expected, rel=1e-9)


@pytest.mark.quick("*-T=1")
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_begin_forgets(name: str, sampling: Sampling, tiny_target: Target) -> None:
    """A second sequence is drafted as if it were the first, by the noise of its own places."""
    earlier, prompt = (
        tiny_target.chat("Something else entirely, and longer"),
        tiny_target.chat(ASKED),
    )
    drafting.check_begin(
        partial(drafter_of, name, tiny_target), tiny_target, earlier, prompt, sampling
    )


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_that_parts_is_drafted_for_as_two(name: str, tiny_target: Target) -> None:
    """After a fork both rows, and the second once the first is gone, draft as texts that were told all of it do."""
    if DRAFTERS[name].reads.texts:
        pytest.skip("it drafts behind the target's own rows")
    drafting.check_fork(partial(drafter_of, name, tiny_target), tiny_target, Budget(8, 4, 3))


BESIDE = [ASKED, "Why is the sky blue?", "Who?"]  # of three lengths


def drafted_alone(name: str, sampling: Sampling, target: Target) -> list[Trace]:
    """Three answers, one after the other, each with a drafter of its own."""
    return drafting.draft_alone(
        partial(drafter_of, name, target), target, list(map(target.chat, BESIDE)), sampling
    )


def drafted_beside(name: str, sampling: Sampling, target: Target) -> list[Trace]:
    """The same in one batch of one drafter."""
    return drafting.draft_beside(
        partial(drafter_of, name, target), target, list(map(target.chat, BESIDE)), sampling
    )


@pytest.mark.quick(
    "none-T=1", "suffix-T=1", "eagle1-T=1", "hydra-T=1", "spire-T=1", "dflash-T=1", "mtp-T=1"
)
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_side_by_side_are_as_each_alone(
    name: str, sampling: Sampling, tiny_target: Target
) -> None:
    """Cycle by cycle: a batch of three, and two streams on one drafter that are asked in turn."""
    prompts = list(map(tiny_target.chat, BESIDE))
    drafting.check_side_by_side(
        partial(drafter_of, name, tiny_target), tiny_target, prompts, sampling
    )


@pytest.mark.parametrize("name", LAWFUL)
def test_noise_is_that_of_the_places_that_are_drafted_for(name: str, tiny_target: Target) -> None:
    """What follows a root behind n tokens stands at place n + 1; two tokens more, and it stands two places further."""
    drafting.check_noise(partial(drafter_of, name, tiny_target), tiny_target)


@pytest.mark.parametrize("budget", RANKED + DRAWN, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_are_rooted_and_within_budget(name: str, budget: Budget, tiny_target: Target) -> None:
    """The root is the token that the target chose; nodes, levels and children stay within the budget."""
    drafting.check_tree(partial(drafter_of, name, tiny_target), tiny_target, budget)


@pytest.mark.quick("eagle1", "medusa", "blockwise", "falcon", "early_exit_adapter", "mtp")
@pytest.mark.parametrize("name", TRAINED)
def test_loss_falls_on_one_batch(name: str, tiny_target: Target, batch: Batch) -> None:
    """Thirty steps on one batch teach it half of what the target says there."""
    learning.check_loss_falls(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.fixture(scope="module")
def answers(examples: LiveFeatures, tiny_target: Target) -> Batch:
    """Two texts that go on as the target does."""
    read = learning.make_examples(tiny_target, examples.taps, answered=True)
    return collate(read.read([0, 1]), read.taps)


QUICK = ("eagle1", "medusa", "mtp")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in TRAINED]
)
def test_what_is_drafted_is_what_was_validated(
    name: str, tiny_target: Target, answers: Batch
) -> None:
    """Chains behind every slot of a text, each drafted for anew, are accepted where validation says that they are."""
    learning.check_drafted_as_validated(partial(new_head, name, tiny_target), tiny_target, answers)


@pytest.mark.parametrize("name", TRAINED)
def test_loss_counts_supervised_tokens_alone(name: str, tiny_target: Target, batch: Batch) -> None:
    """What follows the last supervised token of a text changes neither the loss nor a gradient."""
    learning.check_supervised_alone(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.mark.parametrize("name", TRAINED)
def test_loss_depends_on_what_is_supervised(name: str, tiny_target: Target, batch: Batch) -> None:
    """The same change inside the supervised part does change the loss: the test above can fail."""
    learning.check_supervised_counts(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.mark.parametrize("name", TRAINED)
def test_what_follows_the_runs_progress_says_so(
    name: str, tiny_target: Target, batch: Batch
) -> None:
    """A step of a longer run is the same step, unless the head says otherwise."""
    learning.check_progress(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_judged_adds_up(
    name: str, tiny_target: Target, batch: Batch, examples: LiveFeatures
) -> None:
    """Sums of two texts are those of each; the loss terms are those of training; nothing is drawn at random."""

    def part(place: int) -> Batch:
        return collate(examples.read([place]), examples.taps)

    learning.check_validation(partial(new_head, name, tiny_target), tiny_target, batch, part)


@pytest.mark.parametrize("name", TRAINED)
def test_save_and_load_give_the_same_proposal(
    name: str, tiny_target: Target, tmp_path: Path
) -> None:
    """A head from disk drafts what it drafted before it was saved, and a torn one is refused."""
    shipping.check_saved(
        new_head(name, tiny_target), tiny_target, tiny_target.chat(ASKED), tmp_path / "head"
    )


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize("name", TRAINED)
def test_exports_hold_every_tensor_of_the_head(
    name: str, engine: str, tiny_target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Nothing that was learned is lost on the way into an engine's layout; one that cannot serve the head says so."""
    make, folder = partial(new_head, name, tiny_target), tiny_target_dir / "target"
    shipping.check_export(name, make, engine, tiny_target, folder, tmp_path)


def test_a_head_for_another_target_is_refused(tiny_target: Target, tmp_path: Path) -> None:
    """A folder that is no head, a head of another width, and a torn one each say what is wrong."""
    with pytest.raises(ValueError, match="expected a folder with a trained head"):
        load_drafter(tmp_path / "nothing", tiny_target)
    head = new_head("eagle1", tiny_target)
    head.shape.hidden_size //= 2
    other = type(head)(head.settings, head.shape)
    save_head(tmp_path / "narrow", other, "", {})
    with pytest.raises(ValueError, match="was made for a target"):
        load_drafter(tmp_path / "narrow", tiny_target)
    del other.fc
    save_head(tmp_path / "torn", other, "", {})
    with pytest.raises(ValueError, match="missing tensors"):
        load_head(tmp_path / "torn")
