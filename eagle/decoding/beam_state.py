"""The beam-search rule of transformers, step by step: running beams, their scores, finished answers."""

# W beams, C candidates of each beam, K candidates of all beams together

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from eagle.decoding.rows import Stops

EarlyStopping = bool | Literal["never"]
# log-probabilities, as all scores
FAR = -1.0e9  # transformers' score of candidates that must not be chosen
DEAD = -1.0e8  # a lower score contains FAR, so it says nothing about tokens
NEAR_TIE = 1e-5  # two scores that differ by less may change their order by rounding


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
        """Begin a beam search as transformers does.

        Args:
            beams: W, transformers' `num_beams`.
            stops: Where an answer ends.
            limit: The most tokens of an answer.
            length_penalty: Scores are divided by length ** length_penalty.
            early_stopping: As in transformers.
        """
        self.stops = stops
        self.limit = limit
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        # K, transformers' number: enough that all beams go on even if every beam has a candidate for each stop token
        self.candidate_count = max(2, 1 + len(stops.tokens)) * beams
        # the tokens of each running beam, without the prompt
        self.sequences: list[list[int]] = [[] for _ in range(beams)]
        # all beams begin with the same tokens: only the first may have candidates, or all would stay equal
        self.scores = torch.full((beams,), FAR)
        self.scores[0] = 0
        self.answers: list[list[int]] = [[] for _ in range(beams)]
        self.answer_scores = torch.full((beams,), FAR)
        # which entries of `answers` hold an answer; the others are placeholders
        self.has_answer = torch.zeros(beams, dtype=torch.bool)
        self.is_done = False
        self.steps = 0
        self.near_ties = 0

    def step(self, log_probs: Tensor, tokens: Tensor) -> list[int]:
        """Extend the running beams by one token, move candidates that end to the answers, and check for the end.

        Args:
            log_probs: [W, C], of the C likeliest next tokens of each of the W running beams.
            tokens: [W, C], these tokens.

        Returns:
            Of each new beam, best first, the index of the beam that it continues.
        """
        beams = len(self.sequences)
        length = len(self.sequences[0]) + 1  # of each candidate, without the prompt
        # the best K candidates of all beams together, [K] each
        scores, indices = (log_probs + self.scores[:, None]).flatten().topk(self.candidate_count)
        # indices count the candidates beam by beam, C for each
        parents = (indices // tokens.shape[1]).tolist()
        candidates = tokens.flatten()[indices].tolist()
        sequences = [
            [*self.sequences[parent], token]
            for parent, token in zip(parents, candidates, strict=True)
        ]
        is_ended = torch.tensor(
            [length == self.limit or self._ends(sequence) for sequence in sequences]
        )
        # Only the best `beams` candidates may become answers. Rounding matters if it could exchange the last of them
        # with the next candidate, and only one of these two ends.
        is_near = _is_near(scores, beams) and bool(is_ended[beams - 1] != is_ended[beams])

        is_near |= self._choose_answers(sequences, scores / length**self.length_penalty, is_ended)
        # a candidate that has ended is no running beam: FAR sorts it after all others
        running, order = (scores + is_ended * FAR).sort(descending=True)
        is_near |= _is_near(running, beams) and not bool(is_ended.all())
        chosen = order[:beams].tolist()
        self.scores = running[:beams]
        self.sequences = [sequences[candidate] for candidate in chosen]
        is_near |= self._check_end(length, is_ended)
        self.steps += 1
        self.near_ties += is_near
        return [parents[candidate] for candidate in chosen]

    def _ends(self, sequence: list[int]) -> bool:
        """Return whether a stop token or stop string ends an answer with the last token of `sequence`."""
        end, _ = self.stops.first_end(sequence[:-1], sequence[-1:])
        return end is not None

    def _choose_answers(self, sequences: list[list[int]], scores: Tensor, is_ended: Tensor) -> bool:
        """Keep the best of the answers and of the candidates that have ended; return whether that was a near tie.

        Args:
            sequences: The K candidates, best first, each with all tokens of its answer.
            scores: [K], with the length penalty.
            is_ended: [K] bool, which candidates have ended.
        """
        beams = len(self.sequences)
        # transformers' rule: a candidate that ends becomes an answer only if it is among the best `beams`; FAR is added
        # to the scores of all others, so that they rank after every answer
        is_new = is_ended & (torch.arange(len(sequences)) < beams)
        merged = torch.cat([self.answer_scores, scores + ~is_new * FAR])
        merged, order = merged.sort(descending=True, stable=True)
        chosen = order[:beams]
        all_sequences = [*self.answers, *sequences]
        self.answers = [all_sequences[candidate] for candidate in chosen.tolist()]
        self.answer_scores = merged[:beams]
        self.has_answer = torch.cat([self.has_answer, is_new])[chosen]
        return _is_near(merged, beams) and bool(is_new.any())

    def _check_end(self, length: int, is_ended: Tensor) -> bool:
        """Set `is_done` to whether the search is over; return whether rounding could have decided that otherwise.

        The search is over if all candidates have ended, if `early_stopping` is True and there are W answers, or if no
        running beam can become better than the worst answer. As transformers does, the last takes the best beam's
        present score, divided by the penalty of its present length, or, with "never" and a positive penalty, of the
        maximum length. Only this comparison can be a near tie, and only where W answers could end the search.

        Args:
            length: The number of tokens of each beam, without the prompt.
            is_ended: [K] bool, which of the K candidates of this step have ended.
        """
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.limit
        reachable = self.scores[0] / length**self.length_penalty
        # [W]: an entry without an answer counts as worse than any beam, all others as the worst answer
        worst = torch.where(self.has_answer, self.answer_scores.min(), FAR)
        is_full = bool(self.has_answer.all())
        stops_full = self.early_stopping is True and is_full
        # the three reasons to end, in the order of the docstring
        self.is_done = stops_full or bool(is_ended.all()) or not bool((reachable > worst).any())
        return is_full and not stops_full and bool((reachable - worst[0]).abs() < NEAR_TIE)


def _is_near(scores: Tensor, count: int) -> bool:
    """Return whether the `count`-th best score is a near tie with the one after it, so that rounding could swap them.

    Then another order of sums might have chosen another beam.

    Args:
        scores: Of more than `count` candidates, best first.
        count: How many of them are chosen.
    """
    last, following = scores[count - 1 : count + 1].tolist()
    # a difference from a FAR score is no tie
    return last > DEAD and last - following < NEAR_TIE
