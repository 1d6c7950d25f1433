"""Verification emits exactly the target's distribution, shown by enumerating everything that chance may do."""

# V vocabulary, N nodes of a draft tree

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from eagle.core import verify as verification
from eagle.core.tree import DraftTree, TargetOutput
from eagle.core.verify import (
    Choose,
    Coin,
    Pick,
    Probs,
    Sampling,
    sample_block,
    sample_tree,
    verify,
)
from tests.enumerate_law import (
    Chance,
    Drawn,
    Laws,
    Rule,
    distance,
    drawn_trees,
    emitted,
    every_outcome,
    futures,
    laws_of,
    random_laws,
    random_logits,
    texts_of,
)

PLAIN = Sampling(temperature=1.0)
FILTERED = Sampling(temperature=0.7, top_p=0.9)

# children of each node by depth, vocabulary, number of random distributions
Shape = tuple[tuple[int, ...], int, int]
ONE_DRAFT: Shape = ((1,), 6, 80)
CHAIN: Shape = ((1, 1), 6, 80)
LONG_CHAIN: Shape = ((1, 1, 1), 4, 80)
SIBLINGS: Shape = ((3,), 5, 80)
TREE: Shape = ((2, 1), 4, 40)
WIDE_TREE: Shape = ((2, 2), 4, 8)


def random_cases(
    shape: Shape, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Laws, list[Drawn]]]:
    """Yield targets, each with all trees of this shape that a draft may propose."""
    branching, vocab_size, count = shape
    for seed in range(count):
        target, draft = random_laws(seed, vocab_size, len(branching), dtype)
        yield target, list(drawn_trees(draft, branching))


@pytest.mark.parametrize(
    ("rule", "shape", "dtype"),
    [
        (sample_tree, ONE_DRAFT, torch.float64),
        (sample_tree, SIBLINGS, torch.float32),
        (sample_tree, TREE, torch.float64),
        (sample_block, CHAIN, torch.float64),
        (sample_block, SIBLINGS, torch.float32),
        (sample_block, TREE, torch.float64),
        pytest.param(
            sample_tree,
            WIDE_TREE,
            torch.float64,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sample_block,
            WIDE_TREE,
            torch.float64,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sample_block,
            LONG_CHAIN,
            torch.float64,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            sample_block,
            CHAIN,
            torch.float32,
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sampled_drafts_keep_the_targets_law(
    rule: Rule,
    shape: Shape,
    dtype: torch.dtype,
) -> None:
    """The first four tokens have the target's own joint distribution."""
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    for target, trees in random_cases(shape, dtype):
        # the enumeration knows only the rule's coins and picks
        joint, _ = emitted(rule, target, trees)
        assert distance(joint, target) < tolerance


def test_a_stale_proposal_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault bends the law: later siblings are judged as if earlier ones could come again."""
    # without replacement, earlier siblings have no probability left
    monkeypatch.setattr(verification, "_remove_tokens", lambda probs, tokens: probs)
    losses = []
    for target, trees in random_cases(((3,), 5, 20)):
        joint, _ = emitted(sample_tree, target, trees)
        losses.append(distance(joint, target))
    assert np.mean(losses) > 1e-3


@pytest.mark.parametrize(
    ("shape", "least_gain"),
    [
        (SIBLINGS, 0.0),
        (TREE, 0.01),
        pytest.param(CHAIN, 0.01, marks=pytest.mark.slow),
        pytest.param(WIDE_TREE, 0.01, marks=pytest.mark.slow),
    ],
)
def test_block_verification_accepts_at_least_as_many_tokens(
    shape: Shape, least_gain: float
) -> None:
    """For no pair of distributions fewer than token-wise verification, and for some deep ones more."""
    # it is proven for chains (Sun et al. 2024) and for trees (arXiv 2505.12398); here it is counted
    gains = []
    for target, trees in random_cases(shape):
        _, by_block = emitted(sample_block, target, trees)
        _, by_token = emitted(sample_tree, target, trees)
        gains.append(by_block - by_token)
    assert min(gains) > -1e-12
    if least_gain:
        assert max(gains) > least_gain
    else:
        # a tree of one level has no path to judge as a whole
        assert max(gains) < 1e-6


def test_the_weight_of_published_code_is_seen() -> None:
    """A planted fault bends the law: the weight after a removal, as research code computes it."""
    source = inspect.getsource(verification.sample_block)
    right = "parent.weight = mass / (mass + 1 - parent.weight)"
    assert right in source
    # |r| over the draft probability that the removed token left
    wrong = (
        "parent.weight = min(1.0, mass / (1.001 - float(last.proposal[tree.tokens[last.node]])))"
    )
    names: dict[str, Any] = dict(vars(verification))
    exec("from __future__ import annotations\n" + source.replace(right, wrong), names)
    losses = []
    for target, trees in random_cases(TREE):
        joint, _ = emitted(names["sample_block"], target, trees)
        losses.append(distance(joint, target))
    assert max(losses) > 1e-3


@pytest.mark.parametrize("length", [1, 3])
def test_expected_tokens_follow_leviathans_formula(length: int) -> None:
    """A cycle yields (1 - alpha^(length + 1)) / (1 - alpha) tokens where all positions have the same law."""
    for seed in range(20):
        targets, drafts = random_laws(seed, 4, 1)
        # the same law after every text of up to three tokens
        shapes = [[4] * (depth + 1) for depth in range(4)]
        target = [targets[0].expand(shape) for shape in shapes]
        draft = [drafts[0].expand(shape) for shape in shapes]
        _, accepted = emitted(
            sample_tree,
            target,
            drawn_trees(draft, [1] * length),
        )
        # the acceptance rate of one draft
        alpha = float(torch.minimum(targets[0], drafts[0]).sum())
        expected = sum(alpha**step for step in range(length + 1))
        assert accepted + 1 == pytest.approx(expected, abs=1e-12)


# all of the others underflow, or all but one
@pytest.mark.parametrize("third", [-13.0, -0.6])
def test_siblings_of_zero_probability_are_not_accepted(third: float) -> None:
    """A second sibling whose probability underflowed to zero must not be taken for certain."""
    target = laws_of(
        random_logits(0, 4, 2, torch.float32),
        PLAIN,
    )
    peaked = torch.tensor([[0, -12, third, -14]], dtype=torch.float32) / 0.01
    tree = DraftTree.from_paths(
        0,
        [[0], [1]],
    )
    tree = replace(
        tree,
        draft_probs=peaked.softmax(-1).expand(3, 4),
    )
    for rule in (sample_tree, sample_block):
        joint, _ = emitted(rule, target, [(tree, texts_of(tree), 1.0)])
        assert distance(joint, target) < 1e-6


@pytest.mark.parametrize(
    ("rule", "branching"),
    [
        (sample_tree, [2, 1]),
        (sample_block, [1, 1]),
        (sample_block, [2, 1]),
    ],
)
@pytest.mark.parametrize(
    "limits",
    [(0.0, 0.0), (0.0, 1.0)],
    ids=["less", "less then more"],
)
def test_differences_by_rounding_do_no_harm(
    rule: Rule,
    branching: list[int],
    limits: tuple[float, ...],
) -> None:
    """Where a draft differs from the target in its last bit, nothing at all may remain after a rejection."""
    for seed in range(4):
        target = laws_of(
            random_logits(seed, 4, 4, torch.float32),
            PLAIN,
        )
        draft = []
        for law, limit in zip(target, limits, strict=False):
            draft.append(law.nextafter(torch.tensor(limit)))
        joint, accepted = emitted(rule, target, drawn_trees(draft, branching))
        assert distance(joint, target) < 1e-6
        assert accepted == pytest.approx(len(branching), abs=1e-5)


def test_a_block_that_leaves_nothing_goes_on_with_the_target() -> None:
    """A draft just above the target may be rejected, and then there is no remainder to draw from."""
    law = torch.tensor([0.25, 0.75])
    tree = replace(
        DraftTree.chain([0, 1]), draft_probs=law.nextafter(torch.tensor(1.0)).expand(2, 2)
    )
    picked: list[torch.Tensor] = []

    def pick(probs: torch.Tensor) -> int:
        picked.append(probs)
        return 0

    assert sample_block(tree, lambda node: law, lambda odds: False, pick) == ([0], 0)
    assert torch.equal(picked[0], law)


def test_lenience_is_lossy_within_its_bound() -> None:
    """No token is more than 1 / lenience times as likely as the target has it, and more drafts are accepted."""
    lenience = 0.5
    losses = []
    for seed in range(40):
        target, draft = random_laws(seed, 5, 1)
        rule = partial(sample_tree, lenience=lenience)
        joint, accepted = emitted(
            rule,
            target,
            drawn_trees(draft, [1]),
        )
        assert (joint <= futures(target)[0] / lenience + 1e-12).all()
        # Leviathan et al. 2023, appendix A.5: accept with p / (lenience q), else sample from what is left
        taken = torch.minimum(
            target[0] / lenience,
            draft[0],
        )
        rest = (target[0] - lenience * draft[0]).clamp(min=0)
        expected = taken + (1 - taken.sum()) * rest / rest.sum()
        assert accepted == pytest.approx(
            float(taken.sum()),
            abs=1e-12,
        )
        np.testing.assert_allclose(
            joint.sum((1, 2, 3)),
            expected.numpy(),
            atol=1e-12,
        )
        losses.append(distance(joint, target))
    assert np.mean(losses) > 0.01


def random_tree(
    seed: int,
    nodes: int,
    vocab_size: int,
) -> DraftTree:
    """Return a tree of any form, with any tokens."""
    dice = random.Random(seed)
    parents = [-1]
    tokens = [0]
    edges = set()
    while len(tokens) < nodes:
        edge = (
            dice.randrange(len(tokens)),
            dice.randrange(vocab_size),
        )
        # siblings differ
        if edge not in edges:
            edges.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return DraftTree(torch.tensor(tokens), torch.tensor(parents))


def likeliest_tree(
    seed: int,
    nodes: int,
    vocab_size: int,
) -> DraftTree:
    """Return the best first tokens of a draft, each with the best token after it."""
    _, (first, second, *_) = random_laws(seed, vocab_size, 2)
    tokens = first.topk(nodes // 2).indices.tolist()
    return DraftTree.from_paths(
        0,
        [[token, int(second[token].argmax())] for token in tokens],
    )


def read(tree: DraftTree, logits: Laws) -> TargetOutput:
    """Return a target's output on a tree, after a prompt of two tokens."""
    rows = [logits[len(text)][text] for text in texts_of(tree)]
    return TargetOutput(
        tree,
        torch.stack(rows),
        features=None,
        start=2,
        sequence=[1, 2],
    )


def verify_by(
    logits: Laws,
    sampling: Sampling,
    tree: DraftTree,
    _: Probs,
    coin: Coin,
    pick: Pick,
) -> tuple[list[int], int]:
    """Verify by the public function, with coins and picks that an enumeration decides."""
    choose = Choose(sampling)
    choose.coin = coin
    choose.pick = pick
    return verify(read(tree, logits), choose)


class ScriptedChoose(Choose):
    """Choose by enumeration instead of noise."""

    def __init__(self, sampling: Sampling, chance: Chance) -> None:
        super().__init__(sampling)
        self.chance = chance

    def __call__(
        self,
        output: TargetOutput,
        nodes: Sequence[int],
    ) -> list[int]:
        """Return the tokens chosen after `nodes`."""
        return [self.chance.draw(self.probs(output, node).tolist()) for node in nodes]


@pytest.mark.parametrize("make_tree", [random_tree, likeliest_tree])
def test_drafts_without_probabilities_keep_the_targets_law(
    make_tree: Callable[..., DraftTree],
) -> None:
    """The target's choices alone decide, so no candidates can bend its law, however they were found."""
    for seed in range(12):
        logits = random_logits(seed, 4, 4, torch.float64)
        target = laws_of(logits, FILTERED)
        tree = make_tree(seed, nodes=5, vocab_size=4)
        output = read(tree, logits)
        texts = texts_of(tree)
        # after[d][text], the joint law of what follows a text of d tokens
        after = futures(target)
        joint = np.zeros_like(after[0])

        def run(
            chance: Chance,
            output: TargetOutput = output,
        ) -> tuple[list[int], int]:
            return verify(output, ScriptedChoose(FILTERED, chance))

        for (path, token), odds in every_outcome(run):
            text = (*texts[path[-1]], token)
            # what the text leaves open is the target's own
            joint[text] += odds * after[len(text)][text]
        assert distance(joint, target) < 1e-12


@pytest.mark.parametrize(
    ("name", "branching"),
    [
        ("token", [3, 1]),
        ("block", [1, 1]),
        ("block", [2, 1]),
    ],
)
def test_greedy_verification_ignores_draft_probabilities(name: str, branching: list[int]) -> None:
    """At temperature 0 the output is that of walking by argmax."""
    # every tree that may be drafted
    logits = random_logits(0, 4, 4, torch.float32)
    _, draft = random_laws(0, 4, 2, torch.float32)
    for tree, _, _ in drawn_trees(draft, branching):
        greedy = verify(
            read(replace(tree, draft_probs=None), logits),
            Choose(Sampling()),
        )
        assert verify(read(tree, logits), Choose(Sampling(rule=name))) == greedy


def test_lenience_needs_sampled_drafts() -> None:
    """There must be probabilities to be lenient against."""
    tree = DraftTree.chain([0, 1])
    sampling = Sampling(temperature=1.0, lenience=0.5)
    logits = random_logits(0, 4, 2, torch.float32)
    with pytest.raises(ValueError, match=r"lenience.*needs sampled drafts"):
        verify(read(tree, logits), Choose(sampling))
