"""In a batch every row's drafts are those it would have alone, whoever comes, goes or waits."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling
from eagle.core.drafter import Committed, Drafter
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.drafters import DRAFTERS as REGISTRY
from eagle.drafters.draft_model import DraftModel, DraftModelSettings, ModelState
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.parts.decoder_block import Rotary, rotary_tables
from eagle.drafters.parts.sequence_state import split_ragged
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.head_state import HeadState
from eagle.drafters.several import FirstOf
from tests.registry import BY_DEFAULT
from tests.unrolled_heads import SHAPE, frozen_head, moved, new_head

V = SHAPE.vocab_size
FP64 = torch.float64
TREE = Budget.fixed(
    (
        (0,),
        (1,),
        (0, 0),
        (0, 1),
        (1, 0),
        (0, 0, 0),
        (0, 0, 0, 0),
    )
)
DYNAMIC = Budget(9, 5, 3)
BUDGETS: dict[str, list[Budget]] = {
    "dynamic": [DYNAMIC],
    "fixed": [TREE],
    "mixed": [
        DYNAMIC,
        TREE,
        Budget(4, 2, 4),
        replace(DYNAMIC, draw="likeliest"),
        Budget(0),
    ],
    "drawn": [Budget.fixed(TREE.paths or (), "sampled")],
}
SAMPLINGS = {"T=0": Sampling(), "T=1": Sampling(temperature=1.0, seed=3, top_k=20)}


# -- drafters -----------------------------------------------------------------------------------


def small_model() -> DraftModel:
    """Return a random language model in fp64, with fewer positions than some sequences need."""
    torch.manual_seed(4)
    config: Any = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=70,
    )
    model = LlamaForCausalLM(config).double().eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return DraftModel(DraftModelSettings(), config, model).bind(frozen_head(FP64))


def make(name: str, folder: Path) -> Any:
    """Return a drafter in fp64, ready to draft."""
    target_head = frozen_head(FP64)
    if name == "draft model":
        return small_model()
    if name == "lookup, eagle1":
        return FirstOf([NgramDrafter(), make("eagle1", folder)])
    if name in BY_DEFAULT:
        method = REGISTRY[name]
        # few levels, so that drafts of methods that have many are not deeper than budgets
        has_levels = "levels" in method.Settings.model_fields
        settings = method.Settings(levels=4) if has_levels else method.Settings()
        torch.manual_seed(2)
        return moved(method.for_target(settings, SHAPE, target_head)).double().bind(target_head)
    if name in ("eagle1", "two blocks"):
        layers = 1 if name == "eagle1" else 2
        shape: Any = LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": layers})
        torch.manual_seed(2)
        return moved(Eagle1(Eagle1.Settings(), shape)).double().bind(target_head)
    return new_head(folder, name, FP64).bind(target_head)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Return a function that makes each drafter once."""
    drafters: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in drafters:
            drafters[name] = make(name, tmp_path_factory.mktemp("head"))
        return drafters[name]

    return get


# -- rows in a batch and alone ------------------------------------------------------------------


class Text:
    """A row of the batch, and the same sequence in a state of its own, with the same noise."""

    def __init__(
        self,
        drafter: Drafter,
        row: int,
        sampling: Sampling,
        dice: random.Random,
    ) -> None:
        self.drafter = drafter
        self.dice = dice
        self.row = row
        self.sampling = replace(sampling, request=row)
        self.alone = drafter.begin(self.noise())
        self.generator = torch.Generator().manual_seed(row)
        self.tree: DraftTree | None = None
        prompt = [dice.randrange(V) for _ in range(dice.choice([1, 3, 40]))]
        # what the drafter was not asked about yet
        self.pending = [self.commit(prompt)]

    def noise(self) -> Any:
        """Return the noise that a target which samples would offer."""
        return Choose(self.sampling).offer(V, torch.device("cpu"))

    def commit(self, tokens: list[int]) -> Committed:
        """Return an update with these tokens, random features and a random root."""
        self.root = self.dice.randrange(V)
        features = torch.randn(
            len(tokens),
            len(self.drafter.taps),
            SHAPE.hidden_size,
            generator=self.generator,
            dtype=FP64,
        )
        return Committed(torch.tensor(tokens), features, self.root)

    def accept(self) -> None:
        """Commit the root and a random path of the last tree, or the root alone."""
        path: list[int] = []
        if self.tree is not None and self.dice.random() < 0.8:
            children = self.tree.children()
            node = 0
            while children[node] and self.dice.random() < 0.8:
                node = self.dice.choice(children[node])
                path.append(int(self.tree.tokens[node]))
        self.pending.append(self.commit([self.root, *path]))


def compare(tree: DraftTree, alone: DraftTree) -> None:
    """The same nodes, and the same likelihoods and probs up to rounding."""
    assert tree.tokens.tolist() == alone.tokens.tolist(), "another tree than alone"
    assert tree.parents.tolist() == alone.parents.tolist(), "another tree than alone"
    torch.testing.assert_close(
        (tree.likelihoods, tree.draft_probs),
        (alone.likelihoods, alone.draft_probs),
        rtol=1e-5,
        atol=1e-6,
    )


def play(
    drafter: Drafter,
    budgets: list[Budget],
    sampling: Sampling,
    seed: int,
    cycles: int = 30,
) -> int:
    """Return how many trees of batches were compared; rows come, go and wait at random."""
    dice = random.Random(seed)
    state = drafter.open()
    texts: list[Text] = []
    compared = 0
    # a request keeps its kind of draft; only its depth changes from cycle to cycle
    request_budgets = [dice.choice(budgets) for _ in range(cycles)]
    for cycle in range(cycles):
        if len(texts) < 5 and dice.random() < 0.6:
            texts.append(Text(drafter, cycle, sampling, dice))
            state.admit(cycle, texts[-1].noise())
        asked = [text for text in texts if dice.random() < 0.8]
        dice.shuffle(asked)
        updates = {text.row: Committed.join(text.pending) for text in asked}
        limits = {row: request_budgets[row].within(dice.choice([1, 3, 9])) for row in updates}
        trees = state.propose(updates, limits) if asked else {}
        assert trees.keys() == updates.keys()
        for text in asked:
            text.tree = text.alone.propose(updates[text.row], limits[text.row])
            compare(trees[text.row], text.tree)
            compared += len(asked) > 1 and len(text.tree) > 1
            text.pending = []
        for text in list(texts):
            text.accept()
            if dice.random() < 0.12:
                texts.remove(text)
                state.release(text.row)
    return compared


# tests/test_conformance.py compares batches of drafters that read the target's own rows
DRAFTERS = [
    "eagle1",
    "eagle3",
    "eagle3.1",
    "hass",
    "two blocks",
    "draft model",
    "lookup, eagle1",
    *(name for name in BY_DEFAULT if not REGISTRY[name].reads.kv_cache),
]
# budgets and noise belong to what all drafters share: one of them is enough for each kind
CASES = [
    *((name, "mixed", "T=1") for name in DRAFTERS),
    *(("eagle1", kind, "T=0") for kind in ("dynamic", "fixed", "drawn")),
    ("eagle1", "drawn", "T=1"),
]


@pytest.mark.quick(
    "eagle1-drawn-T=1",
    "eagle3-mixed-T=1",
    "medusa-mixed-T=1",
    "hydra-mixed-T=1",
    "falcon-mixed-T=1",
)
@pytest.mark.parametrize(("name", "kind", "sampling"), CASES)
def test_every_row_drafts_as_if_it_were_alone(
    name: str,
    kind: str,
    sampling: str,
    made: Callable[[str], Any],
) -> None:
    """Ragged updates, different depths, rows that wait, and rows that take a place again."""
    compared = 0
    for seed in range(2):
        compared += play(made(name), BUDGETS[kind], SAMPLINGS[sampling], seed)
    assert compared > 25


def stay(state: Any, row: int) -> None:
    """Leave a row's cache to the next one in its place: the fault of a head's state."""
    del state.noises[row]
    if row in state.rows:
        place = state.rows.index(row)
        state.rows[place] = state.rows[-1]
        state.rows.pop()


release = ModelState.release


def leave_draft(state: ModelState, row: int) -> None:
    """Let a row that moves believe that its draft moved too: the fault of a model's state."""
    levels = {kept: list(state.levels[kept]) for kept in state.levels if kept != row}
    release(state, row)
    state.levels |= levels


@pytest.mark.parametrize(
    ("name", "state", "fault"),
    [("eagle1", HeadState, stay), ("draft model", ModelState, leave_draft)],
)
def test_what_a_row_leaves_behind_is_seen(
    name: str,
    state: Any,
    fault: Any,
    made: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The comparison fails if a row finds what another one left in its place."""
    monkeypatch.setattr(state, "release", fault)
    with pytest.raises(AssertionError, match=r"another tree than alone|not close"):
        for seed in range(6):
            play(
                made(name),
                BUDGETS["dynamic"],
                SAMPLINGS["T=1"],
                seed,
            )


# -- what a batch costs -------------------------------------------------------------------------


def updates_of(
    head: Any,
    counts: list[int],
    seed: int = 0,
) -> dict[int, Committed]:
    """Return an update of so many tokens for each row."""
    updates = {}
    for row, count in enumerate(counts):
        text = Text(head, row, Sampling(), random.Random(seed + row))
        updates[row] = text.commit([1] * count)
    return updates


def open_rows(head: Any, count: int) -> Any:
    """Return a state of so many rows."""
    state = head.open()
    for row in range(count):
        state.admit(row)
    return state


@pytest.mark.parametrize("budget", [Budget(8, 4, 3), Budget.fixed(chain_paths(4))])
def test_all_rows_share_a_forward_for_each_level(
    budget: Budget,
    made: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One forward over all committed tokens, then one for each level after the first."""
    head = made("eagle1")
    shapes: list[tuple[int, ...]] = []
    read = head.read

    def note_shape(tokens: Tensor, *given: Any) -> Tensor:
        shapes.append(tuple(tokens.shape))
        return read(tokens, *given)

    monkeypatch.setattr(head, "read", note_shape)
    state = open_rows(head, 8)
    updates = updates_of(head, [1, 4, 2, 1, 3, 5, 2, 1])
    state.propose(updates, dict.fromkeys(range(8), budget))
    # the longest update has five tokens
    assert shapes == [(8, 5), *[(8, width) for width in head.forwards(budget)]]
    shapes.clear()
    # rows with shallow drafts leave the forwards of deeper levels
    limits = {row: budget.within(1 if row < 6 else 4) for row in range(8)}
    state.propose(updates, limits)
    assert [rows for rows, _ in shapes] == [8, 2, 2, 2]


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ({7: 1, 3: 16, 5: 4}, [[7, 3, 5]]),
        ({7: 300, 3: 2, 5: 500, 9: 1}, [[3, 9], [7, 5]]),
        (dict.fromkeys(range(5), 1500), [[0, 1], [2, 3], [4]]),
        ({4: 9000}, [[4]]),
    ],
)
def test_long_rows_are_read_apart_from_short_ones(
    counts: dict[int, int], groups: list[list[int]]
) -> None:
    """Padding is bounded, and few prompts share a forward."""
    assert list(split_ragged(counts)) == groups


def count_columns(state: HeadState) -> int:
    """Return the columns of all rows of the cache."""
    buffer: Tensor = state.cache.buffers[0].tensor
    return buffer.shape[0] * buffer.shape[2]


def test_the_memory_of_ended_rows_is_given_back(made: Callable[[str], Any]) -> None:
    """A long row makes room in all others, and the room goes with it."""
    head = made("eagle1")
    state = open_rows(head, 4)
    budget = Budget.fixed(chain_paths(2))
    state.propose(updates_of(head, [2000, 3, 3, 3]), dict.fromkeys(range(4), budget))
    assert count_columns(state) >= 4 * 2000
    state.release(0)
    # a cache grows by 64 columns
    assert count_columns(state) <= 3 * 64
    for row in (1, 2, 3):
        state.release(row)
    assert count_columns(state) <= 64
    assert not state.rows


def test_nan_of_a_row_ends_with_it(made: Callable[[str], Any]) -> None:
    """It reaches neither the rows that remain nor the one that takes its place."""
    head = made("eagle1")
    budget = Budget(6, 3, 2)
    spoiled = open_rows(head, 3)
    clean = open_rows(head, 3)
    first = updates_of(head, [9, 4, 2])
    later = updates_of(head, [1, 1, 1], seed=7)
    updates = {
        1: later[0],
        2: later[1],
        5: later[2],
    }
    trees = []
    # both states do the same, but that one row of the first overflows
    for state in (spoiled, clean):
        state.propose(first, dict.fromkeys(first, budget))
        if state is spoiled:
            with torch.inference_mode():
                for rows in state.cache.buffers:
                    rows.tensor[state.rows.index(0)] = torch.nan
        state.release(0)
        state.admit(5)
        trees.append(state.propose(updates, dict.fromkeys(updates, budget)))
    for row in updates:
        compare(trees[0][row], trees[1][row])


def test_longrope_frequencies_are_each_rows_own() -> None:
    """A short row beside a long one has the tables that it has alone."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 30,
    }
    shape = LlamaConfig(**{**SHAPE.to_dict(), "rope_parameters": longrope})
    rotary = Rotary(shape)
    like = torch.zeros(1)
    # on both sides of the border at 30
    positions = torch.tensor([[3, 4], [50, 51]])
    cos, sin = rotary_tables(rotary, like, positions)
    for row in range(2):
        row_cos, row_sin = rotary_tables(rotary, like, positions[row : row + 1])
        assert torch.equal(cos[row], row_cos[0])
        assert torch.equal(sin[row], row_sin[0])
    # the plain module would take the long row's frequencies for both
    assert not torch.equal(rotary(like, positions)[0][0], cos[0])
