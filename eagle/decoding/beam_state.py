"""The beam-search rule of transformers, step by step: running beams, their scores, finished answers."""

# W beams, C candidates of each, K candidates of all together

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from eagle.decoding.stops import Stops

EarlyStopping = bool | Literal["never"]
FAR = -1.0e9  # the score of what must not be chosen
DEAD = -1.0e8  # what is below was never chosen for its tokens
NEAR_TIE = 1e-5  # scores that lie no further apart may change places by rounding


class BeamState:
    """The running beams, best first, and the best finished answers; `step` extends them by one token.

    It depends only on the log-probs after the running beams, not on the forward that computed them.
    """

    def __init__(
        self,
        beams: int,
        stops: Stops,
        limit: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.stops, self.limit = stops, limit
        self.length_penalty, self.early_stopping = length_penalty, early_stopping
        # so many candidates that the beams go on even if each of the best ends at each of the stop tokens
        self.count = max(2, 1 + len(stops.tokens)) * beams
        self.texts: list[list[int]] = [[] for _ in range(beams)]  # without the prompt
        self.scores = torch.full((beams,), FAR)
        self.scores[0] = 0  # all begin alike: one is alive
        self.answers: list[list[int]] = [[] for _ in range(beams)]
        self.answer_scores = torch.full((beams,), FAR)
        self.is_finished = torch.zeros(beams, dtype=torch.bool)  # answers that are any
        self.is_done = False
        self.steps = self.near_ties = 0

    def step(self, log_probs: Tensor, tokens: Tensor) -> list[int]:
        """Extend the beams by candidate tokens [W, C]; returns the beam that each new beam continues."""
        beams, length = len(self.texts), len(self.texts[0]) + 1
        scores, picked = (log_probs + self.scores[:, None]).flatten().topk(self.count)
        parents, new = (picked // tokens.shape[1]).tolist(), tokens.flatten()[picked].tolist()
        texts = [[*self.texts[parent], token] for parent, token in zip(parents, new, strict=True)]
        ended = torch.tensor([length == self.limit or self._ends(text) for text in texts])
        near = [_is_near(scores, beams) and bool(ended[beams - 1] != ended[beams])]
        near.append(self._choose_answers(texts, scores / length**self.length_penalty, ended))
        running, order = (scores + ended * FAR).sort(descending=True)
        near.append(_is_near(running, beams) and not bool(ended.all()))
        chosen = order[:beams].tolist()
        self.scores, self.texts = running[:beams], [texts[candidate] for candidate in chosen]
        near.append(self._check_end(length, ended))
        self.steps += 1
        self.near_ties += any(near)
        return [parents[candidate] for candidate in chosen]

    def _ends(self, text: list[int]) -> bool:
        """Whether an answer ends with its last token."""
        return self.stops.first_end(text[:-1], text[-1:])[0] is not None

    def _choose_answers(self, texts: list[list[int]], scores: Tensor, ended: Tensor) -> bool:
        """Add the best finished candidates to the answers; returns whether that was a near tie."""
        beams = len(self.texts)
        is_new = ended & (torch.arange(len(texts)) < beams)
        merged, order = torch.cat([self.answer_scores, scores + ~is_new * FAR]).sort(descending=True, stable=True)
        chosen = order[:beams]
        texts = [*self.answers, *texts]
        self.answer_scores, self.answers = merged[:beams], [texts[candidate] for candidate in chosen.tolist()]
        self.is_finished = torch.cat([self.is_finished, is_new])[chosen]
        return _is_near(merged, beams) and bool(is_new.any())

    def _check_end(self, length: int, ended: Tensor) -> bool:
        """Check whether the search is over; returns whether that was a near tie.

        The best score that a running beam can still reach is its present one at its present length, or with "never" at
        the maximum length.
        """
        is_hopeful = self.early_stopping == "never" and self.length_penalty > 0
        reachable = self.scores[0] / (self.limit if is_hopeful else length) ** self.length_penalty
        worst = torch.where(self.is_finished, self.answer_scores.min(), FAR)
        is_full = bool(self.is_finished.all())
        stops_full = self.early_stopping is True and is_full
        self.is_done = stops_full or bool(ended.all()) or not bool((reachable > worst).any())
        return is_full and not stops_full and bool((reachable - worst[0]).abs() < NEAR_TIE)


def _is_near(scores: Tensor, count: int) -> bool:
    """Whether the `count`-th best score is a near tie with the one after it."""
    last, following = scores[count - 1 : count + 1].tolist()
    return last > DEAD and last - following < NEAR_TIE
