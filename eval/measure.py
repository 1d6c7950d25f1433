"""Measure drafters on prompts, always beside `none`: `python -m eval.measure RECIPE [key=value ...] [--again]`."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from eagle.core.decode import generate
from eagle.core.drafter import Drafter
from eagle.core.trace import Cycle, Trace
from eagle.core.verify import Sampling
from eagle.disk import lock_path
from eagle.log import interrupted_by_user, progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.target import Target
from eval.costs import bare_costs
from eval.load_run import MeasuredDrafter, describe_run, describe_start, load_drafters, load_target, settle_threads
from eval.prompts import KEY_NAMES, Case, Key, Question, cases, encode_prompt, questions
from eval.report import markdown
from eval.results import Results, ends_in_loop, prompt_key, read_results

WARM_UP = 16  # tokens of a generation that is not counted
IN_PIECES = 2  # questions of each set whose answers are also kept in pieces

Row = dict[str, Any]


def read_stored(path: Path) -> Results:
    """The rows of earlier runs, if any; a torn last line is cut off the file."""
    if not path.exists():
        return Results(path, [], [])
    data = path.read_bytes()
    end = data.rfind(b"\n") + 1
    if end < len(data):
        print(f"{path}: the last line is torn; its {len(data) - end} bytes are cut off, and it is measured again")
        with path.open("r+b") as file:
            file.truncate(end)
    return read_results(path)


class ResultsWriter:
    """Appends rows to a results file; a file that other settings made is moved aside first."""

    def __init__(self, stored: Results, settings: dict[str, Any], *, again: bool = False) -> None:
        self.path = stored.path
        self.id = secrets.token_hex(4)
        self.settings = json.loads(json.dumps(settings))
        self.rows: dict[Key, dict[str, Row]] = {}  # by key and drafter
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if stored.headers and not again and self._is_same(stored.header):
            self.id = stored.header["id"]
            for row in stored.answers:
                if row["run"] == self.id:
                    self._remember(row)
        elif stored.headers or stored.answers:
            aside = self.path.with_stem(f"{self.path.stem}-{stored.header.get('id', secrets.token_hex(4))}")
            self.path.rename(aside)
            print(f"what {self.path} held is in {aside} now, and measuring begins anew")

    def begin(self, start: dict[str, Any]) -> None:
        """Write the header of the rows that follow."""
        self._append({"run": {"id": self.id, **start, **self.settings}})

    def add(self, row: Row) -> None:
        """Write one answer; it is in the file when this returns."""
        self._append({"run": self.id, **row})
        self._remember(row)

    def _is_same(self, header: dict[str, Any]) -> bool:
        """Whether the file was made with these settings; prints the names of those that differ."""
        other = [key for key, value in self.settings.items() if header.get(key) != value]
        if other:
            print(f"{self.path} was made by something else ({', '.join(other)})")
        return not other

    def _remember(self, row: Row) -> None:
        self.rows.setdefault(prompt_key(row), {})[row["drafter"]] = row

    def _append(self, line: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


@dataclass
class Measurement:
    """The drafters, the questions, and the answers so far."""

    recipe: Recipe
    target: Target
    drafters: dict[str, MeasuredDrafter]
    questions: list[Question]
    results: ResultsWriter
    missing: Counter[str] = field(default_factory=Counter)  # answers by set, for which the model has no positions

    def cases(self) -> list[Case]:
        """All questions at all temperatures with all seeds."""
        return cases(self.recipe, self.questions, self.recipe.eval.temperatures)

    def is_done(self, case: Case) -> bool:
        """Whether every drafter has answered all turns."""
        keys = [case.key(turn) for turn in range(len(case.question.turns))]
        return all(self.results.rows.get(key, {}).keys() >= self.drafters.keys() for key in keys)

    def run(self) -> None:
        """Measure what is missing; in every question the drafters take turns, another one first each time."""
        every, names = self.cases(), list(self.drafters)
        left = [(number, case) for number, case in enumerate(every) if not self.is_done(case)]
        self.warm_up()
        for number, case in progress(left, "measure", len(every), unit="questions", done=len(every) - len(left)):
            first = number % len(names)
            for row in self.answers(case, names[first:] + names[:first]):
                self.results.add(row)

    def warm_up(self) -> None:
        """Decode once with each drafter, so that no row pays for what happens once."""
        section = self.recipe.eval
        prompts = (encode_prompt(self.recipe, self.target, question.turns[:1]) for question in self.questions)
        prompt = next((prompt for prompt in prompts if prompt is not None), None)
        if prompt is None:
            raise ValueError(
                f"none of {len(self.questions)} prompts and {section.max_new_tokens} new tokens fit in the "
                f"model's {self.target.max_positions} positions: lower eval.max_new_tokens, or take shorter prompts"
            )
        sampling, tokens = Sampling(max(section.temperatures)), min(WARM_UP, section.max_new_tokens)
        for measured in self.drafters.values():
            time_answer(self.target, measured, prompt, sampling, tokens)

    def answers(self, case: Case, order: list[str]) -> Iterator[Row]:
        """The missing rows of one question, turn by turn; drafters answer in this order."""
        turns: list[str] = []
        for turn, text in enumerate(case.question.turns):
            turns.append(text)
            prompt = encode_prompt(self.recipe, self.target, turns)
            if prompt is None:
                self.missing[case.question.set] += len(self.drafters)
                return  # later turns are longer still
            stored = self.results.rows.get(case.key(turn), {})
            new = {name: self.answer(case, turn, name, prompt) for name in order if name not in stored}
            plain = (stored | new)["none"]
            for name in (name for name in self.drafters if name in new):
                is_sampled = self.drafters[name].is_sampled and case.temperature > 0
                new[name]["identical"] = None if is_sampled else new[name]["digest"] == plain["digest"]
                yield new[name]
            turns.append(plain["text"])

    def answer(self, case: Case, turn: int, name: str, prompt: list[int]) -> Row:
        """The row of one drafter's answer to a turn."""
        tokens = self.recipe.eval.max_new_tokens
        trace, wall, cpu = time_answer(self.target, self.drafters[name], prompt, case.sampling(turn), tokens)
        key = dict(zip(KEY_NAMES, case.key(turn), strict=True))
        row = {"drafter": name, **key, "task": case.question.task, **row_of(trace, wall, cpu)}
        of_set = [question for question in self.questions if question.set == case.question.set]
        return {**row, "pieces": trace.pieces()} if case.question in of_set[:IN_PIECES] else row


def time_answer(
    target: Target, measured: MeasuredDrafter, prompt: list[int], sampling: Sampling, new_tokens: int
) -> tuple[Trace, float, float]:
    """Decode an answer, reading the prompt anew; its trace, wall seconds and CPU seconds."""
    target.forget()
    wall, cpu = perf_counter(), process_time()
    options: dict[str, Any] = {"sampling": sampling, "budget": measured.budget, "max_new_tokens": new_tokens}
    trace = generate(target, measured.drafter, prompt, timing=True, **options)
    return trace, perf_counter() - wall, process_time() - cpu


def row_of(trace: Trace, wall: float, cpu: float) -> Row:
    """A trace as the columns of a row."""
    return {
        "prompt_tokens": len(trace.prompt),
        "tokens": len(trace.tokens),
        "finish": trace.finish,
        "seconds": round(wall, 6),
        "cpu_seconds": round(cpu, 6),
        "loops": ends_in_loop(trace.tokens),
        "digest": hashlib.sha256(json.dumps(trace.tokens).encode()).hexdigest()[:16],
        "text": trace.text,
        "cycles": list(map(cycle_of, trace.cycles)),
    }


def cycle_of(cycle: Cycle) -> dict[str, Any]:
    """A cycle as a row holds it."""
    confidence = [(round(prob, 4), accepted) for prob, accepted in cycle.confidence]
    return {
        "nodes": cycle.nodes,
        "depth": cycle.depth,
        "accepted": cycle.accepted,
        "committed": cycle.committed,
        "context": cycle.context,
        "path": cycle.path,
        **({"confidence": confidence} if confidence else {}),
        "seconds": {part: round(seconds, 7) for part, seconds in (cycle.seconds or {}).items()},
    }


def costs_of(measurement: Measurement) -> dict[str, Any]:
    """Bare forwards by drafter, each head's timed once, from the shortest prompt to the end of the longest answer."""
    asked, recipe = measurement.questions, measurement.recipe
    prompts = [encode_prompt(recipe, measurement.target, question.turns[:1]) for question in asked]
    lengths = [len(prompt) for prompt in prompts if prompt is not None] or [1]
    low = min(lengths)
    high = max(lengths) + recipe.eval.max_new_tokens * max(len(question.turns) for question in asked)
    costs: dict[str, Any] = {}
    by_drafter: dict[Drafter | None, Any] = {}
    for name, measured in measurement.drafters.items():
        timed = measured.drafter if measured.drafter.probe(1, 1, 1) else None  # the others share the target's forwards
        if timed not in by_drafter:
            by_drafter[timed] = asdict(bare_costs(measurement.target, timed, [low, (low + high) // 2, high]))
        costs[name] = by_drafter[timed]
    return costs


def results_file(recipe: Recipe) -> Path:
    """The results file of a recipe."""
    return Path(recipe.train.out) / "results.jsonl"


def measure(recipe: Recipe, path: str, *, again: bool = False) -> Path:
    """Measure what a recipe asks for and is not measured yet; returns the results file."""
    target, stored = load_target(recipe), read_stored(results_file(recipe))
    settle_threads(target, None if again else stored.header)
    drafters = load_drafters(recipe, target)
    results = ResultsWriter(stored, describe_run(recipe, target, drafters), again=again)
    measurement = Measurement(recipe, target, drafters, questions(recipe), results)
    if all(map(measurement.is_done, measurement.cases())):
        print(f"all answers are in {results.path} already: --again measures anew")
        return results.path
    costs = {"costs": costs_of(measurement)} if recipe.eval.costs else {}
    results.begin({**describe_start(recipe, path), "prompts": len(measurement.questions), **costs})
    measurement.run()
    for name, count in measurement.missing.items():
        print(
            f"{name}: {count} answers are missing: their prompts and {recipe.eval.max_new_tokens} new tokens exceed "
            f"the model's {target.max_positions} positions"
        )
    return results.path


def main(argv: list[str]) -> None:
    """Measure the recipe's drafters, append the rows to results.jsonl and print the table."""
    parser = command_line("eval.measure", __doc__)
    parser.add_argument("--again", action="store_true", help="measure anew; the rows that are there are kept aside")
    args = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    message = "finished answers are kept, and the same command goes on"
    with interrupted_by_user(lambda: message), lock_path(results_file(recipe)):
        print(markdown(measure(recipe, args.recipe, again=args.again)))


if __name__ == "__main__":
    script(main)
