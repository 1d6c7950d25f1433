"""How much of its attention an EAGLE-3 head spends on the token it stands on, which it reads by attention alone."""

# T rows of a text, S supervised slots of all texts

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead
from eagle.data.examples import Batch
from eagle.drafters.parts.blocks import Attention, rotate


def own_shares(attention: Attention, read: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """[heads, T], what a query gives to its own row, of a causal pass over rows [1, T, width]."""
    query, key = (
        rotate(projection(read[0]), (rotary[0][0], rotary[1][0])) for projection in (attention.q_proj, attention.k_proj)
    )
    scores = query.float() @ key.float().repeat_interleave(len(query) // len(key), dim=0).transpose(1, 2)
    unseen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    laws = (scores * attention.width**-0.5).masked_fill(unseen, -torch.inf).softmax(-1)
    return laws.diagonal(dim1=1, dim2=2)


@torch.no_grad()
def first_level(head: Any, frozen: TargetHead, texts: Batch) -> tuple[Tensor, Tensor]:
    """[heads, S] such shares, and [S] whether the head says what the target says, at the slots that count."""
    found: list[Tensor] = []

    def look(attention: Attention, given: tuple[Any, ...]) -> None:
        found.append(own_shares(attention, *given[:2]))

    block, agreed = head.layers[0], []
    weight = block.mlp.up_proj.weight
    columns = (texts.tokens, texts.tapped(head.taps), texts.tapped((-1,)), texts.loss_mask)
    with block.self_attn.register_forward_pre_hook(look):
        for tokens, taps, true, counted in zip(*(column.split(texts.lengths) for column in columns), strict=True):
            if len(tokens) > 2:
                hidden = head.fuse_taps(taps[None, :-2].to(weight.device, weight.dtype))
                states = head.states(tokens[None, 1:-1].to(weight.device), hidden, 0, frozen)[0]
                said = head.logits(states, frozen).argmax(-1)
                said = said if head.drafts is None else head.drafts[said]
                mine = counted[2:].to(said.device)
                agreed.append((said == frozen.logits(true[1:-1, 0].to(weight.device)).argmax(-1))[mine])
                found[-1] = found[-1][:, mine]
    return torch.cat(found, dim=-1), torch.cat(agreed)
