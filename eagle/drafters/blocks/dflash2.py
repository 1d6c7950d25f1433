"""DFlash2 (z-lab 2026): DFlash with short convolutions, and a selector among the best tokens of each slot.

The authors' objective was not published. Of the four public reconstructions the loss here is SpecForge's: DFlash's
loss, plus the selector's cross-entropy with the sequence's token, wherever that is a candidate, with the same weights.
"""

# A anchors, K levels, N = A * K rows, k candidates, R nodes of one level, H hidden, r rank, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.block_loss import ComparedBlocks, ComparedSettings
from eagle.drafters.blocks.candidates import (
    CandidateLevels,
    CandidateLogits,
    Candidates,
    RankingHead,
    insert_scores,
    pick_candidates,
)
from eagle.drafters.blocks.convolved_block import ConvolvedBlock, check_kernel
from eagle.drafters.parts.decoder_block import STD
from eagle.drafters.parts.reduced_vocab import draft_vocab_size


class CandidateSelector(nn.Module):
    """Scores candidates c of a slot with state h after the token p before it: <P[p] * (W h), S[c]>.

    P and S hold a code of width r, the rank, for each token, and W maps a state to such a code.
    """

    def __init__(self, shape: HeadShape, rank: int) -> None:
        super().__init__()
        # S is 0, so that a new head drafts as DFlash does; the token before may be any, candidates can be drafted
        self.predecessor_codebook = nn.Parameter(STD * torch.randn(shape.vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(draft_vocab_size(shape), rank))
        self.hidden_projection = nn.Linear(shape.hidden_size, rank, bias=False)

    def encode(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the codes P[p] * (W h), [.., r], of tokens [..] and states [.., H]."""
        return F.embedding(tokens, self.predecessor_codebook) * self.hidden_projection(states)

    def forward(self, codes: Tensor, candidates: Tensor) -> Tensor:
        """Return the scores [.., R, k] of k candidates [.., k] after R tokens with these codes [.., R, r]."""
        return codes @ F.embedding(candidates, self.successor_codebook).mT


class DFlash2Settings(ComparedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["dflash2"] = "dflash2"
    conv_kernel_size: int = Field(
        2, ge=1
    )  # number of slots that a convolution reads: a slot and those before
    conv_group_size: int = Field(
        16, ge=1
    )  # number of channels that share a kernel; it divides the target's width
    selector_rank: int = Field(256, ge=1)  # width of the codes by which the selector scores tokens
    selector_top_k: int = Field(
        16, ge=1
    )  # number of candidates of a slot: the tokens with the highest logits
    selector: float = Field(1.0, ge=0)  # weight of the selector's loss

    @model_validator(mode="after")
    def _check_kernel(self) -> DFlash2Settings:
        """Refuse a kernel that reads more slots than a block has."""
        check_kernel(self.conv_kernel_size, self.slots)
        return self


class DFlash2(ComparedBlocks):
    """(states of a block, the token before a slot) -> logits of the slot's candidates."""

    reads_tokens = True
    open_levels = CandidateLevels
    Settings = DFlash2Settings
    settings: DFlash2Settings

    def __init__(self, settings: DFlash2Settings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        # the names of modules are those of the published checkpoints
        self.candidate_selector = CandidateSelector(shape, settings.selector_rank)

    def make_block(self, shape: HeadShape) -> ConvolvedBlock:
        """Return a new transformer block with convolutions over the slots of a block of tokens."""
        settings = self.settings
        return ConvolvedBlock(
            shape, settings.slots, settings.conv_kernel_size, settings.conv_group_size
        )

    @property
    def candidate_count(self) -> int:
        """The number of candidates of a slot."""
        return self.settings.selector_top_k

    @property
    def parts(self) -> Parts:
        """The weights that a faulty conversion could swap, which `eagle doctor` checks.

        They are those of a block head, and the selector's two tables, of one shape where all tokens can be drafted.
        """
        tables = (
            "candidate_selector.predecessor_codebook",
            "candidate_selector.successor_codebook",
        )
        return replace(super().parts, alike=(tables,))

    def score_candidates(self, states: Tensor, tokens: Tensor, candidates: Candidates) -> Tensor:
        """Return the scores [.., R, k] of a slot's candidates after each of R tokens.

        Args:
            states: [.., 1, H], the slot's.
            tokens: [.., R], the tokens before it.
            candidates: The logits [.., 1, k] and the tokens [.., 1, k] of its candidates.
        """
        logits, candidate_tokens = candidates
        codes = self.candidate_selector.encode(states, tokens)
        # score(c | p) = logit(c) + <P[p] * (W h), S[c]>
        return logits + self.candidate_selector(codes, candidate_tokens[..., 0, :])

    # -- training -----------------------------------------------------------------------------------------------------

    def losses(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        weights: Tensor,
        target_head: TargetHead,
    ) -> dict[str, Tensor]:
        """Return "total", the loss of the blocks plus that of the selector, and both by themselves for logs.

        The arguments are those of `ComparedBlocks.losses`: states [A, K, H] and weights [A, K] of K levels after each
        of A anchors.
        """
        ranking = RankingHead.of(target_head, self.candidate_count)
        total = self.compare(batch, anchors, states, weights, (ranking, target_head))
        logits, candidates = ranking.candidates  # [N, k]
        flat = states.flatten(0, 1)
        logits = CandidateLogits.apply(flat, logits, candidates, target_head)
        # in training the token before a slot is the sequence's own
        predecessors = tokens_before(batch, anchors).flatten()
        scores = self.score_candidates(
            flat[:, None], predecessors[:, None], (logits[:, None], candidates[:, None])
        )[:, 0]
        tokens, in_vocab = self.find_drafts(anchors.tokens_of(batch).flatten())
        # [N, k]; a token that is no candidate cannot be chosen, so the selector learns nothing there
        matches = (candidates == tokens[:, None]) & in_vocab[:, None]
        wide = torch.promote_types(scores.dtype, torch.float32)
        log_probs = scores.to(wide).log_softmax(-1)
        # L = -sum_ak w_ak log q(token), over levels whose token is a candidate
        selector = -(log_probs.masked_fill(~matches, 0).sum(-1) * weights.flatten()).sum()
        return {
            "total": total + self.settings.selector * selector,
            "draft_probs": total.detach(),
            "selector": selector.detach(),
        }

    # -- validation ---------------------------------------------------------------------------------------------------

    def read_levels(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        target_head: TargetHead,
    ) -> Tensor:
        """Return states and codes [A, K, H + r] of K levels after each of A anchors, for `level_logits`.

        The sequences' tokens are taken as the draft tokens. The arguments are those of `InjectedHead.read_levels`.
        """
        codes = self.candidate_selector.encode(states, tokens_before(batch, anchors))
        return torch.cat([states, codes], dim=-1)

    def level_logits(self, target_head: TargetHead) -> Callable[[Tensor], Tensor]:
        """Return the function that makes logits [.., V] of what `read_levels` returns, states and codes."""
        return partial(self._choose, target_head=target_head)

    def _choose(self, states_and_codes: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V] of states and codes [.., H + r]: the slot's own, with the candidates' scores."""
        rank = self.settings.selector_rank
        state, code = states_and_codes.tensor_split([states_and_codes.shape[-1] - rank], dim=-1)
        logits = target_head.logits(state)
        best, candidates = pick_candidates(logits, self.settings.selector_top_k)
        scores = best + self.candidate_selector(code[..., None, :], candidates)[..., 0, :]
        return insert_scores(logits, (best, candidates), scores)


def tokens_before(batch: Batch, anchors: Anchors) -> Tensor:
    """Return [A, K], the sequences' token before the one that each level predicts; that of level 0 is the root."""
    roots = anchors.tokens_at(batch, -1)[:, None]
    return torch.cat([roots, anchors.tokens_of(batch)[:, :-1]], dim=1)
