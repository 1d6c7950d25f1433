"""DSpark's loss written out for one anchor after the other, in plain torch."""

# T tokens of a text, B slots of a block, H width, w of a head

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.core.examples import Batch
from tests.naive_divisors import Term, divide_terms


def rms(x: Tensor, norm: Any) -> Tensor:
    """RMSNorm over the last dimension."""
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() * norm.weight


def turn(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Heads [n, heads, w] rotated by positions [n]."""
    half = x.shape[-1] // 2
    angles = positions.to(x.dtype)[:, None, None] * theta ** (
        -torch.arange(half, dtype=x.dtype) / half
    )
    left, right = x[..., :half], x[..., half:]
    return torch.cat(
        [left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1
    )


def attend(block: Any, context: Tensor, x: Tensor, causal: bool) -> Tensor:
    """[B, H], what slots x [B, H] see of the context [a, H] and of one another."""
    attention, width, first = block.self_attn, block.self_attn.width, len(context)
    rows = torch.cat([context, x])
    query, key, value = (
        (part @ projection.weight.T).unflatten(-1, (-1, width))
        for part, projection in (
            (x, attention.q_proj),
            (rows, attention.k_proj),
            (rows, attention.v_proj),
        )
    )
    if attention.q_norm is not None:
        query, key = rms(query, attention.q_norm), rms(key, attention.k_norm)
    query, key = turn(query, first + torch.arange(len(x))), turn(key, torch.arange(len(rows)))
    groups = query.shape[1] // key.shape[1]
    seen = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].T / width**0.5
        for slot in range(len(x)):
            if causal:
                scores[slot, first + slot + 1 :] = -torch.inf
        seen.append(scores.softmax(-1) @ value[:, head // groups])
    return torch.cat(seen, dim=-1) @ attention.o_proj.weight.T


def block_states(head: Any, features: Tensor, root: int, frozen: TargetHead) -> Tensor:
    """[K, H], the states that name tokens behind a root, from the features [a, L, H] of the text before it."""
    settings = head.settings
    tokens = torch.tensor([root] + [settings.mask_token] * (settings.slots - 1))
    context = rms(features.flatten(1) @ head.fc.weight.T, head.hidden_norm)
    x = frozen.embedding(tokens)
    for block in head.layers:
        x = x + attend(block, context, rms(x, block.input_layernorm), settings.causal)
        read, mlp = rms(x, block.post_attention_layernorm), block.mlp
        x = (
            x
            + (F.silu(read @ mlp.gate_proj.weight.T) * (read @ mlp.up_proj.weight.T))
            @ mlp.down_proj.weight.T
        )
    return rms(x, head.norm)[0 if settings.sample_from_anchor else 1 :]


def biases(head: Any, states: Tensor, before: list[int], frozen: TargetHead) -> Tensor:
    """[K, V], what each level adds, where these tokens stand before the levels."""
    kind, tokens = head.settings.markov, torch.tensor(before)
    if kind == "none":
        return torch.zeros(())
    if kind == "domino":
        read, _ = head.prefix_gru(frozen.embedding(tokens)[None])
        made = head.embed_proj(torch.cat([states, read[0]], dim=-1))
        return torch.cat(
            [torch.zeros_like(made[: head.settings.unbiased]), made[head.settings.unbiased :]]
        )
    part, made, memory = head.markov_head, [], torch.zeros(head.settings.rank, dtype=states.dtype)
    for state, token in zip(states, part.markov_w1.weight[tokens], strict=True):
        code = token
        if kind == "gated":
            code = torch.sigmoid(part.gate_proj(torch.cat([state, token]))) * token
        elif kind == "rnn":
            gate, new, out = part.joint_proj(torch.cat([memory, token, state])).chunk(3)
            memory = torch.sigmoid(gate) * memory + (1 - torch.sigmoid(gate)) * torch.tanh(new)
            code = torch.tanh(out)
        made.append(part.markov_w2.weight @ code)
    return torch.stack(made)


def divergence(settings: Any, logits: Tensor, p: Tensor, token: int) -> Tensor:
    """What the probs of these logits lack of the target's and of the text's own token."""
    distance = (p - logits.softmax(-1)).abs().sum()
    return settings.distance * distance - settings.likelihood * logits.log_softmax(-1)[token]


def naive_loss(head: Any, batch: Batch, frozen: TargetHead) -> Tensor:
    """The loss of blocks behind every supervised token but the last of its run."""
    settings, terms, anchors, begin = head.settings, list[Term](), 0, 0
    for length in batch.lengths:
        part = slice(begin, begin + length)
        tokens, mask, begin = (
            batch.tokens[part].tolist(),
            batch.loss_mask[part].tolist(),
            begin + length,
        )
        features, true = batch.select_taps(head.taps)[part], batch.select_taps((-1,))[part, 0]
        for place in [place for place in range(2, length) if mask[place]]:
            anchors += 1
            states = block_states(head, features[: place - 1], tokens[place - 1], frozen)
            known = (tokens + [0] * len(states))[place - 1 : place - 1 + len(states)]
            plain = frozen.logits(states)
            logits = plain + biases(head, states, known, frozen)
            for level, state in enumerate(states):
                named = place + level
                if named >= length or not mask[named]:
                    break
                weight = float(torch.tensor(-level / settings.decay, dtype=torch.float64).exp())
                p = frozen.logits(true[named - 1]).softmax(-1)

                loss = divergence(settings, logits[level], p, tokens[named])
                if settings.markov == "domino":
                    alone = divergence(settings, plain[level], p, tokens[named])
                    loss = batch.progress * loss + (1 - batch.progress) * alone
                if settings.confidence:
                    kept = 1 - (p - logits[level].softmax(-1)).abs().sum().detach() / 2
                    read = state
                    if head.markov_head is not None:
                        read = torch.cat([state, head.markov_head.markov_w1.weight[known[level]]])
                    odds = torch.sigmoid(head.confidence_head.proj(read)[0])
                    loss = loss - kept * odds.log() - (1 - kept) * (1 - odds).log()
                terms.append((0, level, weight, loss))
    return divide_terms(settings.divisor, terms, [anchors])
