"""EAGLE-1: what it is trained on is what it sees when drafting, its loss is the plain one, and its trees are right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from eagle import Budget, DraftTree, Sampling, Target
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.core.verify import Choose, warp
from eagle.drafters.parts import spans
from eagle.drafters.parts.growth import grow_rows
from eagle.drafters.parts.objectives import distillation_loss
from eagle.drafters.recurrent import feature_head as network
from eagle.drafters.recurrent import head_state
from eagle.drafters.recurrent import unroll as unrolled
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.enumerate_law import texts_of
from tests.unrolled_heads import causal_states


@pytest.fixture(scope="module")
def head(tiny_target: Target) -> Eagle1:
    """An untrained head, lent the target's embedding and LM head."""
    torch.manual_seed(0)
    return Eagle1.for_target(Eagle1.Settings(noise=0.0), tiny_target.config).bind(tiny_target.head)


def random_text(target: Target, length: int, seed: int) -> Tensor:
    """Tokens that say nothing."""
    return torch.randint(
        10, target.vocab_size, (length,), generator=torch.Generator().manual_seed(seed)
    )


def batch_of(target: Target, texts: list[Tensor], masks: list[Tensor]) -> Batch:
    """These very texts with the target's features: no token is left out, whatever is supervised."""
    features = [target.features(text[None], (-1,))[0] for text in texts]
    lengths = tuple(len(text) for text in texts)
    return Batch(
        torch.cat(texts),
        torch.cat(masks),
        torch.cat(features),
        lengths,
        (-1,),
        tuple(range(len(texts))),
    )


@pytest.fixture(scope="module")
def batch(tiny_target: Target) -> Batch:
    """Two random texts of different length, supervised here and there."""
    texts = [random_text(tiny_target, length, length) for length in (30, 21)]
    masks = [
        torch.rand(len(text), generator=torch.Generator().manual_seed(1)) < 0.6 for text in texts
    ]
    for mask in masks:
        mask[:2] = False
    return batch_of(tiny_target, texts, masks)


def trained_logits(
    head: Eagle1, batch: Batch, target: Target, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """[S, V], what the head says at the supervised slots while its loss is computed."""
    kept = []

    def keep(student: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        kept.append(target.head.logits(student[0]).detach())
        return distillation_loss(student, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(network, "distillation_loss", keep)
        head(batch, target.head)
    return kept[0]


slots, spans_of = unrolled.text_slots, spans.Spans.of  # what faults are planted in


def moved(place: int, slower: int) -> Callable[..., Any]:
    """Slots that read so many tokens further, and whose positions advance so many times slower."""

    def wrong(*given: Any) -> tuple[Tensor, Tensor, spans.Spans]:
        places, positions, found = slots(*given)
        return places + place, positions // slower, found

    return wrong


def unmasked(count: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """No future is hidden."""
    return torch.zeros(count, count, dtype=dtype, device=device)


# -- alignment --------------------------------------------------------------------------------------------------------


def drafted_logits(
    head: Eagle1, text: Tensor, features: Tensor, pieces: list[int], patch: Any
) -> dict[int, Tensor]:
    """By committed length, the logits after the root when the text comes in these pieces."""
    kept: list[Tensor] = []

    def keep(seeds: Any, logits: Tensor, *rest: Any) -> list[DraftTree]:
        kept.append(logits[0])
        return grow_rows(seeds, logits, *rest)

    with patch.context() as inner:
        inner.setattr(head_state, "grow_rows", keep)
        draft = head.begin()
        for start, end in pairwise(pieces):
            draft.propose(
                Committed(text[start:end], features[start:end], int(text[end])), Budget(8, 3, 3)
            )
    return dict(zip(pieces[1:], kept, strict=True))


def drafting_is_training(head: Eagle1, target: Target, patch: pytest.MonkeyPatch) -> None:
    """Slot i's logits in training are those drafted when i + 1 tokens are committed."""
    text, everywhere = random_text(target, 40, 2), torch.arange(40) >= 2
    batch = batch_of(target, [random_text(target, 9, 3), text], [torch.arange(9) >= 5, everywhere])
    trained = trained_logits(head, batch, target, patch)[4:]  # of the second text, slot by slot
    drafted = drafted_logits(head, text, batch.features[9:], [0, 12, 13, 20, 33, 38], patch)
    for committed, logits in drafted.items():
        torch.testing.assert_close(trained[committed - 1], logits, rtol=0, atol=1e-5)


def test_train_time_logits_are_those_of_drafting(
    head: Eagle1, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within 1e-5 on the same prefix, however the text came in pieces and whatever was drafted in between."""
    drafting_is_training(head, tiny_target, monkeypatch)


@pytest.mark.parametrize(
    ("home", "name", "fault"),
    [
        (unrolled, "text_slots", moved(0, 2)),
        (spans, "_future", unmasked),
    ],
    ids=["positions", "mask"],
)
def test_training_on_something_else_is_seen(
    head: Eagle1,
    tiny_target: Target,
    monkeypatch: pytest.MonkeyPatch,
    home: Any,
    name: str,
    fault: Any,
) -> None:
    """Planted faults: slots that stand elsewhere, and attention without a mask."""
    monkeypatch.setattr(home, name, fault)
    with pytest.raises(AssertionError, match="not close"):
        drafting_is_training(head, tiny_target, monkeypatch)


def leak(head: Eagle1, target: Target, patch: pytest.MonkeyPatch) -> None:
    """Another token t leaves what slots <= t - 2 say of tokens <= t bit-equal, and changes slot t - 1."""
    texts, everywhere = (
        [random_text(target, 30, 5), random_text(target, 20, 6)],
        [torch.arange(30) >= 2],
    )
    everywhere.append(torch.arange(20) >= 2)
    before = trained_logits(head, batch_of(target, texts, everywhere), target, patch)
    for token in (2, 11, 12, 28):
        changed = texts[0].clone()
        changed[token] = (changed[token] + 1) % target.vocab_size
        after = trained_logits(
            head, batch_of(target, [changed, texts[1]], everywhere), target, patch
        )
        assert after[: token - 1].equal(before[: token - 1]), "a slot saw what it names"
        assert not after[token - 1].equal(before[token - 1])
        assert after[28:].equal(before[28:]), "a slot saw another text"


def test_no_slot_sees_what_it_names(
    head: Eagle1, tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With features that the target recomputes from the changed text."""
    leak(head, tiny_target, monkeypatch)


def from_the_first_text(*given: Any, **window: Any) -> spans.Spans:
    """Runs that begin where the first text does."""
    found = spans_of(*given, **window)
    return replace(found, runs=[(0, first, end) for _, first, end in found.runs])


@pytest.mark.parametrize(
    ("home", "name", "fault", "seen"),
    [
        (spans, "_future", unmasked, "what it names"),
        (unrolled, "text_slots", moved(1, 1), "what it names"),
        (spans.Spans, "of", from_the_first_text, "another text"),
    ],
    ids=["mask", "one further", "other text"],
)
def test_a_leak_is_seen(
    head: Eagle1,
    tiny_target: Target,
    monkeypatch: pytest.MonkeyPatch,
    home: Any,
    name: str,
    fault: Any,
    seen: str,
) -> None:
    """Planted faults: attention without a mask, slots that read one token further, texts that see one another."""
    monkeypatch.setattr(home, name, fault)
    with pytest.raises(AssertionError, match=f"a slot saw {seen}"):
        leak(head, tiny_target, monkeypatch)


# -- loss -------------------------------------------------------------------------------------------------------------


def plain_loss(head: Eagle1, batch: Batch, frozen: TargetHead, named: int = 2) -> Tensor:
    """The published loss, slot by slot: Smooth-L1 of the feature plus 0.1 cross-entropy of the laws."""
    losses = []
    columns = (batch.tokens, batch.features[:, 0], batch.loss_mask)
    for tokens, features, mask in zip(
        *(column.split(batch.lengths) for column in columns), strict=True
    ):
        for slot in range(len(tokens) - 2):
            if not mask[slot + named]:
                continue
            seen = slice(0, slot + 1)
            predicted = causal_states(
                head, tokens[1:][seen][None], features[seen][None], 0, frozen
            )[0, -1]
            regression = F.smooth_l1_loss(predicted, features[slot + 1])
            law = frozen.logits(features[slot + 1]).softmax(-1)
            entropy = -(law * frozen.logits(predicted).log_softmax(-1)).sum()
            losses.append(regression + 0.1 * entropy)
    return torch.stack(losses).mean()


def same_gradients(
    head: Eagle1, first: Callable[[], Tensor], second: Callable[[], Tensor], rtol: float
) -> None:
    """Two losses of one head are equal, and so are the gradients of every weight."""
    results = []
    for loss in (first, second):
        head.zero_grad()
        value = loss()
        value.backward()
        results.append([value.detach(), *(weight.grad.clone() for weight in head.parameters())])
    for one, other in zip(*results, strict=True):
        scale = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=0, atol=rtol * scale)


def in_double(head: Eagle1, batch: Batch, target: Target) -> tuple[Eagle1, Batch, TargetHead]:
    """The same in fp64, but for what the norms do in fp32."""
    frozen = target.head
    double = (copy.deepcopy(part).double() for part in (frozen.embedding, frozen.output))
    wide = Batch(
        batch.tokens,
        batch.loss_mask,
        batch.features.double(),
        batch.lengths,
        batch.taps,
        batch.seeds,
    )
    return copy.deepcopy(head).double(), wide, TargetHead(*double)


@pytest.mark.parametrize("double", [False, True])
def test_loss_and_gradients_equal_the_plain_rendering(
    head: Eagle1, batch: Batch, tiny_target: Target, double: bool
) -> None:
    """The batched loss is the mean over supervised slots of a loop that sees nothing but the past."""
    frozen, rtol = tiny_target.head, 1e-5
    if double:
        (head, batch, frozen), rtol = in_double(head, batch, tiny_target), 1e-6
    same_gradients(
        head, lambda: head(batch, frozen)["total"], lambda: plain_loss(head, batch, frozen), rtol
    )
    with pytest.raises(
        AssertionError, match="not close"
    ):  # the gate that public implementations have: t_i
        same_gradients(
            head,
            lambda: head(batch, frozen)["total"],
            lambda: plain_loss(head, batch, frozen, 0),
            rtol,
        )


def test_an_unsupervised_label_changes_no_gradient(
    head: Eagle1, batch: Batch, tiny_target: Target
) -> None:
    """The first label behind the last supervised one counts for nothing; the last one counts."""

    def loss(place: int) -> Tensor:
        tokens, features = batch.tokens.clone(), batch.features.clone()
        tokens[place] = (tokens[place] + 1) % tiny_target.vocab_size
        features[place - 1] += 1  # what names the token
        changed = Batch(tokens, mask, features, batch.lengths, batch.taps, batch.seeds)
        return head(changed, tiny_target.head)["total"]

    mask = batch.loss_mask.clone()
    mask[13:30] = False
    mask[12] = True
    unchanged = Batch(batch.tokens, mask, batch.features, batch.lengths, batch.taps, batch.seeds)
    same_gradients(head, lambda: loss(13), lambda: head(unchanged, tiny_target.head)["total"], 0.0)
    with pytest.raises(AssertionError, match="not equal"):
        same_gradients(
            head, lambda: loss(12), lambda: head(unchanged, tiny_target.head)["total"], 0.0
        )


# -- trees ------------------------------------------------------------------------------------------------------------


def drafted(
    head: Eagle1, target: Target, budget: Budget, noise: Any = None
) -> tuple[Tensor, Tensor, DraftTree]:
    """The tokens and features that the head has read after a prompt, and its tree."""
    prompt = target.chat("What does copy do?")
    news = target.open((-1,)).begin(prompt, Choose(Sampling()))
    tree = head.begin(noise).propose(news, budget)
    return torch.tensor([*prompt[1:], news.root]), news.features[:, 0], tree


def own_scores(
    head: Eagle1, target: Target, tokens: Tensor, states: Tensor, path: list[int]
) -> Tensor:
    """[V] after a drafted path by plain causal passes over the text and the head's own predictions."""
    for token in [*path, None]:
        predicted = causal_states(head, tokens[None], states[None], 0, target.head)[0, -1]
        if token is not None:
            tokens, states = (
                torch.cat([tokens, torch.tensor([token])]),
                torch.cat([states, predicted[None]]),
            )
    return target.head.logits(predicted)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("paths", [chain_paths(5), PUBLISHED_TREE], ids=["chain", "published"])
def test_a_fixed_tree_holds_the_ranked_children(
    head: Eagle1, tiny_target: Target, paths: tuple[tuple[int, ...], ...], temperature: float
) -> None:
    """Each node is the child of its rank by a plain pass over its own path, plus the noise of its place at T > 0."""
    choose = Choose(Sampling(temperature=temperature, seed=4))
    offered = choose.offer(tiny_target.vocab_size, tiny_target.device)
    tokens, states, tree = drafted(head, tiny_target, Budget.fixed(paths), offered)
    named: dict[tuple[int, ...], list[int]] = {(): []}
    for path in sorted(paths, key=len):
        above = named[path[:-1]]
        with torch.no_grad():
            scores = own_scores(head, tiny_target, tokens, states, above)
        if choose.noise is not None:
            place = len(tokens) + 1 + len(above)
            scores = scores + temperature * choose.noise([place], len(scores), scores.device)[0]
        named[path] = [*above, int(scores.sort(descending=True).indices[path[-1]])]
    assert set(texts_of(tree)) == {tuple(path) for path in named.values()}
    assert len(tree) == len(paths) + 1


def test_a_fixed_tree_is_cut_at_the_depth_allowed(head: Eagle1, tiny_target: Target) -> None:
    """What lies deeper is left out, the rest stays."""
    whole, *cut = (
        set(texts_of(drafted(head, tiny_target, Budget.fixed(PUBLISHED_TREE).within(levels))[2]))
        for levels in (9, 3, 1, 0)
    )
    for levels, paths in zip((3, 1, 0), cut, strict=True):
        assert paths == {path for path in whole if len(path) <= levels}


@pytest.mark.parametrize("paths", [chain_paths(4), PUBLISHED_TREE], ids=["chain", "published"])
def test_a_drawn_tree_carries_the_law_of_every_node(
    head: Eagle1, tiny_target: Target, paths: tuple[tuple[int, ...], ...]
) -> None:
    """What a plain pass over the path above says, under the target's own filters; and none was impossible."""
    sampling = Sampling(temperature=0.7, top_k=9, seed=4)
    offered = Choose(sampling).offer(tiny_target.vocab_size, tiny_target.device)
    tokens, states, tree = drafted(head, tiny_target, Budget.fixed(paths, "sampled"), offered)
    assert tree.draft_probs is not None and tree.draft_probs.dtype == torch.float32
    for node in range(1, len(tree)):
        with torch.no_grad():
            scores = own_scores(
                head, tiny_target, tokens, states, tree.tokens[tree.path(node)[1:-1]].tolist()
            )
        torch.testing.assert_close(
            tree.draft_probs[node], warp(scores[None], sampling).softmax(-1)[0], rtol=0, atol=1e-5
        )
        assert tree.draft_probs[node][tree.tokens[node]] > 0
