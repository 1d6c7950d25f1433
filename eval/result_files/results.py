"""Read what `eval.measure` wrote: rows, the runs that they belong to, and figures of groups of rows."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from pathlib import Path
from typing import Any

import torch

from eagle.core.budget import Budget, describe_budget
from eagle.decoding.forward_costs import Costs
from eagle.markup import Html, table
from eagle.target.bits.near_ties import MAX_TIE
from eval.costs import asked_budgets, model_seconds
from eval.result_files.statistics import (
    Difference,
    Estimate,
    Row,
    Statistic,
    estimate,
    estimate_difference,
    format_number,
    ratio,
)

Answer = dict[str, Any]  # one row of a results file
GroupKey = tuple[int, float, str]  # batch size, temperature, drafter
Key = tuple[Any, ...]  # set, conversation, turn, temperature, seed, batch size
# what every row has
ANSWER = {"drafter", "temperature", "tokens", "seconds", "cycles", "loops", "identical"}
# how the children of a node were drawn, by the budget's `draw`
RULES = {
    "noise": "ranked with the target's sampling noise",
    "likeliest": "most probable tokens, as point masses",
    "sampled": "sampled from q",
}


def device_name(device: str) -> str:
    """Return the name of the accelerator, or the processor's model."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    # Linux: the standard library knows the architecture alone
    info = Path("/proc/cpuinfo")
    if info.is_file():
        model = re.search(r"model name\s*:\s*(.*\S)", info.read_text())
        if model:
            return model[1]
    return platform.processor() or platform.machine()


def ends_in_loop(tokens: Sequence[int], window: int = 64, period: int = 16) -> bool:
    """Return whether the last `window` tokens repeat with a period of at most `period`; a short answer does not."""
    tail = list(tokens[-window:])
    if len(tail) < window:
        return False
    return any(tail[step:] == tail[:-step] for step in range(1, period + 1))


def prompt_key(answer: Answer) -> Key:
    """Return the key of a prompt and its settings. The first two items are the conversation."""
    return (
        answer.get("set"),
        answer.get("conversation", answer.get("prompt")),
        answer.get("turn", 0),
        answer["temperature"],
        answer.get("seed", 0),
        answer.get("batch_size", 1),
    )


def item_key(item: Answer) -> Key:
    """Return the key of a line of a results file: a header, the steps of a batch, or an answer."""
    if "batch" in item:
        return "batch", item["batch"]["session"], item["batch"]["step"]
    if isinstance(item.get("run"), dict):
        return "header", json.dumps(item["run"])
    return item["run"], item["drafter"], *prompt_key(item)


def task_of(answer: Answer) -> str:
    """Return the prompt set of an answer, and its task within the set."""
    prompt_set = answer.get("set") or "prompts"
    if not answer.get("task"):
        return str(prompt_set)
    return f"{prompt_set} · {answer['task']}"


def cycles(answer: Answer) -> list[Answer]:
    """Return the cycles of an answer, or none where the file holds only their number."""
    return answer["cycles"] if isinstance(answer["cycles"], list) else []


def count_cycles(answer: Answer) -> Row:
    """Return the committed tokens and the cycles of an answer."""
    if isinstance(answer["cycles"], int):
        return answer["committed"], answer["cycles"]
    return sum(cycle["committed"] for cycle in answer["cycles"]), len(answer["cycles"])


def count_seconds(answer: Answer) -> Row:
    """Return the tokens and seconds of an answer, prefill included; in a batch its share of the seconds."""
    return answer["tokens"], answer["seconds"]


def count_cpu_seconds(answer: Answer) -> Row:
    """Return the tokens and CPU seconds of an answer, which other work on the machine does not change."""
    return answer["tokens"], answer["cpu_seconds"]


def speed_up(sums: Any) -> Any:
    """Return (tokens / seconds) of a drafter over (tokens / seconds) of its baseline, from these four columns."""
    return (sums[0] / sums[1]) / (sums[2] / sums[3])


@dataclass(frozen=True)
class Metric:
    """A figure of many answers: the columns of each answer, and a statistic of the columns' sums."""

    columns: Callable[[Answer], Row]
    statistic: Statistic = ratio


ACCEPTANCE_LENGTH = Metric(count_cycles)
TOKENS_PER_SECOND = Metric(count_seconds)
SPEED_UP = Metric(
    lambda answer: (*count_seconds(answer), *count_seconds(answer["baseline"])), speed_up
)
CPU_SPEED_UP = Metric(
    lambda answer: (*count_cpu_seconds(answer), *count_cpu_seconds(answer["baseline"])), speed_up
)
MODELLED_SPEED_UP = Metric(lambda answer: answer["modelled"], speed_up)  # prefill excluded
# mean seconds; a prompt decoded alone has no latency beside its seconds
LATENCY = Metric(
    lambda answer: (answer["latency"] if "latency" in answer else answer["seconds"], 1)
)


@dataclass(frozen=True)
class Group:
    """The answers of one drafter at one temperature in one run; each holds `none`'s to its prompt as "baseline"."""

    run: str  # the run's label; empty where there is but one
    drafter: str
    temperature: float
    rule: str  # how the draft was drawn
    answers: list[Answer]
    batch_size: int = 1
    # what steps of the batches took, those of interrupted answers included
    steps: tuple[Answer, ...] = ()

    @property
    def name(self) -> str:
        """Return the drafter's name, with its run where there are several."""
        if not self.run:
            return self.drafter
        return f"{self.run} · {self.drafter}"

    @property
    def drafts(self) -> bool:
        """Return whether this is a drafter, not plain decoding."""
        return self.drafter != "none"

    @property
    def cycles(self) -> list[Answer]:
        """Return the recorded cycles of all answers."""
        recorded = []
        for answer in self.answers:
            recorded += cycles(answer)
        return recorded

    @property
    def accepts_nothing(self) -> bool:
        """Return whether cycles are recorded, and none of them accepted a drafted token."""
        recorded = self.cycles
        return bool(recorded) and not any(cycle["accepted"] for cycle in recorded)

    def estimate(self, metric: Metric) -> Estimate:
        """Return the metric over all answers, with its interval over conversations."""
        rows: dict[Key, list[Row]] = {}
        for answer in self.answers:
            rows.setdefault(prompt_key(answer)[:2], []).append(metric.columns(answer))
        return estimate(rows, metric.statistic)

    def average_length(self) -> Estimate:
        """Return SPEED-Bench's Average_AL: the mean over requests, however long, of their tokens per cycle.

        All turns of a request count together.
        """
        sums: dict[Key, list[float]] = {}
        for answer in self.answers:
            key = prompt_key(answer)
            # all but the turn
            total = sums.setdefault((*key[:2], *key[3:]), [0, 0])
            committed, num_cycles = count_cycles(answer)
            total[0] += committed
            total[1] += num_cycles
        rows: dict[Key, list[Row]] = {}
        for key, (committed, num_cycles) in sums.items():
            # an answer of one token has no cycle
            if num_cycles:
                rows.setdefault(key[:2], []).append((committed / num_cycles, 1))
        if not rows:
            return Estimate(nan, -inf, inf)
        return estimate(rows)

    def compare(self, other: Group, metric: Metric) -> Difference:
        """Return the metric of this group minus that of another, over the prompts that both answered.

        Raises:
            ValueError: No prompt was answered by both.
        """
        mine = {prompt_key(row): metric.columns(row) for row in self.answers}
        others = {prompt_key(row): metric.columns(row) for row in other.answers}
        return estimate_difference(others, mine, lambda key: key[:2], metric.statistic)

    @property
    def has_cpu_seconds(self) -> bool:
        """Return whether all answers and baselines have CPU seconds."""
        return all(
            "cpu_seconds" in row and "cpu_seconds" in row["baseline"] for row in self.answers
        )

    @property
    def had_to_wait(self) -> bool:
        """Return whether answers took over 1.1 times their CPU seconds, because other work used the machine."""
        if not self.has_cpu_seconds:
            return False
        return sum(row["seconds"] - 1.1 * row["cpu_seconds"] for row in self.answers) > 0.0

    @property
    def is_modelled(self) -> bool:
        """Return whether all answers have modelled seconds."""
        return all("modelled" in answer for answer in self.answers)

    @property
    def identical(self) -> int:
        """Return the number of answers with exactly the tokens of `none`."""
        return sum(answer["identical"] is True for answer in self.answers)

    @property
    def differing(self) -> int:
        """Return the number of answers that differ from `none` and should not."""
        # the column is None for sampled drafts, which need not be identical
        return sum(answer["identical"] is False for answer in self.answers)

    @property
    def _ties(self) -> list[float | None]:
        return [answer.get("tie") for answer in self.answers if answer["identical"] is False]

    @property
    def parting(self) -> str:
        """Describe how near the ties are at which answers differ from `none`; empty if none does."""
        ties = self._ties
        if not ties:
            return ""
        measured = [tie for tie in ties if tie is not None]
        if not measured:
            return "the others part at ties that were not measured"
        text = (
            f"the others part at near-ties of at most {max(measured):.2g} units in the last place"
        )
        if len(measured) < len(ties):
            text += f", {len(ties) - len(measured)} not measured"
        return text

    @property
    def parts_widely(self) -> bool:
        """Return whether an answer differs from `none` where rounding cannot be the reason."""
        return any(tie is not None and tie > MAX_TIE for tie in self._ties)

    @property
    def looping(self) -> float:
        """Return the share of answers that end in a loop."""
        return sum(answer["loops"] for answer in self.answers) / len(self.answers)

    def _repr_html_(self) -> str:
        return show_groups([self])


def fewest_at_a_time(groups: Sequence[Group]) -> list[Group]:
    """Return the groups of each run's smallest batch size, since acceptance does not depend on it."""
    sizes: dict[str, int] = {}
    for group in groups:
        sizes[group.run] = min(group.batch_size, sizes.get(group.run, group.batch_size))
    return [group for group in groups if group.batch_size == sizes[group.run]]


def describe_output(group: Group) -> str:
    """Describe whether the group's answers are those of `none`."""
    if group.differing:
        compared = group.identical + group.differing
        return f"identical in {group.identical} of {compared}; {group.parting}"
    if group.identical:
        return f"identical in {group.identical} of {len(group.answers)}"
    return "of the same distribution"


def requests_per_step(group: Group) -> float:
    """Return the mean number of requests in a step."""
    num_steps = sum(batch["steps"] for batch in group.steps)
    # answers that were decoded alone record no steps
    if not num_steps:
        return 1.0
    return sum(batch["texts"] for batch in group.steps) / num_steps


def describe_tree(settings: Mapping[str, Any]) -> str:
    """Describe the draft tree of a drafter's settings, or return nothing where the header has none."""
    budget = settings.get("budget")
    if not budget:
        return ""
    text = describe_budget(budget)
    if "policy" in settings:
        text += " at most, chosen each cycle"
    return text


def show_groups(groups: Sequence[Group]) -> Html:
    """Return the groups as a table for a notebook."""
    rows = []
    for group in groups:
        gain = "1.00 ×"
        if group.drafts:
            gain = format_number(group.estimate(SPEED_UP), " ×")
        rows.append(
            (
                f"{group.temperature:g}",
                group.name,
                len(group.answers),
                format_number(group.estimate(ACCEPTANCE_LENGTH)),
                format_number(group.estimate(TOKENS_PER_SECOND), digits=0),
                gain,
                group.identical,
            )
        )
    return table(rows, ("T", "drafter", "answers", "τ", "tokens/s", "speedup", "identical"))


@dataclass(frozen=True)
class Results:
    """One results file: the headers of its runs, and the rows that count."""

    path: Path
    headers: list[dict[str, Any]]
    answers: list[Answer] = field(repr=False)
    batches: tuple[Answer, ...] = field(default=(), repr=False)

    @property
    def header(self) -> dict[str, Any]:
        """Return the header of the newest rows."""
        return self.headers[-1] if self.headers else {}

    def _repr_html_(self) -> str:
        return show_groups(self.groups())

    def settings(self, drafter: str) -> dict[str, Any]:
        """Return head and budget of a drafter, from the header."""
        drafters = self.header.get("drafters")
        # headers of early releases list names alone
        if not isinstance(drafters, dict):
            return {}
        return drafters.get(drafter) or {}

    def groups(self, label: str = "") -> list[Group]:
        """Group the answers by batch size, temperature and drafter; add modelled seconds where costs are known.

        Args:
            label: Names this run among several; empty for a run alone.

        Raises:
            ValueError: A prompt lacks plain decoding's answer.
        """
        baselines = {
            prompt_key(answer): answer for answer in self.answers if answer["drafter"] == "none"
        }

        answers: dict[GroupKey, list[Answer]] = {}
        # answers are copied, so that reading the groups twice adds to fresh rows
        for answer in self.answers:
            key = prompt_key(answer)
            if key not in baselines:
                raise ValueError(
                    f"{self.path}: `{answer['drafter']}` answered {key} and `none` did not; "
                    "every figure needs its baseline in the same run: let eval.measure finish, then report again"
                )
            paired = {**answer, "baseline": baselines[key]}
            group_key = (key[-1], answer["temperature"], answer["drafter"])
            answers.setdefault(group_key, []).append(paired)
        steps: dict[GroupKey, list[Answer]] = {}
        for batch in self.batches:
            group_key = (batch["batch_size"], batch["temperature"], batch["drafter"])
            steps.setdefault(group_key, []).append(batch)

        groups = []
        for group_key, rows in answers.items():
            batch_size, temperature, drafter = group_key
            self._add_modelled(drafter, rows, batch_size)
            group = Group(
                run=label,
                drafter=drafter,
                temperature=temperature,
                rule=self._rule(drafter, temperature),
                answers=rows,
                batch_size=batch_size,
                steps=tuple(steps.get(group_key, ())),
            )
            groups.append(group)
        return groups

    def _add_modelled(self, drafter: str, answers: list[Answer], batch_size: int) -> None:
        """Add tokens and seconds of each answer and its baseline, at the costs in the header if it has them."""
        bare = (self.header.get("costs") or {}).get(drafter)
        if bare is None or (batch_size > 1 and not bare.get("batches")):
            return

        costs = Costs.parse(bare)
        settings = self.settings(drafter)
        values = dict(settings["budget"])
        # JSON has no tuples, and budgets are hashed
        if values.get("paths"):
            values["paths"] = tuple(map(tuple, values["paths"]))
        if "policy" in settings:
            # its budgets change from cycle to cycle: drafts cost what they took
            costs = replace(costs, first=None, level=None)
        seconds = self._model_seconds(costs, answers, Budget(**values))
        baselines = [answer["baseline"] for answer in answers]
        baseline_seconds = self._model_seconds(costs, baselines, None)

        for i, answer in enumerate(answers):
            tokens, _ = count_cycles(answer)
            baseline_tokens, _ = count_cycles(answer["baseline"])
            answer["modelled"] = tokens, seconds[i], baseline_tokens, baseline_seconds[i]

    def _model_seconds(
        self, costs: Costs, answers: Sequence[Answer], budget: Budget | None
    ) -> list[float]:
        limit = self.header.get("new_tokens")
        rows = [{**answer, "cycles": cycles(answer)} for answer in answers]
        budgets = [asked_budgets(row["cycles"], budget, limit) for row in rows]
        return model_seconds(costs, rows, budgets)

    def _rule(self, drafter: str, temperature: float) -> str:
        """Return how a drafter chose its tokens, from its budget in the header."""
        settings = self.settings(drafter)
        if "weights" in settings and settings["weights"] is None:
            return "proposed without probabilities"
        if temperature == 0:
            return "most probable tokens"
        draw = (settings.get("budget") or {}).get("draw", "noise")
        return RULES.get(draw, draw)


def read_results(path: str | Path) -> Results:
    """Read a results file: runs with an id add up over restarts; of runs without one the last counts.

    Raises:
        ValueError: There is no such file, or a line of it is no part of a results file.
    """
    headers: list[dict[str, Any]] = []
    answers: dict[Any, Answer] = {}
    batches: dict[Key, Answer] = {}
    for line_number, item in _read_lines(Path(path)):
        if isinstance(item.get("run"), dict):
            headers.append(item["run"])
            if "id" not in item["run"]:
                headers = headers[-1:]
                answers = {}
                batches = {}
        elif "batch" in item:
            batches[item_key(item)] = item["batch"]
        elif "conversation" in item:
            # an answer that was measured again replaces the earlier one
            key = (item["drafter"], *prompt_key(item))
            answers[key] = item
        else:
            answers[line_number] = item
    return Results(Path(path), headers, list(answers.values()), tuple(batches.values()))


def _read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield number and item of each line; a last line that was cut off while it was written is left out."""
    if not path.is_file():
        raise ValueError(f"no results at {path}: expected a file that eval.measure wrote")
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            try:
                yield line_number, _parse_line(path, line_number, line)
            except ValueError:
                # only the last line can lack its end
                if line.endswith(b"\n"):
                    raise


def _parse_line(path: Path, line_number: int, line: bytes) -> dict[str, Any]:
    """Return a header, the steps of a batch or an answer, and refuse anything else by its line."""
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ValueError(
            f"{path}:{line_number} is not JSON ({error}): remove that line or measure again"
        ) from None
    # a line that is no object at all lacks every column
    fields = item if isinstance(item, dict) else {}
    missing = ANSWER - fields.keys()
    is_other = isinstance(fields.get("run"), dict) or isinstance(fields.get("batch"), dict)
    if missing and not is_other:
        raise ValueError(
            f"{path}:{line_number} is no answer: {', '.join(sorted(missing))} missing; "
            "remove that line or measure again"
        )
    return item
