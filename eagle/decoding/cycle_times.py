"""Measure the seconds of decoding cycles: of bare forwards, and of short generations for the time outside forwards.

`Costs.batch_size` is that of a table, and `rows` are the tokens that a forward of the drafter reads of one sequence.
"""

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

CONTEXTS = (128, 512, 1024)  # tokens before the timed forwards
# tokens that the timed forwards read; every small size, because 3 tokens may take longer than 4
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
UNREAD = 64  # tokens of the forward that shows the drafter's seconds for each token of a prompt
ROUNDS = 6  # the least number of cycles at each draft depth, in every batch
# the number of cycles at each draft depth for one sequence, whose cycles are short
SINGLE_ROUNDS = 20
NEW_TOKENS = 256  # the most new tokens of each sequence, unless the options say otherwise
Clock = Callable[[], float]
Probe = Callable[[], Any]


class TimedCycle(NamedTuple):
    """One cycle of a batch in which all rows had the same budget."""

    levels: int  # the depth of the budget
    # tokens of a sequence that each forward of the draft read; None if the drafter has no timed forwards
    rows: tuple[int, ...] | None
    nodes: int  # of the largest tree
    context: int  # tokens of the longest sequence
    seconds: dict[str, float]  # part of the cycle -> seconds


def clock_of(device: torch.device) -> Clock:
    """Return a clock for measurements on this device: a function that tells seconds, of which differences count.

    With one CPU thread it tells CPU seconds, which other processes do not affect. With several threads, or on another
    device, it tells wall seconds.
    """

    # a device works on after a call has returned: wait for it
    def synchronized() -> float:
        """Return wall seconds, once the device has done all work that was queued on it.

        A GPU works on after a call has returned.
        """
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
    """Measure bare forwards, and the time that a cycle takes outside of them.

    Args:
        target: The target.
        drafter: Any drafter.
        prompts: Token ids of each prompt of the short generations, repeated in turn to fill a batch.
        budget: The deepest draft.
        options: Further options of `time_cycles`.
        tables: Options of `bare_costs`, such as the contexts and batch sizes to measure.

    Returns:
        The costs of forwards, with the time outside of them, and by batch size the timed cycles.
    """
    costs = bare_costs(target, drafter, **tables)
    cycles = {}
    # the costs at each batch size, with the seconds outside of forwards; the first holds those of larger batches
    measured = []
    for batch in costs.by_batch_size:
        # one prompt for each row of the batch
        rows = [prompts[i % len(prompts)] for i in range(batch.batch_size)]
        timed = time_cycles(
            costs,
            target,
            drafter,
            prompts=rows,
            budget=budget,
            clock=tables.get("clock"),
            **options,
        )
        cycles[batch.batch_size] = timed
        measured.append(replace(batch, outside=_time_outside(costs, batch.batch_size, timed)))
    return replace(measured[0], batches=tuple(measured[1:])), cycles


def draft_levels(cycles: Sequence[TimedCycle], depth: int, limit: int = NEW_TOKENS) -> list[float]:
    """Return the seconds that a draft of 0, 1, 2, ... levels adds to a cycle, a list of depth + 1 numbers.

    For drafters whose forwards are not timed by themselves, such as n-gram look-up.

    Args:
        cycles: Timed cycles of one batch size, in which each number of levels must occur. A cycle is one draft and one
            target forward that verifies it.
        depth: The levels of the deepest draft.
        limit: The value of max_new_tokens, for the error message.
    """
    means = []
    for level in range(depth + 1):
        # of the cycles whose budget had so many levels, the seconds of the part that drafts
        seconds = [cycle.seconds["draft"] for cycle in cycles if cycle.levels == level]
        if not seconds:
            raise ValueError(
                f"{len(cycles)} cycles are too few to measure 0 to {depth} levels: raise max_new_tokens, "
                f"which is {limit}"
            )
        means.append(mean_of_most(seconds))
    # a cycle without a draft spends time in this part of the loop, too, which is no cost of drafting
    idle = means[0]
    return [0.0, *(max(draft - idle, 0.0) for draft in means[1:])]


def mean_of_most(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest 5%, which are often interruptions by the machine.

    It is not the median, because drafts by several drafters in turn may have very different times, which all count.
    """
    return mean(sorted(seconds)[: ceil(0.95 * len(seconds))])


def _time_outside(
    costs: Costs, batch_size: int, cycles: Sequence[TimedCycle]
) -> tuple[float, float]:
    """Return median seconds outside of bare forwards: of a cycle, and of each forward of the drafter in a draft.

    Outside of forwards are verification, the bookkeeping of the decoding loop, and what the loop does around the
    drafter.

    Args:
        costs: Of the bare forwards.
        batch_size: The number of sequences that each cycle decoded.
        cycles: Timed cycles at this batch size.
    """
    rest = [cycle.seconds["verify"] + cycle.seconds["other"] for cycle in cycles]
    # the part of the loop that drafts takes some time even without a draft
    idle = [cycle.seconds["draft"] for cycle in cycles if not cycle.levels]
    outside_forwards = []
    for cycle in cycles:
        # how many tokens each forward of the draft read; None or empty if there were no timed forwards, or no draft
        if cycle.rows:
            outside = cycle.seconds["draft"] - costs.draft(cycle.rows, cycle.context, batch_size)
            outside_forwards.append(outside / len(cycle.rows))
    # 0 where no cycle tells
    return median(rest or [0.0]) + median(idle or [0.0]), median(outside_forwards or [0.0])


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
    """Measure the median seconds of bare forwards of target and drafter.

    In each round every forward runs once, so that a slow phase of the machine affects all of them alike.

    Args:
        target: The target.
        drafter: Its forwards are timed, too; None to time the target alone.
        contexts: How many tokens precede a forward, in the KV cache.
        sizes: How many tokens a forward reads.
        rounds: How many times each forward is timed, for the median.
        batch_sizes: Above 1 only the target's forwards are timed, at the shortest and the longest context.
        batch_tokens: How many tokens a forward reads of each sequence of a batch; by default `sizes`.
        clock: By default that of `clock_of`.
    """
    # a plain Drafter has no forwards
    drafter = drafter or Drafter()
    clock = clock or clock_of(target.device)
    if drafter.reads.view:
        drafter.bind_target(target.view())
    # context and tokens together must not exceed the model's positions
    max_positions = target.max_positions or inf
    sizes = tuple(size for size in sorted(set(sizes)) if size < max_positions)
    # the longest context that leaves space for the largest forward
    longest = (target.max_positions or max(contexts) + sizes[-1]) - sizes[-1]
    contexts = tuple(sorted({min(context, longest) for context in contexts}))

    by_context = []
    for context in contexts:
        by_context.append(
            _time_forwards(target, drafter, context, sizes, rounds=rounds, clock=clock)
        )
    # transpose: from lists by context to tables by kind of forward (the target's, the drafter's first, its later ones)
    tables = zip(*by_context, strict=True)
    # the shortest and the longest context
    ends = tuple(sorted({contexts[0], contexts[-1]}))
    # how many tokens of each sequence the forwards over a batch read
    tokens = tuple(sorted(set(batch_tokens or sizes)))
    batches = []
    # a drafter's forward over a batch costs as one over all of its tokens, so only the target's are timed in batches
    for batch_size in sorted(set(batch_sizes) - {1}):
        table = []
        for context in ends:
            # the drafter without forwards leaves a single table, the target's
            medians = _time_forwards(
                target,
                Drafter(),
                context,
                tokens,
                rounds=rounds,
                clock=clock,
                batch_size=batch_size,
            )
            table.append(medians[0])
        batches.append(Costs(ends, tokens, tuple(table), batch_size=batch_size))
    # the tokens of the forward that shows the drafter's seconds for each token of a prompt
    unread = int(min(UNREAD, max_positions - contexts[0]))
    return Costs(
        contexts,
        sizes,
        *tables,
        batches=tuple(batches),
        catch_up=_time_token(drafter, contexts[0], unread, rounds=rounds, clock=clock),
    )


def _time_token(drafter: Drafter, context: int, tokens: int, rounds: int, clock: Clock) -> float:
    """Return the median seconds per token of a drafter's forward over tokens that it has not read, such as a prompt's.

    0 for a drafter without forwards. 0 also for one that drafts with the target's cache (`Reads.kv_cache`), in which
    the target has written keys and values of all committed tokens: it has no tokens of its own to read first.

    Args:
        drafter: The drafter.
        context: Tokens before the forward.
        tokens: How many tokens the forward reads.
        rounds: How many times it is timed.
        clock: Tells seconds.
    """
    # the forward before a draft computes logits of its last token alone
    probe = None if drafter.reads.kv_cache else drafter.probe(context, tokens, 1)
    if probe is None:
        return 0.0
    # the first run is slower, and is not timed
    probe()
    seconds = []
    for _ in range(rounds):
        start = clock()
        probe()
        seconds.append(clock() - start)
    return median(seconds) / tokens


def _time_forwards(
    target: Target,
    drafter: Drafter,
    context: int,
    sizes: Sequence[int],
    rounds: int,
    clock: Clock,
    *,
    batch_size: int = 1,
) -> list[tuple[float, ...]]:
    """Return median seconds of the target's forwards, then of a draft's first and later forwards if there are any.

    Each of these one or three tuples has a number for each of `sizes`.

    Args:
        target: The target.
        drafter: The drafter.
        context: How many tokens precede the forwards, in the KV cache.
        sizes: How many tokens the forwards read of each sequence, ascending.
        rounds: How many times each forward is timed.
        clock: Tells seconds.
        batch_size: The batch size of the target's forwards.
    """
    # seconds depend on the lengths of the sequences alone, so any token serves
    # a target's `read` commits nothing, so each forward finds the same context
    state = target.open()
    for row in range(batch_size):
        state.admit(row, [1] * context, room=sizes[-1])
    while state.prompts:
        state.read_prompts()
    reads: list[Probe] = []
    for size in sizes:
        tree = DraftTree.chain([1] * size)
        reads.append(partial(state.read, dict.fromkeys(range(batch_size), tree)))
    kinds = [reads]  # for each kind of forward, a function by size that runs it
    # the first forward of a draft computes logits of its last token alone, later ones of all tokens
    for scores_all in (False, True):
        probes = []
        for size in sizes:
            probe = drafter.probe(context, size, size if scores_all else 1)
            if probe is not None:
                probes.append(probe)
        if probes:
            kinds.append(probes)

    # kind of forward and index of the size -> seconds
    times: dict[tuple[int, int], list[float]] = defaultdict(list)
    # Forwards take turns, so that a machine that slows down for a while affects all of them. The first round warms up,
    # and is not kept.
    for i in range(rounds + 1):
        for j in range(len(sizes)):
            for kind, probes in enumerate(kinds):
                start = clock()
                probes[j]()
                seconds = clock() - start
                # round 0 is the warm-up
                if i:
                    times[kind, j].append(seconds)
    medians = []
    for kind in range(len(kinds)):
        medians.append(tuple(median(times[kind, j]) for j in range(len(sizes))))
    return medians


class _AllLevels:
    """A policy that requests every draft depth in turn, the same for all rows, and learns nothing."""

    def __init__(self, budget: Budget) -> None:
        """Begin before the first cycle; `budget` is that of the deepest draft, from which shallower ones are cut."""
        self.budget = budget
        self.nodes = budget.nodes
        self.draw = budget.draw
        self.requested: list[Budget] = []  # of each cycle

    def share(self, levels: Mapping[int, int], contexts: Mapping[int, int]) -> dict[int, Budget]:
        """Return a budget of the next depth in turn for all rows: from the deepest to 0, and again.

        The decoding loop calls it once a cycle. A row is one sequence of the batch.

        Args:
            levels: Row id -> the most levels that it may draft.
            contexts: Row id -> its length, which has no influence.
        """
        # the negated count of cycles: 0, depth, depth - 1, ..., 1, 0, ...
        depth = -len(self.requested) % (self.budget.depth + 1)
        budget = self.within(min(depth, *levels.values()))
        self.requested.append(budget)
        return dict.fromkeys(levels, budget)

    def within(self, levels: int) -> Budget:
        """Return the budget of the deepest draft, cut to at most `levels` levels."""
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
    """Return the timed cycles of a short generation, in one batch, that takes all draft depths in turn.

    Args:
        costs: Of bare forwards; they say how many tokens each forward of a draft reads.
        target: The target.
        drafter: Any drafter.
        prompts: The token ids of one prompt for each row of the batch.
        budget: The deepest draft.
        sampling: Of all rows; by default greedy.
        max_new_tokens: The most tokens of each row.
        stop: Stop tokens and strings, as in `generate`; by default nothing ends an answer early.
        clock: By default that of `clock_of`.
        room: Further options of `Decoding`, such as `max_tokens_in_cache`.
    """
    turns = _AllLevels(budget)
    policy: Any = turns  # not a full `Policy`, as it learns nothing
    # enough cycles of each depth, 0 included, for a mean; fewer where more rows make cycles longer
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
        # `requested` has an entry for each cycle that was begun
        while not decoding.is_done and len(turns.requested) <= needed:
            decoding.step()
    finally:
        decoding.close()
    # raises the error that ended a row, if any
    for trace in traces:
        trace.checked()
    return _join_rows(costs, drafter, turns.requested, traces)


def _join_rows(
    costs: Costs, drafter: Drafter, requested: Sequence[Budget], traces: Sequence[Trace]
) -> list[TimedCycle]:
    """Return the cycles that decoded all rows, each as one `TimedCycle`.

    All rows (sequences) of a batch share the forwards and the seconds of a cycle, so it counts once.

    Args:
        costs: Of bare forwards.
        drafter: Whose drafts they were.
        requested: The budget of each cycle, in their order, the same for all rows.
        traces: Of each row, with its cycles.
    """
    # by the number of a cycle: the cycle of each row, and the tokens that its draft's forwards read
    cycles_by_number: dict[int, list[Cycle]] = defaultdict(list)
    forwards_by_number: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for trace in traces:
        budgets = [requested[cycle.number] for cycle in trace.cycles]
        # of each cycle, how many levels were accepted and how many were drafted
        outcomes = [(cycle.accepted, cycle.depth) for cycle in trace.cycles]
        # of each cycle, how many tokens of the row each forward of its draft read; None if none were timed
        forwards = costs.rows_along(drafter, budgets, outcomes)
        for cycle, rows in zip(trace.cycles, forwards, strict=True):
            cycles_by_number[cycle.number].append(cycle)
            if rows is not None:
                forwards_by_number[cycle.number].append(rows)
    # once a row has ended, cycles are those of a smaller batch, and are left out
    timed = []
    for number, cycles in cycles_by_number.items():
        if len(cycles) < len(traces):
            continue
        timed.append(
            TimedCycle(
                levels=requested[number].depth,
                # all rows are padded to the one with the most pending tokens
                rows=max(forwards_by_number[number], default=None),
                nodes=max(cycle.nodes for cycle in cycles),
                context=max(cycle.context for cycle in cycles),
                seconds=cycles[0].seconds or {},  # all rows of a cycle share them
            )
        )
    return timed
