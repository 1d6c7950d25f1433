"""Tabulate a comparison: acceptance lengths of all arms, the cost of their training, and differences of pairs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import isinf
from typing import Any

from eval.comparison.compare_plan import Arm, Comparison
from eval.comparison.compare_rows import Rows
from eval.result_files.buckets import CONTEXT, ENOUGH
from eval.result_files.statistics import Estimate, Row, estimate, estimate_difference, format_number

Key = tuple[Any, ...]  # seed, set, conversation, turn, sampling seed
NO_DATA = "–"
# of a head, and of what it reads; not in older files
SIZES = {"weights": "weights", "token_bytes": "bytes a token"}


@dataclass(frozen=True)
class ComparisonTable:
    """The figures of a comparison, from the rows that are there."""

    comparison: Comparison
    rows: Rows

    @property
    def columns(self) -> list[tuple[str, float]]:
        """Return every shape at every temperature."""
        return list(product(self.comparison.shapes, self.comparison.recipe.eval.temperatures))

    def lengths(self, arm: Arm, shape: str, temperature: float) -> dict[Key, Row]:
        """Return tokens and cycles of each answer to the newest run's prompts, by seed.

        Args:
            arm: One arm of the comparison.
            shape: The name of a draft tree.
            temperature: One at which answers were measured.

        Returns:
            Empty where nothing is measured yet.
        """
        asked = {tuple(prompt) for prompt in self.rows.of("run")[-1]["prompts"]}
        seeds = self.comparison.section.seeds
        digest = self.comparison.row_digest(arm, shape)
        lengths: dict[Key, Row] = {}
        for row in self.rows.of("row", digest=digest, temperature=temperature):
            if (row["set"], row["conversation"]) not in asked:
                continue
            key = (row["set"], row["conversation"], row["turn"], row["sampling_seed"])
            # rows of an untrained arm have no seed, and count for every one
            for seed in seeds if row["seed"] is None else [row["seed"]]:
                if seed in seeds:
                    answer = (seed, *key)
                    lengths[answer] = (row["committed"], row["cycles"])
        return lengths

    @cached_property
    def contexts(self) -> dict[Key, int]:
        """Return the context bucket of every answer: that of the tokens before its middle."""
        names = ("set", "conversation", "turn", "sampling_seed", "temperature")
        contexts = {}
        for row in self.rows.of("answer", digest=self.comparison.answer_digest):
            key = tuple(row[name] for name in names)
            contexts[key] = CONTEXT.find((row["prompt"] + len(row["tokens"])) // 2)
        return contexts

    def split_by_context(
        self, lengths: Mapping[Key, Row], temperature: float
    ) -> dict[str, dict[Key, Row]]:
        """Return the answers of each bucket with enough cycles.

        Args:
            lengths: As `lengths` returns them.
            temperature: That of these answers.
        """
        num_cycles: dict[int, float] = defaultdict(float)
        parts: dict[int, dict[Key, Row]] = {}
        for key, row in lengths.items():
            # a context does not depend on the seed of training
            answer = (*key[1:], temperature)
            bucket = self.contexts[answer]
            num_cycles[bucket] += row[1]
            parts.setdefault(bucket, {})[key] = row

        enough = [bucket for bucket in sorted(parts) if num_cycles[bucket] >= ENOUGH]
        return {CONTEXT.name(bucket): parts[bucket] for bucket in enough}

    def training(self, arm: Arm, seed: int) -> dict[str, float] | None:
        """Return tokens, steps and seconds of training, its starts included, or None where it is not done."""
        total = {"tokens": 0.0, "steps": 0.0, "seconds": 0.0}
        for part in arm.line() if arm.is_trained else []:
            training = self.rows.find_training(part.digest, seed)
            if training is None:
                return None
            for name in total:
                total[name] += training[name]
        return total

    def figures(self) -> dict[str, Any]:
        """Return everything that the table shows, and the figures of each seed."""
        return {
            "about": self.rows.of("run")[-1],
            "commits": sorted({run["commit"] for run in self.rows.of("run")}),
            "arms": [self._arm(arm) for arm in self.comparison.arms.values()],
            "pairs": [self._pair(first, second) for first, second in self.comparison.pairs],
        }

    def _arm(self, arm: Arm) -> dict[str, Any]:
        """Return an arm's means of training over its seeds, its sizes, and its acceptance lengths by column."""
        trained = []
        sizes: dict[str, int] = {}
        for seed in self.comparison.section.seeds:
            training = self.training(arm, seed)
            if training is not None:
                trained.append(training)
            if arm.is_trained:
                last = self.rows.find_training(arm.digest, seed) or {}
                # rows of early releases have no sizes
                sizes |= {name: last[name] for name in SIZES if name in last}

        # an arm that no seed has trained yet has no costs
        means: dict[str, float | None] = {"tokens": None, "steps": None, "seconds": None}
        if trained:
            for name in means:
                total = sum(training[name] for training in trained)
                means[name] = total / len(trained)

        tau = {}
        for shape, temperature in self.columns:
            lengths = self.lengths(arm, shape, temperature)
            if lengths:
                parts = self.split_by_context(lengths, temperature)
                tau[column_name(shape, temperature)] = {
                    **_tau(lengths)._asdict(),
                    "by_seed": _ratios(lengths),
                    "by_context": {name: _tau(part)._asdict() for name, part in parts.items()},
                }

        return {
            "arm": arm.name,
            "trained": arm.is_trained,
            "seeds": len(trained),
            **means,
            **sizes,
            "tau": tau,
        }

    def _pair(self, first: str, second: str) -> dict[str, Any]:
        """Return how much longer the second arm's acceptance lengths are, by prompt and seed."""
        tau = {}
        for shape, temperature in self.columns:
            less = self.lengths(self.comparison.arms[first], shape, temperature)
            more = self.lengths(self.comparison.arms[second], shape, temperature)
            # arms that share no answer have no difference
            if less.keys() & more.keys():
                less_parts = self.split_by_context(less, temperature)
                more_parts = self.split_by_context(more, temperature)
                by_context = {}
                for name, part in more_parts.items():
                    if name in less_parts:
                        by_context[name] = _compare(less_parts[name], part)
                tau[column_name(shape, temperature)] = {
                    **_compare(less, more),
                    "by_context": by_context,
                }
        return {"first": first, "second": second, "tau": tau}


def conversation_of(key: Key) -> Key:
    """Return the cluster of an answer: turns and seeds of one conversation are not independent."""
    return key[1:3]


def column_name(shape: str, temperature: float) -> str:
    """Return the name of a shape at a temperature."""
    return f"{shape}, T = {temperature:g}"


def _tau(lengths: Mapping[Key, Row]) -> Estimate:
    """Return the tokens per cycle over all answers and seeds."""
    return estimate(group_by_conversation(lengths))


def group_by_conversation(lengths: Mapping[Key, Row]) -> dict[Key, list[Row]]:
    """Return the rows of each conversation."""
    # the interval resamples conversations, whatever their seeds and turns
    clusters: dict[Key, list[Row]] = {}
    for key, row in lengths.items():
        clusters.setdefault(conversation_of(key), []).append(row)
    return clusters


def _compare(less: Mapping[Key, Row], more: Mapping[Key, Row]) -> dict[str, float]:
    """Return how much longer the second acceptance lengths are, with the interval and the number of answers."""
    difference = estimate_difference(less, more, conversation_of)
    return {**difference.estimate._asdict(), "answers": difference.pairs}


def _ratios(lengths: Mapping[Key, Row]) -> dict[str, float]:
    """Return the tokens per cycle of each seed."""
    rows: dict[int, list[Row]] = {}
    for key, row in lengths.items():
        rows.setdefault(key[0], []).append(row)
    ratios = {}
    for seed in sorted(rows):
        committed = sum(row[0] for row in rows[seed])
        num_cycles = sum(row[1] for row in rows[seed])
        # the keys of a JSON object are text
        ratios[str(seed)] = committed / max(num_cycles, 1)
    return ratios


def markdown(figures: Mapping[str, Any]) -> str:
    """Return the figures as a table in Markdown, and a second one by context where answers have several.

    Args:
        figures: As `ComparisonTable.figures` returns them, or as `comparison.json` holds them.
    """
    # arms of a comparison that goes on have different columns
    names: dict[str, None] = {}
    sizes = []
    for arm in figures["arms"]:
        names |= dict.fromkeys(arm["tau"])
    for name in SIZES:
        if any(name in arm for arm in figures["arms"]):
            sizes.append(name)
    columns = list(names)

    titles = ["seeds", "tokens", "steps", "seconds", *(SIZES[name] for name in sizes)]
    lines = [
        f"| acceptance length τ | {' | '.join([*titles, *columns])} |",
        "|---|" + "---:|" * (len(titles) + len(columns)),
    ]
    for arm in figures["arms"]:
        cells = [arm["arm"], *_training_cells(arm)]
        cells += [f"{arm[name]:,}" if name in arm else NO_DATA for name in sizes]
        for column in columns:
            tau = arm["tau"].get(column)
            cells.append(NO_DATA if tau is None else f"{tau['value']:.2f}")
        lines.append(f"| {' | '.join(cells)} |")

    # a pair has no training of its own, so these cells are empty
    empty = "| " * len(titles)
    for pair in figures["pairs"]:
        cells = [_difference(pair["tau"].get(column)) for column in columns]
        lines.append(f"| {pair['second']} over {pair['first']} {empty}| {' | '.join(cells)} |")

    lines += _context_lines(figures)
    lines += ["", f"<sub>{', '.join(_about(figures))}</sub>"]
    return "\n".join(lines)


def _context_lines(figures: Mapping[str, Any]) -> list[str]:
    """Return a table of τ by tokens of context; nothing where all answers are in one bucket."""
    columns: dict[tuple[str, str], None] = {}
    for arm in figures["arms"]:
        columns |= dict.fromkeys(_contexts(arm))
    # one bucket says no more than the first table
    if len({context for _, context in columns}) < 2:
        return []
    titles = " | ".join(f"{column}, {context}" for column, context in columns)
    lines = [
        "",
        f"| τ by {CONTEXT.title} | {titles} |",
        "|---|" + "---:|" * len(columns),
    ]
    for arm in figures["arms"]:
        by_context = _contexts(arm)
        cells = []
        for key in columns:
            tau = by_context.get(key)
            cells.append(NO_DATA if tau is None else format_number(Estimate(**tau)))
        lines.append(f"| {arm['arm']} | {' | '.join(cells)} |")

    for pair in figures["pairs"]:
        by_context = _contexts(pair)
        cells = [_difference(by_context.get(key)) for key in columns]
        lines.append(f"| {pair['second']} over {pair['first']} | {' | '.join(cells)} |")
    return lines


def _contexts(row: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, float]]:
    """Return the figures of an arm or a pair by column and context."""
    contexts = {}
    for column, tau in row["tau"].items():
        # files of earlier releases have none
        for context, value in tau.get("by_context", {}).items():
            contexts[column, context] = value
    return contexts


def _training_cells(arm: Mapping[str, Any]) -> list[str]:
    if not arm["trained"] or not arm["seeds"]:
        return [NO_DATA] * 4
    return [
        f"{arm['seeds']}",
        f"{arm['tokens']:,.0f}",
        f"{arm['steps']:,.0f}",
        f"{arm['seconds']:,.1f}",
    ]


def _difference(more: Mapping[str, float] | None) -> str:
    """Return a difference with its interval, in bold where that excludes zero."""
    if more is None:
        return NO_DATA
    # one prompt alone has no interval
    if isinf(more["low"]):
        return f"{more['value']:+.2f}"
    text = f"{more['value']:+.2f} ({more['low']:+.2f} to {more['high']:+.2f})"
    difference = Estimate(more["value"], more["low"], more["high"])
    if difference.sign:
        return f"**{text}**"
    return text


def _about(figures: Mapping[str, Any]) -> Iterator[str]:
    about = figures["about"]
    yield f"{len(about['prompts'])} prompts of up to {about['new_tokens']} new tokens"
    yield "differences with 95% intervals by prompt and seed, bold where they exclude 0"
    yield "tokens, steps and seconds of training are means of the seeds, starts included"
    yield f"{about['machine']}, torch {about['torch']}, transformers {about['transformers']}, {about['date']}"
    yield f"commit {', '.join(figures['commits'])}"
