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
# small ones are not smooth: 3 rows may cost more than 4
SIZES = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    9,
    11,
    13,
    17,
    26,
    41,
    61,
)
UNREAD = 64  # tokens of a prompt that a drafter reads at once, to be timed
ROUNDS = 6  # of all numbers of levels, in every batch
SINGLE_ROUNDS = 20  # of one sequence, whose cycles are short
NEW_TOKENS = 256  # of each sequence, unless the options say otherwise
Clock = Callable[[], float]
Probe = Callable[[], Any]


class TimedCycle(NamedTuple):
    """One cycle of all rows of a batch, which asked all of them for as many levels."""

    levels: int
    # of each sequence in the draft's forwards; None where they have no costs
    rows: tuple[int, ...] | None
    nodes: int  # of the largest tree
    context: int  # of the longest sequence
    seconds: dict[str, float]


def clock_of(device: torch.device) -> Clock:
    """Return a clock of CPU seconds, which other processes do not affect.

    For several threads or a device it tells wall seconds.
    """

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
    """Measure forwards, and what a cycle takes beside them.

    Args:
        target: The target.
        drafter: Any drafter.
        prompts: That take turns in short generations.
        budget: The deepest draft.
        options: Of `time_cycles`.
        tables: Options of `bare_costs`.

    Returns:
        The costs, and by batch size the cycles that show what is outside the forwards.
    """
    costs = bare_costs(target, drafter, **tables)
    cycles = {}
    measured = []
    for batch in costs.by_texts:
        rows = [prompts[i % len(prompts)] for i in range(batch.texts)]
        timed = time_cycles(
            costs,
            target,
            drafter,
            prompts=rows,
            budget=budget,
            clock=tables.get("clock"),
            **options,
        )
        cycles[batch.texts] = timed
        measured.append(replace(batch, outside=_time_outside(costs, batch.texts, timed)))
    return replace(measured[0], batches=tuple(measured[1:])), cycles


def draft_levels(cycles: Sequence[TimedCycle], depth: int, limit: int = NEW_TOKENS) -> list[float]:
    """Return the seconds of a draft of 0 to `depth` levels over those of a cycle without one."""
    means = []
    for level in range(depth + 1):
        seconds = [cycle.seconds["draft"] for cycle in cycles if cycle.levels == level]
        if not seconds:
            raise ValueError(
                f"{len(cycles)} cycles are too few to measure 0 to {depth} levels: raise max_new_tokens, "
                f"which is {limit}"
            )
        means.append(mean_of_most(seconds))
    # a cycle without a draft spends time in this part of the loop, too
    idle = means[0]
    return [0.0, *(max(draft - idle, 0.0) for draft in means[1:])]


def mean_of_most(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest twentieth.

    Not the median: of several drafters in turn one may be far cheaper.
    """
    return mean(sorted(seconds)[: ceil(0.95 * len(seconds))])


def _time_outside(costs: Costs, texts: int, cycles: Sequence[TimedCycle]) -> tuple[float, float]:
    """Return median seconds beside the forwards, of a cycle and of each forward of a draft."""
    rest = [cycle.seconds["verify"] + cycle.seconds["other"] for cycle in cycles]
    idle = [cycle.seconds["draft"] for cycle in cycles if not cycle.levels]
    beside_forwards = []
    for cycle in cycles:
        if cycle.rows:
            beside = cycle.seconds["draft"] - costs.draft(cycle.rows, cycle.context, texts)
            beside_forwards.append(beside / len(cycle.rows))
    return median(rest or [0.0]) + median(idle or [0.0]), median(beside_forwards or [0.0])


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
    """Return median costs of forwards; all take turns in every round, so all see the same caches and machine.

    Args:
        target: The target.
        drafter: Whose forwards are timed, too.
        contexts: Tokens before the forwards.
        sizes: Tokens that a forward reads.
        rounds: Of which the medians are.
        batch_sizes: For more than one sequence the target's forwards alone, at the shortest and longest context.
        batch_tokens: Tokens of each sequence of a batch, by default `sizes`.
        clock: By default that of `clock_of`.
    """
    drafter = drafter or Drafter()
    clock = clock or clock_of(target.device)
    if drafter.reads.view:
        drafter.bind_target(target.view())
    # what is read must fit the model's positions
    max_positions = target.max_positions or inf
    sizes = tuple(size for size in sorted(set(sizes)) if size < max_positions)
    longest = (target.max_positions or max(contexts) + sizes[-1]) - sizes[-1]
    contexts = tuple(sorted({min(context, longest) for context in contexts}))

    by_context = []
    for context in contexts:
        by_context.append(
            _time_forwards(target, drafter, context, sizes, rounds=rounds, clock=clock)
        )
    # from medians of each context to a table of each kind of forward: target, first, later
    tables = zip(*by_context, strict=True)
    ends = tuple(sorted({contexts[0], contexts[-1]}))
    tokens = tuple(sorted(set(batch_tokens or sizes)))
    batches = []
    # a drafter's forward in a batch costs as one of all rows: of batches the target's are measured alone
    for texts in sorted(set(batch_sizes) - {1}):
        table = []
        for context in ends:
            medians = _time_forwards(
                target, Drafter(), context, tokens, rounds=rounds, clock=clock, texts=texts
            )
            table.append(medians[0])
        batches.append(Costs(ends, tokens, tuple(table), texts=texts))
    unread = int(min(UNREAD, max_positions - contexts[0]))
    return Costs(
        contexts,
        sizes,
        *tables,
        batches=tuple(batches),
        catch_up=_time_token(drafter, contexts[0], unread, rounds=rounds, clock=clock),
    )


def _time_token(drafter: Drafter, context: int, rows: int, rounds: int, clock: Clock) -> float:
    """Return median seconds of each of many rows of a drafter's first forward; 0 for one that reads the target's."""
    probe = None if drafter.reads.texts else drafter.probe(context, rows, 1)
    if probe is None:
        return 0.0
    probe()  # warms up
    seconds = []
    for _ in range(rounds):
        start = clock()
        probe()
        seconds.append(clock() - start)
    return median(seconds) / rows


def _time_forwards(
    target: Target,
    drafter: Drafter,
    context: int,
    sizes: Sequence[int],
    rounds: int,
    clock: Clock,
    *,
    texts: int = 1,
) -> list[tuple[float, ...]]:
    """Return the target's medians by size, then those of the drafter's first and later forwards, if any."""
    # what the sequences say does not matter, only how long they are
    state = target.open()
    for row in range(texts):
        state.admit(row, [1] * context, room=sizes[-1])
    while state.prompts:
        state.read_prompts()
    reads: list[Probe] = []
    for size in sizes:
        tree = DraftTree.chain([1] * size)
        reads.append(partial(state.read, dict.fromkeys(range(texts), tree)))
    kinds = [reads]
    for scores_all in (
        False,
        True,
    ):  # the first forward makes the last row into logits, the later ones all
        probes = []
        for size in sizes:
            probe = drafter.probe(context, size, size if scores_all else 1)
            if probe is not None:
                probes.append(probe)
        if probes:
            kinds.append(probes)

    # turns: a machine that slows down for a while slows all forwards
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    for i in range(rounds + 1):  # the first warms up
        for j in range(len(sizes)):
            for kind, probes in enumerate(kinds):
                start = clock()
                probes[j]()
                seconds = clock() - start
                if i:
                    times[kind, j].append(seconds)
    medians = []
    for kind in range(len(kinds)):
        medians.append(tuple(median(times[kind, j]) for j in range(len(sizes))))
    return medians


class _AllLevels:
    """A policy that asks for every draft depth in turn, the same for all rows."""

    def __init__(self, budget: Budget) -> None:
        self.budget = budget
        self.nodes = budget.nodes
        self.draw = budget.draw
        self.asked: list[Budget] = []  # of each cycle

    def share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """Return budgets of the next depth in turn, deepest first."""
        depth = -len(self.asked) % (self.budget.depth + 1)
        budget = self.within(min(depth, *levels.values()))
        self.asked.append(budget)
        return dict.fromkeys(levels, budget)

    def within(self, levels: int) -> Budget:
        """Return the budget, at most so deep."""
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
    """Return the cycles of a short generation, in one batch, that takes all draft depths in turn.

    `costs` tell whether the drafter's forwards have any.
    """
    turns = _AllLevels(budget)
    policy: Any = turns  # learns nothing
    # as many cycles of each depth as a mean needs
    needed = max(ROUNDS, SINGLE_ROUNDS // len(prompts)) * (budget.depth + 1)
    clock = clock or clock_of(target.device)
    decoding = Decoding(
        target, drafter, budget=policy, batch_size=len(prompts), timing=clock, **room
    )
    traces = [Trace([]) for _ in prompts]
    try:
        for row, (prompt, trace) in enumerate(zip(prompts, traces, strict=True)):
            decoding.add(
                row,
                prompt,
                sampling=sampling or Sampling(),
                limit=max_new_tokens,
                trace=trace,
                stop=stop,
            )
        while not decoding.is_done and len(turns.asked) <= needed:
            decoding.step()
    finally:
        decoding.close()
    for trace in traces:
        trace.checked()
    return _join_rows(costs, drafter, turns.asked, traces)


def _join_rows(
    costs: Costs, drafter: Drafter, asked: Sequence[Budget], traces: Sequence[Trace]
) -> list[TimedCycle]:
    """Return the cycles that all rows were in."""
    # by the number of a cycle: what each row did in it, and the rows of its draft's forwards
    cycles_by_number: dict[int, list[Cycle]] = defaultdict(list)
    forwards_by_number: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for trace in traces:
        budgets = [asked[cycle.number] for cycle in trace.cycles]
        outcomes = [(cycle.accepted, cycle.depth) for cycle in trace.cycles]
        forwards = costs.rows_along(drafter, budgets, outcomes)
        for cycle, rows in zip(trace.cycles, forwards, strict=True):
            cycles_by_number[cycle.number].append(cycle)
            if rows is not None:
                forwards_by_number[cycle.number].append(rows)
    # a cycle after one row has ended is one of a smaller batch
    timed = []
    for number, cycles in cycles_by_number.items():
        if len(cycles) < len(traces):
            continue
        timed.append(
            TimedCycle(
                levels=asked[number].depth,
                rows=max(
                    forwards_by_number[number], default=None
                ),  # padded to the most that is pending
                nodes=max(cycle.nodes for cycle in cycles),
                context=max(cycle.context for cycle in cycles),
                seconds=cycles[0].seconds or {},
            )
        )
    return timed
