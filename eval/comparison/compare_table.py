"""The table of a comparison: acceptance lengths of all arms, what their training took, and differences of pairs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isinf
from typing import Any

from eval.comparison.compare_plan import Arm, Comparison
from eval.comparison.compare_rows import Rows
from eval.result_files.buckets import CONTEXT, ENOUGH
from eval.result_files.figures import format_number
from eval.result_files.statistics import Estimate, Row, estimate, estimate_difference

Key = tuple[Any, ...]  # seed, set, conversation, turn, sampling seed
NO_DATA = "–"
SIZES = {"weights": "weights", "token_bytes": "bytes a token"}  # of a head, and of what it reads; not in older files


@dataclass(frozen=True)
class ComparisonTable:
    """The figures of a comparison, from the rows that are there."""

    comparison: Comparison
    rows: Rows

    @property
    def columns(self) -> list[tuple[str, float]]:
        """Every shape at every temperature."""
        temperatures = self.comparison.recipe.eval.temperatures
        return [(shape, temperature) for shape in self.comparison.shapes for temperature in temperatures]

    def lengths(self, arm: Arm, shape: str, temperature: float) -> dict[Key, Row]:
        """Tokens and cycles of every answer to what was asked last; those of an untrained arm count for every seed."""
        asked = {tuple(prompt) for prompt in self.rows.of("run")[-1]["prompts"]}
        seeds = self.comparison.section.seeds
        digest = self.comparison.row_digest(arm, shape)
        return {
            (seed, row["set"], row["conversation"], row["turn"], row["sampling_seed"]): (
                row["committed"],
                row["cycles"],
            )
            for row in self.rows.of("row", digest=digest, temperature=temperature)
            for seed in (seeds if row["seed"] is None else [row["seed"]])
            if seed in seeds and (row["set"], row["conversation"]) in asked
        }

    @cached_property
    def contexts(self) -> dict[Key, int]:
        """The context bucket of every answer: that of the tokens before its middle."""
        answers = self.rows.of("answer", digest=self.comparison.answer_digest)
        names = ("set", "conversation", "turn", "sampling_seed", "temperature")
        return {
            tuple(row[name] for name in names): CONTEXT.find((row["prompt"] + len(row["tokens"])) // 2)
            for row in answers
        }

    def split_by_context(self, lengths: Mapping[Key, Row], temperature: float) -> dict[str, dict[Key, Row]]:
        """The answers of each bucket with enough cycles."""
        parts: dict[int, dict[Key, Row]] = {}
        for key, row in lengths.items():
            answer = *key[1:], temperature
            parts.setdefault(self.contexts[answer], {})[key] = row
        return {
            CONTEXT.name(bucket): part
            for bucket, part in sorted(parts.items())
            if sum(cycles for _, cycles in part.values()) >= ENOUGH
        }

    def training(self, arm: Arm, seed: int) -> dict[str, float] | None:
        """Tokens, steps and seconds of training, those of its starts included; None where it is not done."""
        total = {"tokens": 0.0, "steps": 0.0, "seconds": 0.0}
        for part in arm.line() if arm.is_trained else []:
            training = self.rows.find_training(part.digest, seed)
            if training is None:
                return None
            total = {name: value + training[name] for name, value in total.items()}
        return total

    def figures(self) -> dict[str, Any]:
        """Everything that the table shows, and what every seed has."""
        return {
            "about": self.rows.of("run")[-1],
            "commits": sorted({run["commit"] for run in self.rows.of("run")}),
            "arms": [self._arm(arm) for arm in self.comparison.arms.values()],
            "pairs": [self._pair(first, second) for first, second in self.comparison.pairs],
        }

    def _arm(self, arm: Arm) -> dict[str, Any]:
        by_seed = {seed: self.training(arm, seed) for seed in self.comparison.section.seeds}
        trained = [training for training in by_seed.values() if training is not None]
        means = {
            name: sum(training[name] for training in trained) / len(trained) if trained else None
            for name in ("tokens", "steps", "seconds")
        }
        tau = {}
        for shape, temperature in self.columns:
            if lengths := self.lengths(arm, shape, temperature):
                seeds = sorted({key[0] for key in lengths})
                parts = self.split_by_context(lengths, temperature)
                tau[column_name(shape, temperature)] = {
                    **_tau(lengths)._asdict(),
                    "by_seed": {str(seed): _ratio(lengths, seed) for seed in seeds},
                    "by_context": {name: _tau(part)._asdict() for name, part in parts.items()},
                }
        last = [self.rows.find_training(arm.digest, seed) or {} for seed in by_seed] if arm.is_trained else []
        sizes = {name: row[name] for row in last for name in SIZES if name in row}
        return {"arm": arm.name, "trained": arm.is_trained, "seeds": len(trained), **means, **sizes, "tau": tau}

    def _pair(self, first: str, second: str) -> dict[str, Any]:
        """How much longer the second arm's acceptance lengths are, by prompt and seed."""
        tau = {}
        for shape, temperature in self.columns:
            less, more = (self.lengths(self.comparison.arms[name], shape, temperature) for name in (first, second))
            if less.keys() & more.keys():
                parts = [self.split_by_context(lengths, temperature) for lengths in (less, more)]
                shared = {name: _compare(parts[0][name], part) for name, part in parts[1].items() if name in parts[0]}
                tau[column_name(shape, temperature)] = {**_compare(less, more), "by_context": shared}
        return {"first": first, "second": second, "tau": tau}


def conversation_of(key: Key) -> Key:
    """The cluster of an answer: turns and seeds of one conversation are not independent."""
    return key[1:3]


def column_name(shape: str, temperature: float) -> str:
    """A shape at a temperature."""
    return f"{shape}, T = {temperature:g}"


def _tau(lengths: Mapping[Key, Row]) -> Estimate:
    """Tokens per cycle, over all answers and seeds."""
    return estimate(group_by_conversation(lengths))


def group_by_conversation(lengths: Mapping[Key, Row]) -> dict[Key, list[Row]]:
    """The rows of each conversation."""
    clusters: dict[Key, list[Row]] = {}
    for key, row in lengths.items():
        clusters.setdefault(conversation_of(key), []).append(row)
    return clusters


def _compare(less: Mapping[Key, Row], more: Mapping[Key, Row]) -> dict[str, float]:
    """How much longer the second acceptance lengths are, with the interval and the number of answers."""
    difference = estimate_difference(less, more, conversation_of)
    return {**difference.estimate._asdict(), "answers": difference.pairs}


def _ratio(lengths: Mapping[Key, Row], seed: int) -> float:
    rows = [row for key, row in lengths.items() if key[0] == seed]
    return sum(row[0] for row in rows) / max(sum(row[1] for row in rows), 1)


def markdown(figures: Mapping[str, Any]) -> str:
    """The figures as a table, and a second one by context where answers have several."""
    columns = list(dict.fromkeys(column for arm in figures["arms"] for column in arm["tau"]))
    sizes = [name for name in SIZES if any(name in arm for arm in figures["arms"])]
    titles = ["seeds", "tokens", "steps", "seconds", *(SIZES[name] for name in sizes)]
    lines = [
        f"| acceptance length τ | {' | '.join([*titles, *columns])} |",
        "|---|" + "---:|" * (len(titles) + len(columns)),
    ]
    for arm in figures["arms"]:
        lengths = (f"{arm['tau'][column]['value']:.2f}" if column in arm["tau"] else NO_DATA for column in columns)
        held = (f"{arm[name]:,}" if name in arm else NO_DATA for name in sizes)
        lines.append(f"| {arm['arm']} | {' | '.join([*_training_cells(arm), *held, *lengths])} |")
    for pair in figures["pairs"]:
        cells = (_difference(pair["tau"].get(column)) for column in columns)
        lines.append(f"| {pair['second']} over {pair['first']} {'| ' * len(titles)}| {' | '.join(cells)} |")
    return "\n".join([*lines, *_context_lines(figures), "", f"<sub>{', '.join(_about(figures))}</sub>"])


def _context_lines(figures: Mapping[str, Any]) -> list[str]:
    """A table of τ by tokens of context; nothing where all answers are in one bucket."""
    contexts = [(column, context) for arm in figures["arms"] for column, context in _contexts(arm)]
    columns = list(dict.fromkeys(contexts))
    if len({context for _, context in columns}) < 2:
        return []
    titles = " | ".join(f"{column}, {context}" for column, context in columns)
    lines = ["", f"| τ by {CONTEXT.title} | {titles} |", "|---|" + "---:|" * len(columns)]
    for arm in figures["arms"]:
        by_context = _contexts(arm)
        cells = (format_number(Estimate(**by_context[key])) if key in by_context else NO_DATA for key in columns)
        lines.append(f"| {arm['arm']} | {' | '.join(cells)} |")
    for pair in figures["pairs"]:
        cells = (_difference(_contexts(pair).get(key)) for key in columns)
        lines.append(f"| {pair['second']} over {pair['first']} | {' | '.join(cells)} |")
    return lines


def _contexts(row: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Figures of an arm or a pair by column and context; files of earlier releases have none."""
    parts = ((column, tau.get("by_context", {})) for column, tau in row["tau"].items())
    return {(column, context): value for column, part in parts for context, value in part.items()}


def _training_cells(arm: Mapping[str, Any]) -> list[str]:
    if not arm["trained"] or not arm["seeds"]:
        return [NO_DATA] * 4
    return [f"{arm['seeds']}", f"{arm['tokens']:,.0f}", f"{arm['steps']:,.0f}", f"{arm['seconds']:,.1f}"]


def _difference(more: Mapping[str, float] | None) -> str:
    """A difference with its interval, bold where that excludes zero; one prompt alone has none."""
    if more is None:
        return NO_DATA
    if isinf(more["low"]):
        return f"{more['value']:+.2f}"
    shown = f"{more['value']:+.2f} ({more['low']:+.2f} to {more['high']:+.2f})"
    return f"**{shown}**" if Estimate(more["value"], more["low"], more["high"]).sign else shown


def _about(figures: Mapping[str, Any]) -> Iterator[str]:
    about = figures["about"]
    yield f"{len(about['prompts'])} prompts of up to {about['new_tokens']} new tokens"
    yield "differences with 95% intervals by prompt and seed, bold where they exclude 0"
    yield "tokens, steps and seconds of training are means of the seeds, starts included"
    yield f"{about['machine']}, torch {about['torch']}, transformers {about['transformers']}, {about['date']}"
    yield f"commit {', '.join(figures['commits'])}"
