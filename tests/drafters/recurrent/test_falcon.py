"""Falcon: losses, drafts and validation equal loops over single slots, and no slot reads its own answer."""

# T tokens of a text, H width, V vocabulary, k slots of a block

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import LlamaConfig

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import chain_paths
from eagle.drafters.parts import spans
from eagle.drafters.recurrent import block_state, falcon
from eagle.drafters.recurrent.falcon import Falcon, SlotBlocks
from tests.drafters.parts.test_judge import counted_by_drafting
from tests.enumerate_law import texts_of
from tests.naive_unroll import Network, attended, output_of, projected
from tests.unrolled_heads import (
    SHAPE,
    Weights,
    apart,
    computed,
    frozen_head,
    moved,
    split_texts,
)

H = SHAPE.hidden_size
V = SHAPE.vocab_size
# long and short texts, with gaps in what is supervised
SPANS = {
    17: [(3, 5), (6, 7), (8, 17)],
    9: [(2, 4), (8, 9)],
    5: [(2, 3)],
    23: [(2, 23)],
}
Slot = tuple[int, Tensor]
"""The position of a slot, and what the Llama block reads of it [H]."""


def new_head(
    k: int = 2,
    levels: int = 6,
    shape: LlamaConfig = SHAPE,
) -> Any:
    """Return a head in fp64 without dropout and noise, whose attention is far from uniform."""
    torch.manual_seed(2)
    settings = Falcon.Settings(k=k, levels=levels, dropout=0.0, noise=0.0)
    head = moved(Falcon(settings, shape)).double()
    with torch.no_grad():
        # three times the size, so that a wrong key changes much
        for weight in [
            *head.gates.parameters(),
            *head.layers[0].self_attn.parameters(),
        ]:
            weight *= 3
    return head


def make_batch(
    lengths: dict[int, list[tuple[int, int]]],
    seed: int = 0,
    vocabulary: int = V,
) -> Batch:
    """Return random texts of these lengths, with the spans that are supervised."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for length, answers in lengths.items():
        mask = torch.zeros(length, dtype=torch.bool)
        for start, stop in answers:
            mask[start:stop] = True
        masks.append(mask)

    # `collate` would cut what follows the last supervised token
    count = sum(lengths)
    return Batch(
        tokens=torch.randint(vocabulary, (count,), generator=generator),
        loss_mask=torch.cat(masks),
        features=torch.randn(count, 1, H, generator=generator, dtype=torch.float64),
        lengths=tuple(lengths),
        taps=(-1,),
        seeds=tuple(range(seed, seed + len(masks))),
    )


# -- the loop ---------------------------------------------------------------------------------------------------------


class Loop:
    """Falcon from its formulas: an LSTM that starts again at every slot, and one query of attention at a time."""

    def __init__(self, head: Any, target_head: TargetHead) -> None:
        self.settings = head.settings
        self.k = head.settings.k
        self.target_head = target_head
        self.weights: Weights = {}
        for name, tensor in head.named_parameters():
            self.weights[name] = tensor.detach().clone().requires_grad_()
        # `enter` below replaces what the network would read
        self.network = Network(
            self.weights,
            head.shape,
            enter=None,  # type: ignore[arg-type]
            handed=None,  # type: ignore[arg-type]
            steps=1,
        )
        self.lstm = nn.LSTM(2 * H, H, num_layers=2, batch_first=True).double()
        self.lstm_weights: Weights = dict(self.lstm.named_parameters())
        for layer in (0, 1):
            for name in ("weight", "bias"):
                enter, cell, leave = self.weights[f"gates.{layer}.{name}"].chunk(3)
                # an empty state leaves nothing to forget: this gate may be anything
                forget = torch.randn_like(enter)
                gates = torch.cat([enter, forget, cell, leave])
                self.lstm_weights[f"{name}_ih_l{layer}"] = gates
            hidden_bias = f"bias_hh_l{layer}"
            self.lstm_weights[hidden_bias] = torch.zeros_like(self.lstm_weights[hidden_bias])

    def enter(self, token: Tensor, state: Tensor) -> Tensor:
        """Return [H], the output of torch's own LSTM for one slot alone."""
        read = torch.cat([self.target_head.embed(token), state])
        output = functional_call(self.lstm, self.lstm_weights, (read[None],))[0]
        return output[0]

    def read(self, slot: Slot, context: list[Slot]) -> Tensor:
        """Return [H], the block's output at a slot that sees the context."""
        position, entered = slot
        query = projected(self.network, entered, position)[0]
        rows = [projected(self.network, row, index) for index, row in context]
        keys = torch.stack([row[1] for row in rows])
        values = torch.stack([row[2] for row in rows])
        return output_of(self.network, entered, attended(query, keys, values))

    def enter_text(
        self,
        tokens: Tensor,
        states: Tensor,
        last: int,
    ) -> list[Slot]:
        """Return the slots of a text up to `last`."""
        return [(slot, self.enter(tokens[slot + 1], states[slot])) for slot in range(last + 1)]

    def path_states(self, context: list[Slot], path: tuple[int, ...]) -> list[Tensor]:
        """Return [H] for each level behind a text, along a drafted path; a block gives k of them."""
        length = len(context)
        states = [self.read(slot, context) for slot in context[-self.k :]]
        # a level that begins no block of its own costs no forward
        for start in range(0, len(path) // self.k * self.k, self.k):
            block = []
            for level in range(start, start + self.k):
                token = torch.tensor(path[level])
                block.append((length + level, self.enter(token, states[level])))
            context = [*context, *block]
            states += [self.read(slot, context) for slot in block]
        return states

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the loss at the blocks that lie side by side from the one that a text's seed picks."""
        anchors = SlotBlocks.side_by_side(batch, self.k).spans.rows.tolist()
        total = torch.zeros((), dtype=torch.float64)
        start = 0
        for tokens, features, mask in split_texts(batch):
            stop = start + len(tokens) - 2
            lasts = [anchor - start for anchor in anchors if start <= anchor < stop]
            start = stop
            losses: list[Tensor] = []
            for last in range(self.k - 1, len(tokens) - 2):
                if lasts and mask[last + 2] and (last - lasts[0]) % self.k == 0:
                    losses += self.block_losses(tokens, features, mask, last)
            if losses:
                # a text weighs as much as it has supervised tokens
                total = total + int(mask[2:].sum()) * torch.stack(losses).mean() / batch.slots
        return total

    def block_losses(
        self,
        tokens: Tensor,
        features: Tensor,
        mask: Tensor,
        last: int,
    ) -> list[Tensor]:
        """Return the loss of each slot of the block that ends at `last`."""
        context = self.enter_text(tokens, features, last)
        losses = []
        for level, slot in enumerate(context[-self.k :]):
            label = last + 2 + level
            if label == len(tokens) or not mask[label]:
                break
            state = self.read(slot, context)
            target_state = features[label - 1]
            target_probs = self.target_head.logits(target_state).softmax(-1)
            entropy = F.cross_entropy(self.target_head.logits(state), target_probs)
            regression = F.smooth_l1_loss(state, target_state)
            loss = self.settings.regression * regression + self.settings.cross_entropy * entropy
            losses.append(loss)
        return losses


def distance_from_loop(head: Any, batch: Batch) -> float:
    """Return the largest relative difference of loss and gradients from the loop's."""
    target_head = frozen_head(torch.float64)
    loop = Loop(head, target_head)
    loss = loop.compute_loss(batch)
    # every weight of the head has a part in the loss
    gradients = torch.autograd.grad(loss, list(loop.weights.values()))
    expected = {
        "total": loss.detach(),
        **dict(zip(loop.weights, gradients, strict=True)),
    }
    return apart(head, computed(head.eval(), batch, target_head), expected)


@pytest.mark.parametrize("k", [2, 3])
def test_loss_and_gradients_are_the_loops(k: int) -> None:
    """The regression and the norms compute in fp32, so equal means to its rounding."""
    assert distance_from_loop(new_head(k), make_batch(SPANS, seed=k)) < 1e-5


def show_future(
    count: int,
    stride: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a mask that hides no later slot."""
    return torch.zeros(
        count,
        (count - 1) * stride + 1,
        dtype=dtype,
        device=device,
    )


spans_of = spans.Spans.of
read_blocks = Falcon.read_blocks


def start_at_first_text(*args: Any, **window: Any) -> spans.Spans:
    """Return spans that let each text see those before it in the batch."""
    made = spans_of(*args, **window)
    return replace(made, runs=[(0, rows) for _, rows in made.runs])


@pytest.mark.parametrize(
    ("home", "name", "fault"),
    [
        (spans, "_future", show_future),
        (spans.Spans, "of", start_at_first_text),
        (Falcon, "read_blocks", lambda *args, **named: read_blocks(*args, **named).roll(1, 0)),
    ],
    ids=["future", "other text", "levels"],
)
def test_another_loss_is_seen(
    home: Any,
    name: str,
    fault: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop sees a leak of the future or of another text, and levels that are exchanged."""
    monkeypatch.setattr(home, name, fault)
    assert distance_from_loop(new_head(), make_batch({9: [(3, 9)], 7: [(2, 7)]})) > 1e-4


# -- glancing: in training, some slots that guess wrong read their answer instead -------------------------------------


def change_answers(
    batch: Batch,
    slot: int,
    end: int,
) -> Batch:
    """Return the batch with other states from a slot on, and other tokens behind it, up to a text's end."""
    tokens = batch.tokens.clone()
    tokens[slot + 1 : end] = (tokens[slot + 1 : end] + 1) % V
    features = batch.features.clone()
    features[slot:end] += 1
    return replace(batch, tokens=tokens, features=features)


def count_blind_slots(
    k: int,
    choose: Callable[[int, int], list[int]],
    patch: pytest.MonkeyPatch,
) -> int:
    """Return how many counted slots were checked not to change with their answer or what follows it.

    Every block of a text is glanced at in turn. `choose` returns the glanced slots of a block for k and their number.
    """
    head = new_head(k).train()
    target_head = frozen_head(torch.float64)
    batch = make_batch({12: [(2, 12)], 5: [(2, 5)]}, seed=k)
    blocks = SlotBlocks.side_by_side(batch, k)
    in_first_text = int((blocks.spans.rows < 10).sum())
    count = 0
    for column, run in product(range(in_first_text), range(1, k)):
        if not blocks.reached[-1, column]:
            continue
        glanced = torch.zeros_like(blocks.reached)
        glanced[choose(k, run), column] = True
        patch.setattr(
            SlotBlocks,
            "glance",
            lambda *_, glanced=glanced: glanced,
        )
        with torch.no_grad():
            states, _, weights = head.training_states(batch, target_head)
            for row in weights.nonzero()[:, 0].tolist():
                answer = int(blocks.slots.flatten()[row]) + k
                # the second text is there to be left alone
                if answer >= 12:
                    continue
                count += 1
                changed = head.training_states(change_answers(batch, answer, 12), target_head)[0]
                assert changed[row].equal(states[row]), "read its answer"
    return count


@pytest.mark.parametrize("k", [2, 3])
def test_no_slot_that_counts_reads_its_answer(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any block of a text may be glanced at, in runs of any length."""
    assert count_blind_slots(k, lambda _, run: [*range(run)], monkeypatch) > 10


def test_a_read_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The published code lets glanced slots keep their loss, and lets them end a block; both leak the answer."""
    with pytest.raises(AssertionError, match="read its answer"):
        count_blind_slots(2, lambda k, _: [k - 1], monkeypatch)
    weights = SlotBlocks.weights
    monkeypatch.setattr(
        SlotBlocks,
        "weights",
        lambda blocks, _: weights(blocks, blocks.reached),
    )
    with pytest.raises(AssertionError, match="read its answer"):
        count_blind_slots(2, lambda _, run: [*range(run)], monkeypatch)


def test_a_glanced_slot_reads_its_answer_in_place_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its states are those of a batch in which the answer stands there, and it weighs nothing."""
    head = new_head()
    target_head = frozen_head(torch.float64)
    batch = make_batch({12: [(2, 12)]})
    blocks = SlotBlocks.side_by_side(batch, 2)
    # the first slot of the third block reads what stands two positions on
    glanced = torch.zeros_like(blocks.reached)
    glanced[0, 2] = True
    slot = int(blocks.slots[0, 2])
    tokens = batch.tokens.clone()
    tokens[slot + 1] = batch.tokens[slot + 3]
    features = batch.features.clone()
    features[slot] = batch.features[slot + 2]
    answered = replace(batch, tokens=tokens, features=features)
    expected = head.eval().training_states(answered, target_head)[0]
    monkeypatch.setattr(SlotBlocks, "glance", lambda *_: glanced)
    states, _, weights = head.train().training_states(batch, target_head)
    torch.testing.assert_close(
        states,
        expected,
        rtol=0,
        atol=1e-12,
    )
    assert (weights.view(2, -1) == 0).equal(glanced | ~blocks.reached)
    assert float(weights.sum()) == pytest.approx(1)


def test_as_many_slots_are_glanced_at_as_are_asked_for() -> None:
    """The share holds on average over seeds, for each text, and equal seeds glance at equal slots."""
    counts = torch.zeros(2)
    asked = torch.zeros(2)
    for seed in range(40):
        batch = make_batch({300: [(2, 300)], 200: [(20, 200)]}, seed=2 * seed)
        blocks = SlotBlocks.side_by_side(batch, 4)
        generator = torch.Generator().manual_seed(seed)
        wrong = blocks.reached & (torch.rand(blocks.reached.shape, generator=generator) < 0.6)
        glanced = blocks.glance(wrong, 0.4)
        assert glanced.equal(SlotBlocks.side_by_side(batch, 4).glance(wrong, 0.4))
        # a run starts with its block and leaves the last slot alone
        assert glanced[0].equal(glanced.any(0))
        assert not glanced[-1].any()
        counts += blocks.sum_by_sequence(glanced)
        asked += 0.4 * blocks.sum_by_sequence(wrong)
    assert ((counts / asked - 1).abs() < 0.1).all()


def test_fewer_slots_are_glanced_at_as_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share follows the run's progress, and evaluation glances at nothing."""
    shares: list[float] = []
    glance = SlotBlocks.glance

    def record(
        blocks: SlotBlocks,
        wrong: Tensor,
        share: float,
    ) -> Tensor:
        shares.append(share)
        return glance(blocks, wrong, share)

    monkeypatch.setattr(SlotBlocks, "glance", record)
    head = new_head().train()
    target_head = frozen_head(torch.float64)
    batch = make_batch(SPANS)
    for progress in (0.0, 0.5, 1.0):
        head(replace(batch, progress=progress), target_head)
    head.eval()(batch, target_head)
    assert shares == pytest.approx([0.45, 0.275, 0.1])


# -- drafting ---------------------------------------------------------------------------------------------------------

# ranks on the way to each node: siblings at the first two levels, one path of seven
TREE = (
    (0,), (2,), (0, 1), (0, 0), (2, 0), (0, 1, 1), (0, 0, 0), (2, 0, 2), (0, 1, 1, 0), (2, 0, 2, 1),
    (2, 0, 2, 1, 0), (2, 0, 2, 1, 0, 1), (2, 0, 2, 1, 0, 1, 1),
)  # fmt: skip


@torch.no_grad()
def loop_drafts(
    loop: Loop,
    context: list[Slot],
    levels: int,
) -> set[tuple[int, ...]]:
    """Return the tokens on the way to every node of the tree, cut to its first levels, by the loop."""
    drafted: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
    for path in sorted(TREE, key=len):
        if len(path) > levels:
            break
        above = drafted[path[:-1]]
        state = loop.path_states(context, above)[len(above)]
        ranked = loop.target_head.logits(state).argsort(descending=True)
        drafted[path] = *above, int(ranked[path[-1]])
    return set(drafted.values())


def check_drafts(k: int, levels: int) -> None:
    """Compare the trees of several cycles, which commit one token or many, with the loop's."""
    target_head = frozen_head(torch.float64)
    head = new_head(k, levels)
    loop = Loop(head, target_head)
    text = head.bind(target_head).begin()
    batch = make_batch({31: []})
    for start, end in pairwise([0, 1, 2, 9, 10, 13, 14, 29]):
        root = int(batch.tokens[end])
        update = Committed(
            batch.tokens[start:end],
            batch.features[start:end],
            root,
        )
        drafted = texts_of(text.propose(update, Budget.fixed(TREE)))
        # nothing is drafted before a block is there
        if end < k:
            assert drafted == [()]
            continue
        context = loop.enter_text(batch.tokens, batch.features[:, 0], end - 1)
        assert set(drafted) == loop_drafts(loop, context, levels)


@pytest.mark.slow
@pytest.mark.parametrize(("k", "levels"), [(2, 6), (3, 7)])
def test_drafts_with_a_cache_are_those_of_a_loop_without(k: int, levels: int) -> None:
    """Levels fill the last block (2 of 6) or leave it half empty (3 of 7)."""
    check_drafts(k, levels)


def test_other_drafts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that sees other paths than its own drafts other tokens."""
    level_mask = block_state.level_mask

    def show_all(
        committed: Tensor,
        ancestors: Tensor,
        groups: int,
    ) -> Tensor:
        return level_mask(committed, torch.ones_like(ancestors), groups)

    monkeypatch.setattr(block_state, "level_mask", show_all)
    with pytest.raises(AssertionError):
        check_drafts(2, 6)


def three_word_target() -> TargetHead:
    """Return a target of three words, so that many drafts are right."""
    torch.manual_seed(1)
    embedding = nn.Embedding(3, H).double().requires_grad_(False)
    output = nn.Linear(H, 3, bias=False).double().requires_grad_(False)
    return TargetHead(embedding, output)


def answered_batch(target_head: TargetHead) -> Batch:
    """Return two texts that mostly say what the target would."""
    batch = make_batch({26: [(2, 15), (17, 26)], 12: [(2, 12)]}, vocabulary=3)
    choices = target_head.logits(batch.features[:, 0]).argmax(-1).roll(1)
    is_random = torch.arange(38) % 11 == 10
    return replace(batch, tokens=torch.where(is_random, batch.tokens, choices))


@pytest.mark.parametrize(("k", "levels"), [(2, 8), (3, 4)])
def test_validation_counts_what_drafting_at_every_slot_counts(
    k: int,
    levels: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A chain, and a tree of two children each, are longer or shorter than what the head drafts."""
    target_head = three_word_target()
    batch = answered_batch(target_head)
    head = new_head(k, levels, LlamaConfig(**{**SHAPE.to_dict(), "vocab_size": 3})).bind(
        target_head
    )
    binary: list[tuple[int, ...]] = []
    for depth in range(1, 6):
        binary += product((0, 1), repeat=depth)
    trees = {"chain": chain_paths(4), "tree": tuple(binary)}
    target: Any = SimpleNamespace(head=target_head)
    expected = {}
    for name, paths in trees.items():
        for kind, counts in counted_by_drafting(head, target, batch, paths).items():
            expected[f"{name}/{kind}"] = counts
    # there is something to count at every level
    assert min(expected["tree/accepted"][: min(levels, 5)]) > 0

    def validate() -> dict[str, list[int]]:
        sums = head.validate(batch, target_head, trees)
        return {name: value.tolist() for name, value in sums.items() if "/" in name}

    assert validate() == expected
    # a planted fault: slots that end no block count as the others do
    monkeypatch.setattr(falcon, "drafted_mask", lambda batch, size: batch.loss_mask)
    assert validate() != expected


def test_a_forward_is_priced_by_its_rows() -> None:
    """A block of k rows stands behind each node of every k-th level, and the last slots are read again."""
    head = new_head(2, 6).bind(frozen_head(torch.float64))
    assert head.forwards(Budget(10, 8, 3)) == (6, 6)
    assert head.forwards(Budget.fixed(TREE)) == (6, 2)
    assert head.forwards(Budget(10, 2, 3)) == ()
    assert head.unread(3, 6) == 5
    assert head.probe(12, 6, 1)().shape == (2, V)
    assert head.probe(12, 6, 6)().shape == (6, V)
