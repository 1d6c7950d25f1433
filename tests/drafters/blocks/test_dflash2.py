"""DFlash2: its loss is that of single slots, taps and candidates, and it drafts what it was trained to."""

# B slots of a block, K levels, V vocabulary

from __future__ import annotations

from dataclasses import replace
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
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.blocks import candidates, dflash2
from eagle.drafters.blocks.convolved_block import GroupedConv
from eagle.drafters.blocks.dflash2 import DFlash2
from tests.drafters.blocks.test_dflash import FP64, naive
from tests.drafters.blocks.test_dflash_drafts import check_states
from tests.enumerate_law import texts_of as paths_of
from tests.naive_blocks import anchors_of, level_states
from tests.naive_dflash2 import level_logits
from tests.unrolled_heads import SHAPE, SPANS, TAPS, apart, computed, frozen_head, moved, texts_of

SMALL = {
    "taps": TAPS[:-1],
    "blocks": 2,
    "slots": 4,
    "mask_token": 2,
    "selector_rank": 6,
    "selector_top_k": 9,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "dflash2": {},
    "published": {
        "loss": "tokens",
    },
    "three taps": {
        "conv_kernel_size": 3,
        "conv_group_size": 12,
        "selector": 0.3,
    },
    "one tap": {"conv_kernel_size": 1},
    "from the anchor": {
        "sample_from_anchor": True,
        "slots": 3,
    },
    "d_pace": {
        "loss": "tokens",
        "d_pace": True,
    },
    "by reached levels": {"divisor": "reached"},
    "draft vocabulary": {
        "draft_vocab": 60,
        "loss": "tokens",
    },
    "draft vocabulary, probs": {"draft_vocab": 60},
    "window": {
        "window": {"recent": 5},
        "window_blocks": (0,),
        "causal": "window",
    },
    # more candidates than tokens
    "all candidates": {
        "selector_top_k": 200,
        "causal": True,
        "decay": None,
    },
}


def new_head(**settings: Any) -> Any:
    """Return a head in fp64, all of whose weights differ from how they start."""
    torch.manual_seed(2)
    checked: Any = settings_of({"kind": "dflash2", **SMALL, **settings}, "test")
    frequent = [torch.arange(0, 97, 2).repeat(2), torch.arange(1, 40, 2)]
    head = DFlash2.for_target(checked, SHAPE, supervised=frequent)
    head = moved(head).to(FP64).train()
    with torch.no_grad():
        for weight in head.parameters():
            # large matrices, so that what a block reads changes its states, and the token before its choice
            if weight.ndim == 2:
                weight *= 4
        head.candidate_selector.predecessor_codebook *= 8
        head.candidate_selector.successor_codebook *= 8
    return head


def difference(head: Any) -> float:
    """Return how far training's loss and gradients are from the loop's."""
    texts = texts_of(SPANS, FP64)
    target_head = frozen_head(FP64)
    got = computed(head, collate(texts, TAPS), target_head)
    return apart(head, got, naive(head, texts, target_head))


@pytest.mark.quick("dflash2", "draft vocabulary")
@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_single_candidates(name: str) -> None:
    """Sequences with answers of many tokens, of one, and of none."""
    assert difference(new_head(**VARIANTS[name])) < 1e-6


def test_the_loss_of_a_softcapped_target() -> None:
    """The gradient of a candidate's logit passes the softcap."""
    head = new_head()
    texts = texts_of(SPANS, FP64)
    target_head = replace(frozen_head(FP64), softcap=2.0, logit_scale=1.5)
    got = computed(head, collate(texts, TAPS), target_head)
    assert apart(head, got, naive(head, texts, target_head)) < 1e-6


@pytest.mark.parametrize("name", ["dflash2", "three taps", "from the anchor", "window"])
def test_a_draft_reads_what_training_makes(name: str) -> None:
    """Every level, whatever the lengths of the other sequences."""

    class States(DFlash2):
        """The head without its selector, whose levels give the states of blocks."""

        def read_levels(self, *given: Any) -> Tensor:
            return given[2]

    head = new_head(**VARIANTS[name])
    head.__class__ = States
    check_states(head)


def test_a_new_head_drafts_as_dflash_does() -> None:
    """Its convolutions are the identity, and its selector scores nothing."""
    target_head = frozen_head(FP64)
    texts = texts_of(SPANS, FP64)
    batch = collate(texts, TAPS)
    heads: list[Any] = []
    for kind in ("dflash", "dflash2"):
        section = {"kind": kind, **{name: SMALL[name] for name in list(SMALL)[:4]}}
        checked = settings_of({**section, "linears": "normal"}, "test")
        heads.append(DRAFTERS[kind].for_target(checked, SHAPE).to(FP64))
    plain, new = heads
    # the same weights but for those that DFlash does not have
    new.load_state_dict(plain.state_dict(), strict=False)
    expected = plain.draft_levels(batch, target_head, 3)
    for (state, logits), (more, chosen) in zip(
        expected, new.draft_levels(batch, target_head, 3), strict=True
    ):
        torch.testing.assert_close(chosen(more), logits(state), rtol=0, atol=1e-12)


# -- drafts -----------------------------------------------------------------------------------------------------------


def naive_tree(head: Any, features: Tensor, root: int, path: list[int], target_head: Any) -> Tensor:
    """Return [V], the log-probs of what follows a path of draft tokens after a root, from the formulas."""
    weights = head.state_dict()
    states = level_states(head, weights, features, torch.tensor(root), target_head)
    level = len(path)
    before = [root, *path][level]
    logits = target_head.logits(states[level])
    return level_logits(head, weights, states[level], before, logits=logits).log_softmax(-1)


@pytest.mark.parametrize("nodes", [1, 40])
def test_trees_hold_the_likeliest_paths(nodes: int) -> None:
    """Each node has its own children's scores: those after its own token."""
    target_head = frozen_head(FP64)
    head = new_head(slots=5, selector_top_k=4).bind(target_head)
    (text,) = texts_of({30: []}, FP64)
    assert text.features is not None
    features = text.features[:9, :-1]
    update = Committed(text.tokens[:9], features, 7)
    tree = head.begin().propose(update, Budget(nodes, 4, nodes, sharpness=1.0))
    found: list[tuple[float, tuple[int, ...]]] = []
    paths: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for _ in range(4):
        grown = []
        for score, path in paths:
            log_probs = naive_tree(head, features, 7, list(path), target_head)
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


def test_a_greedy_chain_walks_from_candidate_to_candidate() -> None:
    """Of each slot the best candidate after the token that was chosen before it."""
    target_head = frozen_head(FP64)
    head = new_head(slots=6).bind(target_head)
    (text,) = texts_of({30: []}, FP64)
    assert text.features is not None
    features = text.features[:9, :-1]
    tree = head.begin().propose(
        Committed(text.tokens[:9], features, 7), Budget.fixed(chain_paths(5))
    )
    walked: list[int] = []
    unary: list[int] = []
    states = level_states(head, head.state_dict(), features, torch.tensor(7), target_head)
    for level in range(5):
        walked.append(int(naive_tree(head, features, 7, walked, target_head).argmax()))
        unary.append(int(target_head.logits(states[level]).argmax()))
    assert tree.tokens[1:].tolist() == walked
    # the selector matters here
    assert walked != unary


@pytest.mark.slow
@pytest.mark.parametrize("sampling", drafting.LAW_SAMPLINGS, ids=["T=1", "top-p"])
@pytest.mark.parametrize("budget", drafting.LAW_BUDGETS, ids=["chain", "published"])
def test_sampled_candidates_keep_the_targets_law(budget: Budget, sampling: Any) -> None:
    """The selector chooses among half of the tokens, and the output has the distribution of the untouched model."""
    letters = make_letters()
    settings = {
        "kind": "dflash2",
        "slots": 4,
        "blocks": 1,
        "selector_rank": 4,
        "selector_top_k": 2,
    }

    def make() -> Any:
        torch.manual_seed(4)
        head = DFlash2.for_target(settings_of(settings, "test"), letters.config)
        for weight in moved(head).parameters():
            # large, so that what the selector adds matters
            weight.data *= 2
        return head.bind(letters.head)

    drafting.check_law(make, letters, sampling, budget)


def test_the_validated_cross_entropy_is_of_all_tokens() -> None:
    """Tokens that are no candidates keep the slot's own probs; the others share what is left by their scores."""
    head = new_head().eval()
    texts = texts_of({17: [(3, 5), (8, 17)]}, FP64)
    target_head = frozen_head(FP64)
    batch = collate(texts, TAPS)
    terms = []
    for text, root, _ in anchors_of(texts, 1):
        assert text.features is not None
        features = text.features[:root, :-1]
        weights = head.state_dict()
        state = level_states(head, weights, features, text.tokens[root], target_head)[0]
        logits = target_head.logits(state)
        log_q = level_logits(head, weights, state, int(text.tokens[root]), logits=logits)
        p = target_head.logits(text.features[root, -1]).softmax(-1)
        terms.append(-(p * log_q).sum())
    sums = head.validate(batch, target_head, {"chain": chain_paths(2)})
    assert len(terms) == int(sums["slots"])
    # validation compares in fp32
    assert float(sums["cross_entropy"]) == pytest.approx(float(sum(terms)), rel=1e-5)


# -- planted faults ---------------------------------------------------------------------------------------------------


def test_a_wrong_predecessor_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if the selector reads a slot's own token in place of the one before."""
    monkeypatch.setattr(dflash2, "tokens_before", lambda batch, anchors: anchors.tokens_of(batch))
    assert difference(new_head()) > 1e-4


def test_a_convolution_across_blocks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if the first slot of a block reads the last one of the block before."""

    def convolve(self: Any, x: Tensor, kernel: Tensor, side: int) -> Tensor:
        rows = x.reshape(-1, self.groups, x.shape[-1] // self.groups)
        taps = (
            self.base_kernel[side].view(self.taps, *rows.shape[1:])
            + kernel.flatten(0, 1)[..., None]
        )
        output = taps[:, 0] * rows
        for tap in range(1, self.taps):
            output = output + taps[:, tap] * F.pad(rows[:-tap], (0, 0, 0, 0, tap, 0))
        return output.reshape(x.shape)

    monkeypatch.setattr(GroupedConv, "_convolve", convolve)
    assert difference(new_head()) > 1e-4


def test_a_kernel_of_the_output_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if the second kernel is made of the sublayer's output in place of its input."""

    def after(self: Any, x: Tensor, kernel: Tensor) -> Tensor:
        own = self.kernel_projection(x).view(-1, self.slots, 2, self.taps, self.groups)
        return self._convolve(x, own[:, :, 1], side=1)

    monkeypatch.setattr(GroupedConv, "after", after)
    assert difference(new_head()) > 1e-4


def test_candidates_of_another_slot_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison fails if candidates are those of the slot before."""
    right = candidates.RankingHead.candidates.fget

    def shifted(self: Any) -> Any:
        logits, tokens = right(self)
        return logits, tokens.roll(1, 0)

    monkeypatch.setattr(candidates.RankingHead, "candidates", property(shifted))
    assert difference(new_head()) > 1e-4


def test_a_walk_over_candidates_of_another_slot_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive chain differs if drafting takes the candidates of the slot before."""
    right = candidates.pick_candidates

    def shifted(logits: Tensor, count: int) -> Any:
        values, tokens = right(logits, count)
        return values.roll(1, -2), tokens.roll(1, -2)

    monkeypatch.setattr(candidates, "pick_candidates", shifted)
    with pytest.raises(AssertionError):
        test_a_greedy_chain_walks_from_candidate_to_candidate()


def test_the_root_as_predecessor_of_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive chain differs if a node's children are scored after its parent's token."""
    read = candidates.CandidateLevels._read_tokens

    def of_parent(self: Any, depth: int, rows: list[int], tokens: Tensor) -> Tensor:
        before = getattr(self, "before", tokens)
        self.before = tokens
        return read(self, depth, rows, before)

    monkeypatch.setattr(candidates.CandidateLevels, "_read_tokens", of_parent)
    with pytest.raises(AssertionError):
        test_a_greedy_chain_walks_from_candidate_to_candidate()


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"conv_kernel_size": 5}, "conv_kernel_size is 5, expected at most slots, 4"),
        ({"conv_group_size": 5}, "conv_group_size is 5, expected a divisor of the width, 48"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    """Kernels longer than a block, and groups of channels that do not divide the width."""
    with pytest.raises(ValueError, match=words):
        new_head(**settings)
