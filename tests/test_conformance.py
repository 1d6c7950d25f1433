"""What every registered method must hold; registering it is what puts it under this test.

The checks are those of `eagle check-method`. Here they run on the suite's trained target, which accepts more drafts
than the random one of the command, and with tables for methods that are read from files.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from eagle import Budget, Sampling, Target, load_drafter
from eagle.conformance import drafting, learning, shipping
from eagle.conformance.learning import TREES as TREES
from eagle.conformance.own_answers import chi_square_p, make_letters
from eagle.conformance.own_answers import reference as own_reference
from eagle.conformance.trial import make_head
from eagle.core.examples import Batch, collate
from eagle.data.features import LiveFeatures, taps_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.lookup.counts import CountDrafter
from eagle.formats.export import EXPORTERS
from tests.registry import TRAINED as TRAINED
from tests.tables import some_tables
from tests.trained import fixture_seed

# tables of counts, which are read from files
COUNTED = [name for name, method in DRAFTERS.items() if issubclass(method, CountDrafter)]
# those that grow trees of a law of their own
LAWFUL = [*TRAINED, *COUNTED, "early_exit", "sparse_kv"]
DYNAMIC = drafting.DYNAMIC
RANKED = drafting.RANKED
DRAWN = drafting.DRAWN
SAMPLINGS = drafting.SAMPLINGS
# of three lengths
PROMPTS = ["What does copy do?", "Why is the sky blue?", "Who?"]


def new_head(name: str, target: Target) -> Any:
    """Return an untrained head, the same every time."""
    return make_head(name, target, fixture_seed())


def drafter_of(name: str, target: Target) -> Any:
    """Return a drafter ready to draft."""
    # made here, as no file of tables is shipped
    if name in COUNTED:
        return DRAFTERS[name](some_tables(target.vocab_size))
    if name in TRAINED:
        return new_head(name, target).bind(target.head)
    return load_drafter(name, target)


@cache
def reference(target: Target, prompt: tuple[int, ...], sampling: Sampling, count: int) -> list[int]:
    """Return the untouched model's own continuation, which all methods are compared with."""
    return own_reference(target, prompt, sampling, count)


@pytest.fixture(scope="session")
def examples(tiny_target: Target) -> LiveFeatures:
    """Two short texts of different length with the target's features at all taps of all methods."""
    # all taps in one batch, so that the target reads the texts once
    taps = set()
    for name in TRAINED:
        taps |= {*taps_of(settings_of({"kind": name}, "test"), tiny_target.config)}
    return learning.make_examples(tiny_target, sorted(taps))


@pytest.fixture(scope="session")
def batch(examples: LiveFeatures) -> Batch:
    """Both texts in one batch."""
    return collate(examples.read([0, 1]), examples.taps)


@pytest.fixture(scope="module")
def answers(examples: LiveFeatures, tiny_target: Target) -> Batch:
    """Two texts that go on as the target does."""
    read = learning.make_examples(tiny_target, examples.taps, answered=True)
    return collate(read.read([0, 1]), read.taps)


@pytest.fixture(scope="module")
def letters() -> Target:
    """A target of four tokens, whose probs are neither flat nor certain."""
    return make_letters()


# a family each; the other methods run with the slow tests
@pytest.mark.quick(
    *("none-greedy", "ngram-greedy", "ngram-top-p", "sparse_kv-greedy", "unigram-greedy"),
    *("draft_model-greedy", "eagle1-greedy", "medusa-greedy", "falcon-greedy", "spire-greedy"),
    "dspark-greedy",
)
@pytest.mark.parametrize(
    "sampling", [SAMPLINGS[0], SAMPLINGS[2], SAMPLINGS[3]], ids=["greedy", "T=1", "top-p"]
)
@pytest.mark.parametrize("name", DRAFTERS)
def test_output_is_the_untouched_models_own(
    name: str,
    sampling: Sampling,
    tiny_target: Target,
) -> None:
    """Whatever is drafted, in whatever tree, the output is plain decoding's."""
    prompt = tiny_target.chat(PROMPTS[0])
    expected = reference(tiny_target, tuple(prompt), sampling, 12)
    budgets = RANKED if name in LAWFUL else DYNAMIC
    # above T = 0 sampled drafts keep the target's law, not its tokens: see the next test
    if name in LAWFUL and sampling.temperature == 0:
        budgets = RANKED + DRAWN
    make = partial(drafter_of, name, tiny_target)
    drafting.check_output(
        make,
        tiny_target,
        prompt,
        sampling,
        budgets=budgets,
        expected=expected,
    )


@pytest.mark.slow
@pytest.mark.not_long("*-published-top-p", "eagle1-chain-T=1", "early_exit-chain-T=1")
@pytest.mark.parametrize("sampling", drafting.LAW_SAMPLINGS, ids=["T=1", "top-p"])
@pytest.mark.parametrize("budget", drafting.LAW_BUDGETS, ids=["chain", "published"])
@pytest.mark.parametrize("name", LAWFUL)
def test_drawn_drafts_have_the_targets_law(
    name: str,
    budget: Budget,
    sampling: Sampling,
    letters: Target,
) -> None:
    """The first three tokens of 600 requests follow the law by which the untouched model chooses them."""
    drafting.check_law(
        partial(drafter_of, name, letters),
        letters,
        sampling,
        budget,
    )


@pytest.mark.parametrize("freedom", [1, 12])
def test_the_probability_of_counts_is_that_of_scipy(freedom: int) -> None:
    """The tail that the laws are checked with, from likely counts to those that are refused."""
    for distance in (0.3, 2.0, 6.0):
        # every cell is off by so much that the statistic is cells * distance
        offset = (20 * distance) ** 0.5
        observed = [20 + (-1) ** cell * offset for cell in range(freedom + 1)]
        statistic = sum((count - 20) ** 2 / 20 for count in observed)
        expected = float(scipy.stats.chi2.sf(statistic, freedom))
        assert chi_square_p(observed, [20.0] * (freedom + 1)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.quick("*-T=1")
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_begin_forgets(name: str, sampling: Sampling, tiny_target: Target) -> None:
    """A second sequence is drafted as if it were the first, by the noise of its own positions."""
    # in fp64, as untrained heads give several nodes nearly the same score
    tiny_target = Target(deepcopy(tiny_target.model).double(), tiny_target.tokenizer)
    earlier = tiny_target.chat("Something else entirely, and longer")
    prompt = tiny_target.chat(PROMPTS[0])
    make = partial(drafter_of, name, tiny_target)
    drafting.check_begin(make, tiny_target, earlier, prompt, sampling=sampling)


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_text_that_parts_is_drafted_for_as_two(name: str, tiny_target: Target) -> None:
    """After a fork both rows, and the second once the first is gone, draft as texts that were read whole do."""
    if DRAFTERS[name].reads.kv_cache:
        pytest.skip("it drafts after the target's own rows, which no fork copies")
    drafting.check_fork(partial(drafter_of, name, tiny_target), tiny_target, DYNAMIC[0])


@pytest.mark.quick(
    "none-T=1",
    "suffix-T=1",
    "eagle1-T=1",
    "hydra-T=1",
    "spire-T=1",
    "dflash-T=1",
)
@pytest.mark.parametrize("sampling", [SAMPLINGS[0], SAMPLINGS[2]], ids=["greedy", "T=1"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_side_by_side_are_as_each_alone(
    name: str,
    sampling: Sampling,
    tiny_target: Target,
) -> None:
    """Cycle by cycle: a batch of three, and two streams on one drafter that are asked in turn."""
    # of three lengths, so that rows stand at other positions
    prompts = [tiny_target.chat(prompt) for prompt in PROMPTS]
    make = partial(drafter_of, name, tiny_target)
    drafting.check_side_by_side(make, tiny_target, prompts, sampling)


@pytest.mark.parametrize("name", LAWFUL)
def test_noise_is_that_of_the_places_that_are_drafted_for(name: str, tiny_target: Target) -> None:
    """What follows a root after n tokens has the noise of position n + 1."""
    drafting.check_noise(partial(drafter_of, name, tiny_target), tiny_target)


@pytest.mark.parametrize("budget", RANKED + DRAWN, ids=str)
@pytest.mark.parametrize("name", DRAFTERS)
def test_trees_are_rooted_and_within_budget(name: str, budget: Budget, tiny_target: Target) -> None:
    """The root is the token that the target chose; nodes, levels and children stay within the budget."""
    drafting.check_tree(partial(drafter_of, name, tiny_target), tiny_target, budget)


@pytest.mark.quick(
    "eagle1",
    "medusa",
    "blockwise",
    "falcon",
    "early_exit_adapter",
    "mtp",
)
@pytest.mark.parametrize("name", TRAINED)
def test_loss_falls_on_one_batch(name: str, tiny_target: Target, batch: Batch) -> None:
    """Thirty steps on one batch teach a head half of what the target says there."""
    learning.check_loss_falls(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_what_is_drafted_is_what_was_validated(
    name: str,
    tiny_target: Target,
    answers: Batch,
) -> None:
    """Chains after every position of a text are accepted as far as validation says."""
    learning.check_drafted_as_validated(partial(new_head, name, tiny_target), tiny_target, answers)


@pytest.mark.parametrize("name", TRAINED)
def test_loss_counts_supervised_tokens_alone(name: str, tiny_target: Target, batch: Batch) -> None:
    """What follows the last supervised token of a text changes neither the loss nor a gradient."""
    learning.check_supervised_alone(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.mark.parametrize("name", TRAINED)
def test_loss_depends_on_what_is_supervised(name: str, tiny_target: Target, batch: Batch) -> None:
    """The same change inside the supervised part changes the loss: the test above can fail."""
    learning.check_supervised_counts(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.mark.parametrize("name", TRAINED)
def test_what_follows_the_runs_progress_says_so(
    name: str,
    tiny_target: Target,
    batch: Batch,
) -> None:
    """A step of a longer run is the same step, unless the head says otherwise."""
    learning.check_progress(partial(new_head, name, tiny_target), tiny_target, batch)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_judged_adds_up(
    name: str,
    tiny_target: Target,
    batch: Batch,
    examples: LiveFeatures,
) -> None:
    """Sums over two texts are those of each; the loss terms are those of training; nothing is random."""

    def read_one(index: int) -> Batch:
        return collate(examples.read([index]), examples.taps)

    make = partial(new_head, name, tiny_target)
    learning.check_validation(make, tiny_target, batch, read_one)


@pytest.mark.parametrize("name", TRAINED)
def test_save_and_load_give_the_same_proposal(
    name: str,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """A head from disk drafts what it drafted before it was saved."""
    head = new_head(name, tiny_target)
    shipping.check_saved(
        head,
        tiny_target,
        tiny_target.chat(PROMPTS[0]),
        tmp_path / "head",
    )


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize("name", TRAINED)
def test_exports_hold_every_tensor_of_the_head(
    name: str,
    engine: str,
    tiny_target: Target,
    tiny_target_dir: Path,
    tmp_path: Path,
) -> None:
    """An engine's layout holds all that was learned, or the exporter says why it cannot."""
    shipping.check_export(
        name,
        partial(new_head, name, tiny_target),
        engine,
        target=tiny_target,
        folder=tiny_target_dir / "target",
        out=tmp_path,
    )
