"""LiLiCorr: its loss is that of single candidates and pairs of them, and it drafts what it was trained to."""

# B slots of a block, K levels, k candidates, V vocabulary

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle import Budget
from eagle.conformance import drafting
from eagle.conformance.own_answers import make_letters
from eagle.core.drafter import Committed
from eagle.core.examples import collate
from eagle.core.tree import chain_paths
from eagle.drafters import settings_of
from eagle.drafters.blocks import lilicorr
from eagle.drafters.blocks.convolved_block import GroupedConv
from eagle.drafters.blocks.lilicorr import LatticeScorer, LiLiCorr
from tests.drafters.blocks.test_dflash import FP64, naive
from tests.drafters.blocks.test_dflash_drafts import check_states
from tests.enumerate_law import texts_of as paths_of
from tests.naive_blocks import anchors_of, level_states
from tests.naive_lilicorr import level_logits
from tests.unrolled_heads import SHAPE, TAPS, apart, computed, frozen_head, moved, texts_of

SMALL = {
    "taps": TAPS[:-1],
    "blocks": 2,
    "slots": 4,
    "mask_token": 2,
    # half of the tokens, so that some of the sequence's are candidates
    "candidate_topk": 50,
    "hidden_size": 12,
    "num_heads": 2,
    "factor_dim": 10,
}
# answers of many tokens, of one, and none
ANSWERS = {14: [(3, 5), (6, 7), (8, 14)], 8: [(0, 1)], 9: [(2, 9)]}
CONVOLUTIONS = {"conv_kernel_size": 2, "conv_group_size": 16}
VARIANTS: dict[str, dict[str, Any]] = {
    "lilicorr": {},
    "margin": {"w_ce": 0.125, "w_margin": 0.125, "mlp_ratio": 1.5},
    "the target's probs": {"loss": "cross_entropy", "w_ce": 0.7, "w_pen": 0.0},
    "convolutions": CONVOLUTIONS,
    "from the anchor": {"sample_from_anchor": True, "slots": 3, "num_layers": 1},
    "d_pace, by reached levels": {"d_pace": True, "divisor": "reached"},
    "draft vocabulary": {"draft_vocab": 60},
    "window": {"window": {"recent": 5}, "window_blocks": (0,), "causal": "window"},
    # the lattice has the target's width, and no projection of tokens
    "one width": {"hidden_size": 48, "num_heads": 4, "num_layers": 1},
    # more candidates than tokens
    "all candidates": {"candidate_topk": 200, "num_layers": 1, "slots": 3},
}


def new_head(**settings: Any) -> Any:
    """Return a head in fp64, all of whose weights differ from how they start."""
    torch.manual_seed(2)
    checked: Any = settings_of({"kind": "lilicorr", **SMALL, **settings}, "test")
    frequent = [torch.arange(0, 97, 2).repeat(2), torch.arange(1, 40, 2)]
    head = moved(LiLiCorr.for_target(checked, SHAPE, supervised=frequent)).to(FP64).train()
    with torch.no_grad():
        for name, weight in head.named_parameters():
            # large matrices, so that what a block reads changes its states, and a candidate the scores of others
            if weight.ndim == 2:
                weight *= 4
            if "_bias" in name or "_embedding" in name:
                weight += torch.randn_like(weight)
    return head


def difference(head: Any) -> float:
    """Return how far training's loss and gradients are from the loop's."""
    texts = texts_of(ANSWERS, FP64)
    target_head = frozen_head(FP64)
    got = computed(head, collate(texts, TAPS), target_head)
    return apart(head, got, naive(head, texts, target_head))


@pytest.mark.quick("lilicorr", "convolutions")
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_single_pairs(name: str) -> None:
    """Sequences with answers of many tokens, of one, and of none."""
    assert difference(new_head(**VARIANTS[name])) < 1e-6


def test_some_prefixes_end_at_a_token_that_is_no_candidate() -> None:
    """The sequences of the comparison have blocks that end at once, later, and not at all."""
    head = new_head()
    batch = collate(texts_of(ANSWERS, FP64), TAPS)
    anchors, states = head.read_anchors(batch, frozen_head(FP64))
    _, rows = head.rank_tokens(states, frozen_head(FP64))
    found = head.find_labels(batch, anchors, rows).any(-1)
    prefix = lilicorr.find_prefix(anchors, found[..., None])
    lengths = {int(length) for length in prefix.sum(1)}
    assert {0, 1, 3} <= lengths
    # the prefix rule leaves some candidates out
    assert bool((found & anchors.reached & ~prefix).any())


def test_the_weights_that_a_new_head_starts_from() -> None:
    """Factors are small and not 0, all that tells slots and ranks apart is 0, and convolutions change nothing."""
    settings: Any = settings_of({"kind": "lilicorr", **SMALL, **CONVOLUTIONS}, "test")
    scorer = LiLiCorr.for_target(settings, SHAPE).lilicorr
    for linear in (scorer.out_head, scorer.in_head, scorer.anchor_out_head):
        assert 0.01 < float(linear.weight.detach().std()) < 0.03
        assert not bool(linear.bias.any())
    for name in ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias"):
        assert not bool(getattr(scorer, name).any())
    head = LiLiCorr.for_target(settings, SHAPE)
    convolutions = [module for module in head.modules() if isinstance(module, GroupedConv)]
    assert len(convolutions) == 4
    assert not any(bool(module.kernel_projection.weight.any()) for module in convolutions)


# -- drafts -----------------------------------------------------------------------------------------------------------


class States(LiLiCorr):
    """The head without its lattice, whose levels give the states of blocks."""

    def read_levels(self, *given: Any) -> Tensor:
        return torch.cat([given[2], self.read_context(*given[:2])[:, None].expand_as(given[2])], -1)


@pytest.mark.parametrize("name", ["lilicorr", "convolutions", "from the anchor", "window"])
def test_a_draft_reads_what_training_makes(name: str) -> None:
    """Every level, whatever the lengths of the other sequences, and the features of the last token."""
    head = new_head(**VARIANTS[name])
    head.__class__ = States
    check_states(head)


def naive_next(head: Any, features: Tensor, root: int, path: list[int], target_head: Any) -> Tensor:
    """Return [V], the log-probs of what follows a path of draft tokens after a root, from the formulas."""
    weights = head.state_dict()
    states = level_states(head, weights, features, torch.tensor(root), target_head)
    return level_logits(head, weights, features[-1], states, path=path, target_head=target_head)


@pytest.mark.parametrize("nodes", [1, 14])
def test_trees_hold_the_likeliest_paths(nodes: int) -> None:
    """Each node has its own children's scores; after a token that is no candidate they are the slot's own."""
    target_head = frozen_head(FP64)
    head = new_head(candidate_topk=3).bind(target_head)
    (text,) = texts_of({30: []}, FP64)
    assert text.features is not None
    features = text.features[:9, :-1]
    update = Committed(text.tokens[:9], features, 7)
    tree = head.begin().propose(update, Budget(nodes, 3, nodes, sharpness=1.0))
    # all paths, level by level
    found: list[tuple[float, tuple[int, ...]]] = []
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(3):
        grown = []
        for score, path in paths:
            log_probs = naive_next(head, features, 7, list(path), target_head)
            for value, token in zip(*map(Tensor.tolist, log_probs.topk(nodes)), strict=True):
                grown.append((score + value, (*path, token)))
        # a child is no likelier than its parent, so that worse paths have no good children
        paths = sorted(grown, reverse=True)[:nodes]
        found += paths
    best = sorted(found, reverse=True)[:nodes]
    assert set(paths_of(tree)[1:]) == {path for _, path in best}
    assert tree.likelihoods is not None
    likelihoods = sorted(tree.likelihoods[1:].tolist(), reverse=True)
    assert likelihoods == pytest.approx([score for score, _ in best], abs=1e-5)


@pytest.mark.parametrize("depth", [2, 5])
def test_a_greedy_chain_walks_from_candidate_to_candidate(depth: int) -> None:
    """Of each slot the best candidate after the one that was chosen before; a short draft reads the whole lattice."""
    target_head = frozen_head(FP64)
    head = new_head(slots=6, candidate_topk=8).bind(target_head)
    (text,) = texts_of({30: []}, FP64)
    assert text.features is not None
    features = text.features[:9, :-1]
    tree = head.begin().propose(
        Committed(text.tokens[:9], features, 7), Budget.fixed(chain_paths(depth))
    )
    walked: list[int] = []
    for _ in range(depth):
        walked.append(int(naive_next(head, features, 7, walked, target_head).argmax()))
    assert tree.tokens[1:].tolist() == walked
    states = level_states(head, head.state_dict(), features, torch.tensor(7), target_head)
    # the lattice matters here
    assert target_head.logits(states[:depth]).argmax(-1).tolist() != walked


@pytest.mark.slow
@pytest.mark.parametrize("sampling", drafting.LAW_SAMPLINGS, ids=["T=1", "top-p"])
@pytest.mark.parametrize("budget", drafting.LAW_BUDGETS, ids=["chain", "published"])
def test_sampled_candidates_keep_the_targets_law(budget: Budget, sampling: Any) -> None:
    """The lattice scores half of the tokens, and the output has the distribution of the untouched model."""
    letters = make_letters()
    settings = {**SMALL, "taps": None, "kind": "lilicorr", "blocks": 1, "candidate_topk": 2}

    def make() -> Any:
        torch.manual_seed(4)
        head = LiLiCorr.for_target(settings_of(settings, "test"), letters.config)
        for weight in moved(head).parameters():
            # large, so that scores matter
            weight.data *= 2
        return head.bind(letters.head)

    drafting.check_law(make, letters, sampling, budget)


def test_the_validated_cross_entropy_is_of_all_tokens() -> None:
    """Tokens that are no candidates keep the slot's own probs; the others share what is left by their scores."""
    head = new_head(candidate_topk=6).eval()
    texts = texts_of({17: [(3, 5), (8, 17)]}, FP64)
    target_head = frozen_head(FP64)
    terms = []
    for text, root, _ in anchors_of(texts, 1):
        assert text.features is not None
        log_q = naive_next(head, text.features[:root, :-1], int(text.tokens[root]), [], target_head)
        p = target_head.logits(text.features[root, -1]).softmax(-1)
        terms.append(-(p * log_q).sum())
    sums = head.validate(collate(texts, TAPS), target_head, {"chain": chain_paths(2)})
    assert len(terms) == int(sums["slots"])
    # validation compares in fp32
    assert float(sums["cross_entropy"]) == pytest.approx(float(sum(terms)), rel=1e-5)


def test_validated_levels_follow_the_sequences_tokens() -> None:
    """Those after a token that is no candidate, too."""
    head = new_head(candidate_topk=6).eval()
    texts = texts_of({17: [(3, 5), (8, 17)]}, FP64)
    target_head = frozen_head(FP64)
    (text,) = texts
    assert text.features is not None
    levels = head.draft_levels(collate(texts, TAPS), target_head, 3)
    for index, (_, root, reached) in enumerate(anchors_of(texts, 3)):
        for depth in range(reached):
            # the sequence's tokens in place of drafted ones
            path = text.tokens[root + 1 : root + 1 + depth].tolist()
            features = text.features[:root, :-1]
            expected = naive_next(head, features, int(text.tokens[root]), path, target_head)
            states, logits = levels[depth]
            got = logits(states[index]).log_softmax(-1)
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-9)


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_a_slot_that_follows_its_own_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if a slot is scored after its own token in place of the one before."""
    monkeypatch.setattr(lilicorr, "after_labels", lambda matches: matches[:, :, None])
    assert difference(new_head()) > 1e-4


def test_a_turned_bias_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if the bias is that of the distance from key to query."""
    right = LatticeScorer.attention_bias
    monkeypatch.setattr(LatticeScorer, "attention_bias", lambda *given: right(*given).mT)
    assert difference(new_head()) > 1e-4


def test_a_penalty_of_all_candidates_alike_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if the penalty is no expectation over the head's own choice."""

    right = Tensor.softmax

    def softmax(scores: Tensor, dim: int, **options: Any) -> Tensor:
        # of anchors, levels and candidates
        if scores.shape[-1] == SMALL["candidate_topk"] and scores.ndim == 3:
            return torch.full_like(scores, 1 / scores.shape[dim])
        return right(scores, dim, **options)

    monkeypatch.setattr(Tensor, "softmax", softmax)
    assert difference(new_head()) > 1e-4


def test_slots_after_a_gap_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if a slot counts whose token is a candidate, and one before it is not."""
    monkeypatch.setattr(
        lilicorr, "find_prefix", lambda anchors, matches: anchors.reached & matches.any(-1)
    )
    assert difference(new_head()) > 1e-4


def test_a_convolution_across_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if the first slot of a block reads the last one of the block before."""

    def convolve(self: Any, x: Tensor, kernel: Tensor, side: int) -> Tensor:
        rows = x.reshape(-1, self.groups, x.shape[-1] // self.groups)
        base = self.base_kernel[side].view(self.taps, *rows.shape[1:])
        taps = base + kernel.flatten(0, 1)[..., None]
        earlier = F.pad(rows[:-1], (0, 0, 0, 0, 1, 0))
        return (taps[:, 0] * rows + taps[:, 1] * earlier).reshape(x.shape)

    monkeypatch.setattr(GroupedConv, "_convolve", convolve)
    assert difference(new_head(**CONVOLUTIONS)) > 1e-4


def test_features_without_a_gradient_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if the lattice's loss does not reach the blocks by the candidates' log-probs."""
    right = LatticeScorer.forward

    def detach(self: Any, log_probs: Tensor, *given: Tensor) -> Tensor:
        return right(self, log_probs.detach(), *given)

    monkeypatch.setattr(LatticeScorer, "forward", detach)
    assert difference(new_head()) > 1e-6


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_heads": 5}, "num_heads is 5, expected a divisor of hidden_size, 12"),
        ({"conv_kernel_size": 2}, "conv_group_size None, expected both or neither"),
        (
            {"conv_kernel_size": 5, "conv_group_size": 16},
            "conv_kernel_size is 5, expected at most slots, 4",
        ),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    """Attention heads that do not divide the width, half of a convolution, and kernels longer than a block."""
    with pytest.raises(ValueError, match=words):
        new_head(**settings)
