"""Drafters on prompts, always beside `none`: `python -m eval.measure RECIPE [key=value ...] [--again]`."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from eagle.core.decode import Cycle, Trace, generate
from eagle.core.drafter import Drafter
from eagle.core.verify import Sampling
from eagle.disk import lock_path
from eagle.log import interrupted_by_user, progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.target import Target
from eval.costs import bare_costs
from eval.drafters import Measured, load_drafters, load_target, made_by, settle_threads, started
from eval.prompts import Case, Key, Question, cases, key_of, prompt_of, questions, sampling_of
from eval.report import markdown
from eval.results import loops, parse_line

WARM_UP = 16  # tokens of a generation that is not counted
COLOURED = 2  # questions of each set whose answers are kept in pieces

Row = dict[str, Any]


class Results:
    """The rows of one run in a file that only grows; what belongs to other settings is moved aside."""

    def __init__(self, path: Path, made: dict[str, Any], *, again: bool = False) -> None:
        self.path, self.id = path, secrets.token_hex(4)
        self.made = json.loads(json.dumps(made))
        self.rows: dict[Key, dict[str, Row]] = {}  # by key and drafter
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.loads(line) for line in whole_lines(path)]
        header = last_header(lines)
        if header is not None and not again and self._same(header):
            self.id = header["id"]
            for row in lines:
                if row["run"] == self.id:
                    self._note(row)
        elif lines:
            self._move_aside(header or {})

    def _same(self, header: dict[str, Any]) -> bool:
        """Whether the file was made by what would be measured now; said where it was not."""
        if other := [key for key, value in self.made.items() if header.get(key) != value]:
            print(f"{self.path} was made by something else ({', '.join(other)})")
        return not other

    def _move_aside(self, header: dict[str, Any]) -> None:
        aside = self.path.with_name(f"{self.path.stem}-{header.get('id', secrets.token_hex(4))}{self.path.suffix}")
        self.path.rename(aside)
        print(f"what {self.path} held is in {aside} now, and measuring begins anew")

    def _note(self, row: Row) -> None:
        key = (row["set"], row["conversation"], row["turn"], row["temperature"], row["seed"])
        self.rows.setdefault(key, {})[row["drafter"]] = row

    def begin(self, started: dict[str, Any]) -> None:
        """Say what made the rows that follow."""
        self._append({"run": {"id": self.id, **started, **self.made}})

    def add(self, row: Row) -> None:
        """One answer, in the file when this returns."""
        self._append({"run": self.id, **row})
        self._note(row)

    def _append(self, line: Row) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


def last_header(lines: Sequence[Row]) -> dict[str, Any] | None:
    """What the newest run of a results file was made by."""
    return next((line["run"] for line in reversed(lines) if isinstance(line.get("run"), dict)), None)


def whole_lines(path: Path) -> list[str]:
    """The lines of a file; a last one that was torn is cut off."""
    data = path.read_bytes() if path.exists() else b""
    end = data.rfind(b"\n") + 1
    if end < len(data):
        print(f"{path}: the last line is torn; its {len(data) - end} bytes are cut off, and it is measured again")
        with path.open("r+b") as file:
            file.truncate(end)
    lines = data[:end].splitlines()
    for number, line in enumerate(lines, start=1):
        parse_line(path, number, line)
    return list(map(bytes.decode, lines))


@dataclass
class Measurement:
    """Who answers what, and which answers are there."""

    recipe: Recipe
    target: Target
    drafters: dict[str, Measured]
    asked: list[Question]
    results: Results
    missing: Counter[str] = field(default_factory=Counter)  # answers by set, for which the model has no positions

    def cases(self) -> list[Case]:
        """What is asked, one after the other."""
        return cases(self.recipe, self.asked, self.recipe.eval.temperatures)

    def is_done(self, case: Case) -> bool:
        """Whether all answers are there."""
        keys = [key_of(case, turn) for turn in range(len(case[2].turns))]
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
        """Each drafter once, so that no row pays for what happens once."""
        found = (prompt_of(self.recipe, self.target, question.turns[:1]) for question in self.asked)
        prompt = next((one for one in found if one is not None), None)
        if prompt is None:
            raise ValueError(
                f"none of {len(self.asked)} prompts and {self.recipe.eval.max_new_tokens} new tokens fit in the "
                f"model's {self.target.max_positions} positions: lower eval.max_new_tokens, or take shorter prompts"
            )
        asked = self.recipe.eval
        for measured in self.drafters.values():
            timed(self.target, measured, prompt, Sampling(max(asked.temperatures)), min(WARM_UP, asked.max_new_tokens))

    def answers(self, case: Case, order: list[str]) -> Iterator[Row]:
        """The rows of one question that are not there yet, turn by turn; drafters answer in this order."""
        (temperature, _, question), said = case, list[str]()
        for turn, text in enumerate(question.turns):
            said.append(text)
            prompt, sampling = prompt_of(self.recipe, self.target, said), sampling_of(case, turn)
            there = self.results.rows.get(key_of(case, turn), {})
            if prompt is None:
                self.missing[question.set] += len(self.drafters)
                return  # later turns are longer still
            new: dict[str, Any] = {}
            for name in (name for name in order if name not in there):
                answer = timed(self.target, self.drafters[name], prompt, sampling, self.recipe.eval.max_new_tokens)
                new[name] = {"drafter": name, **named(case, turn), **row_of(*answer)}
                if self.is_coloured(question):
                    new[name]["pieces"] = answer[0].pieces()
            plain = (there | new)["none"]
            for name in (name for name in self.drafters if name in new):
                drawn = self.drafters[name].drawn and temperature > 0
                new[name]["identical"] = None if drawn else new[name]["digest"] == plain["digest"]
                yield new[name]
            said.append(plain["text"])

    def is_coloured(self, question: Question) -> bool:
        """Whether this is one of the few questions whose answers are kept in pieces."""
        return question in [one for one in self.asked if one.set == question.set][:COLOURED]


def timed(
    target: Target, measured: Measured, prompt: list[int], sampling: Sampling, new_tokens: int
) -> tuple[Trace, float, float]:
    """An answer, and the seconds that it took by the wall's clock and by the CPU's; the prompt is read anew."""
    target.forget()
    wall, cpu = perf_counter(), process_time()
    options: dict[str, Any] = {"sampling": sampling, "budget": measured.budget, "max_new_tokens": new_tokens}
    trace = generate(target, measured.drafter, prompt, timing=True, **options)
    return trace, perf_counter() - wall, process_time() - cpu


def named(case: Case, turn: int) -> Row:
    """What a row answers."""
    keys = ("set", "conversation", "turn", "temperature", "seed")
    return {**dict(zip(keys, key_of(case, turn), strict=True)), "task": case[2].task}


def row_of(trace: Trace, wall: float, cpu: float) -> Row:
    """What came of it."""
    return {
        "prompt_tokens": len(trace.prompt),
        "tokens": len(trace.tokens),
        "finish": trace.finish,
        "seconds": round(wall, 6),
        "cpu_seconds": round(cpu, 6),
        "loops": loops(trace.tokens),
        "digest": hashlib.sha256(json.dumps(trace.tokens).encode()).hexdigest()[:16],
        "text": trace.text,
        "cycles": list(map(cycle_of, trace.cycles)),
    }


def cycle_of(cycle: Cycle) -> dict[str, Any]:
    """What is written down of a cycle."""
    seconds = {part: round(spent, 7) for part, spent in (cycle.seconds or {}).items()}
    sure = [(round(likely, 4), kept) for likely, kept in cycle.confidence]
    return {
        "nodes": cycle.nodes,
        "depth": cycle.depth,
        "accepted": cycle.accepted,
        "committed": cycle.committed,
        "context": cycle.context,
        "path": cycle.path,
        **({"confidence": sure} if sure else {}),
        "seconds": seconds,
    }


def costs_of(measurement: Measurement) -> dict[str, Any]:
    """Bare forwards by drafter, each head's timed once, from the shortest prompt to the end of the longest answer."""
    asked, new = measurement.asked, measurement.recipe.eval.max_new_tokens
    prompts = [prompt_of(measurement.recipe, measurement.target, question.turns[:1]) for question in asked]
    lengths = [len(prompt) for prompt in prompts if prompt is not None] or [1]
    low, high = min(lengths), max(lengths) + new * max(len(question.turns) for question in asked)
    costs: dict[str, Any] = {}
    measured: dict[Drafter | None, Any] = {}
    for name, one in measurement.drafters.items():
        probed = one.drafter if one.drafter.probe(1, 1, 1) else None  # the others share the target's forwards
        if probed not in measured:
            measured[probed] = asdict(bare_costs(measurement.target, probed, [low, (low + high) // 2, high]))
        costs[name] = measured[probed]
    return costs


def results_file(recipe: Recipe) -> Path:
    """Where the rows of a recipe are."""
    return Path(recipe.train.out) / "results.jsonl"


def measure(recipe: Recipe, path: str, *, again: bool = False) -> Path:
    """Measure what a recipe asks for, as far as it is not there yet; returns where the rows are."""
    target, out = load_target(recipe), results_file(recipe)
    settle_threads(target, None if again else last_header([json.loads(line) for line in whole_lines(out)]))
    drafters = load_drafters(recipe, target)
    results = Results(out, made_by(recipe, target, drafters), again=again)
    measurement = Measurement(recipe, target, drafters, questions(recipe), results)
    if all(map(measurement.is_done, measurement.cases())):
        print(f"all answers are in {results.path} already: --again measures anew")
        return results.path
    costs = {"costs": costs_of(measurement)} if recipe.eval.costs else {}
    results.begin({**started(recipe, path), "prompts": len(measurement.asked), **costs})
    measurement.run()
    for name, count in measurement.missing.items():
        print(
            f"{name}: {count} answers are missing: their prompts and {recipe.eval.max_new_tokens} new tokens exceed "
            f"the model's {target.max_positions} positions"
        )
    return results.path


def main(argv: list[str]) -> None:
    """Measure the recipe's drafters, append the rows to results.jsonl and print the summary."""
    parser = command_line("eval.measure", __doc__)
    parser.add_argument("--again", action="store_true", help="measure anew; the rows that are there are kept aside")
    asked = parser.parse_intermixed_args(argv)
    recipe = Recipe.load(asked.recipe, asked.overrides)
    goes_on = "finished answers are kept, and the same command goes on"
    with interrupted_by_user(lambda: goes_on), lock_path(results_file(recipe)):
        print(markdown(measure(recipe, asked.recipe, again=asked.again)))


if __name__ == "__main__":
    script(main)
