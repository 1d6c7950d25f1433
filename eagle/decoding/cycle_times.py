"""Measure what cycles cost: bare forwards, and short generations for what a cycle takes beside them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf
from statistics import mean, median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch

from eagle.core.budget import Budget
from eagle.core.drafter import Drafter
from eagle.core.sampling import Sampling
from eagle.core.trace import Cycle, Trace
from eagle.core.tree import DraftTree
from eagle.decoding.forward_costs import Costs
from eagle.decoding.loop import Decoding
from eagle.target.target import Target

CONTEXTS = (128, 512, 1024)
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 17, 26, 41, 61)  # small ones are not smooth: 3 rows may cost more than 4
UNREAD = 64  # tokens of a text that a drafter reads at once, to be timed
ROUNDS = 6  # of all numbers of levels, in every batch
SINGLE_ROUNDS = 20  # of one text, whose cycles are short
NEW_TOKENS = 256  # of each text, unless the options say otherwise
Clock = Callable[[], float]


class TimedCycle(NamedTuple):
    """One cycle of all texts of a batch, which asked all of them for as many levels."""

    levels: int
    rows: tuple[int, ...] | None  # of each text in the draft's forwards; None where they have no costs
    nodes: int  # of the largest tree
    context: int  # of the longest text
    seconds: dict[str, float]


def clock_of(device: torch.device) -> Clock:
    """A clock of CPU seconds, which other processes do not affect; of wall seconds for several threads or a device."""

    def synchronized() -> float:
        torch.accelerator.synchronize(device)
        return perf_counter()

    if device.type != "cpu":
        return synchronized
    return perf_counter if torch.get_num_threads() > 1 else process_time


def measure_costs(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    budget: Budget,
    options: Mapping[str, Any],
    **tables: Any,
) -> tuple[Costs, dict[int, list[TimedCycle]]]:
    """The costs of forwards and of what a cycle takes beside them, and the cycles that show it, by number of texts.

    `options` are those of `time_cycles`, `tables` those of `bare_costs`.
    """
    costs = bare_costs(target, drafter, **tables)
    cycles, measured = {}, []
    for each in (costs, *costs.batches):
        rows = [prompts[number % len(prompts)] for number in range(each.texts)]
        cycles[each.texts] = time_cycles(costs, target, drafter, rows, budget, clock=tables.get("clock"), **options)
        measured.append(replace(each, outside=_time_outside(costs, each.texts, cycles[each.texts])))
    return replace(measured[0], batches=tuple(measured[1:])), cycles


def draft_levels(cycles: Sequence[TimedCycle], depth: int, limit: int = NEW_TOKENS) -> list[float]:
    """Seconds of a draft of 0 to `depth` levels over those of a cycle without one."""
    seconds = [[cycle.seconds["draft"] for cycle in cycles if cycle.levels == level] for level in range(depth + 1)]
    if not all(seconds):
        raise ValueError(
            f"{len(cycles)} cycles are too few to measure 0 to {depth} levels: raise max_new_tokens, which is {limit}"
        )
    idle, *drafts = map(mean_of_most, seconds)
    return [0.0, *(max(draft - idle, 0.0) for draft in drafts)]


def mean_of_most(seconds: Sequence[float]) -> float:
    """The mean without the slowest twentieth: not the median, as of several drafters in turn one may be far cheaper."""
    return mean(sorted(seconds)[: ceil(0.95 * len(seconds))])


def _time_outside(costs: Costs, texts: int, cycles: Sequence[TimedCycle]) -> tuple[float, float]:
    """Median seconds beside the forwards, of a cycle and of each forward of a draft."""
    rest = [cycle.seconds["verify"] + cycle.seconds["other"] for cycle in cycles]
    idle = [cycle.seconds["draft"] for cycle in cycles if not cycle.levels]
    drafts = [
        (cycle.seconds["draft"] - costs.draft(cycle.rows, cycle.context, texts)) / len(cycle.rows)
        for cycle in cycles
        if cycle.rows
    ]
    return median(rest or [0.0]) + median(idle or [0.0]), median(drafts or [0.0])


def bare_costs(
    target: Target,
    drafter: Drafter | None = None,
    contexts: Sequence[int] = CONTEXTS,
    sizes: Sequence[int] = SIZES,
    rounds: int = 7,
    batch_sizes: Sequence[int] = (1,),
    batch_tokens: Sequence[int] | None = None,
    clock: Clock | None = None,
) -> Costs:
    """Median costs; all forwards take turns in every round, so all see the same caches and the same machine.

    Of batches of more than one text the target's forwards alone, of `batch_tokens` tokens a text (by default `sizes`),
    at the shortest and the longest context.
    """
    drafter, clock = drafter or Drafter(), clock or clock_of(target.device)
    if drafter.reads.view:
        drafter.bind_target(target.view())
    sizes = tuple(size for size in sorted(set(sizes)) if size < (target.max_positions or inf))
    longest = (target.max_positions or max(contexts) + sizes[-1]) - sizes[-1]
    contexts = tuple(sorted({min(context, longest) for context in contexts}))
    tables = [_at(target, drafter, context, sizes, rounds, clock) for context in contexts]
    ends, tokens = tuple(sorted({contexts[0], contexts[-1]})), tuple(sorted(set(batch_tokens or sizes)))
    batches = []
    for texts in sorted(set(batch_sizes) - {1}):
        table = tuple(_at(target, Drafter(), context, tokens, rounds, clock, texts)[0] for context in ends)
        batches.append(Costs(ends, tokens, table, texts=texts))
    costs = Costs(contexts, sizes, *(tuple(column) for column in zip(*tables, strict=True)))
    rows = min(UNREAD, (target.max_positions or inf) - contexts[0])
    return replace(costs, batches=tuple(batches), catch_up=_time_row(drafter, contexts[0], int(rows), rounds, clock))


def _time_row(drafter: Drafter, context: int, rows: int, rounds: int, clock: Clock) -> float:
    """Median seconds of each of many rows of a drafter's first forward; none for a drafter that reads the target's."""
    probe = None if drafter.reads.texts else drafter.probe(context, rows, 1)
    if probe is None:
        return 0.0
    seconds = []
    for _ in range(rounds + 1):  # the first warms up
        start = clock()
        probe()
        seconds.append(clock() - start)
    return median(seconds[1:]) / rows


def _at(
    target: Target, drafter: Drafter, context: int, sizes: Sequence[int], rounds: int, clock: Clock, texts: int = 1
) -> list[tuple[float, ...]]:
    """At one context: the target's medians by size, then those of the drafter's first and later forwards, if any."""
    state = target.open()
    for row in range(texts):
        state.admit(row, [1] * context, room=sizes[-1])
    while state.prompts:
        state.read_prompts()
    chains = [dict.fromkeys(range(texts), DraftTree.chain([1] * size)) for size in sizes]
    kinds: list[list[Callable[[], Any]]] = [[partial(state.read, trees) for trees in chains]]
    for every in (False, True):  # the first forward makes the last row into logits, the later ones all
        probes = [drafter.probe(context, size, size if every else 1) for size in sizes]
        kinds += [[probe for probe in probes if probe is not None]] if probes[0] is not None else []
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for number in range(rounds + 1):  # the first warms up
        for place, forwards in enumerate(zip(*kinds, strict=True)):
            for kind, forward in enumerate(forwards):
                start = clock()
                forward()
                if number:
                    times[kind, place].append(clock() - start)
    return [tuple(median(times[kind, place]) for place in range(len(sizes))) for kind in range(len(kinds))]


class _AllLevels:
    """A policy that asks for every draft depth in turn, the same for all texts."""

    def __init__(self, budget: Budget) -> None:
        self.budget, self.nodes, self.draw = budget, budget.nodes, budget.draw
        self.asked: list[Budget] = []  # of each cycle

    def share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """Budgets of the next depth in turn."""
        self.asked.append(self.within(min(-len(self.asked) % (self.budget.depth + 1), *levels.values())))
        return dict.fromkeys(levels, self.asked[-1])

    def within(self, levels: int) -> Budget:
        """The budget, at most so deep."""
        return self.budget.within(levels)


def time_cycles(
    costs: Costs,
    target: Target,
    drafter: Drafter,
    prompts: Sequence[list[int]],
    budget: Budget,
    *,
    sampling: Sampling | None = None,
    max_new_tokens: int = NEW_TOKENS,
    stop: Any = (),
    clock: Clock | None = None,
    **room: Any,
) -> list[TimedCycle]:
    """Cycles of all these prompts side by side in a short generation that alternates between all draft depths.

    `costs` tell whether the drafter's forwards have any.
    """
    turns, traces = _AllLevels(budget), [Trace([]) for _ in prompts]
    needed = max(ROUNDS, SINGLE_ROUNDS // len(prompts)) * (budget.depth + 1)
    clock = clock or clock_of(target.device)
    policy: Any = turns  # learns nothing
    decoding = Decoding(target, drafter, budget=policy, batch_size=len(prompts), timing=clock, **room)
    try:
        for number, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
            decoding.add(number, prompt, sampling or Sampling(), max_new_tokens, trace, stop=stop)
        while not decoding.is_done and len(turns.asked) <= needed:
            decoding.step()
    finally:
        decoding.close()
    for trace in traces:
        trace.checked()
    return _join_texts(costs, drafter, turns.asked, traces)


def _join_texts(costs: Costs, drafter: Drafter, asked: Sequence[Budget], traces: Sequence[Trace]) -> list[TimedCycle]:
    """The cycles that all texts were in."""
    shared: dict[int, list[tuple[Cycle, tuple[int, ...] | None]]] = defaultdict(list)
    for trace in traces:
        budgets = [asked[cycle.number] for cycle in trace.cycles]
        outcomes = [(cycle.accepted, cycle.depth) for cycle in trace.cycles]
        for cycle, rows in zip(trace.cycles, costs.rows_along(drafter, budgets, outcomes), strict=True):
            shared[cycle.number].append((cycle, rows))
    timed = []
    for number, texts in shared.items():
        seconds, forwards = texts[0][0].seconds or {}, [rows for _, rows in texts if rows is not None]
        if len(texts) == len(traces):
            nodes, context = (max(getattr(cycle, name) for cycle, _ in texts) for name in ("nodes", "context"))
            rows = max(forwards, default=None)  # padded to the most that is pending
            timed.append(TimedCycle(asked[number].depth, rows, nodes, context, seconds))
    return timed
