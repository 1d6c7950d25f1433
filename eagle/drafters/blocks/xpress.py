"""XPress (arXiv 2608.02438): DFlash's blocks, whose slots a small refiner corrects by the tokens of the slots before.

The refiner reads a whole block at once. A draft repeats it a few times, each time on the tokens that the last pass
chose, instead of drafting the tokens one after the other: Jacobi passes.
"""

# A anchors, B slots of a block, K levels, H hidden, r rank, V vocabulary, D draft vocabulary, S sequences, P terms

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from eagle.core.budget import Budget
from eagle.core.drafter import Committed, HeadShape, Noise, Parts, TargetHead
from eagle.core.examples import Batch
from eagle.core.tree import DraftTree
from eagle.device import must_wait, upload
from eagle.drafters.blocks.anchors import Anchors
from eagle.drafters.blocks.injected_head import InjectedHead, InjectedSettings
from eagle.drafters.blocks.injected_state import InjectedState
from eagle.drafters.parts.objectives import (
    ROWS,
    BiasedHead,
    LanguageHead,
    Objective,
    SequenceTokens,
    distillation_loss,
)
from eagle.drafters.parts.reduced_vocab import draft_vocab_size


class Refiner(nn.Module):
    """(states of a block, the token before each slot) -> a code of width r for each slot, which biases its logits.

    All slots are read at once: a slot sees its own token and state, those of earlier slots, and the mean of all states.
    """

    def __init__(self, shape: HeadShape, slots: int, rank: int, mlp_ratio: int) -> None:
        super().__init__()
        width = shape.hidden_size
        # the names of modules are those of speculators
        self.token_embed = nn.Embedding(shape.vocab_size, rank)
        self.down_h = nn.Linear(width, rank, bias=False)
        self.down_g = nn.Linear(width, rank, bias=False)
        self.in_proj = nn.Linear(3 * rank, rank, bias=False)
        # [r, B, B]: for each channel, what a slot (first) takes from another (second); above the diagonal it is unused
        self.mix_l = nn.Parameter(torch.zeros(rank, slots, slots))
        self.mlp_gate = nn.Linear(rank, mlp_ratio * rank, bias=False)
        self.mlp_up = nn.Linear(rank, mlp_ratio * rank, bias=False)
        self.mlp_down = nn.Linear(mlp_ratio * rank, rank, bias=False)
        self.readout = nn.Linear(rank, draft_vocab_size(shape), bias=False)
        # as published: logits are at first almost those of the target's LM head
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def read_states(self, states: Tensor) -> Tensor:
        """Return what the refiner reads of the states [.., B, H] of blocks, which is the same in all passes.

        It is c = [down_h h_k; down_g mean(h)] for each slot k, [.., B, 2r].
        """
        by_slot = self.down_h(states)
        by_block = self.down_g(states.mean(-2, keepdim=True))
        return torch.cat([by_slot, by_block.expand_as(by_slot)], dim=-1)

    def forward(self, context: Tensor, previous: Tensor) -> Tensor:
        """Return the codes [.., B, r] of the slots of blocks. The bias of a slot's logits is readout(code).

        Args:
            context: What `read_states` returned, [.., B, 2r]; or its first slots, to which a draft may be limited.
            previous: The token before the one that each slot predicts or holds, [.., B].
        """
        # x_k = in_proj [c_k; embed(previous_k)]
        code = self.in_proj(torch.cat([context, self.token_embed(previous)], dim=-1))
        # x_k += sum over j <= k of L_kj x_j, for each channel by itself
        count = previous.shape[-1]
        mix = self.mix_l[:, :count, :count].tril()
        code = code + torch.einsum("ckj,...jc->...kc", mix, code)
        # x += down(SiLU(gate x) * up x)
        return code + self.mlp_down(F.silu(self.mlp_gate(code)) * self.mlp_up(code))


class RefinedState(InjectedState):
    """The drafting state, whose blocks are refined as soon as they are read: all levels then have their final logits.

    A level's logits are the same for all nodes of a tree. They are right for the likeliest path, on which the passes
    agree in the end; other nodes of a tree get what follows that path. A level never depends on a token that was
    sampled for the draft, so `Budget(draw="sampled")` is exact too.
    """

    def __init__(self, head: XPress) -> None:
        super().__init__(head)
        # of the draft that is being made, by row: the token before the root, and the limits on the tree
        self.last_tokens: dict[int, int] = {}
        self.budgets: Mapping[int, Budget] = {}

    def propose(
        self, updates: Mapping[int, Committed], budgets: Mapping[int, Budget]
    ) -> dict[int, DraftTree]:
        """Return a draft tree for each row; the arguments are those of `InjectedState.propose`."""
        # the root comes after the newest committed token
        self.last_tokens = {row: int(update.tokens[-1]) for row, update in updates.items()}
        self.budgets = budgets
        return super().propose(updates, budgets)

    def read_blocks(self, cache_rows: Sequence[int], roots: Tensor) -> Tensor:
        """Read and refine a block after each cache row's sequence; return the states and codes [S, K, H + r].

        K is the depth of the deepest draft, and deeper levels are left out.

        Args:
            cache_rows: The rows of the cache in which the S sequences are.
            roots: [S], the first tokens of the blocks; mask tokens follow them.
        """
        head = self.head
        states = super().read_blocks(cache_rows, roots)  # [S, B, H]
        rows = [self.rows[cache_row] for cache_row in cache_rows]
        # all levels where the time of a draft is measured, as nothing is drafted there
        depths = [head.levels] * len(rows)
        if self.budgets:
            depths = [min(self.budgets[row].depth, head.levels) for row in rows]
        noises = []
        for row, cache_row, depth in zip(rows, cache_rows, depths, strict=True):
            # the root has the position of the sequence's length
            first = self.sequence_length(cache_row) + 1
            noises.append(self._find_noise(row, range(first, first + depth)))
        first_tokens = roots[:, None]
        # a first slot that predicts nothing reads the token before the root
        if head.first_slot:
            last = torch.tensor([[self.last_tokens.get(row, 0)] for row in rows])
            first_tokens = torch.cat([upload(last, roots.device), first_tokens], dim=1)
        return head.refine_greedily(states, first_tokens, max(depths), noises)

    def _find_noise(self, row: int, positions: Sequence[int]) -> tuple[Noise, Tensor] | None:
        """Return a row's noise, and what the target adds to its logits at the positions of the draft, [positions, V].

        None if the draft's tokens are the head's likeliest, as the target's noise is not used.
        """
        noise = self.noises[row]
        if noise is None or self.budgets[row].draw != "noise":
            return None
        return noise, noise(list(positions))


class XPressSettings(InjectedSettings):
    """Settings of the head in a recipe."""

    kind: Literal["xpress"] = "xpress"
    decay: float | None = Field(4.0, gt=0)  # level d has the weight e^(-d / decay) in the loss
    rank: int = Field(256, ge=1)  # the refiner's width
    mlp_ratio: int = Field(2, ge=1)  # the width of the refiner's MLP, divided by the rank
    # how often a draft is refined: so many of its first levels are then as if drafted one after the other
    passes: int = Field(6, ge=0)
    # in training, how often the refiner reads what it chose itself, as in a draft
    rounds: int = Field(3, ge=0)
    consistency: float = Field(0.3, ge=0)  # weight of the mean loss of these rounds
    base: float = Field(0.6, ge=0)  # weight of the loss of the unrefined logits
    likelihood: float = Field(
        0.1, ge=0
    )  # weight of the cross-entropy with the sequence's own tokens
    variation: float = Field(0.9, ge=0)  # weight of the total variation, half the sum of |p - q|


class XPress(InjectedHead):
    """DFlash's network, and a refiner that adds a low-rank bias to the logits of each slot."""

    Settings = XPressSettings
    settings: XPressSettings

    def __init__(self, settings: XPressSettings, shape: HeadShape) -> None:
        super().__init__(settings, shape)
        self.refiner_head = Refiner(shape, settings.slots, settings.rank, settings.mlp_ratio)

    @property
    def first_state(self) -> int:
        """The first slot whose state is used: the root's, as the refiner reads the states of a whole block."""
        return 0

    @property
    def parts(self) -> Parts:
        """The weights that a faulty conversion could swap: those of a block head, and pairs of the refiner's."""
        alike = [_name_pair("down_h", "down_g"), _name_pair("mlp_gate", "mlp_up")]
        # both have the shape [V, r] where all tokens can be drafted
        if self.own_drafts is None:
            alike.append(_name_pair("token_embed", "readout"))
        return replace(super().parts, alike=tuple(alike))

    def lm_head(self, target_head: TargetHead) -> LanguageHead:
        """Return the LM head that reads states and codes [.., H + r]: the target's, plus the refiner's bias."""
        return BiasedHead(target_head, self.refiner_head.readout.weight)

    def logits(self, state: Tensor, target_head: TargetHead) -> Tensor:
        """Return the refined logits [.., D] of states and codes [.., H + r]."""
        logits = self.lm_head(target_head).logits(state.flatten(0, -2))
        return logits.unflatten(0, state.shape[:-1])

    def refine(self, states: Tensor, context: Tensor, previous: Tensor) -> Tensor:
        """Return the states and codes [.., K, H + r] of the levels of blocks.

        Args:
            states: The states [.., B, H] of all slots.
            context: What the refiner reads of them, [.., B, 2r].
            previous: The token before the one of each slot [.., B].
        """
        codes = self.refiner_head(context, previous)
        return torch.cat([states, codes.to(states.dtype)], dim=-1)[..., self.first_slot :, :]

    def unrefined(self, states: Tensor) -> Tensor:
        """Return the states [.., B, H] of the levels with codes of zeros, [.., K, H + r]: without a bias."""
        return F.pad(states, (0, self.settings.rank))[..., self.first_slot :, :]

    # -- training -----------------------------------------------------------------------------------------------------

    def read_levels(
        self, batch: Batch, anchors: Anchors, states: Tensor, target_head: TargetHead
    ) -> Tensor:
        """Return states and codes [A, K, H + r], where the sequences' tokens are taken as the draft tokens.

        The arguments are those of `InjectedHead.read_levels`, with the states [A, B, H] of all slots.
        """
        context = self.refiner_head.read_states(states)
        return self.refine(states, context, self.tokens_before(batch, anchors))

    def tokens_before(self, batch: Batch, anchors: Anchors) -> Tensor:
        """Return the sequences' token before the one of each slot, [A, B].

        The slot of level d reads the token of level d - 1. That of level 0 reads the root (-1), and a first slot that
        predicts nothing the token before the root (-2).
        """
        levels = range(-1 - self.first_slot, self.levels - 1)
        return torch.stack([anchors.tokens_at(batch, level) for level in levels], dim=1)

    def forward(self, batch: Batch, target_head: TargetHead) -> dict[str, Tensor]:
        """Return the loss over all levels of the blocks after sampled anchors, as "total".

        "refined" is the part of the logits that are refined by the sequences' own tokens. There are P terms: these, the
        free-running rounds, and the unrefined logits.
        """
        settings = self.settings
        anchors, states = self.read_anchors(batch, target_head)  # states [A, B, H]
        output = self.output_head(target_head)
        head = self.lm_head(output)
        # L = refined by the sequences' tokens + consistency * mean of the rounds + base * unrefined
        context = self.refiner_head.read_states(states)
        previous = self.tokens_before(batch, anchors)
        unrefined = self.unrefined(states)
        hidden = unrefined
        terms = [self.refine(states, context, previous)]  # [A, K, H + r] each
        factors = [1.0]
        rounds = settings.rounds if settings.consistency else 0
        for _ in range(rounds):
            # what the last round would draft takes the place of the sequences' tokens, as in a draft
            tokens = self.choose_tokens(hidden, head.cast(target_head.weight.dtype))
            previous = torch.cat([previous[:, : 1 + self.first_slot], tokens[:, :-1]], dim=1)
            hidden = self.refine(states, context, previous)
            terms.append(hidden)
            factors.append(settings.consistency / rounds)
        if settings.base:
            terms.append(unrefined)
            factors.append(settings.base)
        # [A, K], 0 at levels that are not reached
        weights = anchors.reached * self.level_shares(batch)
        drafts, in_vocab = self.find_drafts(anchors.tokens_of(batch).flatten())
        # the loss writes the overlaps with the target's probs here; nothing reads them
        overlaps = weights.new_zeros(len(terms), len(drafts))
        # tokens that cannot be drafted have no likelihood
        mask = None if self.own_drafts is None else in_vocab
        # the terms are steps that share the teacher's logits: [P, A * K, ..]
        total, losses = distillation_loss(
            torch.stack(terms).flatten(1, 2),
            anchors.states_before(batch).flatten(0, 1),
            torch.outer(weights.new_tensor(factors), weights.flatten()),
            (head, output),
            objective=Objective("tv", settings.variation, tokens=settings.likelihood),
            dtype=target_head.weight.dtype,
            sequence_tokens=SequenceTokens(drafts, overlaps, mask),
        )
        return {"total": total, "refined": losses[0]}

    @torch.no_grad()
    def choose_tokens(self, hidden: Tensor, head: LanguageHead) -> Tensor:
        """Return the likeliest token of each level of the blocks after A anchors, [A, K]; it has no gradient.

        Args:
            hidden: The states and codes [A, K, H + r].
            head: The LM head that reads them.
        """
        # ROWS rows at a time, as logits of all rows may not fit in memory
        chunks = hidden.flatten(0, 1).split(ROWS)
        rows = torch.cat([head.logits(chunk).argmax(-1) for chunk in chunks])
        return self._as_tokens(rows).view(hidden.shape[:2])

    def _as_tokens(self, rows: Tensor) -> Tensor:
        """Return the target's tokens of rows of the LM head, which are fewer with a draft vocabulary."""
        return rows if self.drafts is None else self.drafts[rows]

    # -- drafting -----------------------------------------------------------------------------------------------------

    def open(self) -> RefinedState:
        """Return the state for several sequences drafted in a batch."""
        return RefinedState(self)

    def refine_greedily(
        self,
        states: Tensor,
        first_tokens: Tensor,
        depth: int,
        noises: Sequence[tuple[Noise, Tensor] | None],
    ) -> Tensor:
        """Return the states and codes [S, K, H + r] of drafts after S roots, refined by Jacobi passes.

        Args:
            states: The states [S, B, H] of all slots.
            first_tokens: What the first slots read, [S, 1 + first_slot]: the token before the root, and the root.
            depth: K, the number of levels that are drafted.
            noises: Of each sequence the target's noise, and its values [K, V] at the positions of the levels, or of
                fewer for a shorter draft. None: the target takes its likeliest token.
        """
        # levels after the last one have no influence: a slot reads earlier ones, and the states of all
        read = self.first_slot + depth
        context = self.refiner_head.read_states(states)[:, :read]
        states = states[:, :read]
        hidden = self.unrefined(states)
        tokens = first_tokens[:, :0]
        # after pass i the first i levels are final, as they read final tokens alone
        for _ in range(min(self.settings.passes, depth)):
            last_tokens = tokens
            tokens = self._choose_drafts(hidden, noises)
            # a pass that changes no token ends them; to look would let the host wait for a GPU
            if not must_wait(tokens.device) and torch.equal(tokens, last_tokens):
                break
            previous = torch.cat([first_tokens, tokens[:, :-1]], dim=1)
            hidden = self.refine(states, context, previous)
        return hidden

    def _choose_drafts(
        self, hidden: Tensor, noises: Sequence[tuple[Noise, Tensor] | None]
    ) -> Tensor:
        """Return the token [S, K] that the target would take at each level if its logits were those of `hidden`.

        A target that samples takes the argmax of logits plus noise. The arguments are those of `refine_greedily`.
        """
        logits = self.logits(hidden, self.target_head).float()  # [S, K, D]
        for index, row_noise in enumerate(noises):
            if row_noise is not None:
                noise, added = row_noise
                added = added if self.drafts is None else added[:, self.drafts]
                row_logits = logits[index, : len(added)]
                row_logits[:] = noise.filter_logits(row_logits) + added
        return self._as_tokens(logits.argmax(-1))


def _name_pair(first: str, second: str) -> tuple[str, str]:
    """Return the names, in a head, of the weights of two modules of its refiner."""
    return f"refiner_head.{first}.weight", f"refiner_head.{second}.weight"
