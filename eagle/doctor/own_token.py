"""The share of attention on the current token, for heads that read this token through attention only."""

# T rows of a text, S supervised slots of all texts

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.parts.decoder_block import Attention
from eagle.drafters.parts.operations import rotate


def own_row_shares(attention: Attention, read: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[heads, T], each query's attention to its own row, in a causal pass over rows [1, T, width]."""
    query, key = (
        rotate(projection(read[0]), (rotary[0][0], rotary[1][0])) for projection in (attention.q_proj, attention.k_proj)
    )
    scores = query.float() @ key.float().repeat_interleave(len(query) // len(key), dim=0).transpose(1, 2)
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    probs = (scores * attention.width**-0.5).masked_fill(unseen, -torch.inf).softmax(-1)
    return probs.diagonal(dim1=1, dim2=2)


@torch.no_grad()
def own_token_shares(head: Any, frozen: TargetHead, texts: Batch) -> Tensor | None:
    """[heads, S], attention to the own row in the first block; None for a head that fuses token and state before it."""
    drafter = copy.deepcopy(head)
    attention = next((part for part in drafter.modules() if isinstance(part, Attention)), None)
    if attention is None or attention.q_proj.in_features != 2 * head.shape.hidden_size:
        return None
    shares: list[Tensor] = []

    def look(attention: Any, inputs: tuple[Any, ...]) -> None:
        shares.append(own_row_shares(attention, *inputs[:2]))

    drafter.bind(frozen)
    columns = (texts.tokens, texts.select_taps(head.taps), texts.loss_mask)
    with attention.register_forward_pre_hook(look):
        for tokens, features, mask in zip(*(column.split(texts.lengths) for column in columns), strict=True):
            if len(tokens) > 2:
                drafter.begin().propose(Committed(tokens[:-2], features[:-2], int(tokens[-2])), Budget(1, 1, 1))
                shares[-1] = shares[-1][:, mask[2:].to(shares[-1].device)]
    return torch.cat(shares, dim=-1)
