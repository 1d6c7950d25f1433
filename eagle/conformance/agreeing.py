"""What a head drafts is what its training and validation took it to draft: each slot is drafted for, and counted."""

from __future__ import annotations

from typing import Any

import torch

from eagle.conformance.trial import Fault, Make, begin_text
from eagle.core.budget import Budget
from eagle.core.examples import Batch
from eagle.core.tree import chain_paths
from eagle.core.verify import Choose, Sampling
from eagle.target.target import Target

LEVELS = 3
CHAIN = Budget.fixed(chain_paths(LEVELS))
TIES = 1  # slots that rounding may decide otherwise in a batch


def check_drafted_as_validated(make: Make, target: Target, batch: Batch, steps: int = 30) -> None:
    """A chain behind each slot is accepted as far as `validate` says, once the head has learned these texts."""
    head = teach(make(), target, batch, steps)
    sums = head.validate(batch, target.head, {"chain": chain_paths(LEVELS)})
    reached, accepted = count_drafts(head, target, batch)
    for level in range(LEVELS):
        got = int(sums["chain/reached"][level]), int(sums["chain/accepted"][level])
        expected = reached[level], accepted[level]
        if any(abs(one - other) > TIES for one, other in zip(got, expected, strict=True)):
            raise Fault(
                f"validate says that of {got[0]} chains that come to level {level + 1} {got[1]} are accepted there, "
                f"and of {expected[0]} that are drafted {expected[1]} are: training reads other states or tokens "
                "than drafting has; behind a root at place n the states end at n - 1, and the tokens at n"
            )


def teach(head: Any, target: Target, batch: Batch, steps: int) -> Any:
    """The head after so many steps on one batch, ready to draft."""
    optimizer = torch.optim.AdamW(head.train().parameters(), lr=1e-3)
    for _ in range(steps):
        loss = head(batch, target.head)["total"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return head.eval().bind(target.head)


@torch.no_grad()
def count_drafts(head: Any, target: Target, batch: Batch) -> tuple[list[int], list[int]]:
    """How many chains come to each level, and are accepted there; each slot is drafted for anew, from the text alone.

    A chain is followed as long as the text goes on as the target would, and inside what is supervised.
    """
    reached, accepted = [0] * LEVELS, [0] * LEVELS
    texts = zip(batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True)
    for tokens, counted in texts:
        choices = target.head.logits(target.features(tokens[None], (-1,))[0, :, 0]).argmax(-1)  # after each token
        for slot in (counted[2:].nonzero()[:, 0] + 2).tolist():
            root = slot - 1
            text, update = begin_text(head, target, tokens[:root].tolist(), Choose(Sampling()))
            chain = text.propose(type(update)(update.tokens, update.features, int(tokens[root])), CHAIN)
            for level, guess in enumerate(chain.tokens[1:].tolist()):
                place = slot + level  # of the token that is guessed
                if place >= len(tokens) or not counted[place] or (level and tokens[place - 1] != choices[place - 2]):
                    break
                reached[level] += 1
                if guess != int(choices[place - 1]):
                    break
                accepted[level] += 1
    return reached, accepted
