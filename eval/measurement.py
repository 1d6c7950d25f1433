"""Hold the questions that each process of a command asks of every drafter, and the answers so far."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, TypeVar

import torch.distributed as dist

from eagle.core.trace import Trace
from eagle.data.features import world
from eagle.recipe import Recipe
from eagle.target.bits.near_ties import measure_tie
from eagle.target.target import Target
from eval.load_run import MeasuredDrafter
from eval.prompts import KEY_NAMES, Case, Question, cases, encode_prompt
from eval.result_files.write_results import ResultsWriter, Row

# questions of each set whose answers are also kept in pieces
IN_PIECES = 2
Made = TypeVar("Made")


@dataclass(frozen=True)
class Processes:
    """This process among those of the command; without a launcher it is the only one."""

    rank: int = 0
    count: int = 1

    @classmethod
    def join(cls) -> Processes:
        """Join the processes that a launcher has started."""
        rank, count, _ = world()
        return cls(rank, count)

    @property
    def is_first(self) -> bool:
        """Return whether this is the process that writes for all."""
        return self.rank == 0

    def share(self, make: Callable[[], Made]) -> Made:
        """Return a value that the first process makes, for all processes; they wait for it here."""
        if self.count == 1:
            return make()
        # the others' value is overwritten by the broadcast
        box = [make() if self.is_first else None]
        dist.broadcast_object_list(box)
        return box[0]  # type: ignore[return-value]

    def part(self, items: Sequence[Made]) -> list[Made]:
        """Return the items that this process handles."""
        return list(items[self.rank :: self.count])

    def wait(self) -> None:
        """Wait for the others."""
        if self.count > 1:
            world()[2]()


ALONE = Processes()


@dataclass
class Measurement:
    """The drafters, the questions, and the answers so far."""

    recipe: Recipe
    target: Target
    drafters: dict[str, MeasuredDrafter]
    questions: list[Question]
    results: ResultsWriter
    processes: Processes = ALONE
    # answers by set, for which the model has no positions
    missing: Counter[str] = field(default_factory=Counter)
    # of this run, by question and batch size
    plain_tokens: dict[Any, list[int]] = field(default_factory=dict)

    def cases(self) -> list[Case]:
        """Return this process's questions at all temperatures with all seeds."""
        asked = self.processes.part(self.questions)
        return cases(self.recipe, asked, self.recipe.eval.temperatures)

    @property
    def batch_sizes(self) -> list[int]:
        """Return the batch sizes in order, each once."""
        return sorted(set(self.recipe.eval.batch_size))

    def answers(self, case: Case, turn: int, batch_size: int) -> dict[str, Row]:
        """Return the stored answers to a turn by drafter."""
        return self.results.rows.get((*case.key(turn), batch_size), {})

    def is_done(self, case: Case, batch_size: int) -> bool:
        """Return whether every drafter has answered all turns."""
        turns = range(len(case.question.turns))
        return all(
            self.answers(case, turn, batch_size).keys() >= self.drafters.keys() for turn in turns
        )

    def has_all(self) -> bool:
        """Return whether nothing is left to be measured, by any process."""
        every = cases(self.recipe, self.questions, self.recipe.eval.temperatures)
        return all(self.is_done(case, size) for case, size in product(every, self.batch_sizes))

    def prompt(self, case: Case, turn: int, batch_size: int) -> list[int] | None:
        """Return the token ids of a turn, or None where the model has no positions for it."""
        # all drafters answer plain decoding's conversation, so that their prompts are equal
        answers = [self.answers(case, earlier, batch_size)["none"] for earlier in range(turn)]
        texts = [answer["text"] for answer in answers]
        return encode_prompt(self.recipe, self.target, case.question, texts)

    def first_prompt(self) -> list[int]:
        """Return the first prompt that fits.

        Raises:
            ValueError: None fits into the model's positions.
        """
        for question in self.questions:
            prompt = encode_prompt(self.recipe, self.target, question)
            if prompt is not None:
                return prompt
        raise ValueError(
            f"none of {len(self.questions)} prompts and {self.recipe.eval.max_new_tokens} new tokens fit in the "
            f"model's {self.target.max_positions} positions: lower eval.max_new_tokens, or take shorter prompts"
        )

    def describe(self, name: str, case: Case, turn: int) -> dict[str, Any]:
        """Return the columns that identify an answer."""
        key = dict(zip(KEY_NAMES, case.key(turn), strict=True))
        return {"drafter": name, **key, "task": case.question.task}

    def is_in_pieces(self, case: Case) -> bool:
        """Return whether the answers to a question are also kept in pieces."""
        of_set = [question for question in self.questions if question.set == case.question.set]
        return case.question in of_set[:IN_PIECES]

    def compare(self, row: Row, plain: Row, case: Case, turn: int, *, trace: Trace) -> None:
        """Record in a row whether it equals plain decoding's answer, and how near the tie is where they differ.

        Args:
            row: A drafter's answer, which gets the columns.
            plain: Plain decoding's answer to the same prompt.
            case: The question.
            turn: Its turn that was answered.
            trace: The drafter's answer with its tokens, which rows do not hold.
        """
        drafts = self.drafters[row["drafter"]]
        if drafts.is_sampled and case.temperature > 0:
            # sampled drafts keep the distribution, not each token
            row["identical"] = None
            return

        row["identical"] = row["digest"] == plain["digest"]
        # rows hold no token ids: the tie is known only where this run has decoded plainly, too
        plain_tokens = self.plain_tokens.get((case.key(turn), row.get("batch_size", 1)))
        if not row["identical"] and plain_tokens is not None:
            tie = measure_tie(
                self.target, trace.prompt, plain_tokens, trace.tokens, sampling=case.sampling(turn)
            )
            row["tie"] = None if tie is None else round(tie, 3)
