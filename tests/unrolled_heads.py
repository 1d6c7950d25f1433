"""Small heads of EAGLE-3 and HASS with every switch, random texts for them, and their losses by the naive loop."""

# B sequences, T tokens, H hidden

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch, Example, collate
from eagle.drafters.parts.decoder_block import rotary_tables
from eagle.drafters.parts.reduced_vocab import save_draft_vocab
from eagle.drafters.parts.sequence_state import causal_mask
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.drafters.recurrent.hass import Hass
from tests import naive_unroll

# four heads in groups of two, together wider than the state; 97 tokens, of which a head may say 70
SHAPE = LlamaConfig(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)
# heads that together are as wide as the state
NARROW = LlamaConfig(**{**SHAPE.to_dict(), "head_dim": 12})
TAPS = (2, 4, 5, -1)
# answers of many tokens, of one, at the end of a text, and none that a drafter could write
SPANS = {
    17: [(3, 5), (6, 7), (8, 17)],
    9: [(2, 4), (8, 9)],
    8: [(0, 1)],
    12: [(2, 12)],
}
# one text with a gap that no draft bridges
ONE = {30: [(6, 20), (29, 30)]}
# one run of more rows than attention reads at once
LONG = {310: [(5, 8), (30, 175), (306, 310)], 12: [(4, 12)]}
VARIANTS: dict[str, dict[str, Any]] = {
    "eagle3": {"kind": "eagle3"},
    "eagle3 draft vocabulary": {"kind": "eagle3", "draft_vocab": True},
    "eagle3 regression": {
        "kind": "eagle3",
        "draft_vocab": True,
        "regression": 0.5,
        "loss": "acceptance",
    },
    "eagle3 frozen": {"kind": "eagle3", "train_lm_head": False, "intermediate_size": 64},
    "eagle3 random": {"kind": "eagle3", "draft_vocab": True, "lm_head": "random", "decay": 0.6},
    "eagle3 normed residual": {"kind": "eagle3", "norm_before_residual": True},
    "eagle3.1": {"kind": "eagle3", "draft_vocab": True, "fc_norm": True, "norm_output": True},
    "eagle3 joint norm": {"kind": "eagle3", "norm_before_fc": True, "norm_output": True},
    "eagle3 acceptance": {
        "kind": "eagle3",
        "draft_vocab": True,
        "loss": "acceptance",
        "fc_norm": True,
    },
    "eagle3 hybrid": {
        "kind": "eagle3",
        "loss": "hybrid",
        "norm_output": True,
        "norm_before_residual": True,
    },
    "hass": {"kind": "hass", "noise": 0.0},
    "hass weighted": {
        "kind": "hass",
        "noise": 0.0,
        "fc_bias": False,
        "regression": 0.4,
        "cross_entropy": 0.7,
        "top": 0.3,
        "top_k": 3,
    },
}
Weights = dict[str, Tensor]


def causal_states(
    head: Any,
    tokens: Tensor,
    hidden: Tensor,
    start: int,
    target_head: TargetHead,
) -> Tensor:
    """Return [B, T, H], the states of one causal pass without a cache over slots that begin at position `start`.

    Args:
        head: the head.
        tokens: [B, T].
        hidden: [B, T, H], what the slots read beside the tokens.
        start: the position of the first slot.
        target_head: the target's embedding and LM head.
    """
    positions = torch.arange(tokens.shape[1])[None]
    tables = rotary_tables(head.rotary, hidden, start + positions)
    mask = None
    if head.window is not None:
        mask = causal_mask(positions, tokens.shape[1], hidden.dtype, head.window)
    caches = [None] * len(head.layers)
    states: Tensor = head.read(tokens, hidden, tables, mask, caches, target_head)
    return states


def texts_of(spans: dict[int, list[tuple[int, int]]], dtype: torch.dtype) -> list[Example]:
    """Return random texts with random states of the target; `spans` has the answers of each length."""
    generator = torch.Generator().manual_seed(3)
    examples = []
    for length, answers in spans.items():
        mask = torch.zeros(length, dtype=torch.bool)
        for start, stop in answers:
            mask[start:stop] = True
        size = (length, len(TAPS), SHAPE.hidden_size)
        features = torch.randn(size, generator=generator, dtype=dtype)
        # low ids are frequent, so that the draft vocabulary covers much and not all
        tokens = (torch.rand(length, generator=generator) ** 3 * SHAPE.vocab_size).long()
        examples.append(Example(tokens, mask, features))
    return examples


def split_texts(batch: Batch, tap: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the tokens [T], the states [T, H] of one tap and the loss mask [T] of each text of a batch."""
    columns = (batch.tokens, batch.features[:, tap], batch.loss_mask)
    return zip(*(column.split(batch.lengths) for column in columns), strict=True)


def frozen_head(dtype: torch.dtype) -> TargetHead:
    """Return a random embedding and LM head, whose probs are neither flat nor certain."""
    torch.manual_seed(1)
    embedding = nn.Embedding(97, 48, dtype=dtype)
    output = nn.Linear(48, 97, bias=False, dtype=dtype)
    nn.init.normal_(output.weight, std=0.3)
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def everywhere(lengths: list[int]) -> list[Example]:
    """Return such texts in fp32, all of them supervised."""
    texts = texts_of({length: [] for length in lengths}, torch.float32)
    return [replace(text, loss_mask=torch.arange(len(text.tokens)) >= 2) for text in texts]


def draft_vocab(path: Path, vocab_size: int, size: int) -> Path:
    """Write a draft vocabulary of so many tokens, more of the low ids, with gaps; return its file."""
    # random counts added to falling ones: the most frequent are kept
    spread = torch.randint(vocab_size, (vocab_size,), generator=torch.Generator().manual_seed(4))
    save_draft_vocab(path, torch.arange(vocab_size, 0, -1) + spread, size, {})
    return path


def moved(head: Any) -> Any:
    """Return the head with all its weights away from where they start."""
    with torch.no_grad():
        for weight in head.parameters():
            # norms and biases move more than matrices, which start random
            weight.add_(torch.randn_like(weight), alpha=0.3 if weight.ndim == 1 else 0.03)
    return head


def new_head(
    folder: Path,
    name: str,
    dtype: torch.dtype = torch.float32,
    shape: LlamaConfig = SHAPE,
    **changes: Any,
) -> Any:
    """Return a head of a variant, ready to train.

    Args:
        folder: where a draft vocabulary is written.
        name: a variant.
        dtype: of all weights.
        shape: the head's sizes.
        changes: settings that differ from the variant's.
    """
    values = {**VARIANTS[name], **changes}
    method: Any = Hass if values["kind"] == "hass" else Eagle3
    if values.get("draft_vocab"):
        file = draft_vocab(folder / "draft_vocab.safetensors", SHAPE.vocab_size, 70)
        values["draft_vocab"] = str(file)
    torch.manual_seed(2)
    head = method.for_target(method.Settings(**values), shape, frozen_head(torch.float32))
    return moved(head).to(dtype).train()


def gradients_of(head: Any, loss_of: Callable[[Weights], Tensor]) -> Weights:
    """Return a naive loss of the head's weights as `total`, and its gradients by the names of the weights."""
    weights = {name: tensor.detach().clone() for name, tensor in head.state_dict().items()}
    # buffers such as d2t are integers
    learned = {
        name: tensor.requires_grad_()
        for name, tensor in weights.items()
        if tensor.is_floating_point()
    }
    loss = loss_of(weights)
    gradients = torch.autograd.grad(loss, list(learned.values()))
    return {"total": loss.detach(), **dict(zip(learned, gradients, strict=True))}


def rendered(head: Any, texts: list[Example], target_head: TargetHead) -> Weights:
    """Return the total loss and the gradients of all weights by the naive loop."""
    loss = naive_unroll.LOSSES[head.settings.kind]
    settings = head.settings
    return gradients_of(
        head, lambda weights: loss(weights, settings, head.shape, texts, target_head=target_head)
    )


def computed(head: Any, batch: Batch, target_head: TargetHead) -> Weights:
    """Return the total loss and the gradients of all weights as training computes them."""
    head.zero_grad()
    loss = head(batch, target_head)["total"]
    loss.backward()
    learned = {
        name: weight.grad for name, weight in head.named_parameters() if weight.requires_grad
    }
    return {"total": loss.detach(), **learned}


def apart(head: Any, own: Weights, true: Weights) -> float:
    """Return the largest difference of loss and gradients, each relative to its largest number."""
    if not getattr(head.settings, "train_lm_head", True):
        true = {name: value for name, value in true.items() if name != "lm_head.weight"}
    assert own.keys() == true.keys()
    errors = []
    for name, value in true.items():
        error = (own[name] - value).abs().max()
        errors.append(error / value.abs().max())
    # the maximum is not a number where one of them is not
    return float(torch.stack(errors).max())


def difference(head: Any, spans: dict[int, list[tuple[int, int]]], dtype: torch.dtype) -> float:
    """Return how far training's loss and gradients are from the loop's."""
    texts = texts_of(spans, dtype)
    target_head = frozen_head(dtype)
    return apart(
        head, computed(head, collate(texts, TAPS), target_head), rendered(head, texts, target_head)
    )
