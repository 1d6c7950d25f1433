"""Measure the acceptance of a comparison's arms along the target's own answers, for every shape and temperature."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import product
from typing import Any

from data_prep.image_texts import as_text
from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.drafters.none import NoDrafter
from eagle.formats.checkpoint import load_drafter
from eagle.log import progress
from eagle.target.talk import with_answer
from eagle.target.target import Target
from eval.comparison.compare_plan import Arm, Comparison, digest_of
from eval.comparison.compare_rows import Entry, Rows
from eval.load_run import load_target
from eval.prompts import Case, cases, encode_prompt, questions
from eval.replay import Answer, features_of, record_cycles, replay

KEY = ("set", "conversation", "turn", "temperature", "sampling_seed")


class Decoder:
    """The target and its answers, made when they are first needed, and the drafters that are replayed along them."""

    def __init__(self, comparison: Comparison, rows: Rows) -> None:
        self.comparison = comparison
        self.rows = rows
        self.recipe = comparison.recipe
        self.questions = questions(comparison.recipe)
        # by the keys of their answers: rows hold no images
        self.prompts: dict[tuple[Any, ...], list[int]] = {}
        parts: list[Any] = [[question.turns for question in self.questions], self.recipe.eval.seeds]
        images = [list(map(as_text, question.images)) for question in self.questions]
        # digests of questions without images are those of earlier releases
        if any(images):
            parts.append(images)
        replays = [question.replay for question in self.questions]
        if any(replays):
            parts.append(replays)
        self.asked = digest_of(*parts)

    @cached_property
    def target(self) -> Target:
        """Load the target, in the precision in which outputs are compared."""
        return load_target(self.recipe)

    @cached_property
    def answers(self) -> list[Entry]:
        """Return the target's own answers to all prompts at all temperatures. Those in the file are not made again."""
        every = cases(self.recipe, self.questions, self.recipe.eval.temperatures)
        answers = []
        for case in progress(every, "answers", len(every), unit="questions"):
            answers += self._answer_case(case)

        num_turns = sum(len(case.question.turns) for case in every)
        if len(answers) < num_turns:
            print(
                f"{num_turns - len(answers)} of {num_turns} answers are left out: their prompts and "
                f"{self.recipe.eval.max_new_tokens} new tokens exceed the model's {self.target.max_positions} positions"
            )
        return answers

    def release(self) -> None:
        """Free the target's memory."""
        self.__dict__.pop("target", None)

    def is_done(self, arm: Arm, seed: int) -> bool:
        """Return whether all figures of an arm are in the file."""
        columns = product(self.comparison.shapes, self.recipe.eval.temperatures)
        return all(self._marks(arm, seed, shape, temperature) for shape, temperature in columns)

    def measure(self, arm: Arm, seed: int) -> None:
        """Measure an arm in the shapes and at the temperatures that the file does not hold yet.

        Args:
            arm: One arm, whose head is trained.
            seed: That of its training.
        """
        head = arm.section.untrained or str(arm.folder(self.comparison.folder, seed) / "last")
        for temperature in self.recipe.eval.temperatures:
            rows = [row for row in self.answers if row["temperature"] == temperature]
            answers: list[Answer] = []
            for shape, budget in self.comparison.shapes.items():
                if self._marks(arm, seed, shape, temperature):
                    continue

                # a fresh one for each shape, because some drafters remember what they drafted
                drafter = load_drafter(head, self.target, **arm.section.options)
                # features do not depend on the shape
                answers = answers or [self._with_features(row, drafter.taps) for row in rows]
                lengths = [self._cycles(drafter, answer, budget) for answer in answers]
                self._record(arm, seed, shape, temperature, lengths=zip(rows, lengths, strict=True))

    # -- one answer ---------------------------------------------------------------------------------------------------

    def _answer_case(self, case: Case) -> list[Entry]:
        """Return the answers to a question's turns, up to the first that the model has no positions for."""
        answers: list[Entry] = []
        for turn in range(len(case.question.turns)):
            # a turn follows the target's own answers to those before
            texts = [answer["text"] for answer in answers]
            prompt = encode_prompt(self.recipe, self.target, case.question, texts)
            if prompt is None:
                break
            key = case.key(turn)
            self.prompts[key] = prompt
            about = {"digest": self.comparison.answer_digest, **dict(zip(KEY, key, strict=True))}
            if not self.rows.of("answer", **about):
                self._write_answer(about, prompt, case.sampling(turn))
            answers.append(self.rows.of("answer", **about)[-1])
        return answers

    def _write_answer(self, about: Entry, prompt: list[int], sampling: Sampling) -> None:
        limit = self.recipe.eval.max_new_tokens
        trace = generate(self.target, NoDrafter(), prompt, sampling=sampling, max_new_tokens=limit)
        row = {
            **about,
            "prompt": len(prompt),
            "tokens": [*prompt, *trace.tokens],
            "text": trace.text,
            "request": sampling.request,
        }
        self.rows.add("answer", [row])

    def _with_features(self, row: Entry, taps: tuple[int, ...]) -> Answer:
        """Return an answer with the target's features that a drafter reads along it."""
        prompt = self.prompts[tuple(row[name] for name in KEY)]
        # rows hold the ids of a prompt, and not the images in it
        tokens = with_answer(prompt, row["tokens"][len(prompt) :])
        sampling = Sampling(row["temperature"], seed=row["sampling_seed"], request=row["request"])
        return Answer(
            task="",
            tokens=tokens,
            prompt=row["prompt"],
            features=features_of(self.target, tokens, taps),
            sampling=sampling,
            limit=self.recipe.eval.max_new_tokens,
        )

    def _cycles(self, drafter: Drafter, answer: Answer, budget: Budget) -> tuple[int, int]:
        """Return the committed tokens and cycles of one answer."""
        if budget.draw == "sampled" and answer.sampling.temperature > 0:
            # the target's random numbers decide, so a replay cannot tell
            trace = generate(
                self.target,
                drafter,
                answer.asked,
                sampling=answer.sampling,
                budget=budget,
                max_new_tokens=answer.limit,
            )
            return sum(cycle.committed for cycle in trace.cycles), len(trace.cycles)
        cycles = record_cycles(answer, replay(self.target, drafter, answer, budget))
        return sum(cycle["committed"] for cycle in cycles), len(cycles)

    # -- the file -----------------------------------------------------------------------------------------------------

    def _about(self, arm: Arm, seed: int, shape: str) -> dict[str, Any]:
        """Return the columns that identify an arm's figures in one shape; an untrained arm has no seed."""
        return {
            "digest": self.comparison.row_digest(arm, shape),
            "seed": seed if arm.is_trained else None,
        }

    def _marks(self, arm: Arm, seed: int, shape: str, temperature: float) -> list[Entry]:
        about = self._about(arm, seed, shape)
        return self.rows.of("done", **about, temperature=temperature, asked=self.asked)

    def _record(
        self,
        arm: Arm,
        seed: int,
        shape: str,
        temperature: float,
        *,
        lengths: Iterable[tuple[Entry, tuple[int, int]]],
    ) -> None:
        """Add the missing rows of one shape and temperature, then the mark that they are complete."""
        about = self._about(arm, seed, shape)
        stored = set()
        for row in self.rows.of("row", **about):
            stored.add(tuple(row[name] for name in KEY))

        rows = []
        for answer, (committed, cycles) in lengths:
            key = {name: answer[name] for name in KEY}
            # a run that was killed, or asked for less, has stored some of them
            if tuple(key.values()) in stored:
                continue
            row = {
                "arm": arm.name,
                **about,
                "shape": shape,
                **key,
                "committed": committed,
                "cycles": cycles,
            }
            rows.append(row)

        # the mark comes last, so that rows without it are completed later
        self.rows.add("row", rows)
        self.rows.add("done", [{**about, "temperature": temperature, "asked": self.asked}])
