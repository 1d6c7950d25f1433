"""The questions that this process asks of every drafter, and the answers so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eagle.core.trace import Trace
from eagle.recipe import Recipe
from eagle.target.bits.near_ties import measure_tie
from eagle.target.target import Target
from eval.load_run import MeasuredDrafter
from eval.processes import ALONE, Processes
from eval.prompts import KEY_NAMES, Case, Question, cases, encode_prompt
from eval.result_files.answer_rows import Row
from eval.result_files.write_results import ResultsWriter

IN_PIECES = 2  # questions of each set whose answers are also kept in pieces


@dataclass
class Measurement:
    """The drafters, the questions, and the answers so far."""

    recipe: Recipe
    target: Target
    drafters: dict[str, MeasuredDrafter]
    questions: list[Question]
    results: ResultsWriter
    processes: Processes = ALONE
    missing: Counter[str] = field(default_factory=Counter)  # answers by set, for which the model has no positions
    plain_tokens: dict[Any, list[int]] = field(default_factory=dict)  # of this run, by question and batch size

    def cases(self) -> list[Case]:
        """All questions of this process at all temperatures with all seeds."""
        return cases(self.recipe, self.processes.part(self.questions), self.recipe.eval.temperatures)

    @property
    def batch_sizes(self) -> list[int]:
        """The numbers of texts at a time, each once."""
        return sorted(set(self.recipe.eval.batch_size))

    def answers(self, case: Case, turn: int, batch_size: int) -> dict[str, Row]:
        """The stored answers to a turn by drafter."""
        return self.results.rows.get((*case.key(turn), batch_size), {})

    def is_done(self, case: Case, batch_size: int) -> bool:
        """Whether every drafter has answered all turns."""
        turns = range(len(case.question.turns))
        return all(self.answers(case, turn, batch_size).keys() >= self.drafters.keys() for turn in turns)

    def has_all(self) -> bool:
        """Whether nothing is left to be measured, by any process."""
        every = cases(self.recipe, self.questions, self.recipe.eval.temperatures)
        return all(self.is_done(case, batch_size) for batch_size in self.batch_sizes for case in every)

    def prompt(self, case: Case, turn: int, batch_size: int) -> list[int] | None:
        """Token ids of a turn after plain decoding's answers to those before; None where the model has no room."""
        turns = list(case.question.turns[: turn + 1])
        for before in range(turn):
            turns.insert(2 * before + 1, self.answers(case, before, batch_size)["none"]["text"])
        return encode_prompt(self.recipe, self.target, turns, case.question.images)

    def first_prompt(self) -> list[int]:
        """The first prompt that fits."""
        asked = ((question.turns[:1], question.images) for question in self.questions)
        prompts = (encode_prompt(self.recipe, self.target, *one) for one in asked)
        prompt = next((prompt for prompt in prompts if prompt is not None), None)
        if prompt is None:
            raise ValueError(
                f"none of {len(self.questions)} prompts and {self.recipe.eval.max_new_tokens} new tokens fit in the "
                f"model's {self.target.max_positions} positions: lower eval.max_new_tokens, or take shorter prompts"
            )
        return prompt

    def describe(self, name: str, case: Case, turn: int) -> dict[str, Any]:
        """The columns that identify an answer."""
        key = dict(zip(KEY_NAMES, case.key(turn), strict=True))
        return {"drafter": name, **key, "task": case.question.task}

    def is_in_pieces(self, case: Case) -> bool:
        """Whether the answers to a question are also kept in pieces."""
        of_set = [question for question in self.questions if question.set == case.question.set]
        return case.question in of_set[:IN_PIECES]

    def compare(self, row: Row, plain: Row, case: Case, turn: int, trace: Trace) -> None:
        """Note in an answer's row whether it is plain decoding's, None where it need not be, and how near they part.

        How near is known where this run has decoded plainly, too.
        """
        drafts = self.drafters[row["drafter"]]
        is_sampled = drafts.is_sampled and case.temperature > 0
        row["identical"] = None if is_sampled else row["digest"] == plain["digest"]
        own = self.plain_tokens.get((case.key(turn), row.get("batch_size", 1)))
        if row["identical"] is False and own is not None:
            tie = measure_tie(self.target, trace.prompt, own, trace.tokens, case.sampling(turn))
            row["tie"] = None if tie is None else round(tie, 3)
