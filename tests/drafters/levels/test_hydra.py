"""Hydra and Hydra++: losses, states and trees against loops over single slots, nodes and whole texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import test_conformance as conformance
import torch
from torch import Tensor
from trained import equal, prepared, rows, run

from eagle import Budget, Sampling, Target, load_drafter
from eagle.core.drafter import Committed
from eagle.core.examples import Batch, collate
from eagle.core.tree import PUBLISHED_TREE, DraftTree
from eagle.data.features import LiveFeatures
from eagle.drafters import DRAFTERS
from eagle.drafters.levels import hydra
from eagle.drafters.levels.hydra import Hydra, HydraSettings
from eagle.drafters.levels.level_heads import LevelHeads
from eagle.drafters.parts import spans, text_state
from eagle.drafters.parts.text_dropout import TextDropout
from tests import naive_hydra
from tests.drafters.test_many_texts import BUDGETS, SAMPLINGS, Text, play
from tests.naive_hydra import level_hidden, level_logits, prefix_states
from tests.unrolled_heads import (
    LONG,
    ONE,
    SHAPE,
    SPANS,
    TAPS,
    apart,
    computed,
    everywhere,
    frozen_head,
    moved,
    texts_of,
)

VARIANTS: dict[str, dict[str, Any]] = {
    "hydra": {"levels": 3, "loss": "tokens"},
    "deep": {"levels": 3, "layers": 3, "regression": 0.4},
    "hydra++": {"levels": 3, "layers": 2, "prefix": True},
    "hydra++ tokens": {
        "levels": 4,
        "layers": 2,
        "prefix": True,
        "loss": "tokens",
        "regression": 2.0,
    },
}
FP64 = torch.float64


def new_head(name: str, **changes: Any) -> Any:
    """A head of a variant in fp64, its weights away from where they start."""
    torch.manual_seed(2)
    settings = HydraSettings(**{**VARIANTS[name], **changes})
    return moved(Hydra.for_target(settings, SHAPE, frozen_head(torch.float32))).to(FP64).train()


def difference(name: str, lengths: dict[int, list[tuple[int, int]]]) -> float:
    """Of training's loss and gradients from the loop's, relative."""
    head, frozen, texts = new_head(name), frozen_head(FP64), texts_of(lengths, FP64)
    weights = {
        key: weight.detach().clone().requires_grad_() for key, weight in head.state_dict().items()
    }
    loss = naive_hydra.hydra_loss(weights, head.settings, head.shape, texts, frozen)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    expected = {"total": loss.detach(), **dict(zip(weights, gradients, strict=True))}
    return apart(head, computed(head, collate(texts, TAPS), frozen), expected)


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_and_gradients_are_those_of_the_loop(name: str) -> None:
    """Texts of several answers, of one token, and none that counts."""
    assert difference(name, SPANS) < 1e-6
    assert difference(name, ONE) < 1e-6


@pytest.mark.slow
def test_a_long_text_is_read_in_pieces() -> None:
    """More rows than attention reads at once."""
    assert difference("hydra++", LONG) < 1e-6


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("begin_at", lambda anchor: anchor + 1),
        ("tokens_behind", lambda anchor, level: range(anchor + 2, anchor + 3 + level)),
        ("tokens_behind", lambda anchor, level: reversed(range(anchor + 1, anchor + 2 + level))),
        ("prefix_states", lambda weights, shape, states: prefix_states({}, shape, states)),
    ],
    ids=["state", "tokens", "order", "no prefix"],
)
def test_another_alignment_is_seen(part: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop with a fault: the next state, the next tokens, tokens the other way round, the states as they are."""
    monkeypatch.setattr(naive_hydra, part, fault)
    try:
        assert difference("hydra++", ONE) > 1e-3
    except RuntimeError as error:  # of weights that nothing depends on
        assert part == "prefix_states" and "not have been used" in str(error)


# -- what a level may see ---------------------------------------------------------------------------------------------


def hidden_of(head: Any, batch: Batch) -> list[Tensor]:
    """What each level's LM head reads at slots 0, 1, .. of the only text."""
    with torch.no_grad():
        return [
            state[:, 0]
            for state in torch.stack(head.level_states(batch, frozen_head(FP64))[1])[:, :, None]
        ]


def leak(name: str) -> None:
    """Level d at slot i changes with tokens up to i + 1 + d and states up to i, and with none behind."""
    (text,) = everywhere([21])
    text = replace(text, features=text.features.double())
    head, batch = new_head(name), collate([text], TAPS)
    whole = hidden_of(head, batch)
    for place in (2, 9, 15):
        tokens, features = batch.tokens.clone(), batch.features.clone()
        tokens[place:] = (tokens[place:] + 1) % SHAPE.vocab_size
        features[place:] += 1
        other_tokens, other_states = (
            hidden_of(head, replace(batch, **change))
            for change in ({"tokens": tokens}, {"features": features})
        )
        for level, (state, read, seen) in enumerate(
            zip(whole, other_tokens, other_states, strict=True)
        ):
            same = (state == read).all(-1)
            first = max(place - 1 - level, 0)
            assert same[:first].all(), f"level {level} saw a token that is drafted later"
            assert not same[first:].any(), f"level {level} did not see a token"
            same = (state == seen).all(-1)
            assert same[:place].all(), f"level {level} saw a later state"
            assert not same[place:].any(), f"level {level} did not see a state"


@pytest.mark.parametrize("name", ["deep", "hydra++"])
def test_no_level_sees_what_comes_later(name: str) -> None:
    """Nor does it miss what it may see."""
    leak(name)


read_token, text_slots = Hydra.read_token, hydra.text_slots


def token_further(self: Any, level: int, state: Tensor, tokens: Tensor, frozen: Any) -> Tensor:
    """Each slot reads the next one's token."""
    return read_token(self, level, state, tokens.roll(-1, -1), frozen)


def state_further(self: Any, batch: Batch, places: Tensor) -> Tensor:
    """Each slot reads the next one's state."""
    return batch.select_taps(self.taps)[:, 0][places + 1].to(self.dtype)


def slots_further(batch: Batch, device: torch.device) -> Any:
    """The blocks read the next slot's state."""
    known, positions, wanted = text_slots(batch, device)
    return known + 1, positions, wanted


def unmasked(count: int, stride: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """No future is hidden."""
    return torch.zeros(count, count, dtype=dtype, device=device)


@pytest.mark.parametrize(
    ("name", "home", "part", "fault", "seen"),
    [
        ("deep", Hydra, "read_token", token_further, "a token that is drafted later"),
        ("deep", LevelHeads, "start_states", state_further, "a later state"),
        ("hydra++", hydra, "text_slots", slots_further, "a later state"),
        ("hydra++", spans, "_future", unmasked, "a later state"),
    ],
    ids=["token", "state", "prefix slot", "mask"],
)
def test_a_leak_is_seen(
    name: str, home: Any, part: str, fault: Any, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: one token or state too far, and a prefix without a mask."""
    monkeypatch.setattr(home, part, fault)
    with pytest.raises(AssertionError, match=f"saw {seen}"):
        leak(name)


# -- drafting ---------------------------------------------------------------------------------------------------------

PATHS = (
    (0,),
    (1,),
    (2,),
    (0, 0),
    (0, 1),
    (1, 0),
    (2, 0),
    (0, 0, 0),
    (0, 1, 0),
    (0, 1, 1),
    (1, 0, 0),
)


def plain_tree(head: Any, states: Tensor, root: int) -> DraftTree:
    """The fixed shape by ranks, each path computed by itself from all states [T, H] that were committed."""
    weights, (frozen,), tokens = dict(head.state_dict()), head.frozen, {(): root}
    last = prefix_states(weights, head.shape, states)[-1]
    for path in sorted(PATHS, key=len):
        read = [tokens[path[:length]] for length in range(len(path))]
        embedded = list(frozen.embed(torch.tensor(read)))
        level = len(path) - 1
        logits = level_logits(weights, level, level_hidden(weights, level, last, embedded))
        tokens[path] = int(logits.argsort(descending=True, stable=True)[path[-1]])
    return DraftTree.from_paths(
        root, [[tokens[path[: end + 1]] for end in range(len(path))] for path in PATHS]
    )


def nodes(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens on the way to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist(), strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def drafted_trees_are_plain(name: str) -> None:
    """Three texts that come and go over eight cycles."""
    head, dice = new_head(name).bind(frozen_head(FP64)), random.Random(1)
    state, texts, seen = head.open(), dict[int, Text](), dict[int, list[Tensor]]()
    for cycle in range(8):
        if cycle in (0, 1, 4):
            texts[cycle], seen[cycle] = Text(head, cycle, Sampling(), dice), []
            state.admit(cycle)
        if cycle == 3:
            state.release(0)
            del texts[0]
        updates = {
            row: Committed.join(text.pending)
            for row, text in texts.items()
            if cycle != 6 or row == 4
        }
        trees = state.propose(updates, dict.fromkeys(updates, Budget.fixed(PATHS)))
        for row, update in updates.items():
            assert update.features is not None
            seen[row].append(update.features[:, 0])
            expected = plain_tree(head, torch.cat(seen[row]), update.root)
            assert nodes(trees[row]) == nodes(expected), "another tree"
            texts[row].tree, texts[row].pending = trees[row], []
        for text in texts.values():
            text.accept()


@pytest.mark.parametrize("name", ["deep", "hydra++"])
@torch.no_grad()
def test_drafts_are_those_of_a_loop_without_a_cache(name: str) -> None:
    """Of every text, whatever others are beside it."""
    drafted_trees_are_plain(name)


def elder(head: Any, level: int, state: Tensor, tokens: Tensor, frozen: Any) -> Tensor:
    """A node reads the token of the one before it."""
    return read_token(head, level, state, tokens.roll(1, -1), frozen)


positions = text_state.slot_positions


def forgetful(starts: list[int], counts: list[int], device: torch.device) -> Tensor:
    """Every update stands at the beginning."""
    return positions([0] * len(starts), counts, device)


@pytest.mark.parametrize(
    ("home", "part", "fault"),
    [(Hydra, "read_token", elder), (text_state, "slot_positions", forgetful)],
    ids=["a neighbour's token", "positions"],
)
@torch.no_grad()
def test_another_draft_is_seen(
    home: Any, part: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: nodes that read another's token, updates that stand elsewhere."""
    monkeypatch.setattr(home, part, fault)
    with pytest.raises(AssertionError, match="another tree"):
        drafted_trees_are_plain("hydra++")


@pytest.mark.parametrize(
    ("kind", "sampling"), [("mixed", "T=1"), ("drawn", "T=1"), ("fixed", "T=0")]
)
def test_rows_are_as_each_alone(kind: str, sampling: str) -> None:
    """Texts that come, go and are passed over at random, with noise of their own."""
    for name in ("deep", "hydra++"):
        assert (
            play(
                new_head(name).bind(frozen_head(FP64)),
                BUDGETS[kind],
                SAMPLINGS[sampling],
                5,
                cycles=15,
            )
            > 5
        )


# -- dropout ----------------------------------------------------------------------------------------------------------


def test_dropout_is_that_of_the_seed_and_of_training_alone() -> None:
    """Of numbers in front of blocks and LM heads: another loss for another text's seed, and none while not training."""
    head, frozen = new_head("hydra++", dropout=0.3), frozen_head(FP64)
    batch = collate(texts_of(SPANS, FP64), TAPS)

    def loss(seed: int) -> float:
        return float(head(replace(batch, seeds=(seed, *batch.seeds[1:])), frozen)["total"].detach())

    assert loss(3) == loss(3) != loss(4)
    whole = head.validate(batch, frozen, conformance.TREES)
    assert loss(3) != head.eval()(batch, frozen)["total"] == loss(3) == loss(4)
    assert (
        head.validate(batch, frozen, conformance.TREES)["cross_entropy"] == whole["cross_entropy"]
    )


@pytest.mark.parametrize("layers", [1, 3])
def test_dropout_stands_in_front_of_every_block_and_lm_head(
    layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the widths of what is dropped from: a level's concatenation, then the target's width."""
    head, frozen = new_head("deep", layers=layers, dropout=0.5, regression=0.0), frozen_head(FP64)
    widths: list[int] = []
    monkeypatch.setattr(
        TextDropout, "__call__", lambda drop, state: widths.append(state.shape[-1]) or state
    )
    head(collate(texts_of(ONE, FP64), TAPS), frozen)
    wide = [48 * (level + 2) for level in range(3)]
    assert sorted(widths) == sorted(wide + 3 * layers * [48])


# -- all that any method must hold, with a prefix ---------------------------------------------------------------------


class PlusSettings(HydraSettings):
    """Hydra++ by default."""

    kind: Literal["hydra++"] = "hydra++"  # type: ignore[assignment]
    layers: int = 2
    prefix: bool = True
    dropout: float = 0.1


class Plus(Hydra):
    """Hydra++ under a name of its own."""

    Settings = PlusSettings


examples, batch = conformance.examples, conformance.batch  # fixtures


@pytest.fixture(scope="module", autouse=True)
def registered() -> Iterator[None]:
    """As long as these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(DRAFTERS, "hydra++", Plus)
        for names in ("TRAINED", "LAWFUL"):
            patch.setattr(conformance, names, [*getattr(conformance, names), "hydra++"])
        patch.setattr(conformance, "RANKED", [Budget(8, 4, 3), Budget.fixed(PUBLISHED_TREE)])
        patch.setattr(conformance, "DRAWN", [])
        yield


WARM = pytest.param(conformance.SAMPLINGS[2], marks=pytest.mark.slow)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [conformance.SAMPLINGS[0], WARM], ids=["greedy", "T=1"])
def test_decoding_with_a_prefix_is_lossless_and_forgets(
    sampling: Sampling, tiny_target: Target
) -> None:
    """The untouched model's own tokens, and a second text as if it were the first."""
    conformance.test_output_is_the_untouched_models_own("hydra++", sampling, tiny_target)
    conformance.test_begin_forgets("hydra++", sampling, tiny_target)
    conformance.test_texts_side_by_side_are_as_each_alone("hydra++", sampling, tiny_target)


@pytest.mark.slow
def test_what_is_trained_with_a_prefix_is_learned_saved_and_loaded(
    tiny_target: Target, batch: Batch, examples: LiveFeatures, tmp_path: Path
) -> None:
    """The loss falls, sees no future, and adds up in validation; a head from disk drafts the same."""
    conformance.test_loss_falls_on_one_batch("hydra++", tiny_target, batch)
    conformance.test_loss_counts_supervised_tokens_alone("hydra++", tiny_target, batch)
    conformance.test_loss_depends_on_what_is_supervised("hydra++", tiny_target, batch)
    conformance.test_what_is_judged_adds_up("hydra++", tiny_target, batch, examples)
    conformance.test_save_and_load_give_the_same_proposal("hydra++", tiny_target, tmp_path)
    conformance.test_noise_is_that_of_the_places_that_are_drafted_for("hydra++", tiny_target)
    for budget in conformance.RANKED:
        conformance.test_trees_are_rooted_and_within_budget("hydra++", budget, tiny_target)


@pytest.mark.slow
def test_a_run_goes_on_as_it_would_have(tiny_target_dir: Path, tmp_path: Path) -> None:
    """With dropout: stopped after half of its steps and gone on with, it leaves the same bytes."""
    plus = [
        "drafter={kind: hydra, levels: 2, layers: 2, prefix: true, dropout: 0.2, regression: 0.1}"
    ]
    command = prepared(tiny_target_dir, tmp_path, *plus)
    asked = ["train.epochs=1", "train.checkpoint_every=3"]
    whole, out = (run(command, tmp_path / name, *asked) for name in ("whole", "halves"))
    (out / "checkpoints/step-6/complete.json").unlink()
    run(command, out, *asked)
    assert equal(out, whole) and rows(out) == rows(whole)
    assert (
        load_drafter(out / "last", Target.load(tiny_target_dir / "target")).settings.dropout == 0.2
    )


def test_a_first_forward_is_timed_with_its_prefix(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the levels behind it without."""
    head: Any = conformance.new_head("hydra++", tiny_target).bind(tiny_target.head)
    read: list[int] = []
    whole: Callable[..., Tensor] = head.read
    monkeypatch.setattr(
        head, "read", lambda tokens, *rest: read.append(tokens.shape[1]) or whole(tokens, *rest)
    )
    first, level = head.probe(32, 5, 1), head.probe(32, 5, 5)
    read.clear()
    first()
    assert read == [5]
    (logits,) = level()
    assert read == [5] and logits.shape == (1, 5, tiny_target.vocab_size)
