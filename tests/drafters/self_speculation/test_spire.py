"""SPiRe: loss, gradients and drafts against loops over single slots, and against the model that it was cut from."""

# T tokens of a text, n blocks, H width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trained import equal, prepared, rows, run
from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from eagle import Budget, Target, load_drafter
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import PUBLISHED_TREE, DraftTree
from eagle.drafters.parts.growth import grow_rows
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.window import Window
from eagle.drafters.self_speculation import spire
from eagle.drafters.self_speculation.spire import MemoryState, Spire, _MemoryLevels
from recipes.forecast import empty_weights
from tests.drafters.test_many_texts import BUDGETS, SAMPLINGS, play
from tests.naive_unroll import Network, attended, output_of, projected, rms
from tests.unrolled_heads import (
    LONG,
    SHAPE,
    SPANS,
    apart,
    computed,
    everywhere,
    frozen_head,
    moved,
    texts_of,
)

FP64 = torch.float64
COLUMNS = (6, 7, 5, -1)  # which taps the random states of tests are
WINDOWS = {"all": None, "1+4": Window(1, 4), "3 recent": Window(0, 3), "2+1": Window(2, 1)}


def new_head(window: Window | None = WINDOWS["1+4"], **settings: Any) -> Any:
    """A head in fp64 with weights away from where they start, which looks at some memories more than at others."""
    torch.manual_seed(2)
    head = (
        moved(Spire.for_target(Spire.Settings(window=window, **settings), SHAPE)).double().train()
    )
    with torch.no_grad():
        for block in head.layers:
            block.self_attn.q_proj.weight *= 8
            block.self_attn.v_proj.weight *= 4
    return head


def batch_of(lengths: dict[int, list[tuple[int, int]]]) -> Batch:
    """Random texts with random states of the target."""
    return collate(texts_of(lengths, FP64), COLUMNS)


# -- the loop ---------------------------------------------------------------------------------------------------------


def sees(window: Window | None, place: int, position: int, drafted: bool) -> bool:
    """Whether a query at a position sees the memory of a token that stands at a place before it."""
    sink = window is not None and place < window.sinks and not drafted
    return place < position and (window is None or sink or place >= position - window.recent)


def memories_of(weights: dict[str, Tensor], states: Sequence[Tensor]) -> list[Tensor]:
    """[H] for each block, of a drafted token with these embedding and outputs."""
    return [
        sum(share * state for share, state in zip(row.softmax(0), states, strict=True))
        for row in weights["mix"]
    ]


def level_states(
    weights: dict[str, Tensor],
    head: Any,
    context: Tensor,
    path: Sequence[int],
    embed: Callable[..., Tensor],
) -> list[Tensor]:
    """[H] for each token of a path that follows a text with these states of the target [T, n, H]."""
    known: list[tuple[int, Any, bool]] = [
        (place, states, False) for place, states in enumerate(context)
    ]
    found = []
    for depth, token in enumerate(path):
        position, states = len(context) + depth, [embed(torch.tensor(token))]
        for number in range(len(head.layers)):
            mine = {
                name.replace(f"layers.{number}.", "layers.0."): weight
                for name, weight in weights.items()
            }
            network = Network(mine, head.shape, None, None, 1)  # type: ignore[arg-type]
            gain, eps = weights[f"layers.{number}.input_layernorm.weight"], head.shape.rms_norm_eps
            query = projected(network, rms(states[-1], gain, eps), position)[0]
            rows = [
                projected(network, rms(memory[number], gain, eps), place)
                for place, memory, drafted in known
                if sees(head.settings.window, place, position, drafted)
            ]
            keys, values = (torch.stack([row[part] for row in rows]) for part in (1, 2))
            states.append(output_of(network, states[-1], attended(query, keys, values)))
        known.append((position, memories_of(weights, states), True))
        found.append(rms(states[-1], weights["norm.weight"], head.shape.rms_norm_eps))
    return found


def loss_of(weights: dict[str, Tensor], head: Any, batch: Batch, frozen: TargetHead) -> Tensor:
    """The loss at the slots of the phase that was drawn for each text."""
    settings, anchors, begin = (
        head.settings,
        head.training_slots(batch, batch.tokens.device)[0].rows.tolist(),
        0,
    )
    total = torch.zeros((), dtype=FP64)
    columns = (
        batch.tokens,
        batch.loss_mask,
        batch.select_taps(head.taps),
        batch.select_taps((-1,))[:, 0],
    )
    supervised = sum(int(mask[2:].sum()) for mask in batch.loss_mask.split(batch.lengths))
    for tokens, mask, features, true in zip(
        *(column.split(batch.lengths) for column in columns), strict=True
    ):
        mine = [anchor - begin for anchor in anchors if begin <= anchor < begin + len(tokens) - 2]
        begin += max(len(tokens) - 2, 0)
        for slot in mine:
            path = tokens[slot + 1 : slot + 1 + settings.steps].tolist()
            states = level_states(weights, head, features[: slot + 1], path, frozen.embed)
            for named, state in enumerate(states, start=slot + 2):
                if named == len(tokens) or not mask[named]:
                    break
                target_probs, probs = (
                    frozen.logits(part).softmax(-1) for part in (true[named - 1], state)
                )
                apart = (target_probs * (target_probs.log() - probs.log())).sum()
                overlap = torch.minimum(target_probs, probs).sum()
                loss = settings.cross_entropy * apart + (1 - settings.cross_entropy) * (1 - overlap)
                total = total + loss * int(mask[2:].sum()) / len(mine) / supervised
    return total


def difference(lengths: dict[int, list[tuple[int, int]]], **settings: Any) -> float:
    """Of training's loss and gradients from the loop's, relative."""
    head, frozen, batch = new_head(**settings), frozen_head(FP64), batch_of(lengths)
    weights = {
        key: weight.detach().clone().requires_grad_() for key, weight in head.state_dict().items()
    }
    loss = loss_of(weights, head, batch, frozen)
    gradients = torch.autograd.grad(loss, list(weights.values()))
    expected = {"total": loss.detach(), **dict(zip(weights, gradients, strict=True))}
    return apart(head, computed(head, batch, frozen), expected)


@pytest.mark.quick("3 recent")
@pytest.mark.parametrize("window", WINDOWS)
def test_loss_and_gradients_are_those_of_the_loop(window: str) -> None:
    """Texts of several answers, and one where nothing is supervised."""
    assert difference(SPANS, window=WINDOWS[window], steps=3, stride=2) < 1e-6


@pytest.mark.slow
def test_a_head_of_three_blocks_by_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """More passes than lie between slots, and most of the loss the overlap's."""
    monkeypatch.setitem(globals(), "COLUMNS", (5, 6, 7, -1))
    assert difference(SPANS, blocks=3, steps=5, stride=3, cross_entropy=0.1) < 1e-6


@pytest.mark.slow
def test_a_long_text_is_read_in_pieces() -> None:
    """More rows than attention reads at once, every fourth of them."""
    assert difference(LONG) < 1e-6


sees_by_rule = sees
FAULTS: dict[str, tuple[str, Any]] = {
    "own memory": ("sees", lambda window, place, position, drafted: place <= position),
    "a wider window": (
        "sees",
        lambda window, *at: sees_by_rule(replace(window, recent=window.recent + 1), *at),
    ),
    "no sinks": ("sees", lambda window, *at: sees_by_rule(replace(window, sinks=0), *at)),
    "sums of states": (
        "memories_of",
        lambda weights, states: [torch.stack(tuple(states)).sum(0)] * 2,
    ),
}


@pytest.mark.quick("a wider window")
@pytest.mark.parametrize("fault", FAULTS)
def test_another_loop_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop with a fault: other memories, or more and fewer of them."""
    name, planted = FAULTS[fault]
    monkeypatch.setitem(globals(), name, planted)
    try:
        assert difference({17: [(3, 17)]}) > 1e-3
    except RuntimeError as error:  # of weights that nothing depends on
        assert name == "memories_of" and "not have been used" in str(error)


def test_a_text_is_trained_at_every_fourth_slot() -> None:
    """From one that its seed decides: each supervised slot has its turn, and a text weighs what it has of them."""
    head, batch = new_head(), batch_of({40: [(2, 40)], 25: [(9, 20)]})
    seen = set()
    for seed in range(16):
        spans, weights = head.training_slots(
            replace(batch, seeds=(seed, seed + 50)), batch.tokens.device
        )
        rows = spans.rows
        first, second = rows[rows < 38], rows[rows >= 38]
        assert (first.diff() == 4).all() and (second.diff() == 4).all()
        assert weights[0, : len(first)].sum().item() == pytest.approx(38 / 49)
        assert weights[0].sum().item() == pytest.approx(1)
        seen |= set(rows.tolist())
    assert seen == set(range(38)) | set(range(38 + 7, 38 + 18))


# -- the model that it was cut from -----------------------------------------------------------------------------------


def small_model() -> Any:
    """A target of two blocks in fp64, whose queries look at some keys more than at others."""
    torch.manual_seed(3)
    config = LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": 2}, attn_implementation="eager")
    model = LlamaForCausalLM(config).double().eval()
    for name, weight in model.named_parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3 if weight.ndim == 1 else 0.1)
        weight.data.mul_(4 if "q_proj" in name else 1)
    return model


def from_model(model: Any, window: Window | None) -> Any:
    """All of its blocks, with memories that are what each block reads itself."""
    head: Any = Spire.for_target(
        Spire.Settings(window=window), model.config, weights=model.state_dict().__getitem__
    )
    with torch.no_grad():
        head.mix.copy_(100 * torch.eye(2, 3))
    return head.double()


def model_logits(model: Any, tokens: Tensor, root: int, window: Window | None) -> Tensor:
    """[T, V], the whole model's, where from the root on tokens see those before them in a window alone."""
    place = torch.arange(len(tokens))
    mask = place[None] <= place[:, None]
    for position in range(root, len(tokens)):
        mask[position] = torch.tensor(
            [sees(window, int(at), position, bool(at >= root)) for at in place]
        )
    hidden = torch.zeros(mask.shape, dtype=FP64).masked_fill_(~mask, torch.finfo(FP64).min)
    return model(tokens[None], attention_mask=hidden[None, None]).logits[0]


@pytest.mark.parametrize("window", WINDOWS)
def test_a_whole_model_as_its_own_draft_says_what_it_would_without_own_keys(window: str) -> None:
    """Every level, at every slot: the model itself, read by transformers under a mask."""
    model, shown, levels = small_model(), WINDOWS[window], 4
    head = from_model(model, shown)
    tokens = torch.randint(SHAPE.vocab_size, (14,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
        features = torch.stack([states[0][0], states[1][0], states[2][0]], dim=1)
        batch = collate([Example(tokens, torch.arange(14) >= 2, features)], (0, 1, -1))
        frozen = TargetHead(model.model.embed_tokens, model.lm_head)
        found = [logits(state) for state, logits in head.draft_levels(batch, frozen, levels)]
        for slot in range(12):
            expected = model_logits(model, tokens, slot + 1, shown)
            for level in range(min(levels, 13 - slot)):
                torch.testing.assert_close(
                    found[level][slot], expected[slot + 1 + level], rtol=1e-6, atol=1e-6
                )


# -- what a level may see ---------------------------------------------------------------------------------------------


def leak(head: Any) -> None:
    """Level d at slot i changes with tokens from i + 1 to i + 1 + d and states up to i, and with none behind."""
    (text,) = everywhere([19])
    batch = collate([replace(text, features=text.features.double())], COLUMNS)
    frozen = frozen_head(FP64)

    def states_of(batch: Batch) -> Tensor:
        with torch.no_grad():
            return torch.stack([state for state, _ in head.draft_levels(batch, frozen, 4)])

    whole = states_of(batch)
    for place in (2, 9, 15):
        tokens, features = batch.tokens.clone(), batch.features.clone()
        tokens[place] = (tokens[place] + 1) % SHAPE.vocab_size
        features[place] += torch.randn(features[place].shape, dtype=FP64)
        for level, (before, token, state) in enumerate(
            zip(
                whole,
                states_of(replace(batch, tokens=tokens)),
                states_of(replace(batch, features=features)),
                strict=True,
            )
        ):
            slots = torch.arange(len(before))
            assert torch.equal(
                (before != token).any(-1), (slots <= place - 1) & (slots + 1 + level >= place)
            )
            assert torch.equal((before != state).any(-1), slots >= place)


def test_no_level_sees_what_comes_later() -> None:
    """Nor does it miss what it may see."""
    leak(new_head(window=None))


@pytest.mark.parametrize("fault", ["a later state", "a later token"])
def test_a_leak_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories that begin a state late, or tokens that do."""
    select = Batch.select_taps
    if fault == "a later state":
        monkeypatch.setattr(Batch, "select_taps", lambda self, taps: select(self, taps).roll(-1, 0))
    else:
        slots = spire.text_slots
        moved_on = lambda batch, device: (slots(batch, device)[0] + 1, *slots(batch, device)[1:])  # noqa: E731
        monkeypatch.setattr(spire, "text_slots", moved_on)
    with pytest.raises(AssertionError):
        leak(new_head(window=None))


# -- drafting ---------------------------------------------------------------------------------------------------------


def naive_tree(
    head: Any, frozen: TargetHead, context: Tensor, root: int, budget: Budget
) -> DraftTree:
    """The tree of whose nodes each is read with its whole path anew."""
    weights = head.state_dict()
    paths: list[list[int]] = [[root]]

    def level(depth: int, rows: list[int], tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
        nonlocal paths
        if depth == 1:
            paths = [[root]]
        paths = [
            [*paths[parent], token]
            for token, parent in zip(tokens[0].tolist(), before[0].tolist(), strict=True)
        ]
        states = [level_states(weights, head, context, path, frozen.embed)[-1] for path in paths]
        return frozen.logits(torch.stack(states))[None]

    first = frozen.logits(level_states(weights, head, context, [root], frozen.embed)[0])
    return grow_rows([DraftRequest(root, len(context) + 1, budget, None)], first[None], level)[0]


DRAFTED = [
    Budget(12, 4, 3),
    pytest.param(Budget.fixed(PUBLISHED_TREE), marks=pytest.mark.slow),
    Budget(5, 5, 1),
]


def unlike_trees(window: Window | None, budget: Budget) -> int:
    """How many trees of a text that grows by ragged updates are not those of the naive loop."""
    head, frozen = new_head(window=window).eval(), frozen_head(FP64)
    head.bind(frozen)
    (text,) = everywhere([20])
    features, unlike = text.features.double()[:, :2], 0
    state = head.open()
    state.admit(5)
    for start, end in ((0, 7), (7, 8), (8, 12), (12, 20)):
        update = Committed(text.tokens[start:end], features[start:end], 11 + end)
        tree = state.propose({5: update}, {5: budget})[5]
        expected = naive_tree(head, frozen, features[:end], 11 + end, budget)
        same = torch.equal(tree.tokens, expected.tokens) and torch.equal(
            tree.parents, expected.parents
        )
        if same and tree.likelihoods is not None and expected.likelihoods is not None:
            same = torch.allclose(tree.likelihoods, expected.likelihoods, atol=1e-4)
        unlike += not same
    return unlike


@pytest.mark.quick("2+1-chain")
@pytest.mark.parametrize("budget", DRAFTED, ids=["tree", "published", "chain"])
@pytest.mark.parametrize("window", [*WINDOWS][1:])
def test_trees_are_those_of_the_loop(window: str, budget: Budget) -> None:
    """A text that grows by ragged updates, longer than the window and shorter."""
    with torch.no_grad():
        assert unlike_trees(WINDOWS[window], budget) == 0


def own_column(self: _MemoryLevels, *given: Any) -> Tensor:
    """A level whose nodes see their siblings' memories too."""
    depth, rows, tokens, before, seen = given
    seen = torch.ones_like(seen)
    return CALL(self, depth, rows, tokens, before, seen)


CALL = _MemoryLevels.__call__


@pytest.mark.quick("positions")
@pytest.mark.parametrize("fault", ["siblings", "still windows", "positions", "no trimming"])
def test_other_drafts_are_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that see others than their ancestors, a window that does not move, tables a position late, none at all."""
    tables = _MemoryLevels._tables
    if fault == "siblings":
        monkeypatch.setattr(_MemoryLevels, "__call__", own_column)
    elif fault == "still windows":
        monkeypatch.setattr(
            Window, "hides", lambda self, place, *_: torch.zeros_like(place, dtype=torch.bool)
        )
    elif fault == "positions":
        monkeypatch.setattr(_MemoryLevels, "_tables", lambda self, depth: tables(self, depth + 1))
    else:
        monkeypatch.setattr(MemoryState, "_trim", lambda self, memory: memory)
    with torch.no_grad():
        assert unlike_trees(Window(1, 4), Budget(12, 4, 3)) > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixed", pytest.param("dynamic", marks=pytest.mark.slow)])
def test_texts_in_small_windows_draft_as_if_alone(kind: str) -> None:
    """Texts of unlike lengths, some shorter than the window."""
    head = new_head(window=Window(2, 3)).eval().bind(frozen_head(FP64))
    assert play(head, BUDGETS[kind], SAMPLINGS["T=1"], 0) > 15


def test_memory_of_a_text_is_as_long_as_its_window() -> None:
    """However long the text is."""
    head = new_head(window=Window(1, 4)).eval().bind(frozen_head(FP64))
    (text,) = everywhere([60])
    state = head.open()
    state.admit(0)
    state.propose(
        {0: Committed(text.tokens, text.features[:, :2].double(), 3)}, {0: Budget(2, 2, 1)}
    )
    assert len(state.memory[0]) == 5


# -- where it starts --------------------------------------------------------------------------------------------------


def test_blocks_start_as_the_targets_last() -> None:
    """Every matrix and norm of theirs, and the norm behind."""
    config = LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": 5})
    weights = LlamaForCausalLM(config).state_dict()
    head: Any = Spire.for_target(Spire.Settings(), config, weights=weights.__getitem__)
    assert head.taps == (3, 4)
    for name, weight in head.state_dict().items():
        if name == "norm.weight":
            assert torch.equal(weight, weights["model.norm.weight"])
        elif name != "mix":
            number = int(name.split(".")[1])
            assert torch.equal(
                weight, weights[f"model.{name.replace(f'layers.{number}', f'layers.{number + 3}')}"]
            )


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OTHERS = {
    "self_attn.q_proj.bias": Qwen2Config(**SMALL, num_hidden_layers=3),
    "self_attn.q_norm.weight": Qwen3Config(**SMALL, num_hidden_layers=3, head_dim=8),
    "gelu_pytorch_tanh": Gemma2Config(**SMALL, num_hidden_layers=3, head_dim=8),
    "mlp.gate.weight": MixtralConfig(**SMALL, num_hidden_layers=3, num_local_experts=2),
    "self_attn.q_proj.bias, which": GptOssConfig(
        **SMALL, num_hidden_layers=3, head_dim=8, num_local_experts=2
    ),
}


@pytest.mark.parametrize("tensor", OTHERS)
def test_blocks_of_other_families_are_refused_by_name(tensor: str) -> None:
    """Biases, norms of queries, experts, another activation: the message says what stands in the way."""
    weights = empty_weights(OTHERS[tensor])
    with pytest.raises(ValueError, match=tensor):
        Spire.for_target(Spire.Settings(), OTHERS[tensor], weights=weights.__getitem__)


def test_more_blocks_than_the_target_has_are_refused() -> None:
    """By their number."""
    with pytest.raises(ValueError, match="at most the target's 8"):
        Spire.for_target(Spire.Settings(blocks=9), SHAPE)


@pytest.mark.slow
def test_a_run_on_stored_features_starts_from_the_targets_blocks(
    tiny_target_dir: Path, tmp_path: Path
) -> None:
    """Stopped after half of its steps and gone on with, it leaves the same bytes; few steps leave them near."""
    command = prepared(tiny_target_dir, tmp_path, "drafter={kind: spire}")
    asked = ["train.epochs=1", "train.checkpoint_every=3"]
    whole, out = (run(command, tmp_path / name, *asked) for name in ("whole", "halves"))
    (out / "checkpoints/step-6/complete.json").unlink()
    run(command, out, *asked)
    assert equal(out, whole) and rows(out) == rows(whole)
    target = Target.load(tiny_target_dir / "target", dtype=torch.float32)
    drafter: Any = load_drafter(out / "last", target)
    first = drafter.layers[0].self_attn.k_proj.weight.flatten()
    copied = target.tensor(f"model.layers.{drafter.taps[0]}.self_attn.k_proj.weight").flatten()
    assert torch.cosine_similarity(first, copied, dim=0) > 0.9
