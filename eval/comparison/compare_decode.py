"""Acceptance of a comparison's arms along the target's own answers, for every shape and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
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
        self.comparison, self.rows, self.recipe = comparison, rows, comparison.recipe
        self.questions = questions(comparison.recipe)
        self.prompts: dict[tuple[Any, ...], list[int]] = {}  # by the keys of their answers: rows hold no images
        turns = [list(question.turns) for question in self.questions]
        shown = [list(map(as_text, question.images)) for question in self.questions]
        self.asked = digest_of(turns, list(self.recipe.eval.seeds), *([shown] if any(shown) else []))

    @cached_property
    def target(self) -> Target:
        """The target, in the precision in which outputs are compared."""
        return load_target(self.recipe)

    @cached_property
    def answers(self) -> list[Entry]:
        """The target's own answers to all prompts at all temperatures; those in the file are not made again."""
        every = cases(self.recipe, self.questions, self.recipe.eval.temperatures)
        turns = sum(len(question.turns) for _, _, question in every)
        shown = progress(every, "answers", len(every), unit="questions")
        answers = [row for case in shown for row in self._answer_case(case)]
        if len(answers) < turns:
            print(
                f"{turns - len(answers)} of {turns} answers are left out: their prompts and "
                f"{self.recipe.eval.max_new_tokens} new tokens exceed the model's {self.target.max_positions} positions"
            )
        return answers

    def release(self) -> None:
        """Give the target's memory back."""
        self.__dict__.pop("target", None)

    def is_done(self, arm: Arm, seed: int) -> bool:
        """Whether all figures of an arm are in the file."""
        return all(
            self._marks(arm, seed, shape, temperature)
            for shape in self.comparison.shapes
            for temperature in self.recipe.eval.temperatures
        )

    def measure(self, arm: Arm, seed: int) -> None:
        """Measure an arm in the shapes and at the temperatures that the file does not hold yet."""
        head = arm.section.untrained or str(arm.folder(self.comparison.folder, seed) / "last")
        for temperature in self.recipe.eval.temperatures:
            shapes = [shape for shape in self.comparison.shapes if not self._marks(arm, seed, shape, temperature)]
            rows = [row for row in self.answers if row["temperature"] == temperature]
            answers: list[Answer] = []
            for shape in shapes:
                drafter = load_drafter(
                    head, self.target, **arm.section.options
                )  # anew, for some remember what they drafted
                answers = answers or [self._with_features(row, drafter.taps) for row in rows]
                budget = self.comparison.shapes[shape]
                lengths = [self._cycles(drafter, answer, budget) for answer in answers]
                self._note(arm, seed, shape, temperature, rows, lengths)

    # -- one answer ---------------------------------------------------------------------------------------------------

    def _answer_case(self, case: Case) -> list[Entry]:
        """The answers to a question's turns, up to the first that the model has no positions for."""
        texts: list[str] = []
        answers: list[Entry] = []
        for turn, text in enumerate(case[2].turns):
            prompt = encode_prompt(self.recipe, self.target, [*texts, text], case.question.images)
            if prompt is None:
                break
            about = {"digest": self.comparison.answer_digest, **dict(zip(KEY, case.key(turn), strict=True))}
            self.prompts[case.key(turn)] = prompt
            if not self.rows.of("answer", **about):
                limit = self.recipe.eval.max_new_tokens
                trace = generate(self.target, NoDrafter(), prompt, sampling=case.sampling(turn), max_new_tokens=limit)
                row = {**about, "prompt": len(prompt), "tokens": [*prompt, *trace.tokens], "text": trace.text}
                self.rows.add("answer", [{**row, "request": case.sampling(turn).request}])
            answers += self.rows.of("answer", **about)[-1:]
            texts += [text, answers[-1]["text"]]
        return answers

    def _with_features(self, row: Entry, taps: tuple[int, ...]) -> Answer:
        """An answer with the target's features that a drafter reads along it."""
        prompt = self.prompts[tuple(row[name] for name in KEY)]
        tokens = with_answer(prompt, row["tokens"][len(prompt) :])
        features = features_of(self.target, tokens, taps)
        sampling = Sampling(row["temperature"], seed=row["sampling_seed"], request=row["request"])
        return Answer("", tokens, row["prompt"], features, sampling, self.recipe.eval.max_new_tokens)

    def _cycles(self, drafter: Drafter, answer: Answer, budget: Budget) -> tuple[int, int]:
        """Tokens committed and cycles of one answer: replayed, or decoded where only the target's coins decide."""
        if budget.draw == "sampled" and answer.sampling.temperature > 0:
            trace = generate(
                self.target, drafter, answer.asked, sampling=answer.sampling, budget=budget, max_new_tokens=answer.limit
            )
            return sum(cycle.committed for cycle in trace.cycles), len(trace.cycles)
        cycles = record_cycles(answer, replay(self.target, drafter, answer, budget))
        return sum(cycle["committed"] for cycle in cycles), len(cycles)

    # -- the file -----------------------------------------------------------------------------------------------------

    def _about(self, arm: Arm, seed: int, shape: str) -> dict[str, Any]:
        """The columns that identify an arm's figures in one shape; an untrained arm has no seed."""
        return {"digest": self.comparison.row_digest(arm, shape), "seed": seed if arm.is_trained else None}

    def _marks(self, arm: Arm, seed: int, shape: str, temperature: float) -> list[Entry]:
        return self.rows.of("done", **self._about(arm, seed, shape), temperature=temperature, asked=self.asked)

    def _note(
        self,
        arm: Arm,
        seed: int,
        shape: str,
        temperature: float,
        answers: Sequence[Entry],
        lengths: Sequence[tuple[int, int]],
    ) -> None:
        """Add the missing rows of one shape and temperature, then the mark that they are complete."""
        about = self._about(arm, seed, shape)
        known = {tuple(row[name] for name in KEY) for row in self.rows.of("row", **about)}
        rows = []
        for answer, (committed, cycles) in zip(answers, lengths, strict=True):
            key = {name: answer[name] for name in KEY}
            if tuple(key.values()) not in known:
                rows.append({"arm": arm.name, **about, "shape": shape, **key, "committed": committed, "cycles": cycles})
        self.rows.add("row", rows)
        self.rows.add("done", [{**about, "temperature": temperature, "asked": self.asked}])
