"""SPiRe: loss, gradients and drafts against loops over single slots, and against the model that it was cut from."""

# T tokens of a text, n blocks, H width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from eagle import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.core.tree import DraftTree
from eagle.drafters.parts.growth import grow_rows
from eagle.drafters.parts.scoring import DraftRequest
from eagle.drafters.parts.window import Window
from eagle.drafters.self_speculation.spire import Spire, _MemoryLevels
from recipes.forecast import empty_weights
from tests.drafters.test_many_texts import BUDGETS, SAMPLINGS, play
from tests.naive_unroll import Network, attended, output_of, projected, rms
from tests.unrolled_heads import (
    SHAPE,
    SPANS,
    Weights,
    apart,
    computed,
    everywhere,
    frozen_head,
    gradients_of,
    moved,
    texts_of,
)

FP64 = torch.float64
SMALL_WINDOW = Window(1, 4)


def new_head(window: Window | None = SMALL_WINDOW, **settings: Any) -> Any:
    """Return a head in fp64 that looks at some memories more than at others."""
    torch.manual_seed(2)
    head = Spire.for_target(Spire.Settings(window=window, **settings), SHAPE)
    head = moved(head).double().train()
    with torch.no_grad():
        # flat attention would hide a wrong window
        for block in head.layers:
            block.self_attn.q_proj.weight *= 8
            block.self_attn.v_proj.weight *= 4
    return head


# -- the loop ---------------------------------------------------------------------------------------------------------


def sees(
    window: Window | None,
    key: int,
    position: int,
    drafted: bool,
) -> bool:
    """Return whether a query at a position sees the memory of the token at position `key`."""
    if key >= position:
        return False
    if window is None or key >= position - window.recent:
        return True
    # a text's first tokens stay in sight, drafted ones do not
    return key < window.sinks and not drafted


def mix_states(weights: Weights, states: Sequence[Tensor]) -> list[Tensor]:
    """Return the memory [H] of a drafted token for each block, a mean of its embedding and the blocks' outputs."""
    memories = []
    for row in weights["mix"]:
        shares = row.softmax(0)
        memories.append((shares[:, None] * torch.stack(list(states))).sum(0))
    return memories


def network_of(
    weights: Weights,
    head: Any,
    block: int,
) -> Network:
    """Return one block as a network of the naive unroll, which names its only block 0."""
    renamed = {}
    for name, weight in weights.items():
        renamed[name.replace(f"layers.{block}.", "layers.0.")] = weight
    return Network(
        renamed,
        head.shape,
        enter=None,  # type: ignore[arg-type]
        handed=None,  # type: ignore[arg-type]
        steps=1,
    )


def path_states(
    weights: Weights,
    head: Any,
    context: Tensor,
    path: Sequence[int],
    embed: Callable[..., Tensor],
) -> list[Tensor]:
    """Return [H] for each token of a path behind a text, of which the target's states [T, n, H] are known."""
    eps = head.shape.rms_norm_eps
    networks = [network_of(weights, head, block) for block in range(len(head.layers))]
    # position, memory of each block, and whether it was drafted
    memories: list[tuple[int, Any, bool]] = []
    for position, memory in enumerate(context):
        memories.append((position, memory, False))
    outputs = []
    for position, token in enumerate(path, start=len(context)):
        states = [embed(torch.tensor(token))]
        for block, network in enumerate(networks):
            gain = network.weights["layers.0.input_layernorm.weight"]
            query = projected(network, rms(states[-1], gain, eps), position)[0]
            rows = []
            for key, memory, drafted in memories:
                if sees(head.settings.window, key, position, drafted):
                    rows.append(projected(network, rms(memory[block], gain, eps), key))
            keys = torch.stack([row[1] for row in rows])
            values = torch.stack([row[2] for row in rows])
            states.append(output_of(network, states[-1], attended(query, keys, values)))
        memories.append((position, mix_states(weights, states), True))
        outputs.append(rms(states[-1], weights["norm.weight"], eps))
    return outputs


def compute_loss(
    weights: Weights,
    head: Any,
    batch: Batch,
    target_head: TargetHead,
) -> Tensor:
    """Return the loss at every fourth slot or so, from the one that the seed of each text picks."""
    settings = head.settings
    anchors = head.training_slots(batch, batch.tokens.device)[0].rows.tolist()
    columns = (
        batch.tokens,
        batch.loss_mask,
        batch.select_taps(head.taps),
        batch.select_taps((-1,))[:, 0],
    )
    total = torch.zeros((), dtype=FP64)
    first_slot = 0
    for tokens, mask, features, last_states in zip(
        *(column.split(batch.lengths) for column in columns), strict=True
    ):
        stop = first_slot + max(len(tokens) - 2, 0)
        slots = [anchor - first_slot for anchor in anchors if first_slot <= anchor < stop]
        first_slot = stop
        for slot in slots:
            path = tokens[slot + 1 : slot + 1 + settings.steps].tolist()
            states = path_states(
                weights,
                head,
                features[: slot + 1],
                path,
                embed=target_head.embed,
            )
            for label, state in enumerate(states, start=slot + 2):
                if label == len(tokens) or not mask[label]:
                    break
                target_probs = target_head.logits(last_states[label - 1]).softmax(-1)
                probs = target_head.logits(state).softmax(-1)
                kl = (target_probs * (target_probs.log() - probs.log())).sum()
                overlap = torch.minimum(target_probs, probs).sum()
                loss = settings.cross_entropy * kl + (1 - settings.cross_entropy) * (1 - overlap)
                # a text weighs as much as it has supervised tokens, however many slots were picked
                total = total + loss * int(mask[2:].sum()) / len(slots) / batch.slots
    return total


def distance_from_loop(
    lengths: dict[int, list[tuple[int, int]]],
    taps: tuple[int, ...] = (6, 7, 5, -1),
    **settings: Any,
) -> float:
    """Return the relative difference of training's loss and gradients from the loop's."""
    head = new_head(**settings)
    target_head = frozen_head(FP64)
    batch = collate(texts_of(lengths, FP64), taps)
    # the loop reads one query at a time, and shares no attention with the head
    expected = gradients_of(head, lambda weights: compute_loss(weights, head, batch, target_head))
    return apart(head, computed(head, batch, target_head), expected)


@pytest.mark.quick("3 recent")
@pytest.mark.parametrize(
    "settings",
    [
        {"window": Window(0, 3), "steps": 3, "stride": 2},
        {"window": Window(2, 1), "steps": 3, "stride": 2},
        # more steps than lie between slots, and most of the loss is the overlap's
        {
            "blocks": 3,
            "taps": (5, 6, 7, -1),
            "steps": 5,
            "stride": 3,
            "cross_entropy": 0.1,
        },
    ],
    ids=["3 recent", "2+1", "three blocks"],
)
def test_loss_and_gradients_are_those_of_the_loop(settings: dict[str, Any]) -> None:
    """Texts have several answers, or none."""
    assert distance_from_loop(SPANS, **settings) < 1e-6


def test_another_loop_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop whose window is wider by one token is not taken for training."""
    rule = sees

    def see_further(window: Window, *args: Any) -> bool:
        return rule(replace(window, recent=window.recent + 1), *args)

    monkeypatch.setitem(globals(), "sees", see_further)
    assert distance_from_loop({17: [(3, 17)]}) > 1e-3


def test_a_text_is_trained_at_every_fourth_slot() -> None:
    """The seed picks the first slot, so that each has its turn; a text weighs what it has supervised."""
    head = new_head()
    batch = collate(texts_of({40: [(2, 40)], 25: [(9, 20)]}, FP64), (6, 7, 5, -1))
    trained = set()
    for seed in range(16):
        seeded = replace(batch, seeds=(seed, seed + 50))
        spans, weights = head.training_slots(seeded, batch.tokens.device)
        # 38 slots of the first text come first
        first = spans.rows[spans.rows < 38]
        second = spans.rows[spans.rows >= 38]
        assert (first.diff() == 4).all()
        assert (second.diff() == 4).all()
        # 38 and 11 tokens are supervised
        assert weights[0, : len(first)].sum().item() == pytest.approx(38 / 49)
        assert weights[0].sum().item() == pytest.approx(1)
        trained |= set(spans.rows.tolist())
    assert trained == {*range(38), *range(38 + 7, 38 + 18)}


# -- the model that it was cut from -----------------------------------------------------------------------------------


def small_model() -> Any:
    """Return a Llama of two blocks in fp64, whose queries look at some keys more than at others."""
    torch.manual_seed(3)
    sizes = {**SHAPE.to_dict(), "num_hidden_layers": 2}
    # eager attention takes a mask of any shape
    model = LlamaForCausalLM(LlamaConfig(**sizes, attn_implementation="eager")).double().eval()
    for name, weight in model.named_parameters():
        weight.data.add_(torch.randn_like(weight), alpha=0.3 if weight.ndim == 1 else 0.1)
        if "q_proj" in name:
            weight.data.mul_(4)
    return model


def masked_logits(
    model: Any,
    tokens: Tensor,
    root: int,
    window: Window | None,
) -> Tensor:
    """Return the model's logits [T, V] if tokens from the root on see others through the window, and not themselves."""
    positions = torch.arange(len(tokens))
    mask = positions[None] <= positions[:, None]
    for position in range(root, len(tokens)):
        row = [sees(window, key, position, drafted=key >= root) for key in range(len(tokens))]
        mask[position] = torch.tensor(row)
    bias = torch.zeros(mask.shape, dtype=FP64).masked_fill_(~mask, torch.finfo(FP64).min)
    return model(tokens[None], attention_mask=bias[None, None]).logits[0]


@pytest.mark.parametrize(
    "window",
    [None, SMALL_WINDOW],
    ids=["all", "1+4"],
)
def test_a_whole_model_drafts_what_transformers_says_under_a_mask(window: Window | None) -> None:
    """If a head holds all blocks, and its memories are what each reads, every level at every slot is the model's."""
    model = small_model()
    head: Any = Spire.for_target(
        Spire.Settings(window=window),
        model.config,
        weights=model.state_dict().__getitem__,
    )
    head = head.double()
    with torch.no_grad():
        # a softmax of this is the identity
        head.mix.copy_(100 * torch.eye(2, 3))
    tokens = torch.randint(
        SHAPE.vocab_size,
        (14,),
        generator=torch.Generator().manual_seed(1),
    )
    target_head = TargetHead(model.model.embed_tokens, model.lm_head)
    with torch.no_grad():
        states = model(tokens[None], output_hidden_states=True).hidden_states
        features = torch.stack([state[0] for state in states], dim=1)
        batch = collate([Example(tokens, torch.arange(14) >= 2, features)], (0, 1, -1))
        levels = [logits(state) for state, logits in head.draft_levels(batch, target_head, 4)]
        for slot in range(12):
            expected = masked_logits(model, tokens, slot + 1, window)
            for level in range(min(4, 13 - slot)):
                torch.testing.assert_close(
                    levels[level][slot],
                    expected[slot + 1 + level],
                    rtol=1e-6,
                    atol=1e-6,
                )


# -- drafting ---------------------------------------------------------------------------------------------------------


def naive_tree(
    head: Any,
    target_head: TargetHead,
    context: Tensor,
    root: int,
    budget: Budget,
) -> DraftTree:
    """Return a tree of which each node is read with its whole path, by the loop and without a cache."""
    weights = head.state_dict()
    paths: list[list[int]] = []

    def read_path(path: Sequence[int]) -> Tensor:
        return path_states(weights, head, context, path, embed=target_head.embed)[-1]

    def read_level(
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        ancestors: Tensor,
    ) -> Tensor:
        # `grow_rows` names nodes by their place in the last level
        nonlocal paths
        above = [[root]] if depth == 1 else paths
        pairs = zip(tokens[0].tolist(), parents[0].tolist(), strict=True)
        paths = [[*above[parent], token] for token, parent in pairs]
        return target_head.logits(torch.stack([read_path(path) for path in paths]))[None]

    request = DraftRequest(root, len(context) + 1, budget, None)
    first = target_head.logits(read_path([root]))
    return grow_rows([request], first[None], read_level)[0]


@torch.no_grad()
def count_other_trees(window: Window, budget: Budget) -> int:
    """Return how many trees of a text, which comes in pieces of unlike lengths, are not the naive loop's."""
    target_head = frozen_head(FP64)
    head = new_head(window).eval().bind(target_head)
    text = everywhere([20])[0]
    # the head reads two taps
    features = text.features.double()[:, :2]
    state = head.open()
    state.admit(5)
    count = 0
    for start, end in ((0, 7), (7, 8), (8, 12), (12, 20)):
        root = 11 + end
        update = Committed(text.tokens[start:end], features[start:end], root)
        tree = state.propose({5: update}, {5: budget})[5]
        expected = naive_tree(
            head,
            target_head,
            features[:end],
            root,
            budget=budget,
        )
        same_tokens = torch.equal(tree.tokens, expected.tokens)
        count += not (same_tokens and torch.equal(tree.parents, expected.parents))
    return count


@pytest.mark.quick("chain")
@pytest.mark.parametrize(
    ("window", "budget"),
    [
        (Window(2, 1), Budget(5, 5, 1)),
        (SMALL_WINDOW, Budget(12, 4, 3)),
    ],
    ids=["chain", "tree"],
)
def test_trees_are_those_of_the_loop(window: Window, budget: Budget) -> None:
    """The chain is longer than its window, and the text grows beyond both windows."""
    assert count_other_trees(window, budget) == 0


def test_other_drafts_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Levels that are read one position too far draft other tokens than the loop."""
    tables = _MemoryLevels._tables
    monkeypatch.setattr(
        _MemoryLevels,
        "_tables",
        lambda self, depth: tables(self, depth + 1),
    )
    assert count_other_trees(SMALL_WINDOW, Budget(5, 5, 1)) > 0


@pytest.mark.slow
def test_texts_in_small_windows_draft_as_if_alone() -> None:
    """`test_many_texts` has no text as long as the default window; here some are longer and some shorter."""
    head = new_head(Window(2, 3)).eval().bind(frozen_head(FP64))
    assert play(head, BUDGETS["mixed"], SAMPLINGS["T=1"], 0) > 15


def test_memory_of_a_text_is_as_long_as_its_window() -> None:
    """The state of 60 tokens holds the five that the window shows."""
    head = new_head(SMALL_WINDOW).eval().bind(frozen_head(FP64))
    text = everywhere([60])[0]
    state = head.open()
    state.admit(0)
    update = Committed(text.tokens, text.features[:, :2].double(), 3)
    state.propose({0: update}, {0: Budget(2, 2, 1)})
    assert len(state.memory[0]) == 5


# -- where it starts --------------------------------------------------------------------------------------------------


def test_blocks_start_as_the_targets_last() -> None:
    """Every matrix and norm of two blocks, and the norm behind them, is the target's."""
    config = LlamaConfig(**{**SHAPE.to_dict(), "num_hidden_layers": 5})
    weights = LlamaForCausalLM(config).state_dict()
    head: Any = Spire.for_target(
        Spire.Settings(),
        config,
        weights=weights.__getitem__,
    )
    assert head.taps == (3, 4)
    for name, weight in head.state_dict().items():
        if name != "mix":
            renamed = name.replace("layers.1.", "layers.4.").replace("layers.0.", "layers.3.")
            assert torch.equal(weight, weights[f"model.{renamed}"])


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
}
# what stands in the way, and a family that has it
REFUSED = {
    "self_attn.q_proj.bias": Qwen2Config(**SIZES),
    "self_attn.q_norm.weight": Qwen3Config(**SIZES, head_dim=8),
    "gelu_pytorch_tanh": Gemma2Config(**SIZES, head_dim=8),
    "mlp.gate.weight": MixtralConfig(**SIZES, num_local_experts=2),
    "self_attn.q_proj.bias, which": GptOssConfig(**SIZES, head_dim=8, num_local_experts=2),
    "at most the target's 1": LlamaConfig(**{**SIZES, "num_hidden_layers": 1}),
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_blocks_that_cannot_be_copied_are_refused_by_name(keyword: str) -> None:
    """The message names the tensor or activation in the way, or the number of blocks."""
    weights = empty_weights(REFUSED[keyword])
    with pytest.raises(ValueError, match=keyword):
        Spire.for_target(
            Spire.Settings(),
            REFUSED[keyword],
            weights=weights.__getitem__,
        )
