"""EAGLE-3's and HASS's losses from their formulas: one query at a time, over keys that are laid side by side for it."""

# T tokens of a text, L taps, H width, n heads, w of a head, M keys that one query sees, V vocabulary, D of the draft

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example

Weights = Mapping[str, Tensor]
Enter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Embedding [H] and state [H] of one slot -> what its projections read, and what the block's output is added to."""
Text = tuple[Tensor, Tensor]
"""Tokens [T], and what the head reads of the target at the first of them."""


@dataclass(frozen=True)
class Network:
    """One block: its weights by name, its sizes, and what sets a method's apart."""

    weights: Weights
    shape: Any
    enter: Enter
    handed: Callable[[Tensor], Tensor]  # from an output [H] to the state that the next step reads
    steps: int


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm."""
    return weight * x / (x.square().mean() + eps).sqrt()


def turned(x: Tensor, position: int, theta: float) -> Tensor:
    """x [n, w], each pair (j, j + w/2) turned by position * theta^(-2j/w); angles in fp32, as heads have them."""
    half = x.shape[-1] // 2
    angle = position * (1.0 / theta ** (torch.arange(half) * 2.0 / x.shape[-1]))
    cosine, sine = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat(
        [x[:, :half] * cosine - x[:, half:] * sine, x[:, half:] * cosine + x[:, :half] * sine],
        dim=1,
    )


def projected(network: Network, read: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [n, w] of one slot."""
    theta, width = network.shape.rope_parameters["rope_theta"], network.shape.head_dim
    layer, weights = "layers.0.self_attn.", network.weights
    query, key, value = (
        F.linear(
            read, weights[f"{layer}{name}_proj.weight"], weights.get(f"{layer}{name}_proj.bias")
        ).view(-1, width)
        for name in "qkv"
    )
    if f"{layer}q_norm.weight" in weights:
        query, key = (
            torch.stack(
                [
                    rms(head, weights[f"{layer}{name}_norm.weight"], network.shape.rms_norm_eps)
                    for head in heads
                ]
            )
            for name, heads in (("q", query), ("k", key))
        )
    return turned(query, position, theta), turned(key, position, theta), value


def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """[n * w] of one query [n, w] over keys and values [M, fewer n, w], each of which serves several heads."""
    group = query.shape[0] // keys.shape[1]
    heads = []
    for head, row in enumerate(query):
        law = (keys[:, head // group] @ row / len(row) ** 0.5).softmax(0)
        heads.append(law @ values[:, head // group])
    return torch.cat(heads)


def output_of(network: Network, residual: Tensor, attention: Tensor) -> Tensor:
    """[H], the rest of the block behind its attention."""
    weights, layer = network.weights, "layers.0."
    x = residual + weights[layer + "self_attn.o_proj.weight"] @ attention
    normed = rms(x, weights[layer + "post_attention_layernorm.weight"], network.shape.rms_norm_eps)
    gate, up = (weights[f"{layer}mlp.{name}_proj.weight"] @ normed for name in ("gate", "up"))
    return x + weights[layer + "mlp.down_proj.weight"] @ (F.silu(gate) * up)


def place(anchor: int, step: int) -> int:
    """Where a query stands: a step's as far behind its anchor as the tokens that were drafted before it."""
    return anchor + step


def seen(anchor: int, step: int) -> list[tuple[int, int]]:
    """The keys that a query sees, as (slot, step): the true ones of its text so far, and those that it drafted."""
    return [(slot, 0) for slot in range(anchor + 1)] + [
        (anchor, drafted) for drafted in range(1, step + 1)
    ]


def unrolled(
    network: Network, embedded: Tensor, first: Sequence[Tensor], anchors: Mapping[int, int]
) -> dict:
    """{(anchor, step): output [H]} of one text, for as many steps at each anchor as is said.

    `embedded` [T, H] are the text's tokens, `first` the true states of its slots.
    """
    rows, outputs = {}, {}
    for slot, state in enumerate(first):
        rows[slot, 0] = projected(
            network, network.enter(embedded[slot + 1], state)[0], place(slot, 0)
        )
    states = dict(enumerate(first))
    for step in range(max(anchors.values())):
        for anchor in [anchor for anchor, steps in anchors.items() if step < steps]:
            read, residual = network.enter(embedded[anchor + 1 + step], states[anchor])
            rows[anchor, step] = projected(network, read, place(anchor, step))
            query, keys, values = (
                rows[anchor, step][0],
                *(torch.stack([rows[at][part] for at in seen(anchor, step)]) for part in (1, 2)),
            )
            outputs[anchor, step] = output_of(network, residual, attended(query, keys, values))
            states[anchor] = network.handed(outputs[anchor, step])
    return outputs


def anchors_of(loss_mask: Tensor, sayable: Tensor, steps: int) -> dict[int, int]:
    """How many steps count at each anchor: as long as every token named on the way is supervised and can be said."""
    found = {}
    for anchor in range(len(loss_mask) - 2):
        if loss_mask[anchor + 2]:
            named = range(anchor + 2, min(anchor + 2 + steps, len(loss_mask)))
            wrong = [
                step
                for step, place in enumerate(named)
                if not (loss_mask[place] and sayable[place])
            ]
            found[anchor] = wrong[0] if wrong else len(named)
    return found


# -- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def eagle3_network(weights: Weights, settings: Any, shape: Any) -> Network:
    """Two norms, one for each half of what is read; the state is added to the output, normed or not."""
    eps = shape.rms_norm_eps

    def enter(embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = rms(state, weights["layers.0.hidden_norm.weight"], eps)
        halves = [rms(embedding, weights["layers.0.input_layernorm.weight"], eps), normed]
        return torch.cat(halves), normed if settings.norm_before_residual else state

    def handed(output: Tensor) -> Tensor:
        return rms(output, weights["norm.weight"], eps) if settings.norm_output else output

    return Network(weights, shape, enter, handed, settings.steps)


def fused(weights: Weights, settings: Any, shape: Any, taps: Tensor) -> Tensor:
    """[H] from the taps [3, H] of one token."""
    parts = list(taps)
    if settings.fc_norm:
        parts = [
            rms(part, weights[f"fc_norm.{i}.weight"], shape.rms_norm_eps)
            for i, part in enumerate(parts)
        ]
    return weights["fc.weight"] @ torch.cat(parts)


def law_loss(kind: str, wanted: Tensor, logits: Tensor) -> Tensor:
    """From the target's logits and the head's, both [D]: cross-entropy, or what aims at acceptance."""
    wanted, own = wanted.log_softmax(-1), logits.log_softmax(-1)
    alpha = torch.minimum(wanted.exp(), own.exp()).sum()
    if kind == "acceptance":
        return -alpha.log()
    if kind == "hybrid":
        share = (-3 * alpha).exp().detach()
        return share * (wanted.exp() * (wanted - own)).sum() + (1 - share) * (1 - alpha)
    return -(wanted.exp() * own).sum()


def smooth_l1(output: Tensor, true: Tensor) -> Tensor:
    """The mean of Huber's loss over the width."""
    off = (output - true).abs()
    return torch.where(off < 1, off.square() / 2, off - 0.5).mean()


def sayable_ids(weights: Weights, vocabulary: int) -> Tensor:
    """[D], the target's ids of the draft vocabulary."""
    offsets = weights.get("d2t")
    return torch.arange(vocabulary) if offsets is None else torch.arange(len(offsets)) + offsets


def eagle3_states(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: Text,
    frozen: TargetHead,
    anchors: Mapping[int, int],
) -> dict:
    """{(anchor, step): what the LM head reads [H]} of one text: its tokens, and the taps [.., 3, H] that are known."""
    tokens, taps = text
    first = [fused(weights, settings, shape, row) for row in taps]
    outputs = unrolled(
        eagle3_network(weights, settings, shape), frozen.embed(tokens), first, anchors
    )
    return {
        at: rms(output, weights["norm.weight"], shape.rms_norm_eps)
        for at, output in outputs.items()
    }


def eagle3_logits(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: Text,
    frozen: TargetHead,
    anchors: Mapping[int, int],
) -> dict:
    """{(anchor, step): logits [D]}."""
    states = eagle3_states(weights, settings, shape, text, frozen, anchors)
    return {at: weights["lm_head.weight"] @ state for at, state in states.items()}


def eagle3_loss(
    weights: Weights, settings: Any, shape: Any, texts: Sequence[Example], frozen: TargetHead
) -> Tensor:
    """The sum over steps of decay^step times the loss there, over the number of anchors.

    Features are the three taps and, last, what the teacher reads.
    """
    total, slots, ids = torch.zeros(()), 0, sayable_ids(weights, frozen.weight.shape[0])
    for text in texts:
        anchors = anchors_of(text.loss_mask, torch.isin(text.tokens, ids), settings.steps)
        slots += len(anchors)
        known = text.tokens, text.features[:-2, :3]
        states = eagle3_states(weights, settings, shape, known, frozen, anchors) if anchors else {}
        for (anchor, step), state in states.items():
            true = text.features[anchor + 1 + step, -1]
            loss = law_loss(
                settings.loss, frozen.logits(true)[ids], weights["lm_head.weight"] @ state
            )
            total = total + settings.decay**step * (
                loss + settings.regression * smooth_l1(state, true)
            )
    return total / slots


# -- HASS -------------------------------------------------------------------------------------------------------------


def hass_network(weights: Weights, settings: Any, shape: Any) -> Network:
    """EAGLE-1's: no norm on the way in, and no gradient from a step into the state that it reads."""

    def enter(embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        joined = F.linear(
            torch.cat([embedding, state]), weights["fc.weight"], weights.get("fc.bias")
        )
        return joined, joined

    return Network(weights, shape, enter, Tensor.detach, settings.steps)


def hass_outputs(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: Text,
    frozen: TargetHead,
    anchors: Mapping[int, int],
) -> dict:
    """{(anchor, step): predicted state [H]} of one text: its tokens, and the states [.., H] of those that are known."""
    tokens, states = text
    return unrolled(
        hass_network(weights, settings, shape), frozen.embed(tokens), list(states), anchors
    )


def hass_logits(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: Text,
    frozen: TargetHead,
    anchors: Mapping[int, int],
) -> dict:
    """{(anchor, step): logits [V]}, as `eagle3_logits`."""
    outputs = hass_outputs(weights, settings, shape, (text[0], text[1][:, 0]), frozen, anchors)
    return {at: frozen.logits(output) for at, output in outputs.items()}


def hass_loss(
    weights: Weights,
    settings: Any,
    shape: Any,
    texts: Sequence[Example],
    frozen: TargetHead,
    noise: Sequence[Tensor] | None = None,
) -> Tensor:
    """Regression, cross-entropy and the likeliest tokens' share of it at every step, over the number of anchors.

    `noise` [T - 2, H] of each text is added to the true states that are read, not to those that are taught.
    """
    total, slots = torch.zeros(()), 0
    for number, text in enumerate(texts):
        states = text.features[:, -1]
        anchors = anchors_of(text.loss_mask, torch.ones_like(text.loss_mask), settings.steps)
        slots += len(anchors)
        known = text.tokens, states[:-2] if noise is None else states[:-2] + noise[number]
        outputs = hass_outputs(weights, settings, shape, known, frozen, anchors) if anchors else {}
        for (anchor, step), output in outputs.items():
            total = total + hass_loss_at(settings, output, states[anchor + 1 + step], frozen)
    return total / slots


def hass_loss_at(settings: Any, output: Tensor, state: Tensor, frozen: TargetHead) -> Tensor:
    """The weighted loss of one slot's prediction against the target's state."""
    regression = smooth_l1(output, state)
    law, own = frozen.logits(state).softmax(-1), frozen.logits(output).log_softmax(-1)
    best = law.sort(descending=True).indices[: settings.top_k]
    entropy, top = -(law * own).sum(), -(law[best] * own[best]).sum()
    return settings.regression * regression + settings.cross_entropy * entropy + settings.top * top


LOSSES = {"eagle3": eagle3_loss, "hass": hass_loss}
LOGITS = {"eagle3": eagle3_logits, "hass": hass_logits}
