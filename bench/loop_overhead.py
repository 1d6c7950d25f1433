"""What the decoding loop costs beside the forwards it is made of: `python bench/loop_overhead.py --target T --head H`.

A cycle is held against the bare forwards that it contains, of target and head, timed in turn outside of the loop behind
as much text and under the same attention. One thread, CPU seconds; the figures that count are medians over rounds.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from time import process_time
from typing import Any

import torch

from bench.machine import made_on, markdown, write_results
from eagle import Budget, DraftTree, Target, load_drafter, stream
from eagle.core.drafter import Committed, Drafter, Noise
from eagle.core.trace import Trace
from eagle.log import script
from eval.costs import Costs, bare_costs

CONTEXTS, NODES, DEPTH, TOP_K = (128, 1024), (8, 25, 60), 6, 10
CYCLES = 8  # of one answer: few, so that the context stays what it was timed for


class Timed(Drafter):
    """A drafter that notes how long it drafts."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.taps, self.seconds = drafter, drafter.taps, 0.0

    def begin(self, noise: Noise | None = None) -> Timed:
        """Start the drafter's text."""
        self.text = self.drafter.begin(noise)
        return self

    def propose(self, update: Committed, budget: Budget) -> DraftTree:
        """The drafter's tree; its time is noted."""
        begun = process_time()
        tree = self.text.propose(update, budget)
        self.seconds = process_time() - begun
        return tree


def cycles(target: Target, drafter: Drafter, context: int, budget: Budget) -> Iterator[dict[str, float]]:
    """Seconds of some cycles and of the drafting in them, and what they read."""
    prompt = torch.randint(target.vocab_size, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    timed, trace = Timed(drafter), Trace([])
    limit = (CYCLES + 2) * (budget.depth + 1)
    answer = stream(target, timed, prompt, max_new_tokens=limit, stop=[], budget=budget, trace=trace)
    next(answer)
    next(answer)  # the head reads the prompt in the first cycle
    for _ in range(CYCLES):
        before, begun = trace.cycles[-1].accepted, process_time()
        next(answer)
        spent, cycle = process_time() - begun, trace.cycles[-1]
        yield {"cycle": spent, "draft": timed.seconds, "read": cycle.nodes + 1, "fed": before + 1, "at": cycle.context}


def shares(target: Target, drafter: Drafter, context: int, budget: Budget, costs: Costs) -> dict[str, float]:
    """Milliseconds of a mean cycle and its drafting, and those of the bare forwards that they contain."""
    rows = list(cycles(target, drafter, context, budget))
    levels = drafter.forwards(budget) or ()
    draft = [costs.draft([int(row["fed"]), *levels], int(row["at"])) for row in rows]
    read = [costs.read(int(row["read"]), int(row["at"])) for row in rows]
    seconds = {
        "cycle": fmean(row["cycle"] for row in rows),
        "bare_cycle": fmean(draft) + fmean(read),
        "draft": fmean(row["draft"] for row in rows),
        "bare_draft": fmean(draft),
    }
    return {name: 1000 * value for name, value in seconds.items()}


def measure(target: Target, drafter: Drafter, rounds: int) -> list[dict[str, Any]]:
    """One row per context and tree; loop and bare forwards take turns, so that a drifting machine hurts both."""
    sizes = [*range(1, DEPTH + 2), *(nodes + 1 for nodes in NODES), *(min(TOP_K, nodes) for nodes in NODES)]
    rounds_of: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds + 1):  # the first warms up
        for context in CONTEXTS:
            # of an answer's cycles, the middle
            costs = bare_costs(target, drafter, [context, context + CYCLES * (DEPTH + 1)], sizes, rounds=3)
            for nodes in NODES:
                row = shares(target, drafter, context, Budget(nodes, DEPTH, TOP_K), costs)
                rounds_of[context, nodes] += [row] if number else []
    return [{"context": context, "nodes": nodes, **_medians(rows)} for (context, nodes), rows in rounds_of.items()]


def _medians(rows: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the rounds: of the milliseconds, and of each round's own ratios and remainder."""
    figures = {f"{name}_ms": median(row[name] for row in rows) for name in rows[0]}
    figures["over_bare"] = median(row["cycle"] / row["bare_cycle"] - 1 for row in rows)
    figures["draft_over_bare"] = median(row["draft"] / row["bare_draft"] - 1 for row in rows)
    figures["beside_ms"] = median(row["cycle"] - row["bare_cycle"] for row in rows)
    return {name: round(value, 4) for name, value in figures.items()}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    header = ["nodes", "context", *("cycle", "its bare forwards", "over them"), *("drafting", "its bare forwards")]
    rows = []
    for row in sorted(results["rows"], key=lambda row: (row["nodes"], row["context"])):
        cycle, bare, draft, bare_draft = (
            f"{row[f'{name}_ms']:.2f} ms" for name in ("cycle", "bare_cycle", "draft", "bare_draft")
        )
        over = f"{row['over_bare']:+.1%} ({row['beside_ms']:.2f} ms)"
        rows.append(
            [row["nodes"], row["context"], cycle, bare, over, draft, bare_draft, f"{row['draft_over_bare']:+.1%}"]
        )
    table = markdown([*header, "over them"], rows, results["machine"])
    return table.replace("<sub>", f"<sub>trees of {DEPTH} levels, top {TOP_K}; ")


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--head", required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("docs/results/loop_overhead.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = Target.load(args.target, dtype="float32")
    results = {
        "machine": made_on(target=Path(args.target).name),
        "rows": measure(target, load_drafter(args.head, target), args.rounds),
    }
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
