"""What `eval.measure` wrote, read again: rows, the runs that they belong to, and groups of them to take figures of."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.statistics import Difference, Estimate, Row, Statistic, estimate, paired, ratio

Answer = dict[str, Any]  # one line of a results file
Prompt = tuple[Any, ...]  # set, conversation, turn, temperature, seed
Measure = Callable[[Answer], Row]
ANSWER = {"drafter", "temperature", "tokens", "seconds", "cycles", "loops", "identical"}  # what every row has
RULES = {
    "noise": "ranked with the target's own noise",
    "likeliest": "the likeliest, as point masses",
    "sampled": "sampled from q",
}


def commit() -> str:
    """The commit that figures were measured at."""
    asked = ["git", "rev-parse", "--short", "HEAD"]
    return subprocess.run(asked, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or "unknown"


def loops(tokens: Sequence[int], window: int = 64, period: int = 16) -> bool:
    """Whether the last `window` tokens repeat with a period of at most `period`."""
    tail = list(tokens[-window:])
    return len(tail) == window and any(tail[step:] == tail[:-step] for step in range(1, period + 1))


def cycles(answer: Answer) -> list[Answer]:
    """The cycles of an answer; none where the file only counted them."""
    return answer["cycles"] if isinstance(answer["cycles"], list) else []


def taken(answer: Answer) -> Row:
    """Tokens committed, and the cycles that it took."""
    if isinstance(answer["cycles"], int):
        return answer["committed"], answer["cycles"]
    return sum(cycle["committed"] for cycle in answer["cycles"]), len(answer["cycles"])


def pace(answer: Answer) -> Row:
    """Tokens, and the seconds that they took, prefill included."""
    return answer["tokens"], answer["seconds"]


def beside(answer: Answer) -> Row:
    """Tokens and seconds of an answer, then those of `none` on the same prompt."""
    return *pace(answer), *pace(answer["plain"])


def speed_up(sums: Any) -> Any:
    """Tokens per second over those of `none`, from the columns of `beside`."""
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


def prompt_of(answer: Answer) -> Prompt:
    """What was asked: a row's key but for the drafter."""
    conversation = answer.get("conversation", answer.get("prompt"))
    return answer.get("set"), conversation, answer.get("turn", 0), answer["temperature"], answer.get("seed", 0)


def conversation_of(prompt: Prompt) -> Prompt:
    """What prompts are clustered by: the turns and seeds of one conversation are not independent."""
    return prompt[:2]


def clustered(answers: Iterable[Answer], measure: Measure) -> dict[Prompt, list[Row]]:
    """What `measure` takes of each answer, by conversation."""
    rows: dict[Prompt, list[Row]] = {}
    for answer in answers:
        rows.setdefault(conversation_of(prompt_of(answer)), []).append(measure(answer))
    return rows


@dataclass(frozen=True)
class Group:
    """The answers of one drafter at one temperature, in one run; each has `none`'s to the same prompt as "plain"."""

    run: str  # the run's label; empty where there is but one
    drafter: str
    temperature: float
    rule: str  # how the draft was drawn
    answers: list[Answer]

    @property
    def name(self) -> str:
        """The drafter, with its run where there are several."""
        return f"{self.run} · {self.drafter}" if self.run else self.drafter

    def estimate(self, measure: Measure, statistic: Statistic = ratio) -> Estimate:
        """A statistic of what `measure` takes of each answer, with its interval."""
        return estimate(clustered(self.answers, measure), statistic)

    def more_than(self, other: Group, measure: Measure, statistic: Statistic = ratio) -> Difference:
        """How much more this group has of a statistic, by prompt."""
        mine, others = ({prompt_of(answer): measure(answer) for answer in group.answers} for group in (self, other))
        return paired(others, mine, conversation_of, statistic)

    def part(self, kept: Callable[[Answer], bool]) -> Group:
        """The group of some of the answers."""
        return Group(self.run, self.drafter, self.temperature, self.rule, [a for a in self.answers if kept(a)])

    @property
    def identical(self) -> int:
        """How many answers are the very tokens of `none`."""
        return sum(answer["identical"] is True for answer in self.answers)

    @property
    def differing(self) -> int:
        """How many answers are not, and should be: a draft sampled with its law keeps the law alone."""
        return sum(answer["identical"] is False for answer in self.answers)

    @property
    def looping(self) -> float:
        """The share of answers that end in a loop."""
        return sum(answer["loops"] for answer in self.answers) / len(self.answers)


@dataclass(frozen=True)
class Results:
    """One results file: the headers of its runs, and the rows that count."""

    path: Path
    headers: list[dict[str, Any]]
    answers: list[Answer]

    @property
    def header(self) -> dict[str, Any]:
        """What made the newest rows."""
        return self.headers[-1] if self.headers else {}

    def settings(self, drafter: str) -> dict[str, Any]:
        """What the header says of a drafter: its head and its budget."""
        drafters = self.header.get("drafters")
        return (drafters.get(drafter) or {}) if isinstance(drafters, dict) else {}

    def groups(self, label: str = "") -> list[Group]:
        """The answers by temperature and drafter, in the order in which they were measured."""
        plain = {prompt_of(answer): answer for answer in self.answers if answer["drafter"] == "none"}
        groups: dict[tuple[float, str], list[Answer]] = {}
        for answer in self.answers:
            if prompt_of(answer) not in plain:
                raise ValueError(
                    f"{self.path}: `{answer['drafter']}` answered {prompt_of(answer)} and `none` did not; "
                    "every figure needs its baseline in the same run: let eval.measure finish, then report again"
                )
            row = {**answer, "plain": plain[prompt_of(answer)]}
            groups.setdefault((answer["temperature"], answer["drafter"]), []).append(row)
        return [Group(label, name, heat, self._rule(name, heat), rows) for (heat, name), rows in groups.items()]

    def _rule(self, drafter: str, temperature: float) -> str:
        """How a drafter drew, as its budget in the header says."""
        settings = self.settings(drafter)
        if "weights" in settings and settings["weights"] is None:
            return "found without a law"
        if temperature == 0:
            return "the likeliest"
        draw = (settings.get("budget") or {}).get("draw", "noise")
        return RULES.get(draw, draw)


def read(path: str | Path) -> Results:
    """A results file: rows that name their run add up over restarts; in a file without names the last run counts."""
    headers: list[dict[str, Any]] = []
    answers: dict[Any, Answer] = {}
    for line, item in _lines(Path(path)):
        if isinstance(item.get("run"), dict):
            headers.append(item["run"])
            if "id" not in item["run"]:
                headers, answers = headers[-1:], {}
        else:
            key = (item["drafter"], *prompt_of(item)) if "conversation" in item else line
            answers[key] = item
    return Results(Path(path), headers, list(answers.values()))


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The lines as JSON; a last one that was cut off while it was written is not one yet."""
    if not path.is_file():
        raise ValueError(f"no results at {path}: expected a file that eval.measure wrote")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, parse_line(path, number, line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise


def parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """What a line of a results file holds: what made a run, or an answer; anything else is refused by its place."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{number} is not JSON ({error}): remove that line or measure again") from None
    missing = ANSWER - item.keys() if isinstance(item, dict) else ANSWER
    if missing and not (isinstance(item, dict) and isinstance(item.get("run"), dict)):
        raise ValueError(
            f"{path}:{number} is no answer: {', '.join(sorted(missing))} missing; remove that line or measure again"
        )
    return item


def newest_run(path: str | Path) -> tuple[dict[str, Any], list[Answer]]:
    """What made the last run in a results file, and its rows."""
    results = read(path)
    return results.header, results.answers


def summary(rows: list[Answer]) -> list[dict[str, Any]]:
    """Per temperature and drafter: acceptance length, speed, speed-up over `none`, and whether nothing was lost."""
    groups: dict[tuple[float, str], list[Answer]] = {}
    for row in rows:
        groups.setdefault((row["temperature"], row["drafter"]), []).append(row)
    speed = {key: _total(map(pace, group)) for key, group in groups.items()}
    return [
        {
            "temperature": temperature,
            "drafter": name,
            "acceptance_length": _total(map(taken, group)),
            "tokens_per_second": speed[temperature, name],
            "speed_up": speed[temperature, name] / speed[temperature, "none"],
            "identical": all(row["identical"] for row in group),
            "loops": sum(row["loops"] for row in group) / len(group),
        }
        for (temperature, name), group in groups.items()
    ]


def _total(rows: Iterable[Row]) -> float:
    over, under = map(sum, zip(*rows, strict=True))
    return over / max(under, 1e-9)
