"""EAGLE-3's and HASS's losses from their formulas: one query at a time, over keys that are collected for it alone.

Tests plant faults by patching `place`, `seen`, `anchors_of`, `sayable_ids` and `hass_network` here.
"""

# T tokens of a text, L taps, H hidden, n heads, w of a head, M keys that one query sees, V vocabulary, D of the draft

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example
from tests.naive_layers import Weights as Weights
from tests.naive_layers import finish_block, project_heads
from tests.naive_layers import rms as rms
from tests.naive_layers import turned as turned

Enter = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Embedding [H] and state [H] of one position -> what its projections read, and what the output is added to."""
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


def projected(network: Network, read: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return query, key and value [n, w] of one position."""
    layer = "layers.0.self_attn."
    query, key = [
        project_heads(network.weights, f"{layer}{name}_", read[None], network.shape, [position])[0]
        for name in "qk"
    ]
    value = project_heads(network.weights, f"{layer}v_", read[None], network.shape)[0]
    return query, key, value


def attended(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return [n * w] of one query [n, w] over keys and values [M, fewer n, w], each of which serves several heads."""
    group = query.shape[0] // keys.shape[1]
    heads = []
    # one softmax a head, over the keys of its group
    for head, row in enumerate(query):
        probs = (keys[:, head // group] @ row / len(row) ** 0.5).softmax(0)
        heads.append(probs @ values[:, head // group])
    return torch.cat(heads)


def output_of(network: Network, residual: Tensor, attention: Tensor) -> Tensor:
    """Return [H], the block's output after its attention."""
    eps = network.shape.rms_norm_eps
    return finish_block(network.weights, "layers.0.", residual, attention, eps=eps)


def place(anchor: int, step: int) -> int:
    """Return the position of a query: a step's is as far after its anchor as tokens were drafted before it."""
    return anchor + step


def seen(anchor: int, step: int) -> list[tuple[int, int]]:
    """Return the keys that a query sees, as (position, step): the text's true ones so far, and those it drafted."""
    true = [(position, 0) for position in range(anchor + 1)]
    return true + [(anchor, drafted) for drafted in range(1, step + 1)]


def unrolled(
    network: Network,
    embedded: Tensor,
    first: Sequence[Tensor],
    anchors: Mapping[int, int],
) -> dict:
    """Return {(anchor, step): output [H]} of one text, for as many steps at each anchor as `anchors` says.

    `embedded` [T, H] are the text's tokens, `first` the true states of its positions.

    Args:
        network: the block, with what sets the method apart.
        embedded: [T, H], the text's tokens.
        first: [H] of each known position, its true state.
        anchors: how many steps are drafted at each position.
    """
    rows = {}
    outputs = {}
    for position, state in enumerate(first):
        read, _ = network.enter(embedded[position + 1], state)
        # keys and values of the true states, which all later positions see
        rows[position, 0] = projected(network, read, place(position, 0))
    states = dict(enumerate(first))
    for step in range(max(anchors.values())):
        for anchor, steps in anchors.items():
            if step >= steps:
                continue
            read, residual = network.enter(embedded[anchor + 1 + step], states[anchor])
            rows[anchor, step] = projected(network, read, place(anchor, step))
            # the keys of a query, collected one by one: no mask is needed
            query = rows[anchor, step][0]
            keys = torch.stack([rows[at][1] for at in seen(anchor, step)])
            values = torch.stack([rows[at][2] for at in seen(anchor, step)])
            outputs[anchor, step] = output_of(network, residual, attended(query, keys, values))
            states[anchor] = network.handed(outputs[anchor, step])
    return outputs


def anchors_of(loss_mask: Tensor, sayable: Tensor, steps: int) -> dict[int, int]:
    """Return how many steps count at each anchor: as long as all tokens so far are supervised and can be drafted."""
    counts = loss_mask & sayable
    found = {}
    for anchor in range(len(loss_mask) - 2):
        if loss_mask[anchor + 2]:
            # a run of counted tokens ends at the first gap
            run = counts[anchor + 2 : anchor + 2 + steps].tolist()
            found[anchor] = [*run, False].index(False)
    return found


# -- EAGLE-3 ----------------------------------------------------------------------------------------------------------


def eagle3_network(weights: Weights, settings: Any, shape: Any) -> Network:
    """Two norms, one for each half of what is read; the state is added to the output, normed or not."""

    def norm(x: Tensor, name: str) -> Tensor:
        return rms(x, weights[f"{name}.weight"], shape.rms_norm_eps)

    def enter(embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        normed = norm(state, "layers.0.hidden_norm")
        both = torch.cat([norm(embedding, "layers.0.input_layernorm"), normed])
        # the residual is the state, or its norm as in some checkpoints
        return both, normed if settings.norm_before_residual else state

    def handed(output: Tensor) -> Tensor:
        return norm(output, "norm") if settings.norm_output else output

    return Network(weights, shape, enter, handed=handed, steps=settings.steps)


def fused(weights: Weights, settings: Any, shape: Any, taps: Tensor) -> Tensor:
    """Return [H], from the taps [3, H] of one token."""
    rows = list(taps)
    if settings.fc_norm:
        eps = shape.rms_norm_eps
        rows = [rms(row, weights[f"fc_norm.{i}.weight"], eps) for i, row in enumerate(rows)]
    joined = torch.cat(rows)
    # only EAGLE-3 has this setting, P-EAGLE has not
    if getattr(settings, "norm_before_fc", False):
        joined = rms(joined, weights["input_norm.weight"], shape.rms_norm_eps)
    return weights["fc.weight"] @ joined


def law_loss(kind: str, wanted: Tensor, logits: Tensor) -> Tensor:
    """Return a loss from the target's logits and the head's, both [D]: cross-entropy, or one of acceptance."""
    target = wanted.log_softmax(-1)
    own = logits.log_softmax(-1)
    alpha = torch.minimum(target.exp(), own.exp()).sum()  # the share of drafts that is accepted
    if kind == "acceptance":
        return -alpha.log()
    if kind == "hybrid":
        share = (-3 * alpha).exp().detach()
        return share * (target.exp() * (target - own)).sum() + (1 - share) * (1 - alpha)
    return -(target.exp() * own).sum()


def smooth_l1(output: Tensor, true: Tensor) -> Tensor:
    """Return the mean of Huber's loss over the hidden dimension."""
    error = (output - true).abs()
    return torch.where(error < 1, error.square() / 2, error - 0.5).mean()


def sayable_ids(weights: Weights, vocabulary: int) -> Tensor:
    """Return [D], the target's ids of the draft vocabulary."""
    # d2t holds the distance from an id of the draft to the target's
    offsets = weights.get("d2t")
    return torch.arange(vocabulary) if offsets is None else torch.arange(len(offsets)) + offsets


def eagle3_states(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: Text,
    target_head: TargetHead,
    anchors: Mapping[int, int],
) -> dict:
    """Return {(anchor, step): what the LM head reads [H]} of one text: its tokens, and the taps [.., 3, H] so far.

    Args:
        weights: the head's weights by name.
        settings: the head's.
        shape: the head's sizes.
        text: its tokens [T] and the taps [.., 3, H] of those that are known.
        target_head: the target's embedding and LM head.
        anchors: how many steps count at each position.
    """
    tokens, taps = text
    first = [fused(weights, settings, shape, row) for row in taps]
    network = eagle3_network(weights, settings, shape)
    outputs = unrolled(network, target_head.embed(tokens), first, anchors)
    gain = weights["norm.weight"]
    return {at: rms(output, gain, shape.rms_norm_eps) for at, output in outputs.items()}


def eagle3_logits(weights: Weights, *args: Any, **kwargs: Any) -> dict:
    """Return {(anchor, step): logits [D]}; the arguments are those of `eagle3_states`."""
    states = eagle3_states(weights, *args, **kwargs)
    return {at: weights["lm_head.weight"] @ state for at, state in states.items()}


def eagle3_loss(
    weights: Weights,
    settings: Any,
    shape: Any,
    texts: Sequence[Example],
    target_head: TargetHead,
) -> Tensor:
    """Return the sum over steps of decay^step times the loss there, divided by the number of anchors.

    Features are the three taps and, last, what the teacher reads.

    Args:
        weights: the head's weights by name.
        settings: the head's.
        shape: the head's sizes.
        texts: the batch.
        target_head: the target's embedding and LM head.
    """
    total = torch.zeros(())
    count = 0
    ids = sayable_ids(weights, target_head.weight.shape[0])
    for text in texts:
        anchors = anchors_of(text.loss_mask, torch.isin(text.tokens, ids), settings.steps)
        if not anchors:
            continue
        count += len(anchors)
        known = (text.tokens, text.features[:-2, :3])
        states = eagle3_states(
            weights, settings, shape, known, target_head=target_head, anchors=anchors
        )
        # the head's state at anchor i and step s names token i + 2 + s, as the target's at i + 1 + s does
        for (anchor, step), state in states.items():
            teacher = text.features[anchor + 1 + step, -1]
            logits = weights["lm_head.weight"] @ state
            loss = law_loss(settings.loss, target_head.logits(teacher)[ids], logits)
            loss = loss + settings.regression * smooth_l1(state, teacher)
            total = total + settings.decay**step * loss
    return total / count


# -- HASS -------------------------------------------------------------------------------------------------------------


def hass_network(weights: Weights, settings: Any, shape: Any) -> Network:
    """EAGLE-1's: no norm on the way in, and no gradient from a step into the state that it reads."""

    def enter(embedding: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat([embedding, state])
        joined = F.linear(both, weights["fc.weight"], weights.get("fc.bias"))
        return joined, joined

    return Network(
        weights,
        shape,
        enter,
        handed=Tensor.detach,
        steps=settings.steps,
    )


def hass_outputs(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: Text,
    target_head: TargetHead,
    anchors: Mapping[int, int],
) -> dict:
    """Return {(anchor, step): predicted state [H]} of one text: its tokens, and the known states [.., H].

    Args:
        weights: the head's weights by name.
        settings: the head's.
        shape: the head's sizes.
        text: its tokens [T] and the states [.., H] of those that are known.
        target_head: the target's embedding and LM head.
        anchors: how many steps count at each position.
    """
    tokens, states = text
    network = hass_network(weights, settings, shape)
    return unrolled(network, target_head.embed(tokens), list(states), anchors)


def hass_logits(
    weights: Weights,
    settings: Any,
    shape: Any,
    text: Text,
    target_head: TargetHead,
    anchors: Any,
) -> dict:
    """Return {(anchor, step): logits [V]}, as `eagle3_logits`."""
    tokens, taps = text
    known = (tokens, taps[:, 0])
    outputs = hass_outputs(
        weights, settings, shape, known, target_head=target_head, anchors=anchors
    )
    return {at: target_head.logits(output) for at, output in outputs.items()}


def hass_loss(
    weights: Weights,
    settings: Any,
    shape: Any,
    texts: Sequence[Example],
    target_head: TargetHead,
    noise: Sequence[Tensor] | None = None,
) -> Tensor:
    """Return regression, cross-entropy and the likeliest tokens' share of it at every step, divided by the anchors.

    `noise` [T - 2, H] of each text is added to the true states that are read, not to those that are learned.

    Args:
        weights: the head's weights by name.
        settings: the head's.
        shape: the head's sizes.
        texts: the batch.
        target_head: the target's embedding and LM head.
        noise: what is added to each text's states; none without it.
    """
    total = torch.zeros(())
    count = 0
    for index, text in enumerate(texts):
        states = text.features[:, -1]
        anchors = anchors_of(text.loss_mask, torch.ones_like(text.loss_mask), settings.steps)
        if not anchors:
            continue
        count += len(anchors)
        read = states[:-2] if noise is None else states[:-2] + noise[index]
        known = (text.tokens, read)
        outputs = hass_outputs(
            weights, settings, shape, known, target_head=target_head, anchors=anchors
        )
        # a predicted state stands for the target's at the next position
        for (anchor, step), output in outputs.items():
            total = total + hass_loss_at(settings, output, states[anchor + 1 + step], target_head)
    return total / count


def hass_loss_at(settings: Any, output: Tensor, state: Tensor, target_head: TargetHead) -> Tensor:
    """Return the weighted loss of one predicted state against the target's."""
    probs = target_head.logits(state).softmax(-1)
    log_probs = target_head.logits(output).log_softmax(-1)
    # the top-k share of the cross-entropy, as HASS adds it
    best = probs.sort(descending=True).indices[: settings.top_k]
    entropy = -(probs * log_probs).sum()
    top = -(probs[best] * log_probs[best]).sum()
    regression = settings.regression * smooth_l1(output, state)
    return regression + settings.cross_entropy * entropy + settings.top * top


LOSSES = {"eagle3": eagle3_loss, "hass": hass_loss}
LOGITS = {"eagle3": eagle3_logits, "hass": hass_logits}
