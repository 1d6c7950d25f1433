"""Many texts at once: every row's trees are those that it would have alone, whoever comes, goes or is not asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import product
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
from eagle.drafters.parts import growth, text_state
from eagle.drafters.parts.decoder_block import Rotary, rotary_tables
from eagle.drafters.parts.text_state import split_ragged
from eagle.drafters.recurrent import head_state
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.head_state import HeadState
from eagle.drafters.several import FirstOf
from tests.registry import BY_DEFAULT
from tests.unrolled_heads import SHAPE, frozen_head, moved, new_head

V, CPU = SHAPE.vocab_size, torch.device("cpu")
TREE = Budget.fixed(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
DRAWN = Budget.fixed(TREE.paths or (), "sampled")
BUDGETS: dict[str, list[Budget]] = {
    "dynamic": [Budget(9, 5, 3)],
    "fixed": [TREE],
    "mixed": [Budget(9, 5, 3), TREE, Budget(4, 2, 4), Budget(9, 5, 3, draw="likeliest"), Budget(0)],
    "drawn": [DRAWN],
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 30,
}


def small_model(**more: Any) -> DraftModel:
    """A random language model of the heads' vocabulary in fp64, with fewer positions than some texts come to."""
    torch.manual_seed(4)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = LlamaConfig(
        vocab_size=V, num_hidden_layers=2, max_position_embeddings=70, **sizes, **more
    )
    model = LlamaForCausalLM(config).double().eval()
    torch.nn.init.normal_(model.lm_head.weight, std=0.5)
    return DraftModel(DraftModelSettings(), config, model).bind(frozen_head(torch.float64))


def make(name: str, folder: Path) -> Any:
    """A drafter in fp64, ready to draft."""
    frozen = frozen_head(torch.float64)
    if name.startswith("draft model"):
        longrope = {"rope_parameters": LONGROPE, "original_max_position_embeddings": 30}
        return small_model(**(longrope if "longrope" in name else {}))
    if name in BY_DEFAULT:
        torch.manual_seed(2)
        method = REGISTRY[name]
        settings = method.Settings(
            **{"levels": 4} if "levels" in method.Settings.model_fields else {}
        )
        return moved(method.for_target(settings, SHAPE, frozen)).double().bind(frozen)
    if name == "lookup, eagle1":
        return FirstOf([NgramDrafter(), make("eagle1", folder)])
    if name in ("eagle1", "two blocks"):
        shape = LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": 1 + (name == "two blocks")})
        torch.manual_seed(2)
        return moved(Eagle1(Eagle1.Settings(), shape)).double().bind(frozen)
    return new_head(folder, name, torch.float64).bind(frozen)


# of those that read the target's texts tests/test_conformance.py compares batches
BY_ITSELF = [name for name in BY_DEFAULT if not REGISTRY[name].reads.texts]
DRAFTERS = [
    "eagle1",
    "eagle3",
    "eagle3.1",
    "hass",
    "two blocks",
    "draft model",
    "draft model, longrope",
    *BY_ITSELF,
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Each drafter, made once."""
    known: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in known:
            known[name] = make(name, tmp_path_factory.mktemp("head"))
        return known[name]

    return get


class Text:
    """A row of the batch, and the same text in a state of its own; its noise is that of its request in both."""

    def __init__(self, drafter: Drafter, row: int, sampling: Sampling, dice: random.Random) -> None:
        self.drafter, self.dice, self.row = drafter, dice, row
        self.sampling = replace(sampling, request=row)
        self.alone = drafter.begin(self.noise())
        self.root = dice.randrange(V)
        self.generator = torch.Generator().manual_seed(row)
        self.pending = [self.committed([dice.randrange(V) for _ in range(dice.choice([1, 3, 40]))])]
        self.tree: DraftTree | None = None

    def noise(self) -> Any:
        """What a target that samples would offer."""
        return Choose(self.sampling).offer(V, CPU)

    def committed(self, tokens: list[int]) -> Committed:
        """These tokens with random features."""
        self.root = self.dice.randrange(V)
        features = torch.randn(
            len(tokens), len(self.drafter.taps), 48, generator=self.generator, dtype=torch.float64
        )
        return Committed(torch.tensor(tokens), features, self.root)

    def accept(self) -> None:
        """Commit the root and a random path of the last tree, or no path of it."""
        path: list[int] = []
        if self.tree is not None and self.dice.random() < 0.8:
            children, node = self.tree.children(), 0
            while children[node] and self.dice.random() < 0.8:
                node = self.dice.choice(children[node])
                path.append(int(self.tree.tokens[node]))
        self.pending.append(self.committed([self.root, *path]))


def compare(tree: DraftTree, alone: DraftTree) -> None:
    """The same nodes; likelihoods and probs to rounding."""
    assert tree.tokens.tolist() == alone.tokens.tolist(), "another tree than alone"
    assert tree.parents.tolist() == alone.parents.tolist(), "another tree than alone"
    for mine, its in ((tree.likelihoods, alone.likelihoods), (tree.draft_probs, alone.draft_probs)):
        assert (mine is None) == (its is None)
        if mine is not None and its is not None:
            torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def play(
    drafter: Drafter, budgets: list[Budget], sampling: Sampling, seed: int, cycles: int = 30
) -> int:
    """Rows that come, go and are passed over at random; how many trees of several rows at once were compared."""
    dice, state, texts, compared = random.Random(seed), drafter.open(), list[Text](), 0
    base = {row: dice.choice(budgets) for row in range(cycles)}  # a request keeps its draw
    for cycle in range(cycles):
        if len(texts) < 5 and dice.random() < 0.6:
            texts.append(Text(drafter, cycle, sampling, dice))
            state.admit(cycle, texts[-1].noise())
        asked = [text for text in texts if dice.random() < 0.8]
        dice.shuffle(asked)
        updates = {text.row: Committed.join(text.pending) for text in asked}
        limits = {text.row: base[text.row].within(dice.choice([1, 3, 9])) for text in asked}
        trees = state.propose(updates, limits) if asked else {}
        assert trees.keys() == updates.keys()
        for text in asked:
            text.tree = text.alone.propose(updates[text.row], limits[text.row])
            compare(trees[text.row], text.tree)
            compared += len(asked) > 1 and len(text.tree) > 1
            text.pending = []
        for text in texts:
            text.accept()
        for text in [text for text in texts if dice.random() < 0.12]:
            texts.remove(text)
            state.release(text.row)
    return compared


SAMPLINGS = {"T=0": Sampling(), "T=1": Sampling(temperature=1.0, seed=3, top_k=20)}
QUICK = [
    *product(("eagle1", "eagle3", "draft model", *BY_DEFAULT), [("dynamic", "T=1")]),
    ("eagle1", ("drawn", "T=1")),
    ("eagle3", ("fixed", "T=0")),
    ("draft model, longrope", ("fixed", "T=0")),
]
CASES = [
    pytest.param(
        name, kind, sampling, marks=[pytest.mark.slow] * ((name, (kind, sampling)) not in QUICK)
    )
    for name, kind, sampling in product([*DRAFTERS, "lookup, eagle1"], BUDGETS, SAMPLINGS)
]


@pytest.mark.quick(
    "eagle1-drawn-T=1",
    "eagle3-fixed-T=0",
    "medusa-dynamic-T=1",
    "mlp_speculator-dynamic-T=1",
    "blockwise-dynamic-T=1",
    "hydra-dynamic-T=1",
    "falcon-dynamic-T=1",
)
@pytest.mark.parametrize(("name", "kind", "sampling"), CASES)
def test_every_row_drafts_as_if_it_were_alone(
    name: str, kind: str, sampling: str, made: Callable[[str], Any]
) -> None:
    """Ragged updates, depths that differ, rows passed over, slots that are taken again; each text has its own noise."""
    assert sum(play(made(name), BUDGETS[kind], SAMPLINGS[sampling], seed) for seed in range(2)) > 40


# -- planted faults ---------------------------------------------------------------------------------------------------


def rolled_noise(seeds: list[Any], *rest: Any) -> list[DraftTree]:
    """Each row drafts with the noise of its neighbour, as if noise belonged to slots."""
    noises = [seed.noise for seed in seeds]
    return growth.grow_rows(
        [replace(seed, noise=noises[n - 1]) for n, seed in enumerate(seeds)], *rest
    )


def neighbours_place(starts: list[int], counts: list[int], device: torch.device) -> Tensor:
    """Positions behind another row's text."""
    return positions([*starts[1:], starts[0]], counts, device)


def stays(self: Any, row: int) -> None:
    """A row leaves its columns to the next one in its slot."""
    del self.noises[row]
    if row in self.rows:
        slot = self.rows.index(row)
        self.rows[slot] = self.rows[-1]
        self.rows.pop()


def unhidden(committed: Tensor, seen: Tensor, groups: int) -> Tensor:
    """A mask that shows a short row what lies behind its text."""
    return level_mask(torch.zeros_like(committed), seen, groups)


def left_behind(self: ModelState, row: int) -> None:
    """A row that takes another's slot goes on believing that its draft came with it."""
    levels = {kept: list(self.levels[kept]) for kept in self.levels if kept != row}
    release(self, row)
    self.levels |= levels


positions, level_mask, release = (
    text_state.slot_positions,
    head_state.level_mask,
    ModelState.release,
)


@pytest.mark.parametrize(
    ("name", "home", "part", "fault"),
    [
        ("eagle1", head_state, "grow_rows", rolled_noise),
        ("eagle1", text_state, "slot_positions", neighbours_place),
        ("eagle1", head_state, "level_mask", unhidden),
        ("eagle1", HeadState, "release", stays),
        ("draft model", ModelState, "release", left_behind),
    ],
    ids=[
        "noise by slot",
        "neighbour's offset",
        "columns behind a text",
        "stale rows",
        "draft left behind",
    ],
)
def test_a_disturbed_row_is_seen(
    name: str,
    home: Any,
    part: str,
    fault: Any,
    made: Callable[[str], Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows that draft with another's noise, stand or look where another's text ends, or find what one left there."""
    monkeypatch.setattr(home, part, fault)
    with pytest.raises(AssertionError, match=r"another tree than alone|not close"):
        for seed in range(6):
            play(made(name), BUDGETS["dynamic"], SAMPLINGS["T=1"], seed)


# -- what a batch costs -----------------------------------------------------------------------------------------------


def updates_of(head: Any, counts: list[int], seed: int = 0) -> dict[int, Committed]:
    """An update of so many tokens for each row."""
    texts = {
        row: Text(head, row, Sampling(), random.Random(seed + row)) for row in range(len(counts))
    }
    return {
        row: text.committed([1] * count)
        for (row, text), count in zip(texts.items(), counts, strict=True)
    }


@pytest.mark.parametrize(
    "budget", [Budget(8, 4, 3), Budget.fixed(chain_paths(4))], ids=["dynamic", "chain"]
)
def test_all_rows_share_a_forward_a_level(
    budget: Budget, made: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight ragged rows: one forward over what was committed, then one for each level after the first."""
    head, shapes = made("eagle1"), list[tuple[int, int]]()
    read = head.read

    def counted(tokens: Tensor, *rest: Any) -> Tensor:
        shapes.append((tokens.shape[0], tokens.shape[1]))
        return read(tokens, *rest)

    monkeypatch.setattr(head, "read", counted)
    state, counts = head.open(), [1, 4, 2, 1, 3, 5, 2, 1]
    for row in range(8):
        state.admit(row)
    state.propose(updates_of(head, counts), dict.fromkeys(range(8), budget))
    assert shapes == [(8, 5), *[(8, width) for width in head.forwards(budget)]]
    shapes.clear()
    ends = {row: budget.within(1 if row < 6 else 4) for row in range(8)}
    state.propose(updates_of(head, counts), ends)
    assert [rows for rows, _ in shapes] == [
        8,
        2,
        2,
        2,
    ]  # rows whose texts end soon leave the level's forward


def test_a_prompt_is_not_padded_onto_its_neighbours() -> None:
    """Rows of very different numbers of tokens are read apart, short ones together, and few prompts in one forward."""
    assert list(split_ragged({7: 1, 3: 16, 5: 4})) == [[7, 3, 5]]
    assert list(split_ragged({7: 300, 3: 2, 5: 500, 9: 1})) == [[3, 9], [7, 5]]
    assert list(split_ragged({row: 1500 for row in range(5)})) == [[0, 1], [2, 3], [4]]
    assert list(split_ragged({4: 9000})) == [[4]]


def columns_held(state: HeadState) -> int:
    """Columns of all slots."""
    buffer = state.cache.buffers[0].buffer
    return buffer.shape[0] * buffer.shape[2]


def test_what_ended_texts_held_is_given_back(made: Callable[[str], Any]) -> None:
    """A long text beside short ones makes room, and the room goes with it."""
    head, budget = made("eagle1"), Budget.fixed(chain_paths(2))
    state = head.open()
    for row in range(4):
        state.admit(row)
    state.propose(updates_of(head, [2000, 3, 3, 3]), dict.fromkeys(range(4), budget))
    assert columns_held(state) >= 4 * 2000
    state.release(0)
    assert columns_held(state) <= 3 * 64
    for row in (1, 2, 3):
        state.release(row)
    assert columns_held(state) <= 64 and not state.rows


def test_infinities_of_a_text_end_with_it(made: Callable[[str], Any]) -> None:
    """What overflowed in one row reaches neither its neighbour, nor who moves into its slot, nor who begins there."""
    head, budget = made("eagle1"), Budget(6, 3, 2)
    state, clean = head.open(), head.open()
    for held in (state, clean):
        for row in range(3):
            held.admit(row)
        held.propose(updates_of(head, [9, 4, 2]), dict.fromkeys(range(3), budget))
    with torch.inference_mode():
        for rows in state.cache.buffers:
            rows.buffer[state.rows.index(0)] = torch.nan
    for held in (state, clean):
        held.release(0)
        held.admit(5)
    asked = updates_of(head, [1, 1, 1], 7)
    asked = {1: asked[0], 2: asked[1], 5: asked[2]}
    trees, expected = (held.propose(asked, dict.fromkeys(asked, budget)) for held in (state, clean))
    for row, tree in trees.items():
        compare(tree, expected[row])


def test_frequencies_that_follow_the_longest_text_are_each_rows_own() -> None:
    """Longrope tables of a short row beside a long one are those that it has alone."""
    shape = LlamaConfig(
        **{
            **SHAPE.to_dict(),
            "rope_parameters": {**LONGROPE, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        }
    )
    rotary, like = Rotary(shape), torch.zeros(1)
    places = torch.tensor([[3, 4], [50, 51]])
    together = rotary_tables(rotary, like, places)
    for row in range(2):
        for table, alone in zip(
            together, rotary_tables(rotary, like, places[row : row + 1]), strict=True
        ):
            assert torch.equal(table[row], alone[0])
    assert not torch.equal(rotary(like, places)[0][0], together[0][0])
