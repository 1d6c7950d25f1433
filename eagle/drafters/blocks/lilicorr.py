"""LiLiCorr (arXiv 2608.20530): DFlash's blocks, and a small transformer over the best tokens of all slots at once.

The best tokens of each slot are its candidates, and those of all slots the lattice. Every candidate gets a vector for
what may precede it and one for what may follow it. Drafts walk from candidate to candidate by the cosines of both.
"""

# A anchors, K levels, N = A * K rows, k candidates, R nodes of one level, B sequences, T = K * k candidates of a block,
# H hidden, W width of the lattice's transformer, F width of factors, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from eagle.core.drafter import HeadShape, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.device import pick_rows
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.block_loss import ComparedBlocks, ComparedSettings
from eagle.drafters.blocks.candidates import (
    CandidateLevels,
    CandidateLogits,
    Candidates,
    RankingHead,
    candidate_log_probs,
    insert_scores,
)
from eagle.drafters.blocks.convolved_block import ConvolvedBlock, check_kernel
from eagle.drafters.blocks.injected_head import ANCHORS_AT_ONCE
from eagle.drafters.blocks.injected_state import InjectedState
from eagle.drafters.parts.decoder_block import STD, Norm, NormedBlock
from eagle.drafters.parts.objectives import ROWS

LARGEST_WIDTH = 1024  # of the lattice by default, as published
FEATURES = 5  # numbers that tell the lattice how likely DFlash's part finds a candidate


class LiLiCorrSettings(ComparedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["lilicorr"] = "lilicorr"
    candidate_topk: int = Field(8, ge=1)  # number of candidates of a slot: its likeliest tokens
    # width of the lattice's transformer; by default the target's, at most the published 1024
    hidden_size: int | None = Field(None, ge=1)
    num_layers: int = Field(2, ge=1)  # number of its layers
    num_heads: int = Field(8, ge=1)  # number of its attention heads
    mlp_ratio: float = Field(2.0, gt=0)  # width of its MLPs, in hidden sizes
    # width of the vectors whose cosines are scores; by default that of the transformer
    factor_dim: int | None = Field(None, ge=1)
    logit_scale: float = Field(8.0, gt=0)  # factor from a cosine to a score
    vector_eps: float = Field(1e-4, gt=0, lt=0.5)  # the least norm that such a vector is divided by
    w_ce: float = Field(0.25, ge=0)  # weight of the cross-entropy of the choice among candidates
    # weight of the margin by which the sequence's token should win (a published variant: 0.125, with w_ce 0.125)
    w_margin: float = Field(0.0, ge=0)
    margin: float = Field(2.0, gt=0)  # that margin, in scores
    # weight of the penalty for candidates to which the target gives smaller logits
    w_pen: float = Field(0.25, ge=0)
    # number of slots that a convolution reads, as in DFlash2; null for no convolutions
    conv_kernel_size: int | None = Field(None, ge=1)
    # number of channels that share a kernel; to be set together with conv_kernel_size
    conv_group_size: int | None = Field(None, ge=1)

    def find_widths(self, hidden_size: int) -> tuple[int, int]:
        """Return `hidden_size` and `factor_dim` of the lattice, for a target of this hidden size."""
        # attention heads are equally wide
        heads = self.num_heads
        width = self.hidden_size or max(min(hidden_size, LARGEST_WIDTH) // heads, 1) * heads
        return width, self.factor_dim or width

    @model_validator(mode="after")
    def _check_sizes(self) -> LiLiCorrSettings:
        """Refuse sizes that do not fit to one another."""
        if (self.hidden_size or 0) % self.num_heads:
            raise ValueError(
                f"num_heads is {self.num_heads}, expected a divisor of hidden_size, {self.hidden_size}"
            )
        if (self.conv_kernel_size is None) != (self.conv_group_size is None):
            raise ValueError(
                f"conv_kernel_size is {self.conv_kernel_size} and conv_group_size {self.conv_group_size}, expected "
                "both or neither"
            )
        check_kernel(self.conv_kernel_size or 1, self.slots)
        return self


class Mlp(nn.Module):
    """Two linear layers with SiLU between them."""

    def __init__(self, inputs: int, inner: int, outputs: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(inputs, inner)
        self.down_proj = nn.Linear(inner, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Return down(SiLU(up x))."""
        y: Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return y


class LatticeAttention(nn.MultiheadAttention):
    """The parameters of torch's module; its forward would copy the bias for every block."""

    def attend(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return attention's output [A, T, W] of candidates x [A, T, W], with a bias [heads, T, T] on its logits."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias)
        # [A, heads, T, W / heads] each
        query, key, value = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, bias.to(query.dtype)[None])
        output: Tensor = self.out_proj(attended.transpose(1, 2).flatten(2))
        return output


class LatticeLayer(nn.Module):
    """A transformer layer in which every candidate of a block sees all others, also those of later slots."""

    def __init__(self, settings: LiLiCorrSettings, width: int, eps: float) -> None:
        super().__init__()
        self.attn_norm = Norm(width, eps)
        self.attn = LatticeAttention(width, settings.num_heads)
        self.mlp_norm = Norm(width, eps)
        self.mlp = Mlp(width, int(width * settings.mlp_ratio), width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Return the layer's output [A, T, W]; the arguments are those of `LatticeAttention.attend`."""
        x = x + self.attn.attend(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


class LatticeScorer(nn.Module):
    """Scores every candidate after every candidate of the slot before, from all candidates of a block at once."""

    def __init__(self, settings: LiLiCorrSettings, shape: HeadShape, levels: int) -> None:
        super().__init__()
        self.settings = settings
        inputs = shape.hidden_size
        width, factor_dim = settings.find_widths(inputs)
        eps = shape.rms_norm_eps
        # the names and shapes of weights are those of the published checkpoints
        self.token_proj = nn.Identity() if inputs == width else nn.Linear(inputs, width)
        self.pass_hidden_proj = nn.Linear(inputs, width)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = Mlp(FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, levels, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, settings.candidate_topk, width))
        # by the distance of two slots, -(slots - 1) to slots - 1
        distances = 2 * settings.slots - 1
        self.relative_slot_bias = nn.Parameter(torch.zeros(settings.num_heads, distances))
        self.same_slot_bias = nn.Parameter(torch.zeros(settings.num_heads))
        self.context_proj = nn.Linear(inputs, width)
        self.layers = nn.ModuleList(
            LatticeLayer(settings, width, eps) for _ in range(settings.num_layers)
        )
        self.output_norm = Norm(width, eps)
        self.anchor_norm = Norm(width, eps)
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head = nn.Linear(width, factor_dim)
        self.in_head = nn.Linear(width, factor_dim)
        self.anchor_out_head = nn.Linear(width, factor_dim)

    def embed_slots(self, levels: int) -> Tensor:
        """Return the embeddings [1, K, 1, W] of K slots."""
        # the doctor also tries a level more than there are embeddings, which reads the last one
        last = self.slot_embedding.shape[2] - 1
        slots = torch.arange(levels, device=self.slot_embedding.device).clamp(max=last)
        return self.slot_embedding[0, :, slots]

    def attention_bias(self, levels: int, count: int) -> Tensor:
        """Return the bias [heads, T, T] of a candidate's attention (first) to another, by the distance of their slots.

        There are `count` candidates at each of `levels` levels.
        """
        device = self.same_slot_bias.device
        slots = torch.arange(levels, device=device).repeat_interleave(count)
        distances = slots[:, None] - slots
        # bias(q, k) = relative[slot(q) - slot(k)] + same * [slot(q) = slot(k)]
        relative = self.relative_slot_bias[:, distances + self.settings.slots - 1]
        return relative + self.same_slot_bias[:, None, None] * (distances == 0)

    def forward(
        self, log_probs: Tensor, embedded: Tensor, states: Tensor, context: Tensor
    ) -> Tensor:
        """Return the scores [A, K, k, k] of each candidate (last) after each candidate of the slot before.

        Those of the first slot are after the root, the same in all k rows.

        Args:
            log_probs: [A, K, k], of the candidates, the likeliest first.
            embedded: Their embeddings [A, K, k, H].
            states: The states [A, K, H] of the slots.
            context: The fused features [A, H] of the last token before the root.
        """
        _, levels, count = log_probs.shape
        ranks = torch.linspace(0, 1, count, dtype=log_probs.dtype, device=log_probs.device)
        ranks = ranks.expand_as(log_probs)
        features = torch.stack(
            [log_probs, log_probs.exp(), log_probs - log_probs[..., :1], ranks, ranks == 0], dim=-1
        )
        # x = token + state + MLP(norm(features)) + slot + rank
        x = self.token_proj(embedded) + self.pass_hidden_proj(states)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features.to(states.dtype)))
        x = x + self.embed_slots(levels) + self.rank_embedding[0, :, :, :count]
        x = x.flatten(1, 2)
        bias = self.attention_bias(levels, count)
        for layer in self.layers:
            x = layer(x, bias)
        x = self.output_norm(x).unflatten(1, (levels, count))  # [A, K, k, W]
        anchor = self.anchor_norm(self.context_proj(context))[:, None, None]  # [A, 1, 1, W]
        wide_anchor = anchor.expand_as(x)
        # f = SiLU(W [x; a; x * a])
        factors = F.silu(
            self.factor_input_proj(torch.cat([x, wide_anchor, x * wide_anchor], dim=-1))
        )
        normalise = partial(F.normalize, dim=-1, eps=self.settings.vector_eps)
        ins = normalise(self.in_head(factors))  # [A, K, k, F]
        outs = normalise(self.out_head(factors[:, :-1]))
        first = normalise(self.anchor_out_head(anchor)).expand(-1, 1, count, -1)
        # score(c | c') = scale * cos(out(c'), in(c)), where the root's vector is made of the context
        cosines = torch.cat([first, outs], dim=1) @ ins.mT
        return self.settings.logit_scale * cosines.to(log_probs.dtype)


def follow(scores: Tensor, best: Tensor, matches: Tensor) -> Tensor:
    """Return the scores [.., R, k] of a slot's candidates after R tokens.

    After a token that is no candidate of the slot before, the candidates keep the slot's own logits.

    Args:
        scores: [.., k, k], of each candidate (last) after each candidate of the slot before.
        best: The slot's own logits [.., k] of its candidates.
        matches: [.., R, k] bool, which candidate of the slot before a token is; none, or all for the root.
    """
    index = matches.long().argmax(-1, keepdim=True).expand(*matches.shape[:-1], scores.shape[-1])
    return torch.where(matches.any(-1, keepdim=True), scores.gather(-2, index), best[..., None, :])


class LatticeState(InjectedState):
    """The drafting state, which keeps the fused features of the last committed token of each sequence."""

    def __init__(self, head: LiLiCorr) -> None:
        super().__init__(head)
        self.contexts: dict[int, Tensor] = {}  # [H] each, by cache row

    def inject(self, cache_rows: Sequence[int], features: Sequence[Tensor]) -> None:
        """Add the keys and values of committed tokens to the cache, as `InjectedState.inject` does."""
        super().inject(cache_rows, features)
        # a sequence without a token has no last one
        last = {row: rows[-1] for row, rows in zip(cache_rows, features, strict=True) if len(rows)}
        if last:
            states = torch.stack(list(last.values())).to(self.device, self.dtype)
            self.contexts |= zip(last, self.head.fuse_taps(states), strict=True)

    def read_blocks(self, cache_rows: Sequence[int], roots: Tensor) -> Tensor:
        """Return the states of blocks and, beside each, the fused features of the sequence's last token, [B, K, 2H].

        The arguments are those of `InjectedState.read_blocks`.
        """
        states = super().read_blocks(cache_rows, roots)
        context = torch.stack([self.contexts[row] for row in cache_rows])
        return torch.cat([states, context[:, None].expand_as(states)], dim=-1)


class LatticeLevels(CandidateLevels):
    """The logits of all levels of all trees, by the scores of the lattice, which is read once for all trees."""

    @cached_property
    def lattice(self) -> Tensor:
        """The scores [B, K, k, k] of each candidate after each candidate of the slot before."""
        states, context = self.states.chunk(2, dim=-1)
        candidates = candidate_log_probs(self.logits, self.best), self.tokens
        scores: Tensor = self.head.score_lattice(
            states, context[:, 0], candidates, self.head.target_head
        )
        return scores

    def score(self, depth: int, rows: list[int], tokens: Tensor, candidates: Candidates) -> Tensor:
        """Return the scores [B, R, k] of a level's candidates; the arguments are those of `CandidateLevels.score`."""
        parents = self.head.as_tokens(pick_rows(self.tokens[:, depth - 1], rows))  # [B, k]
        # the scores after a root are the same in all rows
        matches = (tokens[..., None] == parents[:, None]) | (depth == 0)
        return follow(pick_rows(self.lattice[:, depth], rows), candidates[0][:, 0], matches)


class LiLiCorr(ComparedBlocks):
    """DFlash's network, and a scorer of the paths through the candidates of all slots."""

    reads_tokens = True
    reads_all_levels = True
    counts_by_forward = True
    open_levels = LatticeLevels
    Settings = LiLiCorrSettings
    settings: LiLiCorrSettings

    def __init__(self, settings: LiLiCorrSettings, shape: HeadShape) -> None:
        hidden_size, factor_dim = settings.find_widths(shape.hidden_size)
        # resolved, as readers of a checkpoint have no defaults
        widths = {"hidden_size": hidden_size, "factor_dim": factor_dim}
        super().__init__(settings.model_copy(update=widths), shape)
        self.lilicorr = LatticeScorer(self.settings, shape, self.levels)

    def make_block(self, shape: HeadShape) -> NormedBlock:
        """Return a new transformer block, with convolutions over the slots of a block of tokens if settings say so."""
        settings = self.settings
        if settings.conv_kernel_size is None or settings.conv_group_size is None:
            return super().make_block(shape)
        return ConvolvedBlock(
            shape, settings.slots, settings.conv_kernel_size, settings.conv_group_size
        )

    def draw_weights(self) -> None:
        """Initialise the linear layers of a new head in place."""
        super().draw_weights()
        scorer = self.lilicorr
        # small, as scores should be alike at first, and not 0, as the product of two zeros has no gradient
        for linear in (scorer.out_head, scorer.in_head, scorer.anchor_out_head):
            nn.init.normal_(linear.weight, std=STD)
            nn.init.zeros_(linear.bias)

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and the settings that decide what its weights mean."""
        names = ("logit_scale", "vector_eps")
        return {**super().network, **{name: getattr(self.settings, name) for name in names}}

    @property
    def parts(self) -> Parts:
        """The weights that a faulty conversion could swap: those of a block head, and the lattice's two factors."""
        factors = ("lilicorr.out_head.weight", "lilicorr.in_head.weight")
        return replace(super().parts, alike=(factors,), choosing=("lilicorr",))

    @property
    def candidate_count(self) -> int:
        """The number of candidates of a slot."""
        return self.settings.candidate_topk

    @property
    def level_width(self) -> int:
        """The width of what a draft's levels are made of: a state and the fused features of the last token."""
        return 2 * super().level_width

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V] of states [.., H], of which more than H columns may be given."""
        return super().logits(state[..., : self.shape.hidden_size], target_head)

    def as_tokens(self, rows: Tensor) -> Tensor:
        """Return the target's tokens of rows of the LM head, which are fewer with a draft vocabulary."""
        return rows if self.drafts is None else self.drafts[rows]

    def score_lattice(
        self, states: Tensor, context: Tensor, candidates: Candidates, target_head: TargetHead
    ) -> Tensor:
        """Return the scores [A, K, k, k] of each candidate (last) after each candidate of the slot before.

        Args:
            states: The states [A, K, H] of the slots.
            context: The fused features [A, H] of the last token before the root.
            candidates: The log-probs [A, K, k] and the tokens [A, K, k] of the candidates.
            target_head: The target's embedding.
        """
        log_probs, rows = candidates
        embedded = target_head.embed(self.as_tokens(rows)).detach().to(self.dtype)
        scores: Tensor = self.lilicorr(log_probs, embedded, states, context)
        return scores

    # -- training -----------------------------------------------------------------------------------------------------

    def level_shares(self, batch: Batch) -> Tensor:
        """Return [K], the weight of each of K levels in DFlash's loss, divided by its divisor."""
        if batch.divisors:
            # the last one divides the lattice's loss
            batch = replace(batch, divisors=batch.divisors[:-1])
        return super().level_shares(batch)

    def forward(
        self, batch: Batch, target_head: TargetHead, count: bool = False
    ) -> dict[str, Tensor]:
        """Return the loss as "total", and terms that are logged; with `count` the divisors of DFlash's and of its own.

        The arguments are those of `ComparedBlocks.forward`.
        """
        if not count:
            return super().forward(batch, target_head)
        divisors = list(self.divisors(batch.masks, batch.seeds))
        if super().counts_by_forward:
            divisors = [super().forward(batch, target_head, count=True)["divisor"].item()]
        anchors, states = self.read_anchors(batch, target_head)
        _, rows = self.rank_tokens(states, self.output_head(target_head))
        matches = self.find_labels(batch, anchors, rows)
        divisors.append(find_prefix(anchors, matches).sum().item())
        return {"divisor": torch.tensor(divisors, dtype=torch.float64)}

    @torch.no_grad()
    def rank_tokens(self, states: Tensor, target_head: TargetHead) -> Candidates:
        """Return the log-probs [A, K, k] and the tokens [A, K, k] of the candidates of slots with states [A, K, H]."""
        ranking = RankingHead.of(target_head, self.candidate_count, normalised=True)
        for rows in states.flatten(0, 1).split(ROWS):
            ranking.logits(rows)
        log_probs, tokens = ranking.candidates
        return log_probs.unflatten(0, states.shape[:2]), tokens.unflatten(0, states.shape[:2])

    def find_labels(self, batch: Batch, anchors: Anchors, rows: Tensor) -> Tensor:
        """Return a bool [A, K, k], which candidate, of these rows of the LM head, is the sequence's token."""
        labels, in_vocab = self.find_drafts(anchors.tokens_of(batch))
        return (rows == labels[..., None]) & in_vocab[..., None]

    def read_context(self, batch: Batch, anchors: Anchors) -> Tensor:
        """Return the fused features [A, H] of the last token before each anchor's root."""
        features = batch.select_taps(self.taps).index_select(0, anchors.token_indices)
        return self.fuse_taps(features.to(self.dtype))

    def losses(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        weights: Tensor,
        target_head: TargetHead,
    ) -> dict[str, Tensor]:
        """Return "total", the loss of the blocks plus that of the lattice, and both by themselves for logs.

        The arguments are those of `ComparedBlocks.losses`: states [A, K, H] and weights [A, K] of K levels after each
        of A anchors.
        """
        ranking = RankingHead.of(target_head, self.candidate_count, normalised=True)
        total = self.compare(batch, anchors, states, weights, (ranking, target_head))
        log_probs, rows = ranking.candidates  # [N, k]
        # the lattice's loss reaches the blocks by these, too
        log_probs = CandidateLogits.apply(states.flatten(0, 1), log_probs, rows, target_head, True)
        candidates = log_probs.unflatten(0, weights.shape), rows.unflatten(0, weights.shape)
        scores = self.score_lattice(
            states, self.read_context(batch, anchors), candidates, target_head
        )
        matches = self.find_labels(batch, anchors, candidates[1])
        # the slots up to the first whose token is no candidate; all others have no loss
        supervised = find_prefix(anchors, matches)
        # each slot is scored after the sequence's token of the slot before
        node = follow(scores, candidates[0], after_labels(matches))[:, :, 0]  # [A, K, k]
        terms = self._compare_scores(node, matches)
        if self.settings.w_pen:
            target_logits = _read_target(batch, anchors, candidates[1], target_head)
            gold = matches.long().argmax(-1, keepdim=True)
            # sum over c of q(c) relu(z(token) - z(c)), with the target's logits z
            gaps = (target_logits.gather(-1, gold) - target_logits).relu()
            terms = terms + self.settings.w_pen * (node.softmax(-1) * gaps).sum(-1)
        divisor = supervised.sum() if batch.divisors is None else batch.divisors[-1]
        # a mean; without a supervised slot its sum is 0, and any divisor does
        lattice = (terms * supervised).sum() / torch.as_tensor(divisor).clamp(min=1)
        return {
            "total": total + lattice,
            "draft_probs": total.detach(),
            "lattice": lattice.detach(),
        }

    def _compare_scores(self, node: Tensor, matches: Tensor) -> Tensor:
        """Return [A, K], the weighted sum of cross-entropy and margin of each slot.

        Args:
            node: The scores [A, K, k] of the candidates.
            matches: [A, K, k] bool, which of them is the sequence's token.
        """
        settings = self.settings
        # w_ce * -log q(token) + w_margin * relu(margin - (s(token) - max of the other scores))
        terms = -settings.w_ce * (node.log_softmax(-1) * matches).sum(-1)
        if settings.w_margin and node.shape[-1] > 1:
            others = node.masked_fill(matches, -torch.inf).amax(-1)
            gaps = (node * matches).sum(-1) - others
            terms = terms + settings.w_margin * (settings.margin - gaps).relu()
        return terms

    # -- validation ---------------------------------------------------------------------------------------------------

    def read_levels(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        target_head: TargetHead,
    ) -> Tensor:
        """Return states, scores and candidates [A, K, H + 2k] of K levels after each of A anchors, for `level_logits`.

        Scores are those after the sequences' tokens. Candidates are rows of the LM head, which need fp32. The arguments
        are those of `InjectedHead.read_levels`.
        """
        head = self.output_head(target_head)
        log_probs, rows = self.rank_tokens(states, head)
        log_probs = CandidateLogits.apply(
            states.flatten(0, 1), log_probs.flatten(0, 1), rows.flatten(0, 1), head, True
        ).view_as(log_probs)
        context = self.read_context(batch, anchors)
        # some anchors at a time, as the attention of a whole lattice is in memory for each of them
        chunks = zip(
            *(tensor.split(ANCHORS_AT_ONCE) for tensor in (states, context, log_probs, rows)),
            strict=True,
        )
        scores = torch.cat(
            [
                self.score_lattice(chunk_states, chunk_context, (values, tokens), target_head)
                for chunk_states, chunk_context, values, tokens in chunks
            ]
        )
        matches = self.find_labels(batch, anchors, rows)
        node = follow(scores, log_probs, after_labels(matches))[:, :, 0]
        return torch.cat([states.to(node.dtype), node, rows.to(node.dtype)], dim=-1)

    def level_logits(self, target_head: TargetHead) -> Callable[[Tensor], Tensor]:
        """Return the function that makes logits [.., V] of what `read_levels` returns."""
        return partial(self._choose, target_head=target_head)

    def _choose(self, level: Tensor, target_head: TargetHead) -> Tensor:
        """Return the logits [.., V] of states, scores and candidates [.., H + 2k]: the slot's own, with the scores."""
        width = self.shape.hidden_size
        state, scores, rows = level.tensor_split([width, (level.shape[-1] + width) // 2], dim=-1)
        logits = target_head.logits(state)
        return insert_scores(logits, (logits.gather(-1, rows.long()), rows.long()), scores)

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> LatticeState:
        """Return the state for several sequences drafted in a batch."""
        return LatticeState(self)


def find_prefix(anchors: Anchors, matches: Tensor) -> Tensor:
    """Return a bool [A, K]: whether the tokens of a slot and of all slots before are supervised and candidates.

    `matches` [A, K, k] says which candidate of a slot is the sequence's token.
    """
    return (anchors.reached & matches.any(-1)).long().cumprod(1).bool()


def after_labels(matches: Tensor) -> Tensor:
    """Return `matches` [A, K, 1, k] of the slot before each slot, as `follow` reads them; the first is after a root."""
    return torch.cat([torch.ones_like(matches[:, :1]), matches[:, :-1]], dim=1)[:, :, None]


@torch.no_grad()
def _read_target(batch: Batch, anchors: Anchors, rows: Tensor, target_head: TargetHead) -> Tensor:
    """Return the target's logits [A, K, k] of candidates, which are these rows of the LM head."""
    hidden = anchors.states_before(batch).flatten(0, 1)
    # some rows at a time, as the logits of all tokens may not fit in memory
    chunks = zip(hidden.split(ROWS), rows.flatten(0, 1).split(ROWS), strict=True)
    return torch.cat([target_head.logits(chunk).gather(1, index) for chunk, index in chunks]).view(
        rows.shape
    )
