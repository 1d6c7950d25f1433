"""What a head drafts is what its training and validation took it to draft: each slot is drafted for, and counted."""

from __future__ import annotations

from typing import Any

import torch

from eagle.conformance.learning import TREES, teach
from eagle.conformance.trial import Fault, Make, begin_text
from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.core.examples import Batch
from eagle.core.verify import Choose, Sampling
from eagle.target.target import Target

CHAIN = TREES["chain"]
LEVELS = len(CHAIN)
TIES = 1  # slots that rounding may decide otherwise in a batch


def check_drafted_as_validated(make: Make, target: Target, batch: Batch) -> None:
    """A chain behind each slot is accepted as far as `validate` says, once the head has learned these texts."""
    head = make()
    teach(head, target, batch)
    head.eval().bind(target.head)
    sums = head.validate(batch, target.head, {"chain": CHAIN})
    reached, accepted = count_drafts(head, target, batch)
    for level in range(LEVELS):
        got = int(sums["chain/reached"][level]), int(sums["chain/accepted"][level])
        expected = reached[level], accepted[level]
        if abs(got[0] - expected[0]) > TIES or abs(got[1] - expected[1]) > TIES:
            raise Fault(
                f"validate says that of {got[0]} chains that come to level {level + 1} {got[1]} are accepted there, "
                f"and of {expected[0]} that are drafted {expected[1]} are: training reads other states or tokens "
                "than drafting has; behind a root at place n the states end at n - 1, and the tokens at n"
            )


@torch.no_grad()
def count_drafts(head: Any, target: Target, batch: Batch) -> tuple[list[int], list[int]]:
    """How many chains come to each level, and are accepted there; each slot is drafted for anew, from the text alone.

    A chain is followed as long as the text goes on as the target would, and inside what is supervised.
    """
    reached, accepted, budget = [0] * LEVELS, [0] * LEVELS, Budget.fixed(CHAIN)
    texts = zip(batch.tokens.split(batch.lengths), batch.loss_mask.split(batch.lengths), strict=True)
    for tokens, counted in texts:
        choices = target.head.logits(target.features(tokens[None], (-1,))[0, :, 0]).argmax(-1)  # after each token
        for slot in (counted[2:].nonzero()[:, 0] + 2).tolist():
            root = slot - 1
            text, update = begin_text(head, target, tokens[:root].tolist(), Choose(Sampling()))
            chain = text.propose(Committed(update.tokens, update.features, int(tokens[root])), budget)
            for level, guess in enumerate(chain.tokens[1:].tolist()):
                place = slot + level  # of the token that is guessed
                if place >= len(tokens) or not counted[place] or (level and tokens[place - 1] != choices[place - 2]):
                    break
                reached[level] += 1
                if guess != int(choices[place - 1]):
                    break
                accepted[level] += 1
    return reached, accepted
