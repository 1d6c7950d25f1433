"""The rules of verification emit exactly the target's law: shown by enumerating all that chance may do, not by luck."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

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
    walk,
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
    random_logits,
    texts_of,
)

PLAIN = Sampling(temperature=1.0)
TARGETS = [
    Sampling(temperature=t, top_p=p, top_k=k)
    for t in (0.5, 1.0, 1.5)
    for p in (0.6, 0.9, 1.0)
    for k in (0, 3)
]
DRAFTS = [
    PLAIN,
    Sampling(temperature=0.5),
    Sampling(temperature=1.5, top_p=0.7),
    Sampling(temperature=1.0, top_k=2),  # runs dry where three siblings are wanted
    Sampling(temperature=1.0, top_k=1),
]

Shape = tuple[
    tuple[int, ...], int, int
]  # children per node at each depth, vocabulary, families of laws
CHAINS: list[Shape] = [((1,), 6, 80), ((1, 1), 6, 80), ((1, 1, 1), 4, 80)]
TREES: list[Shape] = [
    ((2,), 6, 80),
    ((3,), 5, 80),
    ((2, 1), 4, 40),
    ((1, 3), 4, 40),
    ((2, 2), 4, 8),
]


def family(
    seed: int, vocab_size: int, depth: int, dtype: torch.dtype = torch.float64
) -> tuple[Laws, Laws]:
    """Laws of a target and of a draft: flat or peaked, filtered or not, and now and then the same."""
    dice = random.Random(seed)
    logits = random_logits(seed, vocab_size, max(depth + 1, 4), dtype, dice.choice((1.0, 2.0, 6.0)))
    guesses = random_logits(seed + 10_000, vocab_size, depth, dtype, dice.choice((1.0, 4.0)))
    target, draft = laws_of(logits, dice.choice(TARGETS)), laws_of(guesses, dice.choice(DRAFTS))
    return target, target if dice.random() < 0.1 else draft


def families(
    shape: Shape, dtype: torch.dtype = torch.float64
) -> Iterator[tuple[Laws, list[Drawn]]]:
    """Laws of targets, each with all the trees that some draft may propose."""
    branching, vocab_size, count = shape
    for seed in range(count):
        target, draft = family(seed, vocab_size, len(branching), dtype)
        yield target, list(drawn_trees(draft, branching))


LAWFUL = [(sample_tree, shape) for shape in CHAINS + TREES] + [
    (sample_block, shape) for shape in CHAINS
]


def dtype_cases() -> list[Any]:
    """Every rule and shape in both precisions; in single those of two levels and more are slow."""
    cases = []
    for (rule, shape), (dtype, tolerance) in product(
        LAWFUL, [(torch.float64, 1e-12), (torch.float32, 1e-6)]
    ):
        slow = dtype == torch.float32 and len(shape[0]) > 1
        cases.append(
            pytest.param(rule, shape, dtype, tolerance, marks=pytest.mark.slow if slow else ())
        )
    return cases


@pytest.mark.quick(
    "sample_tree-shape0-dtype0-1e-12",
    "sample_tree-shape1-dtype1-1e-06",
    "sample_tree-shape2-dtype2-1e-12",
    "sample_tree-shape6-dtype6-1e-12",
    "sample_block-shape16-dtype16-1e-12",
    "sample_block-shape17-dtype17-1e-06",
)
@pytest.mark.parametrize(("rule", "shape", "dtype", "tolerance"), dtype_cases())
def test_sampled_drafts_leave_the_targets_law_as_it_is(
    rule: Rule, shape: Shape, dtype: torch.dtype, tolerance: float
) -> None:
    """The first four tokens, and so fewer, have the target's own joint law."""
    for target, trees in families(shape, dtype):
        assert distance(emitted(rule, target, trees)[0], target) < tolerance


@pytest.mark.quick("shape0")
@pytest.mark.parametrize("shape", CHAINS)
def test_block_verification_accepts_no_fewer_tokens(shape: Shape) -> None:
    """In every family the mean number of accepted drafts is at least that of token-wise verification, in some more."""
    gains = [
        emitted(sample_block, *case)[1] - emitted(sample_tree, *case)[1] for case in families(shape)
    ]
    assert min(gains) > -1e-12
    assert (max(gains) > 0.01) == (len(shape[0]) > 1)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_expected_tokens_follow_leviathans_formula(length: int) -> None:
    """Where every position has the same laws, a cycle yields (1 - alpha^(length + 1)) / (1 - alpha) tokens."""
    for seed in range(20):
        ((target, *_), (draft, *_)) = family(seed, 4, 1)
        alpha = float(torch.minimum(target, draft).sum())
        same = [[law.expand([4] * (depth + 1)) for depth in range(4)] for law in (target, draft)]
        accepted = emitted(sample_tree, same[0], drawn_trees(same[1], [1] * length))[1]
        assert accepted + 1 == pytest.approx(
            sum(alpha**step for step in range(length + 1)), abs=1e-12
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_siblings_that_their_law_no_longer_holds_are_left_alone(dtype: torch.dtype) -> None:
    """A second sibling whose probability underflowed to zero says nothing, and so must not be taken for certain."""
    target = laws_of(random_logits(0, 4, 2, dtype), PLAIN)
    point = torch.tensor([[0, -12, -13, -14]], dtype=dtype) / 0.01
    tree = DraftTree(
        torch.tensor([0, 0, 1]), torch.tensor([-1, 0, 0]), point.softmax(-1).expand(3, 4)
    )
    assert distance(emitted(sample_tree, target, [(tree, texts_of(tree), 1.0)])[0], target) < 1e-6


@pytest.mark.quick("less-sample_block-branching1")
@pytest.mark.parametrize(("rule", "branching"), [(sample_tree, [2, 1]), (sample_block, [1, 1, 1])])
@pytest.mark.parametrize(
    "towards", [(0, 0, 0), (1, 1, 1), (0, 1, 1)], ids=["less", "more", "less then more"]
)
def test_laws_that_differ_by_rounding_alone_do_no_harm(
    rule: Rule, branching: list[int], towards: tuple[int, ...]
) -> None:
    """Where a draft is the target but for its last bit, what remains may be nothing at all."""
    for seed in range(8):
        target = laws_of(random_logits(seed, 4, 4, torch.float32), PLAIN)
        draft = [
            law.nextafter(torch.tensor(float(limit)))
            for law, limit in zip(target[:3], towards, strict=True)
        ]
        joint, accepted = emitted(rule, target, drawn_trees(draft, branching))
        assert distance(joint, target) < 1e-6
        assert accepted == pytest.approx(len(branching), abs=1e-5)


def test_lenience_of_one_changes_nothing() -> None:
    """It is the exact rule."""
    for target, trees in families(((2,), 4, 5)):
        lenient = emitted(partial(sample_tree, lenience=1.0), target, trees)
        np.testing.assert_array_equal(lenient[0], emitted(sample_tree, target, trees)[0])


@pytest.mark.parametrize("lenience", [0.9, 0.5, 0.1])
def test_lenience_is_lossy_within_its_bound(lenience: float) -> None:
    """No token is more than 1 / lenience times as likely as it should be, but laws differ, and more is accepted."""
    losses = []
    for seed in range(40):
        target, draft = family(seed, 5, 1)
        joint, accepted = emitted(
            partial(sample_tree, lenience=lenience), target, drawn_trees(draft, [1])
        )
        assert (joint <= futures(target)[0] / lenience + 1e-12).all()
        taken = torch.minimum(target[0] / lenience, draft[0])
        rest = (target[0] - lenience * draft[0]).clamp(min=0)
        expected = taken + (1 - taken.sum()) * rest / rest.sum()
        assert accepted == pytest.approx(float(taken.sum()), abs=1e-12)
        np.testing.assert_allclose(joint.sum((1, 2, 3)), expected.numpy(), atol=1e-12)
        losses.append(distance(joint, target))
    assert np.mean(losses) > 0.01


def textbook(
    tree: DraftTree, law: Probs, coin: Coin, pick: Pick, fault: str = ""
) -> tuple[list[int], int]:
    """The rule for siblings drawn without replacement, written out once more with places to plant faults."""
    assert tree.draft_probs is not None
    tokens, children, path = tree.tokens.tolist(), tree.children(), [0]
    while True:
        target = residual = law(path[-1])
        proposal = None
        for child in children[path[-1]]:
            proposal = (
                tree.draft_probs[child]
                if proposal is None or fault == "stale proposal"
                else proposal / proposal.sum()
            )
            if coin(min(1.0, float(residual[tokens[child]] / proposal[tokens[child]]))):
                path.append(child)
                break
            excess = ((target if fault == "residual of the target" else residual) - proposal).clamp(
                min=0
            )
            if excess.any():
                residual = excess / (1 if fault == "residual not normalised" else excess.sum())
            proposal = proposal.index_fill(0, torch.tensor(tokens[child]), 0)
        else:
            return path, pick(residual)


@pytest.mark.quick("residual of the target")
@pytest.mark.parametrize(
    "fault", ["", "stale proposal", "residual of the target", "residual not normalised"]
)
def test_faults_planted_in_the_residual_are_seen(fault: str) -> None:
    """The enumeration tells a faulty rule from the right one."""
    cases = list(families(((3,), 5, 40))) + list(families(((2, 1), 4, 20)))
    losses = [
        distance(emitted(partial(textbook, fault=fault), *case)[0], case[0]) for case in cases
    ]
    assert np.mean(losses) > 1e-3 if fault else max(losses) < 1e-12


@pytest.mark.parametrize("rule", [sample_tree, sample_block])
def test_a_bonus_token_from_unwarped_logits_is_seen(rule: Rule) -> None:
    """Below the last accepted draft the filters hold as well."""
    losses = []
    for seed in range(20):
        logits = random_logits(seed, 4, 4, torch.float64)
        raw, target = laws_of(logits, PLAIN), laws_of(logits, Sampling(temperature=0.5, top_p=0.9))

        def faulty(
            tree: DraftTree, law: Probs, coin: Coin, pick: Pick, raw: Laws = raw
        ) -> tuple[list[int], int]:
            texts, inner = texts_of(tree), set(tree.parents.tolist())
            return rule(
                tree,
                lambda node: law(node) if node in inner else raw[len(texts[node])][texts[node]],
                coin,
                pick,
            )

        losses.append(
            distance(emitted(faulty, target, drawn_trees(family(seed, 4, 2)[1], [1, 1]))[0], target)
        )
    assert np.mean(losses) > 1e-3


@pytest.mark.parametrize("count", [1, 2])
def test_likeliest_candidates_passed_off_as_samples_are_seen(count: int) -> None:
    """Siblings that were not drawn from the law they carry break the sampling rule."""
    losses = []
    for seed in range(20):
        target, draft = family(seed, 5, 1)
        paths = [[token] for token in draft[0].topk(count).indices.tolist()]
        tree = DraftTree.from_paths(0, paths)
        tree = replace(tree, draft_probs=draft[0].expand(len(tree), 5))
        losses.append(distance(emitted(textbook, target, [(tree, texts_of(tree), 1.0)])[0], target))
    assert np.mean(losses) > 1e-3


def random_tree(seed: int, nodes: int, vocab_size: int) -> DraftTree:
    """A tree of any form, with any tokens."""
    dice = random.Random(seed)
    edges: list[tuple[int, int]] = []
    while len(edges) < nodes - 1:
        edge = (dice.randrange(len(edges) + 1), dice.randrange(vocab_size))
        edges += [edge] if edge not in edges else []
    return DraftTree(
        torch.tensor([0] + [token for _, token in edges]),
        torch.tensor([-1] + [node for node, _ in edges]),
    )


def likeliest_tree(seed: int, vocab_size: int) -> DraftTree:
    """The two best first tokens of a draft, each with the best token after it."""
    first, second, *_ = family(seed, vocab_size, 2)[1]
    return DraftTree.from_paths(
        0, [[token, int(second[token].argmax())] for token in first.topk(2).indices.tolist()]
    )


@pytest.mark.parametrize("make", [partial(random_tree, nodes=5), likeliest_tree])
def test_walking_by_choices_leaves_the_law_as_it_is_for_any_tree(make: partial[DraftTree]) -> None:
    """If the target chooses after every node by its own law, no candidates can bend it, however they were found."""
    for seed in range(12):
        target, tree = family(seed, 4, 4)[0], make(seed, vocab_size=4)
        texts, after = texts_of(tree), futures(target)

        def choose_everywhere(
            chance: Chance, texts: list = texts, target: Laws = target
        ) -> list[int]:
            return [chance.draw(target[len(text)][text].tolist()) for text in texts]

        joint = np.zeros_like(after[0])
        for choices, odds in every_outcome(choose_everywhere):
            last = walk(tree, choices)[-1]
            text = (*texts[last], choices[last])
            joint[text] += odds * after[len(text)][text]
        assert distance(joint, target) < 1e-12


def read(tree: DraftTree, logits: Laws) -> TargetOutput:
    """What a target with these logits says about a tree, after a text of two tokens."""
    rows = [logits[len(text)][text] for text in texts_of(tree)]
    return TargetOutput(tree, torch.stack(rows), None, 2, [1, 2])


def verify_by(
    logits: Laws, sampling: Sampling, tree: DraftTree, _: Probs, coin: Coin, pick: Pick
) -> tuple[list[int], int]:
    """The public rule, its dice replaced; the law is its own affair."""
    choose = Choose(sampling)
    choose.coin, choose.pick = coin, pick
    return verify(read(tree, logits), choose)


@pytest.mark.parametrize(
    "sampling", [PLAIN, Sampling(temperature=0.7, top_p=0.9), Sampling(temperature=1.5, top_k=3)]
)
@pytest.mark.parametrize(("name", "rule"), [("token", sample_tree), ("block", sample_block)])
def test_verify_samples_drafts_that_carry_their_law(
    name: str, rule: Rule, sampling: Sampling
) -> None:
    """The rule asked for decides, with the target's filtered law at every node."""
    sampling = replace(sampling, rule=name)
    for seed in range(5):
        logits = random_logits(seed, 4, 4, torch.float64)
        target, trees = (
            laws_of(logits, sampling),
            list(drawn_trees(family(seed, 4, 3)[1], [1, 1, 1])),
        )
        joint, accepted = emitted(partial(verify_by, logits, sampling), target, trees)
        assert distance(joint, target) < 1e-12
        assert accepted == pytest.approx(emitted(rule, target, trees)[1], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["token", "block"])
def test_verify_with_its_own_dice_agrees_with_the_law(name: str) -> None:
    """The first of the tokens that 4,000 requests emit is distributed as the target says."""
    logits, draft = random_logits(0, 5, 4, torch.float32), family(7, 5, 2)[1]
    sampling = Sampling(temperature=1.2, top_k=4, rule=name)
    trees = list(drawn_trees(draft, [1, 1]))
    drawn = np.random.default_rng(0).choice(
        len(trees), size=4000, p=[weight for *_, weight in trees]
    )
    counts = np.zeros(5)
    for request, place in enumerate(drawn):
        tree = trees[place][0]
        path, token = verify(read(tree, logits), Choose(replace(sampling, request=request)))
        counts[[*tree.tokens[path].tolist(), token][1]] += 1
    law = laws_of(logits, sampling)[0].double().numpy()
    possible = law > 0
    assert counts[~possible].sum() == 0
    assert scipy.stats.chisquare(counts[possible], 4000 * law[possible] / law.sum()).pvalue > 1e-4


class ScriptedChoose(Choose):
    """A target whose choices after nodes are drawn from its law by enumeration instead of noise."""

    def __init__(self, sampling: Sampling, chance: Chance) -> None:
        super().__init__(sampling)
        self.chance = chance

    def __call__(self, output: TargetOutput, nodes: Sequence[int]) -> list[int]:
        """The tokens chosen after `nodes`."""
        return [self.chance.draw(self.probs(output, node).tolist()) for node in nodes]


def test_verify_walks_drafts_that_carry_no_law() -> None:
    """The target's choices alone decide, and the law is its own."""
    sampling = Sampling(temperature=0.7, top_p=0.9)
    for seed in range(8):
        logits, tree = random_logits(seed, 4, 4, torch.float64), random_tree(seed, 4, 4)
        target, output, texts = laws_of(logits, sampling), read(tree, logits), texts_of(tree)
        joint, after = np.zeros([4] * 4), futures(target)
        for (path, token), odds in every_outcome(
            lambda chance, r=output: verify(r, ScriptedChoose(sampling, chance))
        ):
            text = (*texts[path[-1]], token)
            joint[text] += odds * after[len(text)][text]
        assert distance(joint, target) < 1e-12


@pytest.mark.quick("token-branching0", "block-branching2")
@pytest.mark.parametrize(
    ("name", "branching"), [("token", [1, 1, 1]), ("token", [3, 1]), ("block", [1, 1, 1])]
)
def test_greedy_verification_ignores_the_laws_of_drafts(name: str, branching: list[int]) -> None:
    """At temperature 0 the output is that of walking by argmax, with certainty."""
    for seed in range(5):
        logits = random_logits(seed, 4, 4, torch.float32)
        for tree, _, _ in drawn_trees(family(seed, 4, 3, torch.float32)[1], branching):
            greedy = verify(read(replace(tree, draft_probs=None), logits), Choose(Sampling()))
            assert verify(read(tree, logits), Choose(Sampling(rule=name))) == greedy


def test_block_verification_refuses_branches() -> None:
    """The block rule is defined for chains."""
    tree = DraftTree(torch.tensor([0, 1, 2]), torch.tensor([-1, 0, 0]), torch.full((3, 4), 0.25))
    with pytest.raises(ValueError, match=r"chains.*branches.*rule='token'"):
        verify(
            read(tree, random_logits(0, 4, 2, torch.float32)),
            Choose(Sampling(temperature=1.0, rule="block")),
        )


def test_lenient_sampling_refuses_drafts_without_law() -> None:
    """Without the draft's law there is nothing to be lenient against."""
    output = read(DraftTree.chain([0, 1]), random_logits(0, 4, 2, torch.float32))
    with pytest.raises(ValueError, match="lenience at temperature > 0 needs sampled drafts"):
        verify(output, Choose(Sampling(temperature=1.0, lenience=0.5)))
