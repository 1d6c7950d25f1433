"""Falcon: its loss, its masks and its drafts are those of loops over single slots, and no slot reads its answer."""

# T tokens of a text, H width, V vocabulary

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

from eagle import Budget, Sampling
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import chain_paths
from eagle.drafters.parts import spans
from eagle.drafters.parts.decoder_block import Block
from eagle.drafters.recurrent import block_state, falcon, unroll
from eagle.drafters.recurrent.block_state import BlockState
from eagle.drafters.recurrent.falcon import Falcon, SlotBlocks
from tests.drafters.parts.test_judge import counted_by_drafting
from tests.drafters.test_many_texts import BUDGETS, play
from tests.naive_unroll import Network, attended, output_of, projected
from tests.unrolled_heads import SHAPE, frozen_head, moved

H, V = SHAPE.hidden_size, 97
Slot = tuple[int, Tensor]
"""Where a slot stands, and what the Llama block reads of it [H]."""


def new_head(k: int = 2, levels: int = 6, shape: LlamaConfig = SHAPE, **settings: Any) -> Any:
    """A head in fp64 that drops nothing and adds no noise, and whose slots look at one another sharply."""
    torch.manual_seed(2)
    values = {"k": k, "levels": levels, "dropout": 0.0, "noise": 0.0, **settings}
    head = moved(Falcon(Falcon.Settings(**values), shape)).double()
    with torch.no_grad():
        for weight in [*head.gates.parameters(), *head.layers[0].self_attn.parameters()]:
            weight *= 3
    return head


def batch_of(
    lengths: dict[int, list[tuple[int, int]]], seed: int = 0, vocabulary: int = V
) -> Batch:
    """Random texts of these lengths, with stretches that are supervised."""
    generator = torch.Generator().manual_seed(seed)
    masks = []
    for length, answers in lengths.items():
        masks.append(torch.zeros(length, dtype=torch.bool))
        for start, stop in answers:
            masks[-1][start:stop] = True
    count = sum(lengths)
    tokens = torch.randint(vocabulary, (count,), generator=generator)
    features = torch.randn(count, 1, H, generator=generator, dtype=torch.float64)
    return Batch(
        tokens,
        torch.cat(masks),
        features,
        tuple(lengths),
        (-1,),
        tuple(range(seed, seed + len(masks))),
    )


SPANS = {17: [(3, 5), (6, 7), (8, 17)], 9: [(2, 4), (8, 9)], 5: [(2, 3)], 23: [(2, 23)]}


# -- the loop ---------------------------------------------------------------------------------------------------------


class Loop:
    """A head from its formulas: an LSTM that begins anew at every slot, and one query at a time."""

    def __init__(self, head: Any, frozen: TargetHead) -> None:
        self.weights = {
            name: tensor.detach().clone().requires_grad_()
            for name, tensor in head.named_parameters()
        }
        self.network = Network(self.weights, head.shape, lambda *_: None, lambda row: row, 1)  # type: ignore[arg-type]
        self.frozen, self.k = frozen, head.settings.k
        self.lstm = nn.LSTM(2 * H, H, num_layers=2, batch_first=True).double()
        self.parts: dict[str, Tensor] = dict(self.lstm.named_parameters())
        for layer in (0, 1):
            for name in ("weight", "bias"):
                enter, cell, leave = self.weights[f"gates.{layer}.{name}"].chunk(3)
                forget = torch.randn_like(enter)
                self.parts[f"{name}_ih_l{layer}"] = torch.cat([enter, forget, cell, leave])
            self.parts[f"bias_hh_l{layer}"] = torch.zeros_like(self.parts[f"bias_hh_l{layer}"])

    def enter(self, token: Tensor, state: Tensor) -> Tensor:
        """[H], what torch's own LSTM makes of one slot alone; recurrent weights and forget gates are arbitrary."""
        both = torch.cat([self.frozen.embed(token), state])
        return functional_call(self.lstm, self.parts, (both[None],))[0][0]

    def state(self, slot: Slot, seen: list[Slot]) -> Tensor:
        """[H], the block's output at a slot that sees these."""
        query = projected(self.network, slot[1], slot[0])[0]
        rows = [projected(self.network, entered, place) for place, entered in seen]
        keys, values = (torch.stack([row[part] for row in rows]) for part in (1, 2))
        return output_of(self.network, slot[1], attended(query, keys, values))

    def text_slots(self, tokens: Tensor, states: Tensor, last: int) -> list[Slot]:
        """The slots of a text up to one."""
        return [(slot, self.enter(tokens[slot + 1], states[slot])) for slot in range(last + 1)]

    def path_states(self, context: list[Slot], path: list[int]) -> list[Tensor]:
        """States of as many levels as blocks make behind the slots of a text, along a drafted path."""
        length, block = len(context), context[-self.k :]
        guesses = [self.state(slot, context) for slot in block]
        for start in range(0, len(path) // self.k * self.k, self.k):
            read = [torch.tensor(token) for token in path[start : start + self.k]]
            block = [
                (length + start + n, self.enter(token, guesses[start + n]))
                for n, token in enumerate(read)
            ]
            context = [*context, *block]
            guesses += [self.state(slot, context) for slot in block]
        return guesses

    def loss(self, head: Any, batch: Batch) -> Tensor:
        """The total loss, at the blocks of the phase that was drawn for each text."""
        anchors, total, begin = (
            SlotBlocks.side_by_side(batch, self.k).spans.rows.tolist(),
            torch.zeros(()).double(),
            0,
        )
        settings, k = head.settings, self.k
        for tokens, features, mask in zip(
            *(part.split(batch.lengths) for part in columns(batch)), strict=True
        ):
            mine = [
                anchor - begin for anchor in anchors if begin <= anchor < begin + len(tokens) - 2
            ]
            begin += len(tokens) - 2
            losses = []
            for last in range(k - 1, len(tokens) - 2):
                if not (mine and mask[last + 2] and (last - mine[0]) % k == 0):
                    continue
                context = self.text_slots(tokens, features, last)
                for level in range(k):
                    if mask[last + 2 : last + 3 + level].all() and last + 2 + level < len(tokens):
                        state, true = (
                            self.state(context[last - k + 1 + level], context),
                            features[last + 1 + level],
                        )
                        entropy = F.cross_entropy(
                            self.frozen.logits(state), self.frozen.logits(true).softmax(-1)
                        )
                        near = F.smooth_l1_loss(state, true)
                        losses.append(settings.regression * near + settings.cross_entropy * entropy)
            if losses:
                total = total + int(mask[2:].sum()) * torch.stack(losses).mean() / batch.slots
        return total


def columns(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, states and masks of all texts."""
    return batch.tokens, batch.features[:, 0], batch.loss_mask


def difference(head: Any, batch: Batch) -> float:
    """The largest difference of loss and gradients from the loop's, each relative to its largest number."""
    frozen = frozen_head(torch.float64)
    loop = Loop(head, frozen)
    head.eval().zero_grad()
    ours, true = head(batch, frozen)["total"], loop.loss(head, batch)
    ours.backward()
    true.backward()
    pairs = [
        (ours, true),
        *((weight.grad, loop.weights[name].grad) for name, weight in head.named_parameters()),
    ]
    return max(
        float((one - other).detach().abs().max() / other.detach().abs().max())
        for one, other in pairs
    )


@pytest.mark.parametrize("k", [2, 3])
def test_loss_and_gradients_are_the_loops(k: int) -> None:
    """To rounding of fp32, in which the regression and the weights are."""
    assert difference(new_head(k), batch_of(SPANS, seed=k)) < 1e-5


def unmasked(count: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """No future is hidden."""
    return torch.zeros(count, (count - 1) * stride + 1, dtype=dtype, device=device)


def causal(
    head: Any, entered: Tensor, tables: Any, context: Any, blocks: SlotBlocks, own: Any
) -> Tensor:
    """Slots that see their text up to themselves alone."""
    begins = [
        begin
        for begin, start, stop in blocks.spans.runs
        for _ in range(start, stop, blocks.spans.stride)
    ]
    query, residual = falcon.query_and_residual(head.layers[0], (entered, entered), tables)
    seen = []
    for rows, heads in zip(blocks.slots, query.chunk(head.size, dim=1), strict=True):
        runs = [(begin, row, row + 1) for begin, row in zip(begins, rows.tolist(), strict=True)]
        seen.append(spans.attend(heads, *context, spans.Spans(rows, runs, blocks.spans.count)))
    return falcon.add_rows(head.layers[0], torch.cat(seen, 1), residual).unflatten(
        0, (head.size, -1)
    )


def test_another_loss_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: a future that is seen, slots that see no later one of their block, levels and keys turned."""
    head, batch = new_head(), batch_of({9: [(3, 9)], 7: [(2, 7)]})
    right, key_value = Falcon.read_blocks, unroll.key_value

    def turned(block: Any, inputs: Any, tables: Any) -> Any:
        return key_value(block, inputs, tuple(table.roll(1, 0) for table in tables))

    for home, name, fault in (
        (spans, "_future", unmasked),
        (Falcon, "read_blocks", causal),
        (Falcon, "read_blocks", lambda *given: right(*given).roll(1, 0)),
        (falcon, "key_value", turned),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(home, name, fault)
            assert difference(head, batch) > 1e-4


# -- masks ------------------------------------------------------------------------------------------------------------


def changed(batch: Batch, slot: int) -> Batch:
    """Another state at a slot, and another token that it reads."""
    tokens, features = batch.tokens.clone(), batch.features.clone()
    tokens[slot + 1] = (tokens[slot + 1] + 1) % V
    features[slot] += 1
    return replace(batch, tokens=tokens, features=features)


def check_sight(head: Any) -> None:
    """The block of slot p sees the slots 0 .. p of its text and no other; further blocks see them too."""
    batch, frozen = batch_of({9: [(2, 9)], 7: [(2, 7)]}), frozen_head(torch.float64)
    with torch.no_grad():
        before = [state for state, _ in head.draft_levels(batch, frozen, 2 * head.size)]
        for slot in [*range(7), *range(9, 14)]:
            after = [
                state for state, _ in head.draft_levels(changed(batch, slot), frozen, head.size)
            ]
            for level, (old, new) in enumerate(zip(before, after, strict=False)):
                moved_rows = (old != new).any(-1)
                for row in range(12):  # slots 0 .. 6 of the first text, 0 .. 4 of the second
                    place, same_text = (row, slot < 9) if row < 7 else (row + 2, slot >= 9)
                    if place >= head.size - 1 and (place < 9 or place >= 9 + head.size - 1):
                        assert bool(moved_rows[row]) == (same_text and slot <= place), (
                            slot,
                            level,
                            row,
                        )


@pytest.mark.parametrize("k", [2, 3])
def test_a_block_sees_its_text_up_to_its_last_slot(k: int) -> None:
    """All of it, and nothing else."""
    check_sight(new_head(k))


def test_another_sight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: the future, the text before, and slots that do not see the later ones of their block."""
    of = spans.Spans.of

    def from_the_first_text(*given: Any, **window: Any) -> spans.Spans:
        found = of(*given, **window)
        return replace(found, runs=[(0, first, end) for _, first, end in found.runs])

    for home, name, fault in (
        (spans, "_future", unmasked),
        (spans.Spans, "of", from_the_first_text),
        (Falcon, "read_blocks", causal),
    ):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(home, name, fault)
            check_sight(new_head())


# -- glancing ---------------------------------------------------------------------------------------------------------


def check_no_answer_is_read(
    k: int, choose: Callable[[int, int], list[int]], patch: pytest.MonkeyPatch
) -> int:
    """Whatever block is glanced at: no slot that counts changes with its own answer or what follows; how many count.

    `choose` names the slots of a block that are, by how many they are.
    """
    head, frozen, counting = new_head(k).train(), frozen_head(torch.float64), 0
    batch = batch_of({12: [(2, 12)], 5: [(2, 5)]}, seed=k)
    blocks = SlotBlocks.side_by_side(batch, k)
    for column in range(int((blocks.spans.rows < 10).sum())):
        for run in range(1, k):
            glanced = torch.zeros_like(blocks.reached)
            glanced[choose(k, run), column] = True
            if not blocks.reached[-1, column]:
                continue
            patch.setattr(SlotBlocks, "glance", lambda *given, glanced=glanced: glanced)
            with torch.no_grad():
                states, _, weights = head.training_states(batch, frozen)
                for row in weights.nonzero()[:, 0].tolist():
                    answer = int(blocks.slots.flatten()[row]) + k
                    if answer >= 12:
                        continue
                    counting += 1
                    tokens, features = batch.tokens.clone(), batch.features.clone()
                    tokens[answer + 1 : 12] = (tokens[answer + 1 : 12] + 1) % V
                    features[answer:12] += 1
                    other = replace(batch, tokens=tokens, features=features)
                    assert head.training_states(other, frozen)[0][row].equal(states[row]), (
                        "read its answer"
                    )
    return counting


@pytest.mark.parametrize("k", [2, 3])
def test_no_slot_that_counts_reads_its_answer(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of a text glanced at, in runs of every length."""
    assert check_no_answer_is_read(k, lambda _, run: list(range(run)), monkeypatch) > 10


def test_a_read_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: the published rules, by which glanced slots keep their loss, and may end a block."""
    with pytest.raises(AssertionError, match="read its answer"):
        check_no_answer_is_read(2, lambda k, _: [k - 1], monkeypatch)
    weights = SlotBlocks.weights
    monkeypatch.setattr(SlotBlocks, "weights", lambda blocks, _: weights(blocks, blocks.reached))
    with pytest.raises(AssertionError, match="read its answer"):
        check_no_answer_is_read(2, lambda _, run: list(range(run)), monkeypatch)


def test_a_glanced_slot_reads_its_answer_in_place_of_its_own() -> None:
    """Loss and gradients are those of a batch in which it stands there."""
    head, frozen, batch = new_head(), frozen_head(torch.float64), batch_of({12: [(2, 12)]})
    blocks = SlotBlocks.side_by_side(batch, 2)
    glanced = torch.zeros_like(blocks.reached)
    glanced[0, 2] = True
    slot = int(blocks.slots[0, 2])
    tokens, features = batch.tokens.clone(), batch.features.clone()
    tokens[slot + 1], features[slot] = batch.tokens[slot + 3], batch.features[slot + 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotBlocks, "glance", lambda *_: glanced)
        got, _, weights = head.train().training_states(batch, frozen)
    expected = head.eval().training_states(
        replace(batch, tokens=tokens, features=features), frozen
    )[0]
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert (weights.view(2, -1) == 0).equal(glanced | ~blocks.reached)
    torch.testing.assert_close(weights.sum().double(), torch.tensor(1.0).double())


@pytest.mark.parametrize("k", [2, 4])
def test_as_many_slots_are_glanced_at_as_are_asked_for(k: int) -> None:
    """On average over seeds, of those that guess wrong; text by text, the same for the same seeds."""
    counts, asked = torch.zeros(2), torch.zeros(2)
    for seed in range(40):
        batch = batch_of({300: [(2, 300)], 200: [(20, 200)]}, seed=2 * seed)
        blocks = SlotBlocks.side_by_side(batch, k)
        wrong = blocks.reached & (
            torch.rand(blocks.reached.shape, generator=torch.Generator().manual_seed(seed)) < 0.6
        )
        glanced = blocks.glance(wrong, 0.4)
        assert glanced.equal(SlotBlocks.side_by_side(batch, k).glance(wrong, 0.4))
        assert glanced[0].equal(glanced.any(0)) and not glanced[-1].any()
        counts += blocks.sum_by_text(glanced)
        asked += 0.4 * blocks.sum_by_text(wrong)
    assert ((counts / asked - 1).abs() < 0.1).all()


def test_fewer_slots_are_glanced_at_as_training_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """From one share to the other by the run's progress, and none outside of training."""
    shares: list[float] = []
    glance = SlotBlocks.glance
    monkeypatch.setattr(
        SlotBlocks,
        "glance",
        lambda blocks, wrong, share: (shares.append(share), glance(blocks, wrong, share))[1],
    )
    head, frozen, batch = new_head().train(), frozen_head(torch.float64), batch_of(SPANS)
    for progress in (0.0, 0.5, 1.0):
        head(replace(batch, progress=progress), frozen)
    head.eval()(batch, frozen)
    assert shares == pytest.approx([0.45, 0.275, 0.1])


# -- drafting ---------------------------------------------------------------------------------------------------------

SHORT = (
    (0,),
    (2,),
    (0, 1),
    (0, 0),
    (2, 0),
    (0, 1, 1),
    (0, 0, 0),
    (2, 0, 2),
    (0, 1, 1, 0),
    (2, 0, 2, 1),
)
TREE = (*SHORT, (2, 0, 2, 1, 0), (2, 0, 2, 1, 0, 1), (2, 0, 2, 1, 0, 1, 1))


def check_drafts(k: int, levels: int) -> int:
    """Every node of the drafts of several cycles is the child of its rank by the loop; how many there were."""
    head, frozen, batch, nodes = (
        new_head(k, levels),
        frozen_head(torch.float64),
        batch_of({31: []}),
        0,
    )
    loop, text = Loop(head, frozen), head.bind(frozen).begin()
    tokens, features, _ = columns(batch)
    for start, end in pairwise([0, 1, 2, 9, 10, 13, 14, 29]):
        update = Committed(tokens[start:end], batch.features[start:end], int(tokens[end]))
        tree = text.propose(update, Budget.fixed(TREE))
        if end < k:
            assert len(tree) == 1
            continue
        assert max(tree.depths()) == min(levels, 7)
        context = loop.text_slots(tokens, features, end - 1)
        paths: dict[tuple[int, ...], list[int]] = {(): []}
        for path in sorted(
            (path for path in TREE if len(path) <= levels), key=lambda path: (len(path), path)
        ):
            with torch.no_grad():
                states = loop.path_states(context, paths[path[:-1]])
            ranked = frozen.logits(states[len(path) - 1]).argsort(descending=True).tolist()
            paths[path] = [*paths[path[:-1]], ranked[path[-1]]]
        children, drafted = tree.children(), list[list[int]]()
        stack: list[tuple[int, list[int]]] = [(0, [])]
        while stack:
            node, path_tokens = stack.pop()
            drafted.append(path_tokens)
            stack += [(child, [*path_tokens, int(tree.tokens[child])]) for child in children[node]]
        assert sorted(drafted) == sorted(paths.values())
        nodes += len(drafted)
    return nodes


@pytest.mark.slow
@pytest.mark.parametrize(("k", "levels"), [(2, 6), (3, 7)])
def test_drafts_with_a_cache_are_those_of_a_loop_without(k: int, levels: int) -> None:
    """Over cycles of one token and of many; nothing is drafted before a block is there."""
    assert check_drafts(k, levels) > 40


def test_other_drafts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted faults: slots that do not see their whole block, see other paths, stand elsewhere, or swap levels."""
    levels, forward, mask = block_state._BlockLevels, Block.forward, block_state.level_mask
    read, block = BlockState._read_group, levels._read_block

    def shifted(self: Any, depth: int) -> None:
        self.tables = tuple(table.roll(1, 1) for table in self.tables)
        block(self, depth)

    for home, name, fault in (
        (
            Block,
            "forward",
            lambda self, x, tables, mask, cache: forward(self, x, tables, None, cache),
        ),
        (
            block_state,
            "level_mask",
            lambda committed, seen, groups: mask(committed, torch.ones_like(seen), groups),
        ),
        (levels, "_read_block", shifted),
        (BlockState, "_read_group", lambda state, updates: read(state, updates).flip(1)),
    ):
        with monkeypatch.context() as patch, pytest.raises(AssertionError):
            patch.setattr(home, name, fault)
            check_drafts(2, 6)


@pytest.mark.parametrize(
    ("kind", "temperature"), [("mixed", 1.0), ("dynamic", 0.0), ("drawn", 1.0)]
)
def test_texts_side_by_side_are_drafted_as_each_alone(kind: str, temperature: float) -> None:
    """Rows that come, go and are passed over, with updates and depths that differ."""
    head = new_head(3 if kind == "dynamic" else 2).bind(frozen_head(torch.float64))
    assert play(head, BUDGETS[kind], Sampling(temperature=temperature, seed=3), seed=1) > 15


def forgetful(query: Tensor, key: Tensor, value: Tensor, rows: spans.Spans, own: Any) -> Tensor:
    """Nothing that was drafted is seen."""
    return spans.attend(query, key, value, rows)


@pytest.mark.parametrize(("k", "levels"), [(2, 8), (3, 4)])
def test_validation_counts_what_drafting_at_every_slot_counts(
    k: int, levels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts that mostly say what the target would, supervised from their begin on, and few words to choose from.

    Planted faults: slots that no block ends at are counted as others, and blocks that see no other.
    """
    torch.manual_seed(1)
    parts = nn.Embedding(3, H).double(), nn.Linear(H, 3, bias=False).double()
    frozen = TargetHead(*(part.requires_grad_(False) for part in parts))
    head = new_head(k, levels, LlamaConfig(**{**SHAPE.to_dict(), "vocab_size": 3})).bind(frozen)
    batch = batch_of({26: [(2, 15), (17, 26)], 12: [(2, 12)]}, vocabulary=3)
    tokens = frozen.logits(batch.features[:, 0]).argmax(-1).roll(1)
    batch = replace(batch, tokens=torch.where(torch.arange(38) % 11 == 10, batch.tokens, tokens))
    trees = {
        "chain": chain_paths(4),
        "tree": tuple(path for n in range(1, 6) for path in product((0, 1), repeat=n)),
    }
    target: Any = SimpleNamespace(head=frozen)
    expected = {
        f"{name}/{kind}": counts
        for name, paths in trees.items()
        for kind, counts in counted_by_drafting(head, target, batch, paths).items()
    }
    assert min(expected["tree/accepted"][: min(levels, 5)]) > 0
    sums = head.validate(batch, frozen, trees)
    assert {name: value.tolist() for name, value in sums.items() if "/" in name} == expected
    assert sums["slots"] == batch.slots
    for name, fault in (
        ("drafted_mask", lambda batch, size: batch.loss_mask),
        ("attend", forgetful),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(falcon, name, fault)
            sums = head.validate(batch, frozen, trees)
            assert {
                name: value.tolist() for name, value in sums.items() if "/" in name
            } != expected, fault


def test_a_forward_is_priced_by_its_rows() -> None:
    """A block of k rows behind each node of every k-th level, and the last slots once more after a cycle."""
    head = new_head(2, 6).bind(frozen_head(torch.float64))
    assert head.forwards(Budget(10, 8, 3)) == (6, 6)
    assert head.forwards(Budget.fixed(TREE)) == (6, 2)
    assert head.forwards(Budget(10, 2, 3)) == ()
    assert head.unread(3, 6) == 5
    assert head.probe(12, 6, 1)().shape == (2, V) and head.probe(12, 6, 6)().shape == (6, V)
