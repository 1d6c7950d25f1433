"""How costs grow with context, texts, nodes and vocabulary: `python -m bench.cost_growth`, on one thread.

The target is a Llama of 0.3 B random weights in bf16. A draft is that of a new head: its time does not depend on what
it has learned.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import DynamicCache

from bench.machine import made_on, markdown, take_turns, write_results
from bench.widen import stock_model
from eagle import Budget, Target
from eagle.core.tree import DraftTree
from eagle.decoding.cycle_times import bare_costs, clock_of, time_cycles
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.log import progress, script
from eagle.target.structure import cache_name_of

SIZE, ROOM = "0.3 B", 16384
CONTEXTS, TEXTS, NODES = (300, 1200, 3000, 12000), (1, 4, 16, 64), (0, 4, 8, 16, 32, 64, 128)
SHORT = CONTEXTS[0]
VOCABULARIES, VOCABULARY = (8192, 32768, 131072), 32768
BUDGETS = {"chain of 3": Budget(3, 3, 1), "tree of 8": Budget(8, 4, 4), "tree of 25": Budget(25, 6, 6)}


def make_target(vocab_size: int) -> Target:
    """A target of the size that is measured."""
    model = stock_model(SIZE, torch.bfloat16, vocab_size)
    model.config.max_position_embeddings = ROOM
    return Target(model)


def our_forward(target: Target, context: int, texts: int, nodes: int) -> Callable[[], Any]:
    """A cycle's forward over a chain of that many tokens for each text, behind keys and values of no text."""
    state = target.open()
    for row in range(texts):
        state.admit(row, [1] * context, room=nodes)
        state.extend({row: [1]})  # which makes the buffers
        state.commit(row, [1] * (context - 1))
    state.prompts, state.written = {}, texts
    trees = dict.fromkeys(range(texts), DraftTree.chain([1] * nodes))
    return lambda: state.read(trees)


def their_forward(model: Any, context: int, texts: int, nodes: int) -> Callable[[], None]:
    """The model's own forward of that many tokens behind a cache of its own, which then forgets them."""
    config, cache = model.config, DynamicCache(config=model.config)
    held = torch.zeros(texts, config.num_key_value_heads, context, config.head_dim, dtype=model.dtype)
    for layer in range(config.num_hidden_layers):
        cache.update(held, held, layer)
    ids = torch.ones(texts, nodes, dtype=torch.long)

    def run() -> None:
        with torch.inference_mode():
            model(ids, use_cache=True, **{cache_name_of(model): cache})
            cache.crop(-nodes)

    return run


def timed(run: Callable[[], Any], clock: Callable[[], float]) -> Callable[[], float]:
    """The run as one that returns its seconds."""

    def seconds() -> float:
        start = clock()
        run()
        return clock() - start

    return seconds


def forwards(target: Target, places: Sequence[tuple[int, int, int]], rounds: int) -> list[dict[str, Any]]:
    """Milliseconds here and by the untouched model at each context, number of texts and of tokens."""
    clock, rows = clock_of(target.device), []
    for place in progress(places, "forwards", len(places)):
        sides = {"here": our_forward(target, *place), "transformers": their_forward(target.model, *place)}
        turns = take_turns(rounds + 1, {name: timed(run, clock) for name, run in sides.items()})
        times = {name: round(1000 * median(seconds[1:]), 1) for name, seconds in turns.items()}
        rows.append({"context": place[0], "texts": place[1], "tokens": place[2], **times})
    return rows


def drafts(vocab_size: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a draft and of the head's bare forwards in it, by budget."""
    target = make_target(vocab_size)
    head = Eagle1.for_target(Eagle1.Settings(), target.config).to(torch.bfloat16).bind(target.head)
    costs = bare_costs(target, head, (SHORT,), (1, 2, 3, 4, 6, 8, 10), rounds)
    figures = {}
    for name, budget in BUDGETS.items():
        cycles = time_cycles(costs, target, head, [[1] * SHORT], budget, max_new_tokens=20 * budget.depth)
        full = [cycle for cycle in cycles if cycle.levels == budget.depth and cycle.rows]
        seconds = median(cycle.seconds["draft"] for cycle in full)
        bare = median(costs.draft(cycle.rows or (), cycle.context) for cycle in full)
        figures[name] = {"draft": round(1000 * seconds, 2), "forwards": round(1000 * bare, 2)}
    return figures


def table(results: dict[str, Any]) -> str:
    """The results as Markdown, each forward over the first of its kind."""
    first: dict[str, dict[str, Any]] = {}
    rows = []
    for kind, row in results["forwards"]:
        base = first.setdefault(kind, row)
        grown = [f"{row[side]} ms ({row[side] / base[side]:.2f})" for side in ("here", "transformers")]
        rows.append((row["context"], row["texts"], row["tokens"], *grown))
    parts = [markdown(("context", "texts", "tokens of each", "here", "transformers"), rows)]
    levels = [
        (size, *(f"{one['draft']} ms ({one['draft'] / one['forwards'] - 1:+.0%})" for one in figures.values()))
        for size, figures in results["drafts"].items()
    ]
    parts.append(markdown(("vocabulary", *BUDGETS), levels, results["machine"]))
    return "\n\n".join(parts)


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs/results/cost_growth.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    target = make_target(VOCABULARY)
    places = [("context", (context, 1, 1)) for context in CONTEXTS]
    places += [("tree behind a context", (context, 1, 9)) for context in CONTEXTS]
    places += [("texts", (SHORT, texts, 1)) for texts in TEXTS]
    places += [("nodes", (SHORT, 1, nodes + 1)) for nodes in NODES]
    rows = forwards(target, [place for _, place in places], args.rounds)
    results: dict[str, Any] = {"machine": made_on(target=f"Llama of {SIZE}, bfloat16")}
    results["forwards"] = [(kind, row) for (kind, _), row in zip(places, rows, strict=True)]
    del target
    results["drafts"] = {str(size): drafts(size, args.rounds) for size in VOCABULARIES}
    write_results(args.out, results)
    print(table(results))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
