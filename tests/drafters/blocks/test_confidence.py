"""A minimum confidence ends drafts where a head is less sure, and keeps the target's law."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from eagle import Budget, Target, generate
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree, Paths, chain_paths
from eagle.core.verify import Sampling, sample_block, sample_tree
from eagle.drafters.blocks.dspark import DSpark
from eagle.drafters.lookup.ngram import NgramDrafter
from tests.core.test_verify_drawn import Scripted
from tests.drafters.blocks.test_dspark import frozen_head, make_head
from tests.enumerate_law import (
    Chance,
    Drawn,
    Rule,
    distance,
    emitted,
    every_outcome,
    laws_of,
    random_logits,
    texts_of,
)
from tests.families import build

# so few tokens that all drafts can be enumerated
VOCAB = 3
ROOT = 0
MIN_CONFIDENCE = 0.5
SAMPLED = Sampling(temperature=1.0)
CHAIN = chain_paths(3)
TREE: Paths = ((0,), (1,), (0, 0), (1, 0), (0, 0, 0))
FEATURES = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(9))
UPDATE = Committed(torch.tensor([1, 2]), FEATURES, ROOT)
Cut = Callable[[DraftTree], DraftTree]


def small_head() -> DSpark:
    """Return a head whose probs and confidences differ from path to path."""
    torch.manual_seed(8)
    head = make_head(
        VOCAB,
        0.6,
        blocks=1,
        slots=3,
        rank=4,
        taps=(1, 2),
        markov="rnn",
    )
    head.bind(frozen_head().cast(torch.float32).narrow(slice(0, VOCAB)))
    return head


def every_tree(budget: Budget) -> Iterator[tuple[DraftTree, float]]:
    """Yield all trees that the head may draft, with their probabilities."""
    head = small_head()

    def draft(chance: Chance) -> DraftTree:
        noise = Scripted(SAMPLED, VOCAB, chance, budget.top_k)
        return head.begin(noise).propose(UPDATE, budget)

    yield from every_outcome(draft)


def bias_of(
    rule: Rule,
    budget: Budget,
    cut: Cut | None = None,
) -> tuple[float, set[int]]:
    """Return how far the output is from the target's law, and the sizes of the trees."""
    drawn: list[Drawn] = []
    for tree, weight in every_tree(budget):
        kept = tree if cut is None else cut(tree)
        drawn.append((kept, texts_of(kept), weight))
    logits = random_logits(4, VOCAB, 5, torch.float32)
    target = laws_of(logits, SAMPLED)
    joint, _ = emitted(rule, target, drawn)
    return distance(joint, target), {len(tree) for tree, _, _ in drawn}


@pytest.mark.quick("chain", "chain as a block")
@pytest.mark.parametrize(
    ("rule", "paths"),
    [
        (sample_tree, CHAIN),
        (sample_block, CHAIN),
        (sample_tree, TREE),
        (sample_block, TREE),
    ],
    ids=["chain", "chain as a block", "tree", "tree by whole paths"],
)
def test_drafts_that_end_early_keep_the_targets_law(rule: Rule, paths: Paths) -> None:
    """By enumeration of all drafts, some of which end early."""
    bias, sizes = bias_of(rule, Budget.fixed(paths, "sampled", MIN_CONFIDENCE))
    assert bias < 1e-6
    assert len(sizes) > 1


def confidences(tree: DraftTree) -> dict[int, float]:
    """Return the confidence in a child of each node, computed for one node at a time."""
    head = small_head()
    state = head.open()
    state.admit(0)
    state.take_rows([0])
    found = {}
    with torch.inference_mode():
        state.inject([0], [FEATURES])
        states = state.read_blocks([0], torch.tensor([ROOT]))[0]
        for node, depth in enumerate(tree.depths()):
            if depth < len(states):
                found[node] = head.rate(states[depth], tree.tokens[node]).sigmoid().item()
    return found


def cut_after(tree: DraftTree, ahead: int) -> DraftTree:
    """Return the chain up to the node whose child lacks confidence, less `ahead` nodes."""
    last = len(tree) - 1
    for node, confidence in confidences(tree).items():
        if confidence < MIN_CONFIDENCE and node < last:
            end = max(node - ahead, 0) + 1
            probs = None if tree.draft_probs is None else tree.draft_probs[:end]
            return DraftTree(tree.tokens[:end], tree.parents[:end], probs)
    return tree


@pytest.mark.slow
def test_a_rule_that_looks_ahead_is_biased() -> None:
    """The shipped rule ends at the first unsure node; one node earlier, the law is another."""
    whole = Budget.fixed(CHAIN, "sampled")
    short = Budget.fixed(CHAIN, "sampled", MIN_CONFIDENCE)
    for (tree, _), (short_tree, _) in zip(every_tree(whole), every_tree(short), strict=True):
        assert cut_after(tree, 0).tokens.tolist() == short_tree.tokens.tolist()
    # whether a node is drafted must not depend on the token that is sampled there
    bias, _ = bias_of(sample_tree, whole, lambda tree: cut_after(tree, 1))
    assert bias > 1e-3


@pytest.mark.parametrize("shape", [Budget(12, 3, 3), Budget.fixed(TREE), Budget.fixed(CHAIN)])
def test_no_node_goes_on_without_confidence(shape: Budget) -> None:
    """Dynamic and fixed trees lose the nodes after an unsure one, and no others."""
    head = small_head()
    whole = head.begin().propose(UPDATE, shape)
    short = head.begin().propose(UPDATE, replace(shape, confidence=MIN_CONFIDENCE))
    confidence = confidences(whole)
    paths = texts_of(whole)
    # a path stays if the head is sure after each of its nodes
    stays: dict[tuple[int, ...], bool] = {(): True}
    for node in range(1, len(whole)):
        parent = int(whole.parents[node])
        stays[paths[node]] = stays[paths[parent]] and confidence[parent] >= MIN_CONFIDENCE
    assert 1 < len(short) < len(whole)
    # a dynamic tree spends its nodes elsewhere: those paths are not in the whole tree
    common = [path for path in texts_of(short) if path in stays]
    assert common == [path for path in paths if stays[path]]
    certain = replace(shape, confidence=1.0)
    assert len(head.begin().propose(UPDATE, certain)) == 1


def test_temperatures_divide_the_log_odds_of_their_level() -> None:
    """A hot level is less sure, and a tree tells the log-odds of all of its nodes."""
    head = small_head()
    budget = Budget.fixed(CHAIN, confidence=0.0)
    tree = head.begin().propose(UPDATE, budget)
    plain = list(confidences(tree).values())
    assert tree.confidences is not None
    assert tree.confidences[1:].sigmoid().tolist() == pytest.approx(plain)
    head.confidence_temperatures = (0.5, 2.0, 4.0)
    tempered = head.begin().propose(UPDATE, budget).confidences
    assert tempered is not None
    expected = tree.confidences[1:] / torch.tensor([0.5, 2.0, 4.0])
    assert tempered[1:].tolist() == pytest.approx(expected.tolist())


def test_a_drafter_without_confidence_is_refused() -> None:
    """The drafter is asked, whatever its type; a confidence is a probability."""
    target = Target(build("llama"))
    with pytest.raises(ValueError, match=r"confidence is 0\.5, and NgramDrafter cannot tell"):
        generate(
            target,
            NgramDrafter(),
            [5, 6, 5],
            budget=Budget(confidence=0.5),
            max_new_tokens=4,
        )
    with pytest.raises(ValueError, match="expected a probability"):
        Budget(confidence=2)
