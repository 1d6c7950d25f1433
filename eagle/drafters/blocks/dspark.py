"""DSpark (DeepSeek 2026): DFlash with a bias on each level that depends on the previous tokens; also Domino.

The bias is low-rank: a bias module encodes the tokens before a level as a code of width r, and its matrix [V, r] maps
the code to a bias of the logits.
"""

# A anchors, K levels, H hidden, r rank, B sequences, R nodes of one level, V vocabulary, M width of a path's memory

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import MOST_LEVELS
from eagle.core.drafter import HeadShape, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.device import pick_rows, upload
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.injected_head import InjectedHead, InjectedSettings
from eagle.drafters.parts.growth import FollowsRows
from eagle.drafters.parts.objectives import (
    BiasedHead,
    LanguageHead,
    Objective,
    SequenceTokens,
    distillation_loss,
)
from eagle.drafters.parts.reduced_vocab import draft_vocab_size
from eagle.drafters.parts.scoring import DraftRequest


class MarkovBias(nn.Module):
    """The bias W2 W1[token] of a level's logits, where token is the one before the level (DSpark's "vanilla").

    W1 maps a token to a code of width r, the rank, and W2 maps the code to a bias for each token that can be drafted.
    """

    # M, the width of a path's memory: the recurrent state that subclasses update at each token of a path; 0 for none
    memory_size = 0

    def __init__(self, shape: HeadShape, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(shape.vocab_size, rank)
        # the token before may be any, the bias is of those that can be drafted
        self.markov_w2 = nn.Linear(rank, draft_vocab_size(shape), bias=False)
        # a small standard deviation, so that logits are at first almost those of the target's LM head
        nn.init.normal_(self.markov_w1.weight, std=0.02)
        nn.init.normal_(self.markov_w2.weight, std=0.02)

    @property
    def matrix(self) -> Tensor:
        """[V, r], which maps a code to a bias of the logits."""
        return self.markov_w2.weight

    def read_token(
        self,
        level: int,
        state: Tensor,
        tokens: Tensor,
        memory: Tensor,
        target_head: TargetHead,
    ) -> tuple[Tensor, Tensor]:
        """Read the token before a level on each path of a draft, to make the bias of the level's logits.

        The bias of a path is `matrix` @ its code.

        Args:
            level: The level whose logits get the bias. Here all levels are alike, in Domino the first have no bias.
            state: The level's states [.., H].
            tokens: The tokens [..] before the level, one for each path.
            memory: The recurrent state [.., M] of the paths up to these tokens, without them; M may be 0.
            target_head: The target's embedding and LM head, of which only Domino embeds tokens.

        Returns:
            The codes [.., r] of the paths, and their new recurrent state [.., M], these tokens included.
        """
        return self.combine(state, self.markov_w1(tokens), memory)

    def combine(self, state: Tensor, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the code [.., r] and the new recurrent state [.., M] of paths; here the code is the embedded token.

        Args:
            state: The states [.., H] of the level that gets the bias.
            token: The embedded tokens [.., r] before the level.
            memory: The recurrent state [.., M] of the paths without these tokens. Here none is kept: M is 0.
        """
        return token, memory


class GatedBias(MarkovBias):
    """The bias W2 (W1[token] * sigmoid(G [state; W1[token]])): a gate scales the token's embedding."""

    def __init__(self, shape: HeadShape, rank: int) -> None:
        super().__init__(shape, rank)
        self.gate_proj = nn.Linear(shape.hidden_size + rank, rank)

    def combine(self, state: Tensor, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes [.., r], the embedded tokens times their gates, and `memory` unchanged, of width 0.

        The arguments are those of `MarkovBias.combine`: a level's states [.., H] and the embedded tokens [.., r].
        """
        gate = self.gate_proj(torch.cat([state, token], dim=-1)).sigmoid()
        return token * gate, memory


class RecurrentBias(MarkovBias):
    """The bias W2 tanh(c), with a recurrent state m of the path's tokens, m' = s(g) m + (1 - s(g)) tanh(n).

    Here s is the sigmoid and (g, n, c) = J [m; W1[token]; state].
    """

    def __init__(self, shape: HeadShape, rank: int) -> None:
        super().__init__(shape, rank)
        self.memory_size = rank
        # J of the formula above
        self.joint_proj = nn.Linear(2 * rank + shape.hidden_size, 3 * rank)

    def combine(self, state: Tensor, token: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the codes tanh(c) [.., r] and the new recurrent state m' [.., r] of paths.

        The arguments are those of `MarkovBias.combine`: a level's states [.., H], the embedded tokens [.., r] before
        it, and the recurrent state m [.., r] without these tokens.
        """
        gate, new, code = self.joint_proj(torch.cat([memory, token, state], dim=-1)).chunk(
            3, dim=-1
        )
        gate = gate.sigmoid()
        return code.tanh(), gate * memory + (1 - gate) * new.tanh()


# by the setting `markov`
MARKOV = {"vanilla": MarkovBias, "gated": GatedBias, "rnn": RecurrentBias}


@dataclass(frozen=True)
class GruBias:
    """Domino's bias: a GRU reads the path's tokens, and an MLP maps its state and the level's state to the bias.

    The tokens are embedded by the target.
    """

    gru: nn.GRU
    projections: nn.Sequential  # the MLP; its last matrix is `matrix`
    unbiased: int  # the first levels, this many, have no bias

    @property
    def matrix(self) -> Tensor:
        """[V, r], which maps a code to a bias of the logits."""
        return self.projections[-1].weight  # type: ignore[return-value]

    @property
    def memory_size(self) -> int:
        """The width of the GRU's state."""
        return self.gru.hidden_size

    def read_token(
        self,
        level: int,
        state: Tensor,
        tokens: Tensor,
        memory: Tensor,
        target_head: TargetHead,
    ) -> tuple[Tensor, Tensor]:
        """Read the token before a level on each path of a draft, to make the bias of the level's logits.

        Args:
            level: The level whose logits get the bias; the first `unbiased` levels get none.
            state: The level's states [.., H].
            tokens: The tokens [..] before the level, one for each path.
            memory: The GRU's state [.., M] after the paths up to these tokens, without them.
            target_head: The target's head, which embeds the tokens.

        Returns:
            The codes [.., r] of the paths, zeros for a level without a bias, and the GRU's new state [.., M].
        """
        embedded = target_head.embed(tokens).to(memory.dtype)
        # the GRU step by hand, as torch's kernels do not support every precision:
        # r = s(W_r x + U_r h); z = s(W_z x + U_z h); n = tanh(W_n x + r U_n h); h' = z h + (1 - z) n
        # W and U, each with the three matrices for r, z and n, which torch stores in this order
        input_weight, memory_weight, *_ = self.gru.all_weights[0]
        reset, keep, new = F.linear(embedded, input_weight).chunk(3, dim=-1)
        reset_memory, keep_memory, new_memory = F.linear(memory, memory_weight).chunk(3, dim=-1)
        keep = (keep + keep_memory).sigmoid()
        memory = (
            keep * memory
            + (1 - keep) * (new + (reset + reset_memory).sigmoid() * new_memory).tanh()
        )
        # no bias here, but the GRU has read the token for later levels
        if level < self.unbiased:
            return memory.new_zeros(*memory.shape[:-1], self.matrix.shape[1]), memory
        # all layers of the MLP but the last, which is `matrix`
        return self.projections[:-1](torch.cat([state, memory], dim=-1)), memory


class PathLevels(FollowsRows):
    """The logits of all levels of all trees: those of the level's slot plus a bias from each node's path.

    It is a `RowsLevel`, the function that tree growth calls for the logits of each level. One forward over a block has
    made the states of all levels before.
    """

    def __init__(self, head: Any, requests: Sequence[DraftRequest], states: Tensor) -> None:
        """Compute the logits after the roots of B requests, from the head's states of their K levels.

        Args:
            head: The draft head, bound to a target's head.
            requests: Those of the B rows, of which the roots are read.
            states: [B, K, H], the states that predict each level.
        """
        self.head = head
        self.states = states  # [B, K, H]
        self.slot_logits: Tensor = head.logits(
            states, head.target_head
        )  # [B, K, V], without biases
        # the requests whose trees still grow, and all of them, by index
        self.rows = self.all_rows = list(range(len(states)))
        self.roots = upload(torch.tensor([[request.root] for request in requests]), states.device)
        # [B, R], the tokens of the R nodes of the level that was read last; [B, 1] now
        self.tokens = self.roots
        # a head without a bias keeps no recurrent state of paths
        memory_size = 0 if head.bias is None else head.bias.memory_size
        # [B, R, M], the bias module's recurrent state of the path up to each of these nodes; `_read_tokens` updates it
        self.memory = states.new_zeros(len(states), 1, memory_size)
        self.first = self._read_tokens(0)[:, 0]  # [B, V], the logits after the roots
        # the recurrent state after the roots, to which another draft of the same rows returns
        self.first_memory = self.memory

    def __call__(
        self,
        depth: int,
        rows: list[int],
        tokens: Tensor,
        parents: Tensor,
        tree_mask: Tensor,
    ) -> Tensor:
        """Return the logits after the R nodes of one level of each row's tree.

        They are [B, R, V], or [B, 1, V] if they are the same for all nodes of a level.

        Args:
            depth: The depth of the nodes, 1 for the root's children.
            rows: The B rows whose trees still grow.
            tokens: [B, R], the tokens of the nodes.
            parents: [B, R], the index of each node's parent in the level above.
            tree_mask: Unused: a bias depends on the path's recurrent state, and no attention is computed.
        """
        # a new draft of the same rows begins after the roots again
        if depth == 1:
            self.rows = self.all_rows
            self.memory = self.first_memory
        # each node continues the path of its parent
        (memory,) = self.keep_rows(rows, self.memory)
        self.memory = memory.take_along_dim(parents[..., None], 1)
        self.tokens = tokens
        return self._read_tokens(depth)

    def confidence(self, depth: int, rows: list[int]) -> Tensor:
        """Return the estimated log-odds that a node's child is accepted: [B, R], or [B, 1] for all nodes of a level.

        The nodes are the R of each row's tree whose logits were returned last, at depth 0 the roots.

        Args:
            depth: The depth of the nodes.
            rows: The B rows whose trees still grow.
        """
        state = pick_rows(self.states[:, depth : depth + 1], rows)
        # `self.tokens` may be left over from an earlier draft of the same rows, so the roots are taken by themselves
        tokens = self.tokens if depth else pick_rows(self.roots, rows)
        odds: Tensor = self.head.rate(state, tokens)
        temperatures = self.head.confidence_temperatures
        return odds if temperatures is None else odds / temperatures[depth]

    def _read_tokens(self, depth: int) -> Tensor:
        """Return the logits [B, R, V] after `self.tokens` [B, R], those of the R nodes of a level of B trees.

        Without a bias they are [B, 1, V]. It replaces `self.memory`, the recurrent state of the nodes' paths, by that
        with these tokens. `depth` is that of the nodes, 0 for the roots.
        """
        # the slot that predicts what follows nodes of depth d is that of level d
        level = slice(depth, depth + 1)
        logits = pick_rows(self.slot_logits[:, level], self.rows)
        bias = self.head.bias
        if bias is None:
            return logits
        # all nodes of a level share the slot's state and differ by their token and path
        state = pick_rows(self.states[:, level], self.rows).expand(-1, self.tokens.shape[1], -1)
        code, self.memory = bias.read_token(
            depth, state, self.tokens, self.memory, target_head=self.head.target_head
        )
        return logits + (code @ bias.matrix.T).to(logits.dtype)


class DSparkSettings(InjectedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["dspark"] = "dspark"
    # number of slots of a block: the last accepted token, then mask tokens
    slots: int = Field(7, ge=2, le=MOST_LEVELS)
    # each slot predicts the token after its position; otherwise the token at its position
    sample_from_anchor: bool = True
    decay: float | None = Field(4.0, gt=0)  # level d has the weight e^(-d / decay) in the loss
    # kind of the Markov head, which adds a bias that depends on the tokens drafted before
    markov: Literal["none", "vanilla", "gated", "rnn", "domino"] = "vanilla"
    rank: int = Field(256, ge=1)  # rank of the Markov head's matrix
    gru_size: int = Field(1024, ge=1)  # size of the GRU of "domino"
    unbiased: int = Field(1, ge=0)  # number of levels to which "domino" adds no bias
    confidence: bool = True  # also predict how likely each level is to be accepted
    # weight of the cross-entropy with the tokens of the data
    likelihood: float = Field(0.1, ge=0)
    distance: float = Field(0.9, ge=0)  # weight of the sum of |p - q|


class DSpark(InjectedHead):
    """(states of a block, earlier draft tokens) -> logits: one forward gives all states, and each level has a bias.

    The bias depends on the tokens drafted before the level.
    """

    open_levels = PathLevels
    Settings = DSparkSettings
    settings: DSparkSettings

    def __init__(self, settings: DSparkSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        width = shape.hidden_size
        rank = settings.rank
        self.reads_tokens = settings.markov != "none"
        self.rates_nodes = settings.confidence
        # the names of modules are those of the published checkpoints
        self.markov_head = self.prefix_gru = None
        self.confidence_head: Any = None
        if settings.markov == "domino":
            self.prefix_gru = nn.GRU(width, settings.gru_size, bias=False, batch_first=True)
            self.embed_proj = nn.Sequential(
                nn.Linear(width + settings.gru_size, rank, bias=False),
                nn.SiLU(),
                nn.Linear(rank, draft_vocab_size(shape), bias=False),
            )
        elif settings.markov != "none":
            self.markov_head = MARKOV[settings.markov](shape, rank)
        if settings.confidence:
            # it reads the embedded token before the level too, if the Markov bias has an embedding
            inputs = width if self.markov_head is None else width + rank
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(inputs, 1)})

    @property
    def network(self) -> dict[str, Any]:
        """The network's name and the settings that decide what its weights mean."""
        settings = self.settings
        network = {**super().network, "markov": settings.markov, "confidence": settings.confidence}
        if settings.markov == "domino":
            network["unbiased"] = settings.unbiased
        return network

    @property
    def parts(self) -> Parts:
        """The weights that a faulty conversion could swap, which `eagle doctor` checks.

        They are those of a block head, and the two matrices of the Markov bias, W1 and W2.
        """
        if self.markov_head is None:
            return super().parts
        # both have the shape [V, r] where all tokens can be drafted, so that a conversion can exchange them
        tables = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
        return replace(super().parts, alike=(tables,))

    @property
    def bias(self) -> MarkovBias | GruBias | None:
        """The module that encodes the tokens before a level; None if all nodes of a level have the same logits."""
        if self.prefix_gru is not None:
            return GruBias(self.prefix_gru, self.embed_proj, self.settings.unbiased)
        return self.markov_head

    def rate(self, states: Tensor, tokens: Tensor) -> Tensor:
        """Return the log-odds [..] that the token drafted at a level is accepted.

        Args:
            states: The level's states [.., H], or one [.., 1, H] that all tokens share.
            tokens: The tokens [..] before the level.

        Without a Markov bias the tokens are not read, and the log-odds have the shape of the states.
        """
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(tokens)
            states = torch.cat([states.expand(*embedded.shape[:-1], -1), embedded], dim=-1)
        odds: Tensor = self.confidence_head.proj(states)
        return odds[..., 0]

    # -- training -----------------------------------------------------------------------------------------------------

    def lm_head(self, target_head: TargetHead) -> LanguageHead:
        """Return the LM head that reads what `read_levels` returns: states, or states and codes if there is a bias."""
        return target_head if self.bias is None else BiasedHead(target_head, self.bias.matrix)

    def read_levels(
        self,
        batch: Batch,
        anchors: Anchors,
        states: Tensor,
        target_head: TargetHead,
    ) -> Tensor:
        """Return the inputs of `lm_head` in training, where the sequences' tokens are taken as the draft tokens.

        They are states and codes [A, K, H + r] for K levels after each of A anchors; without a bias the states alone.

        Args:
            batch: The sequences.
            anchors: The slots after which the blocks are drafted.
            states: The states [A, K, H] of the blocks.
            target_head: The target's embedding.
        """
        bias = self.bias
        if bias is None:
            return states
        codes = []
        # the bias module's recurrent state of each block's tokens so far
        memory = states.new_zeros(len(states), bias.memory_size)
        for level, state in enumerate(states.unbind(1)):
            # level d reads the token before the one it predicts; level 0 the root
            tokens = anchors.tokens_at(batch, level - 1)
            code, memory = bias.read_token(level, state, tokens, memory, target_head=target_head)
            codes.append(code)
        return torch.cat([states, torch.stack(codes, dim=1)], dim=-1)

    @property
    def follows_progress(self) -> bool:  # type: ignore[override]
        """Whether the loss depends on the progress of training: with Domino's bias its weight grows."""
        return self.prefix_gru is not None

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the loss over all levels of the blocks after sampled anchors, plus the loss of the confidence.

        The sum is "total"; "draft_probs" and "confidence" are logged. There are A anchors, the slots after which
        blocks are drafted, and K levels.
        """
        anchors, states = self.read_anchors(batch, target_head)  # states [A, K, H]
        # [A, K, H + r]: the states, and codes of the tokens before each level; without a bias the states alone
        hidden = self.read_levels(batch, anchors, states, target_head)
        # [A, K], 0 at levels that are not reached
        weights = anchors.reached * self.level_shares(batch)
        # the target's LM head, cut to the draft vocabulary
        output = self.output_head(target_head)
        total, overlaps = self.compare(
            batch, anchors, hidden, weights, heads=(self.lm_head(output), output)
        )
        if self.prefix_gru is not None:
            # Domino first learns to predict without the bias, and gradually with it: progress goes from 0 to 1
            unbiased, _ = self.compare(batch, anchors, states, weights, heads=(output, output))
            total = batch.progress * total + (1 - batch.progress) * unbiased
        losses = {"total": total, "draft_probs": total.detach()}
        if self.confidence_head is not None:
            # the confidence learns the probability that a level is accepted after the sequence's tokens, which is the
            # overlap sum min(p, q) of head and target: [A, K]
            roots = anchors.tokens_at(batch, -1)[:, None]
            # [A, K], the token before the one that each level predicts
            previous = torch.cat([roots, anchors.tokens_of(batch)[:, :-1]], dim=1)
            rated = self.rate(states, previous).to(overlaps.dtype)
            losses["confidence"] = F.binary_cross_entropy_with_logits(
                rated, overlaps, weights, reduction="sum"
            )
            losses["total"] = total + losses["confidence"]
        return losses

    def compare(
        self,
        batch: Batch,
        anchors: Anchors,
        hidden: Tensor,
        weights: Tensor,
        heads: tuple[LanguageHead, TargetHead],
    ) -> tuple[Tensor, Tensor]:
        """Return the loss towards the target's probs and the sequences' tokens, and the overlaps with the target.

        Args:
            batch: The sequences, with the target's states.
            anchors: The A slots after which the blocks are drafted.
            hidden: The inputs of the draft head's LM head for each of K levels: states [A, K, H], or states and codes
                [A, K, H + r].
            weights: The loss weight of each level at each anchor [A, K].
            heads: The draft head's LM head and the target's.

        Returns:
            The loss, and the overlaps sum min(p, q) [A, K], which are the probabilities of acceptance.
        """
        settings = self.settings
        # filled by the loss, which writes to a view of it
        overlaps = torch.zeros_like(weights, dtype=torch.promote_types(hidden.dtype, weights.dtype))
        tokens, in_vocab = self.find_drafts(anchors.tokens_of(batch).flatten())
        # the target's probs are cut to the draft vocabulary, and tokens outside of it have no likelihood; None: all do
        mask = None if self.own_drafts is None else in_vocab
        sequence_tokens = SequenceTokens(tokens, overlaps.view(1, -1), mask)
        # sum |p - q| is twice the total variation
        objective = Objective("tv", weight=2 * settings.distance, tokens=settings.likelihood)
        # every level of every anchor is a row of one step: [1, A * K, ..]; the second result is the loss by step
        total, _ = distillation_loss(
            hidden.flatten(0, 1)[None],
            anchors.states_before(batch).flatten(0, 1),
            weights.flatten()[None],
            heads,
            objective=objective,
            dtype=heads[1].weight.dtype,
            sequence_tokens=sequence_tokens,
        )
        return total, overlaps
