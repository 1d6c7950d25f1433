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

    It depends only on the log-probs after the running beams, not on the forward that computed them. All arithmetic is
    transformers' own, in its order, so that scores are equal to the last bit.
    """

    def __init__(
        self,
        beams: int,
        stops: Stops,
        limit: int,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.stops = stops
        self.limit = limit
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        # so many candidates that the beams go on even if each of the best ends at each of the stop tokens
        self.count = max(2, 1 + len(stops.tokens)) * beams
        # the tokens of each beam, without the prompt
        self.texts: list[list[int]] = [[] for _ in range(beams)]
        # all begin alike: one is alive
        self.scores = torch.full((beams,), FAR)
        self.scores[0] = 0
        self.answers: list[list[int]] = [[] for _ in range(beams)]
        self.answer_scores = torch.full((beams,), FAR)
        self.is_finished = torch.zeros(beams, dtype=torch.bool)  # answers that are any
        self.is_done = False
        self.steps = 0
        self.near_ties = 0

    def step(self, log_probs: Tensor, tokens: Tensor) -> list[int]:
        """Extend the beams by candidate tokens [W, C] with these log-probs [W, C].

        Returns:
            The beam that each new beam continues.
        """
        beams = len(self.texts)
        length = len(self.texts[0]) + 1
        # the best K candidates of all beams together, [K] each
        scores, indices = (log_probs + self.scores[:, None]).flatten().topk(self.count)
        # an index counts the candidates beam after beam
        parents = (indices // tokens.shape[1]).tolist()
        candidates = tokens.flatten()[indices].tolist()
        texts = [
            [*self.texts[parent], token] for parent, token in zip(parents, candidates, strict=True)
        ]
        is_ended = torch.tensor([length == self.limit or self._ends(text) for text in texts])
        # only the best `beams` candidates may become answers: rounding matters where it could exchange the last of them
        # with the next one, and only one of the two ends
        is_near = _is_near(scores, beams) and bool(is_ended[beams - 1] != is_ended[beams])

        is_near |= self._choose_answers(texts, scores / length**self.length_penalty, is_ended)
        # a candidate that has ended does not run on: FAR puts it after all others
        running, order = (scores + is_ended * FAR).sort(descending=True)
        is_near |= _is_near(running, beams) and not bool(is_ended.all())
        chosen = order[:beams].tolist()
        self.scores = running[:beams]
        self.texts = [texts[candidate] for candidate in chosen]
        is_near |= self._check_end(length, is_ended)
        self.steps += 1
        self.near_ties += is_near
        return [parents[candidate] for candidate in chosen]

    def _ends(self, text: list[int]) -> bool:
        """Return whether an answer ends with its last token."""
        end, _ = self.stops.first_end(text[:-1], text[-1:])
        return end is not None

    def _choose_answers(self, texts: list[list[int]], scores: Tensor, is_ended: Tensor) -> bool:
        """Add the best finished candidates to the answers, and return whether that was a near tie.

        Args:
            texts: The K candidates, best first, each with all tokens of its answer.
            scores: [K], with the length penalty.
            is_ended: [K].
        """
        beams = len(self.texts)
        # transformers' rule: a candidate that ends becomes an answer only if it is among the best `beams`
        is_new = is_ended & (torch.arange(len(texts)) < beams)
        merged = torch.cat([self.answer_scores, scores + ~is_new * FAR])
        merged, order = merged.sort(descending=True, stable=True)
        chosen = order[:beams]
        all_texts = [*self.answers, *texts]
        self.answers = [all_texts[candidate] for candidate in chosen.tolist()]
        self.answer_scores = merged[:beams]
        self.is_finished = torch.cat([self.is_finished, is_new])[chosen]
        return _is_near(merged, beams) and bool(is_new.any())

    def _check_end(self, length: int, is_ended: Tensor) -> bool:
        """Check whether the search is over, and return whether that was a near tie.

        The best score that a running beam can still reach is its present one at its present length, or with "never" at
        the maximum length.
        """
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.limit
        reachable = self.scores[0] / length**self.length_penalty
        # an answer that is none yet is worse than any beam
        worst = torch.where(self.is_finished, self.answer_scores.min(), FAR)
        is_full = bool(self.is_finished.all())
        stops_full = self.early_stopping is True and is_full
        self.is_done = stops_full or bool(is_ended.all()) or not bool((reachable > worst).any())
        return is_full and not stops_full and bool((reachable - worst[0]).abs() < NEAR_TIE)


def _is_near(scores: Tensor, count: int) -> bool:
    """Return whether the `count`-th best score is a near tie with the one after it."""
    last, following = scores[count - 1 : count + 1].tolist()
    return last > DEAD and last - following < NEAR_TIE
