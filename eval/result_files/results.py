"""Read what `eval.measure` wrote: rows, the runs that they belong to, and figures of groups of rows."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eagle.core.budget import Budget
from eagle.decoding.forward_costs import Costs
from eagle.markup import Html, table
from eagle.target.bits.near_ties import MAX_TIE
from eval.costs import asked_budgets, model_seconds
from eval.result_files.figures import format_number
from eval.result_files.statistics import Difference, Estimate, Row, Statistic, estimate, estimate_difference, ratio

Answer = dict[str, Any]  # one row of a results file
Key = tuple[Any, ...]  # set, conversation, turn, temperature, seed, batch size
ANSWER = {"drafter", "temperature", "tokens", "seconds", "cycles", "loops", "identical"}  # what every row has
RULES = {
    "noise": "ranked with the target's own noise",
    "likeliest": "the likeliest, as point masses",
    "sampled": "sampled from q",
}


def device_name(device: str) -> str:
    """The name of the device that figures belong to: the accelerator's, or the processor's model."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")  # of Linux, where the standard library knows the architecture alone
    model = re.search(r"model name\s*:\s*(.*\S)", info.read_text()) if info.is_file() else None
    return model[1] if model else platform.processor() or platform.machine()


def ends_in_loop(tokens: Sequence[int], window: int = 64, period: int = 16) -> bool:
    """Whether the last `window` tokens repeat with a period of at most `period`."""
    tail = list(tokens[-window:])
    return len(tail) == window and any(tail[step:] == tail[:-step] for step in range(1, period + 1))


def prompt_key(answer: Answer) -> Key:
    """The key of an answer's prompt and of how it was asked; its first two items are the conversation."""
    conversation = answer.get("conversation", answer.get("prompt"))
    prompt = answer.get("set"), conversation, answer.get("turn", 0)
    return *prompt, answer["temperature"], answer.get("seed", 0), answer.get("batch_size", 1)


def item_key(item: Answer) -> Key:
    """The key of a line of a results file: a header, the steps of a batch, or an answer."""
    if "batch" in item:
        return "batch", item["batch"]["session"], item["batch"]["step"]
    if isinstance(item.get("run"), dict):
        return "header", json.dumps(item["run"])
    return item["run"], item["drafter"], *prompt_key(item)


def cycles(answer: Answer) -> list[Answer]:
    """The cycles of an answer; empty where the file holds only their number."""
    return answer["cycles"] if isinstance(answer["cycles"], list) else []


def count_cycles(answer: Answer) -> Row:
    """Committed tokens and cycles of an answer."""
    if isinstance(answer["cycles"], int):
        return answer["committed"], answer["cycles"]
    return sum(cycle["committed"] for cycle in answer["cycles"]), len(answer["cycles"])


def count_seconds(answer: Answer) -> Row:
    """Tokens and seconds of an answer, prefill included; in a batch its share of the seconds."""
    return answer["tokens"], answer["seconds"]


def count_cpu_seconds(answer: Answer) -> Row:
    """Tokens and CPU seconds of an answer, which other work on the machine leaves alone."""
    return answer["tokens"], answer["cpu_seconds"]


def speed_up(sums: Any) -> Any:
    """(tokens / seconds) of a drafter over (tokens / seconds) of its baseline, from these four columns."""
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


@dataclass(frozen=True)
class Metric:
    """A figure of many answers: the columns that each answer adds, and a statistic of the columns' sums."""

    columns: Callable[[Answer], Row]
    statistic: Statistic = ratio


ACCEPTANCE_LENGTH = Metric(count_cycles)
TOKENS_PER_SECOND = Metric(count_seconds)
SPEED_UP = Metric(lambda answer: (*count_seconds(answer), *count_seconds(answer["baseline"])), speed_up)
CPU_SPEED_UP = Metric(lambda answer: (*count_cpu_seconds(answer), *count_cpu_seconds(answer["baseline"])), speed_up)
MODELLED_SPEED_UP = Metric(lambda answer: answer["modelled"], speed_up)  # prefill excluded
LATENCY = Metric(lambda answer: (answer["latency"] if "latency" in answer else answer["seconds"], 1))  # mean seconds


@dataclass(frozen=True)
class Group:
    """The answers of one drafter at one temperature in one run; each holds `none`'s to its prompt as "baseline"."""

    run: str  # the run's label; empty where there is but one
    drafter: str
    temperature: float
    rule: str  # how the draft was drawn
    answers: list[Answer]
    batch_size: int = 1
    steps: tuple[Answer, ...] = ()  # what steps of the batches took, those of interrupted answers included

    @property
    def name(self) -> str:
        """The drafter, with its run where there are several."""
        return f"{self.run} · {self.drafter}" if self.run else self.drafter

    def estimate(self, metric: Metric) -> Estimate:
        """The metric over all answers, with its interval over conversations."""
        rows: dict[Key, list[Row]] = {}
        for answer in self.answers:
            rows.setdefault(prompt_key(answer)[:2], []).append(metric.columns(answer))
        return estimate(rows, metric.statistic)

    def compare(self, other: Group, metric: Metric) -> Difference:
        """The metric of this group less that of another, over the prompts that both answered."""
        mine, others = ({prompt_key(row): metric.columns(row) for row in group.answers} for group in (self, other))
        return estimate_difference(others, mine, lambda key: key[:2], metric.statistic)

    def select(self, keep: Callable[[Answer], bool]) -> Group:
        """The group of those answers that `keep` accepts."""
        return replace(self, answers=[answer for answer in self.answers if keep(answer)])

    @property
    def has_cpu_seconds(self) -> bool:
        """Whether all answers tell the CPU's seconds."""
        return all("cpu_seconds" in row for answer in self.answers for row in (answer, answer["baseline"]))

    @property
    def had_to_wait(self) -> bool:
        """Whether answers took a tenth more time than their CPU seconds, because other work used the machine."""
        return self.has_cpu_seconds and sum(row["seconds"] - 1.1 * row["cpu_seconds"] for row in self.answers) > 0.0

    @property
    def is_modelled(self) -> bool:
        """Whether the bare costs of its forwards are known."""
        return all("modelled" in answer for answer in self.answers)

    @property
    def identical(self) -> int:
        """Number of answers with exactly the tokens of `none`."""
        return sum(answer["identical"] is True for answer in self.answers)

    @property
    def differing(self) -> int:
        """Number of answers that differ from `none` and should not; sampled drafts need not be identical."""
        return sum(answer["identical"] is False for answer in self.answers)

    @property
    def parting(self) -> str:
        """How near the ties are at which answers part from those of `none`; empty if none does."""
        parted = [answer for answer in self.answers if answer["identical"] is False]
        if not parted:
            return ""
        ties = [answer.get("tie") for answer in parted]
        measured = [tie for tie in ties if tie is not None]
        unknown = len(ties) - len(measured)
        if not measured:
            return "the others part at ties that were not measured"
        more = f", {unknown} not measured" if unknown else ""
        return f"the others part at near-ties of at most {max(measured):.2g} units in the last place{more}"

    @property
    def parts_widely(self) -> bool:
        """Whether an answer parts from that of `none` where no rounding can decide."""
        ties = [answer.get("tie") for answer in self.answers if answer["identical"] is False]
        return any(tie is not None and tie > MAX_TIE for tie in ties)

    @property
    def looping(self) -> float:
        """Share of answers that end in a loop."""
        return sum(answer["loops"] for answer in self.answers) / len(self.answers)

    def _repr_html_(self) -> str:
        return show_groups([self])


def show_groups(groups: Sequence[Group]) -> Html:
    """The groups as a table for a notebook."""
    rows = []
    for group in groups:
        speed_up = "1.00 ×" if group.drafter == "none" else format_number(group.estimate(SPEED_UP), " ×")
        length, speed = group.estimate(ACCEPTANCE_LENGTH), group.estimate(TOKENS_PER_SECOND)
        numbers = (format_number(length), format_number(speed, digits=0), speed_up, group.identical)
        rows.append((f"{group.temperature:g}", group.name, len(group.answers), *numbers))
    return table(rows, ("T", "drafter", "answers", "τ", "tokens/s", "speed-up", "identical"))


@dataclass(frozen=True)
class Results:
    """One results file: the headers of its runs, and the rows that count."""

    path: Path
    headers: list[dict[str, Any]]
    answers: list[Answer] = field(repr=False)
    batches: tuple[Answer, ...] = field(default=(), repr=False)

    @property
    def header(self) -> dict[str, Any]:
        """The header of the newest rows."""
        return self.headers[-1] if self.headers else {}

    def _repr_html_(self) -> str:
        return show_groups(self.groups())

    def settings(self, drafter: str) -> dict[str, Any]:
        """Head and budget of a drafter, from the header."""
        drafters = self.header.get("drafters")
        return (drafters.get(drafter) or {}) if isinstance(drafters, dict) else {}

    def groups(self, label: str = "") -> list[Group]:
        """The answers by batch size, temperature and drafter, with modelled seconds where costs are known."""
        baselines = {prompt_key(answer): answer for answer in self.answers if answer["drafter"] == "none"}
        groups: dict[tuple[int, float, str], list[Answer]] = {}
        for answer in self.answers:
            if (key := prompt_key(answer)) not in baselines:
                raise ValueError(
                    f"{self.path}: `{answer['drafter']}` answered {key} and `none` did not; "
                    "every figure needs its baseline in the same run: let eval.measure finish, then report again"
                )
            group = groups.setdefault((key[-1], answer["temperature"], answer["drafter"]), [])
            group.append({**answer, "baseline": baselines[key]})
        for (batch_size, _, name), rows in groups.items():
            self._add_modelled(name, rows, batch_size)
        steps: dict[tuple[int, float, str], list[Answer]] = {}
        for batch in self.batches:
            steps.setdefault((batch["batch_size"], batch["temperature"], batch["drafter"]), []).append(batch)
        return [
            Group(label, key[2], key[1], self._rule(key[2], key[1]), rows, key[0], tuple(steps.get(key, ())))
            for key, rows in groups.items()
        ]

    def _add_modelled(self, drafter: str, answers: list[Answer], batch_size: int) -> None:
        """Tokens and seconds of each answer and of its baseline, at the costs in the header if it has them."""
        bare = (self.header.get("costs") or {}).get(drafter)
        if bare is None or (batch_size > 1 and not bare.get("batches")):
            return
        costs, limit = Costs.parse(bare), self.header.get("new_tokens")
        values = self.settings(drafter)["budget"]
        paths = values.get("paths")
        budget = Budget(**{**values, "paths": paths and tuple(map(tuple, paths))})
        if "policy" in self.settings(drafter):  # budgets change from cycle to cycle: drafts cost what they took
            costs = replace(costs, first=None, level=None)

        def seconds(rows: list[Answer], budget: Budget | None) -> list[float]:
            rows = [{**row, "cycles": cycles(row)} for row in rows]
            return model_seconds(costs, rows, [asked_budgets(row["cycles"], budget, limit) for row in rows])

        baselines = [answer["baseline"] for answer in answers]
        for answer, *both in zip(answers, seconds(answers, budget), seconds(baselines, None), strict=True):
            (tokens, _), (baseline_tokens, _) = count_cycles(answer), count_cycles(answer["baseline"])
            answer["modelled"] = tokens, both[0], baseline_tokens, both[1]

    def _rule(self, drafter: str, temperature: float) -> str:
        """How a drafter chose its tokens, from its budget in the header."""
        settings = self.settings(drafter)
        if "weights" in settings and settings["weights"] is None:
            return "proposed without probabilities"
        if temperature == 0:
            return "the likeliest"
        draw = (settings.get("budget") or {}).get("draw", "noise")
        return RULES.get(draw, draw)


def read_results(path: str | Path) -> Results:
    """Read a results file: runs with an id add up over restarts; of runs without one the last counts."""
    headers: list[dict[str, Any]] = []
    answers: dict[Any, Answer] = {}
    batches: dict[Key, Answer] = {}
    for number, item in _read_lines(Path(path)):
        if isinstance(item.get("run"), dict):
            headers.append(item["run"])
            if "id" not in item["run"]:
                headers, answers, batches = headers[-1:], {}, {}
        elif "batch" in item:
            batches[item_key(item)] = item["batch"]
        else:
            answers[(item["drafter"], *prompt_key(item)) if "conversation" in item else number] = item
    return Results(Path(path), headers, list(answers.values()), tuple(batches.values()))


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse line by line; a last line that was cut off while it was written is left out."""
    if not path.is_file():
        raise ValueError(f"no results at {path}: expected a file that eval.measure wrote")
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, _parse_line(path, number, line)
            except ValueError:
                if line.endswith(b"\n"):
                    raise


def _parse_line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """A header, steps of a batch or an answer; anything else is refused by its place."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}:{number} is not JSON ({error}): remove that line or measure again") from None
    missing = ANSWER - item.keys() if isinstance(item, dict) else ANSWER
    is_other = isinstance(item, dict) and any(isinstance(item.get(name), dict) for name in ("run", "batch"))
    if missing and not is_other:
        raise ValueError(
            f"{path}:{number} is no answer: {', '.join(sorted(missing))} missing; remove that line or measure again"
        )
    return item
