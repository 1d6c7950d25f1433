"""Heads that read their own states: one unroll trains and judges them, and they draft by the same steps."""

# B batch, T tokens of a text, N of all texts, S supervised slots, L taps, H width, K rows of one level, V vocabulary

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from eagle.core.drafter import Budget, Committed, Noise, TargetHead, TrainableDrafter
from eagle.core.tree import DraftTree, Paths
from eagle.data.examples import Batch
from eagle.drafters.parts.blocks import Block, Cache, Rotary, rotated
from eagle.drafters.parts.growth import grow, level_mask, level_rows
from eagle.drafters.parts.spans import Spans, attend
from eagle.drafters.parts.validation import judged_batch


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What a head makes of a batch: slot i reads state i and token i + 1, and names token i + 2."""

    states: list[Tensor]  # per step [S, H]: in step s a slot names the token s places further
    places: Tensor  # [S], of the slots that are supervised, among all tokens


class UnrolledDrafter(TrainableDrafter):
    """A head whose level reads a token and the state of the level before, the first level a state of the target.

    Subclasses say what is special: how a state is entered and left, and which law it stands for.
    """

    rotary: Rotary
    layers: Any  # one Block
    drafts: Tensor | None = None  # [D], the tokens that it may say, if not all

    @abstractmethod
    def first(self, features: Tensor) -> Tensor:
        """[.., H], the state that the target's features [.., L, H] stand for."""

    @abstractmethod
    def level(
        self, embedded: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor | None, cache: Cache | None
    ) -> Tensor:
        """[B, T, H], the states behind tokens and states."""

    @abstractmethod
    def tokens(self, embedded: Tensor) -> Tensor:
        """[N, P], all that a level computes of a token alone."""

    @abstractmethod
    def entered(self, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        """What a level reads of those parts of tokens, and of states [N, H]."""

    @abstractmethod
    def keys(self, entered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of what was entered, [N, heads * w] each, not yet turned."""

    @abstractmethod
    def queries(self, entered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Queries of what was entered, not yet turned, and the states that attention is added to."""

    @abstractmethod
    def law(self, state: Tensor, frozen: TargetHead) -> Tensor:
        """[.., V or D], the logits of states."""

    def handed(self, state: Tensor) -> Tensor:
        """What the next level reads of a state."""
        return state

    # -- training -----------------------------------------------------------------------------------------------------

    def unrolled(
        self,
        batch: Batch,
        frozen: TargetHead,
        steps: int,
        *,
        detach: bool = False,
        noised: Callable[[Tensor], Tensor] = lambda features: features,
    ) -> Unrolled:
        """States of all supervised slots, by the target's features of every slot that has a future.

        Step 0 sees the text so far. Step s reads the state of step s - 1 and the text's next token, stands one place
        further, and sees what step 0 saw and its own earlier steps.
        """
        block: Block = self.layers[0]
        known, positions, spans = _slots(batch, batch.tokens.device)
        features = noised(batch.select_taps(self.taps)[known].to(block.mlp.up_proj.weight.dtype))
        tokens = self.tokens(frozen.embed(batch.tokens).to(features.dtype))
        turn = self._tables(features, max(batch.lengths, default=0) + steps)
        entered = self.entered(tokens.index_select(0, known + 1), self.first(features))
        key, value = self.keys(entered)
        key, value = rotated(key, turn(positions)).contiguous(), _heads(value, block).contiguous()
        places, positions = known[spans.rows], positions[spans.rows]
        entered = tuple(part.index_select(0, spans.rows) for part in entered)
        states: list[Tensor] = []
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(steps):
            tables = turn(positions + step)
            if step:
                last = states[-1].detach() if detach else states[-1]
                following = (places + 1 + step).clamp(max=len(tokens) - 1)  # what lies beyond a text counts for nothing
                entered = self.entered(tokens.index_select(0, following), self.handed(last))
                mine, its = self.keys(entered)
                own.append((rotated(mine, tables), _heads(its, block)))
            query, kept = self.queries(entered)
            seen = attend(rotated(query, tables), key, value, spans, own)
            states.append(block.ended(kept + block.self_attn.o_proj(seen.transpose(0, 1).flatten(1))))
        return Unrolled(states, places)

    def _tables(self, like: Tensor, length: int) -> Any:
        cosine, sine = (table[0] for table in self.rotary(like, torch.arange(length, device=like.device)[None]))
        return lambda positions: (cosine[positions], sine[positions])

    # -- validation ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def validate(self, batch: Batch, frozen: TargetHead, trees: dict[str, Paths]) -> dict[str, Tensor]:
        """Sums of the loss terms and of what each tree would have kept, over the slots that train."""
        steps = max(len(path) for paths in trees.values() for path in paths)
        found = self.unrolled(batch, frozen, steps)
        laws = (lambda state: self._everywhere(self.law(state, frozen)), frozen.logits)
        return judged_batch(batch, found.states, laws, trees)

    def draft_levels(
        self, batch: Batch, frozen: TargetHead, levels: int
    ) -> list[tuple[Tensor, Callable[[Tensor], Tensor]]]:
        """Each level's states [S, H], all of them read by one LM head."""
        return [(state, lambda state: self.law(state, frozen)) for state in self.unrolled(batch, frozen, levels).states]

    def _everywhere(self, logits: Tensor) -> Tensor:
        """[.., V], impossible where the head says nothing."""
        if self.drafts is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.shape.vocab_size), -torch.inf)
        whole[..., self.drafts] = logits
        return whole

    # -- drafting -----------------------------------------------------------------------------------------------------

    def begin(self, noise: Noise | None = None) -> None:
        """Forget the previous sequence."""
        self.cache, self.noise = Cache(), noise

    def states(self, tokens: Tensor, hidden: Tensor, start: int, frozen: TargetHead) -> Tensor:
        """[B, T, H], the states of a causal pass over slots that begin at position `start`."""
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)[None]
        return self.read(tokens, hidden, positions, None, None, frozen)

    def read(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache | None,
        frozen: TargetHead,
    ) -> Tensor:
        """[B, T, H], the states behind tokens and states."""
        return self.level(frozen.embed(tokens).to(hidden.dtype), hidden, self.rotary(hidden, positions), mask, cache)

    def forwards(self, budget: Budget) -> tuple[int, ...]:
        """The rows of each level of the tree after the first."""
        return level_rows(budget)

    def probe(self, context: int, rows: int, scored: int) -> Callable[[], Tensor]:
        """The head's own forward of so many rows behind so much text, the last `scored` of them made into logits."""
        (frozen,), cache = self.frozen, Cache()
        weight, end = self.layers[0].mlp.up_proj.weight, context + rows
        tokens = torch.ones(1, end, dtype=torch.long, device=weight.device)
        features = torch.zeros(1, end, self.shape.hidden_size, device=weight.device, dtype=weight.dtype)
        positions = torch.arange(end, device=weight.device)[None]
        chain = torch.ones(rows, rows, dtype=torch.bool, device=weight.device).tril()
        mask = level_mask(context, chain, weight.dtype)

        def read(start: int, end: int, mask: Tensor | None) -> Tensor:
            cache.length = start
            part = slice(start, end)
            return self.read(tokens[:, part], features[:, part], positions[:, part], mask, cache, frozen)

        with torch.inference_mode():
            read(0, context, None)

        @torch.inference_mode()
        def run() -> Tensor:
            return self.law(read(context, end, mask)[0, -scored:], frozen)

        return run

    @torch.inference_mode()
    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """A tree grown from the target's features of the committed tokens, then from the head's own."""
        assert update.features is not None
        (frozen,), weight = self.frozen, self.layers[0].mlp.up_proj.weight
        device, dtype = weight.device, weight.dtype
        start, count = self.cache.length, len(update.tokens)
        tokens = torch.cat([update.tokens[1:], torch.tensor([update.root])]).to(device)
        positions = torch.arange(start, start + count, device=device)
        causal = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        mask = None if start == 0 else level_mask(start, causal, dtype)
        hidden = self.first(update.features.to(device, dtype))
        hidden = self.read(tokens[None], hidden[None], positions[None], mask, self.cache, frozen)[0, -1:]
        committed = start + count

        def level(depth: int, tokens: Tensor, before: Tensor, seen: Tensor) -> Tensor:
            nonlocal hidden
            positions = torch.full((1, len(tokens)), committed + depth - 1, device=device)
            mask = level_mask(committed, seen, dtype)
            before_it = self.handed(hidden[None, before])
            hidden = self.read(tokens[None], before_it, positions, mask, self.cache, frozen)[0]
            return self.law(hidden, frozen)

        tree = grow(update.root, self.law(hidden, frozen)[0], level, budget, self.noise, committed + 1, self.drafts)
        self.cache.length = committed
        return tree


def _slots(batch: Batch, device: torch.device) -> tuple[Tensor, Tensor, Spans]:
    """The places of all tokens but each text's last two, their positions in it, and those that are supervised."""
    spans = [torch.arange(max(length - 2, 0)) for length in batch.lengths]
    starts = accumulate(batch.lengths, initial=0)
    known = torch.cat([span + start for span, start in zip(spans, starts, strict=False)])
    masks = [mask[2:] for mask in batch.loss_mask.split(batch.lengths)]
    known, positions = (places.to(device, non_blocking=True) for places in (known, torch.cat(spans)))
    return known, positions, Spans.of(masks, device)


def _heads(flat: Tensor, block: Block) -> Tensor:
    return flat.unflatten(-1, (-1, block.self_attn.width)).transpose(0, 1)
