"""LiLiCorr's lattice from its formulas: one block at a time, one candidate after the other."""

# K levels, k candidates, T = K * k candidates of a block, H hidden, W width of the lattice, V vocabulary, L taps

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from tests.naive_layers import Weights, rms

Place = tuple[int, int]
"""A candidate: its slot among those that predict a token, and its rank."""


def apply_linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return a linear layer's output; x itself where a head has no such layer."""
    if f"lilicorr.{name}.weight" not in weights:
        return x
    return F.linear(x, weights[f"lilicorr.{name}.weight"], weights[f"lilicorr.{name}.bias"])


def apply_mlp(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Return down(SiLU(up x))."""
    inner = F.silu(apply_linear(weights, f"{name}.up_proj", x))
    return apply_linear(weights, f"{name}.down_proj", inner)


def list_candidates(head: Any, logits: Tensor) -> list[list[int]]:
    """Return the candidates of each slot, the likeliest first, as rows of the draft vocabulary; `logits` are [K, V]."""
    order = logits.argsort(descending=True)
    return [row[: head.settings.candidate_topk].tolist() for row in order]


def embed_candidates(
    head: Any, weights: Weights, states: Tensor, logits: Tensor, target_head: TargetHead
) -> tuple[list[Place], Tensor]:
    """Return the candidates of all slots, and the vectors [T, W] with which they enter the lattice.

    Args:
        head: the head, for its settings.
        weights: its weights by name.
        states: [K, H], of the slots.
        logits: [K, V], of all tokens that can be drafted.
        target_head: the target's embedding.
    """
    places = []
    tokens = []
    features = []
    for slot, rows in enumerate(list_candidates(head, logits)):
        log_probs = logits[slot].log_softmax(-1)
        for rank, row in enumerate(rows):
            places.append((slot, rank))
            tokens.append(row if head.drafts is None else int(head.drafts[row]))
            value = log_probs[row]
            share = rank / (len(rows) - 1) if len(rows) > 1 else 0.0
            told = torch.tensor([share, float(rank == 0)], dtype=value.dtype)
            gap = value - log_probs.max()
            features.append(torch.cat([torch.stack([value, value.exp(), gap]), told]))
    found = torch.stack(features)
    # five numbers that tell how likely DFlash's part finds a candidate
    norm = [weights[f"lilicorr.feature_norm.{name}"] for name in ("weight", "bias")]
    slots = [slot for slot, _ in places]
    ranks = [rank for _, rank in places]
    vectors = (
        apply_linear(weights, "token_proj", target_head.embed(torch.tensor(tokens)))
        + apply_linear(weights, "pass_hidden_proj", states[slots])
        + apply_mlp(weights, "feature_mlp", F.layer_norm(found, (5,), *norm))
        + weights["lilicorr.slot_embedding"][0, 0, slots, 0]
        + weights["lilicorr.rank_embedding"][0, 0, 0, ranks]
    )
    return places, vectors


def attend_lattice(
    head: Any, weights: Weights, layer: str, places: list[Place], vectors: Tensor
) -> Tensor:
    """Return attention's output [T, W] of each candidate over all candidates of all slots, one head after the other."""
    width = head.settings.hidden_size
    size = width // head.settings.num_heads
    joined = F.linear(
        vectors, weights[f"{layer}attn.in_proj_weight"], weights[f"{layer}attn.in_proj_bias"]
    )
    attended = []
    for index in range(head.settings.num_heads):
        query, key, value = (
            joined[:, start + index * size : start + (index + 1) * size]
            for start in (0, width, 2 * width)
        )
        levels = places[-1][0] + 1
        # by the slots of the query and the key
        biases = []
        for slot in range(levels):
            for other in range(levels):
                distance = slot - other + head.settings.slots - 1
                bias = weights["lilicorr.relative_slot_bias"][index, distance]
                if slot == other:
                    bias = bias + weights["lilicorr.same_slot_bias"][index]
                biases.append(bias)
        table = torch.stack(biases).view(levels, levels)
        slots = torch.tensor([slot for slot, _ in places])
        scores = query @ key.T / size**0.5 + table[slots][:, slots]
        attended.append(scores.softmax(-1) @ value)
    return F.linear(
        torch.cat(attended, dim=1),
        weights[f"{layer}attn.out_proj.weight"],
        weights[f"{layer}attn.out_proj.bias"],
    )


def lattice_factors(
    head: Any,
    weights: Weights,
    features: Tensor,
    states: Tensor,
    logits: Tensor,
    target_head: TargetHead,
) -> tuple[Tensor, dict[Place, Tensor], dict[Place, Tensor]]:
    """Return the root's outgoing vector, and by candidate the incoming and the outgoing ones.

    Args:
        head: the head, for its settings.
        weights: its weights by name.
        features: [L, H], the taps of the token before the root.
        states: [K, H], of the slots.
        logits: [K, V], of all tokens that can be drafted.
        target_head: the target's embedding.
    """
    eps = head.shape.rms_norm_eps
    places, x = embed_candidates(head, weights, states, logits, target_head=target_head)
    for index in range(head.settings.num_layers):
        layer = f"lilicorr.layers.{index}."
        normed = rms(x, weights[f"{layer}attn_norm.weight"], eps)
        x = x + attend_lattice(head, weights, layer, places, vectors=normed)
        normed = rms(x, weights[f"{layer}mlp_norm.weight"], eps)
        x = x + apply_mlp(weights, f"layers.{index}.mlp", normed)
    x = rms(x, weights["lilicorr.output_norm.weight"], eps)
    # the root has no state: its vector is made of the features of the token before it
    fused = F.linear(features.flatten(), weights["fc.weight"])
    context = rms(fused, weights["hidden_norm.weight"], eps)
    anchor = apply_linear(weights, "context_proj", context)
    anchor = rms(anchor, weights["lilicorr.anchor_norm.weight"], eps)
    ins = {}
    outs = {}
    for place, vector in zip(places, x, strict=True):
        joined = torch.cat([vector, anchor, vector * anchor])
        factor = F.silu(apply_linear(weights, "factor_input_proj", joined))
        ins[place] = shorten(head, apply_linear(weights, "in_head", factor))
        outs[place] = shorten(head, apply_linear(weights, "out_head", factor))
    return shorten(head, apply_linear(weights, "anchor_out_head", anchor)), ins, outs


def shorten(head: Any, vector: Tensor) -> Tensor:
    """Return a vector of the norm 1, or less where its norm is tiny."""
    return vector / vector.norm().clamp(min=head.settings.vector_eps)


def path_losses(
    head: Any,
    weights: Weights,
    text: Any,
    root: int,
    reached: int,
    states: Tensor,
    target_head: TargetHead,
) -> list[Tensor]:
    """Return the weighted loss of each slot of one block, up to the first whose token is no candidate.

    There is none for a head without a lattice.

    Args:
        head: the head, for its settings.
        weights: its weights by name.
        text: the tokens and the taps of a text; the last tap is the teacher's.
        root: the position of the block's root.
        reached: how many levels are supervised.
        states: [K, H], of all slots that predict a token.
        target_head: the target's embedding and LM head.
    """
    settings = head.settings
    if settings.kind != "lilicorr":
        return []
    drafts = list(range(head.shape.vocab_size)) if head.drafts is None else head.drafts.tolist()
    logits = target_head.logits(states)[:, drafts]
    read = text.features[root - 1, : len(settings.taps)]
    before, ins, outs = lattice_factors(
        head, weights, read, states, logits=logits, target_head=target_head
    )
    losses = []
    for slot, rows in enumerate(list_candidates(head, logits)[:reached]):
        tokens = [drafts[row] for row in rows]
        # the slots after a token that is no candidate have no loss
        gold = int(text.tokens[root + 1 + slot])
        if gold not in tokens:
            break
        scores = [settings.logit_scale * before @ ins[slot, rank] for rank in range(len(rows))]
        q = torch.stack(scores).softmax(0)
        best = tokens.index(gold)
        loss = -settings.w_ce * q[best].log()
        others = [score for rank, score in enumerate(scores) if rank != best]
        if others:
            gap = scores[best] - torch.stack(others).max()
            loss = loss + settings.w_margin * (settings.margin - gap).clamp(min=0)
        teacher = target_head.logits(text.features[root + slot, -1])
        for rank, token in enumerate(tokens):
            rejected = (teacher[gold] - teacher[token]).clamp(min=0)
            loss = loss + settings.w_pen * q[rank] * rejected
        losses.append(loss)
        before = outs[slot, best]
    return losses


def level_logits(
    head: Any,
    weights: Weights,
    features: Tensor,
    states: Tensor,
    path: list[int],
    target_head: TargetHead,
) -> Tensor:
    """Return [V], the log-probs of what follows a path of draft tokens, of which candidates divide theirs by scores.

    After a token that is no candidate of its slot they are the slot's own.

    Args:
        head: the head, for its settings.
        weights: its weights by name.
        features: [L, H], the taps of the token before the root.
        states: [K, H], of the slots.
        path: the tokens after the root.
        target_head: the target's embedding and LM head.
    """
    logits = target_head.logits(states)
    probs = logits[len(path)].softmax(-1)
    before, ins, outs = lattice_factors(
        head, weights, features, states, logits=logits, target_head=target_head
    )
    candidates = list_candidates(head, logits)
    if path:
        last = len(path) - 1
        if path[-1] not in candidates[last]:
            return probs.log()
        # the candidate of the slot before
        before = outs[last, candidates[last].index(path[-1])]
    chosen = probs.clone()
    rows = candidates[len(path)]
    scores = [
        float(head.settings.logit_scale * before @ ins[len(path), rank])
        for rank in range(len(rows))
    ]
    chosen[rows] = torch.tensor(scores, dtype=probs.dtype).softmax(0) * probs[rows].sum()
    return chosen.log()
