"""What a cycle costs at long contexts, and from which on a sparse cache drafts best: `python bench/long_context.py`.

On a CPU thread and a target of random weights, behind caches that are filled instead of read, as neither weights nor
texts change what a forward costs. Lines through a few of the contexts predict from where on a drafter is the fastest
at given rates of acceptance (MagicDec's closed form, arXiv 2408.11049); all contexts say where it is.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from bench.machine import made_on, markdown, take_turns, write_results
from eagle import Budget, Sampling, Target, load_drafter
from eagle.core.drafter import Committed, Drafter
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose
from eagle.drafters import DRAFTERS, settings_of
from eagle.log import script
from eagle.target.cache import SlotCache
from eval.costs import time_action

CONTEXTS = (512, 1024, 2048, 4096, 8192, 16384)
FITTED = (512, 2048, 8192)  # through which lines are laid
GAMMAS = (3, 7)  # drafted tokens
NEW = 3  # tokens that a draft has not read yet
SIZES = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 32768}
SPARSE = ("sparse 256", "sparse 512")
AGAINST = ("none", "full", "EAGLE-1")
FURTHER = 4  # times the longest context that lines are followed
RATES = (0.6, 0.7, 0.8, 0.9)
Line = Callable[[float], float]
Seconds = dict[str, dict[int, float]]  # by what was timed, by context


def random_target(**sizes: int) -> Target:
    """A target of random weights."""
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(LlamaConfig(**{**SIZES, **HEADS, **sizes})).eval())


def drafters_of(target: Target) -> dict[str, Drafter]:
    """What drafts, by name; heads are new."""

    def eagle1(**settings: Any) -> Drafter:
        section = settings_of({"kind": "eagle1", **settings}, "bench")
        head: Drafter = DRAFTERS["eagle1"].for_target(section, target.config, target.head).bind(target.head)
        return head

    return {
        "full": load_drafter("early_exit", target, layers=len(target.layers)),
        "early exit": load_drafter("early_exit", target),
        "sparse 256": load_drafter("sparse_kv", target, budget=256),
        "sparse 512": load_drafter("sparse_kv", target, budget=512),
        "EAGLE-1": eagle1(),
        "EAGLE-1, window": eagle1(window={"sinks": 4, "recent": 512}),
    }


# -- what is timed ----------------------------------------------------------------------------------------------------


def fill(cache: SlotCache, context: int, room: int) -> None:
    """Let the only slot hold so many columns of noise."""
    for rows in cache.buffers:
        rows.resize(1, context + room)
        rows.buffer.normal_()
    cache.lengths[0] = context


def hold_text(target: Target, context: int, room: int) -> Any:
    """A state that seems to have read a text."""
    state = target.open()
    state.begin([1], Choose(Sampling()))
    fill(state.cache, context, room)
    state.texts[0] = [1] * context
    return state


def drafting(drafter: Drafter, state: Any, room: int) -> Callable[[int], Any]:
    """A draft of so many tokens, in the middle of the text that a state holds."""
    drafts = drafter.open_with(state.lend()) if drafter.reads.texts else drafter.open()
    drafts.admit(0)
    context, width = state.length(0), state.target.config.hidden_size

    def propose(gamma: int, count: int = NEW) -> Any:
        features = torch.zeros(count, len(drafter.taps), width) if drafter.taps else None
        update = Committed(torch.ones(count, dtype=torch.long), features, 1)
        return drafts.propose({0: update}, {0: Budget.fixed(chain_paths(gamma))})

    if drafter.taps:
        propose(1)
        fill(drafts.cache, context, room)  # type: ignore[attr-defined]
    else:
        propose(1, context)
    return propose


def actions_at(target: Target, context: int, rounds: int) -> dict[str, Callable[[], Any]]:
    """Forwards of the target of 1 and gamma + 1 rows, and every drafter's draft, by name."""
    room = 64 + (rounds + 2) * len(GAMMAS) * NEW
    state = hold_text(target, context, room)
    actions: dict[str, Callable[[], Any]] = {}
    for rows in (1, *(gamma + 1 for gamma in GAMMAS)):
        actions[f"target {rows}"] = partial(state.read, {0: DraftTree.chain([1] * rows)})
    for name, drafter in drafters_of(target).items():
        propose = drafting(drafter, state, room)
        actions |= {f"{name} {gamma}": partial(propose, gamma) for gamma in GAMMAS}
    return actions


def measure(target: Target, contexts: Sequence[int], rounds: int) -> Seconds:
    """Medians of seconds by action and context, all of which take turns."""
    actions = {context: actions_at(target, context, rounds) for context in contexts}
    timed = {
        (name, context): partial(time_action, action, target.device)
        for context, named in actions.items()
        for name, action in named.items()
    }
    take_turns(1, timed)  # warms up
    medians: Seconds = {}
    for (name, context), seconds in take_turns(rounds, timed).items():
        medians.setdefault(name, {})[context] = median(seconds)
    return medians


# -- the closed form --------------------------------------------------------------------------------------------------


def expected_tokens(rate: float, gamma: int) -> float:
    """E[tau] of a chain, each token of which is accepted at a rate, with the token behind it."""
    return sum(rate**level for level in range(gamma + 1))


def per_token(times: Mapping[str, Line], drafter: str, rate: float, gamma: int) -> Line:
    """Seconds for a token by context, (T_D + T_V) / E[tau]; without a drafter those of a forward."""
    if drafter == "none":
        return times["target 1"]
    draft, read, tokens = times[f"{drafter} {gamma}"], times[f"target {gamma + 1}"], expected_tokens(rate, gamma)
    return lambda context: (draft(context) + read(context)) / tokens


def fit_lines(seconds: Seconds, contexts: Sequence[int]) -> dict[str, Line]:
    """Each action's time as a line through some contexts, all of which weigh alike by their ratio to it."""
    lines = {}
    for name, by_context in seconds.items():
        known = np.array([by_context[context] for context in contexts])
        slope, base = np.polyfit(contexts, known, 1, w=1 / known)
        lines[name] = partial(np.polyval, (slope, base))
    return lines


def between_contexts(seconds: Seconds) -> dict[str, Line]:
    """Each action's time as measured, linear between contexts."""
    return {name: partial(np.interp, xp=list(known), fp=list(known.values())) for name, known in seconds.items()}


def crossing(fast: Line, slow: Line, contexts: Sequence[int]) -> float | None:
    """From which context on one is faster than the other and stays so: 0 for everywhere, None for nowhere."""
    places = np.geomspace(min(contexts), max(contexts), 2001)
    slower = np.array([fast(place) >= slow(place) for place in places])
    if slower[-1]:
        return None
    return 0.0 if not slower.any() else float(places[slower.nonzero()[0][-1]])


def crossings(seconds: Seconds, fitted: Sequence[int]) -> Iterator[dict[str, Any]]:
    """From where on each sparse drafter is the faster one, as lines predict it and, up to the longest, as measured."""
    contexts = sorted(seconds["target 1"])
    further = [min(contexts), FURTHER * max(contexts)]
    parts = ((fit_lines(seconds, fitted), further), (between_contexts(seconds), contexts))
    for sparse, other, gamma in product(SPARSE, AGAINST, GAMMAS):
        rates = [(rate, rate) for rate in RATES] if other != "EAGLE-1" else product(RATES, RATES)
        for rate, its_rate in rates:
            predicted, measured = (
                crossing(per_token(times, sparse, rate, gamma), per_token(times, other, its_rate, gamma), ends)
                for times, ends in parts
            )
            about = {"drafter": sparse, "against": other, "gamma": gamma, "rate": rate, "its_rate": its_rate}
            yield {**about, "predicted": predicted, "measured": measured}


def largest_error(rows: Sequence[dict[str, Any]]) -> float:
    """By how much of it the prediction misses a measured crossing at most."""
    return max((abs((row["predicted"] or 0) / row["measured"] - 1) for row in rows if row["measured"]), default=0.0)


# -- what is told -----------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    """Milliseconds by context, and crossings by rate: as predicted, then as measured."""
    seconds, rows = results["seconds"], results["crossings"]
    contexts = list(next(iter(seconds.values())))
    times = [[name, *(f"{1000 * known[context]:.1f}" for context in contexts)] for name, known in seconds.items()]
    lines: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        other = row["against"] + (f" at {row['its_rate']}" if row["against"] == "EAGLE-1" else "")
        cell = f"{show(row['predicted'])} ({show(row['measured'])})"
        lines.setdefault((row["drafter"], other, row["gamma"]), []).append(cell)
    header = ("faster from", "than", "gamma", *RATES)
    table = markdown(header, [(*names, *cells) for names, cells in lines.items()], results["machine"])
    error = f"At most {results['largest_error']:.0%} between a prediction and what was measured."
    return "\n\n".join([markdown(("ms", *contexts), times), table, error])


def show(context: float | None) -> str:
    """A crossing in a table."""
    return "-" if context is None else "all" if context == 0 else f"{context:,.0f}"


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=list(CONTEXTS))
    parser.add_argument("--fitted", type=int, nargs="+", default=list(FITTED))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=Path("docs/results/long_context.json"))
    args = parser.parse_args(argv)
    if missing := sorted({*args.fitted} - {*args.contexts}):
        raise ValueError(f"--fitted names {missing}, expected some of --contexts {args.contexts}")
    torch.set_num_threads(1)
    target = random_target()
    seconds = measure(target, args.contexts, args.rounds)
    about = made_on(rounds=args.rounds, fitted=args.fitted, **SIZES, **HEADS)
    rows = list(crossings(seconds, args.fitted))
    results = {"machine": about, "seconds": seconds, "crossings": rows, "largest_error": largest_error(rows)}
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
