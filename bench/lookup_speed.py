"""What drafters that copy from the text cost and keep: `python bench/lookup_speed.py RECIPE [key=value ...]`.

Cost: CPU microseconds of `propose` along real, periodic and random texts, at two contexts that take turns, and of the
first one for each token of the prompt. What is kept: every variant along the same answers of the target, in modelled
time at the measured costs of its forwards, and as if every further token of a forward cost the same.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import process_time_ns
from typing import Any

import torch

from bench.machine import made_on
from bench.tree_kinds import answers
from eagle.core.drafter import Budget, Committed, Drafter
from eagle.core.verify import walk
from eagle.drafters.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.suffix import SuffixDrafter
from eagle.log import progress, script
from eagle.recipe import Recipe, command_line
from eagle.target.target import Target
from eval.costs import Costs, bare_costs
from eval.load_run import load_target
from eval.prompts import questions
from eval.replay import NOWHERE, Answer, plain, recorded, replay
from eval.statistics import estimate, estimate_difference

CONTEXTS, NEW, TEXTS, ROUNDS = (400, 4000), 200, 6, 3
PERIOD = 37  # of the text that loops
OUT = Path("docs/results/lookup_speed.json")
VARIANTS: dict[str, Callable[[], Drafter]] = {
    "ngram": NgramDrafter,
    "ngram, frequent": partial(NgramDrafter, pick="frequent"),
    **{f"ngram, {branches} branches": partial(NgramDrafter, branches=branches) for branches in (2, 3)},
    **{f"ngram, trust {trust}": partial(NgramDrafter, trust=trust) for trust in (2, 4)},
    "suffix": SuffixDrafter,
    **{f"suffix, trust {trust}": partial(SuffixDrafter, trust=trust) for trust in (1, 2, 4, 6)},
    **{f"suffix, remember {tokens}": partial(SuffixDrafter, remember=tokens) for tokens in (1000, 4000)},
}
TIMED = ("ngram", "ngram, 2 branches", "suffix", "suffix, remember 4000")


@dataclass(frozen=True)
class Timed:
    """One call of `propose`."""

    micros: float
    told: int  # tokens of news
    nodes: int


def texts(recipe: Recipe, target: Target) -> dict[str, list[list[int]]]:
    """Texts of equal length by kind: questions one after another, a loop, and tokens drawn at random."""
    length, dice = max(CONTEXTS) + NEW, random.Random(0)
    said = [token for one in questions(recipe) for token in target.tokenizer.encode(" ".join(one.turns))]
    real = [said[start : start + length] for start in range(0, len(said) - length + 1, length)][:TEXTS]
    if not real:
        raise ValueError(f"the questions have {len(said)} tokens in all, expected {length} or more: raise eval.count")
    return {
        "real": real,
        "loop": [(text[:PERIOD] * length)[:length] for text in real],
        "one token": [[text[0]] * length for text in real[:1]],
        "random": [[dice.randrange(target.vocab_size) for _ in range(length)] for _ in real],
    }


def answered(drafter: Drafter, text: list[int]) -> Drafter:
    """The drafter after a request with this answer, which some remember."""
    drafter.begin()
    drafter.propose(Committed(torch.tensor(text[-1:]), None, text[0]), Budget())
    drafter.propose(Committed(torch.tensor(text[:-1]), None, text[-1]), Budget())
    return drafter


def cycles(drafter: Drafter, text: list[int]) -> list[Timed]:
    """Drafting along a text: the prompt's call, then those for its last tokens."""
    drafter.begin()
    found, seen, root = [], 0, len(text) - NEW
    while root < len(text):
        news = Committed(torch.tensor(text[seen:root]), None, text[root])
        begun = process_time_ns()
        tree = drafter.propose(news, Budget())
        found.append(Timed((process_time_ns() - begun) / 1000, root - seen, len(tree) - 1))
        after = [root + 1 + depth for depth in tree.depths()]
        path = walk(tree, [text[place] if place < len(text) else NOWHERE for place in after])
        seen, root = root, root + len(path)
    return found


def at_equal_drafts(rows: dict[int, list[Timed]]) -> float:
    """The longer context's median over the shorter's, of calls with as much news and as many nodes."""
    kinds: dict[int, dict[tuple[int, int], list[float]]] = {}
    for context, calls in rows.items():
        kinds[context] = defaultdict(list)
        for call in calls:
            kinds[context][call.told, call.nodes].append(call.micros)
    short, long = (kinds[context] for context in CONTEXTS)
    shared = {kind: min(len(short[kind]), len(long[kind])) for kind in short.keys() & long.keys()}
    ratios = sum(times * median(long[kind]) / median(short[kind]) for kind, times in shared.items())
    return ratios / sum(shared.values())


def speed(make: Callable[[], Drafter], texts: list[list[int]]) -> dict[str, Any]:
    """Of one drafter on texts of one kind; both contexts end at the same place, so that they draft the same."""
    first: dict[int, list[float]] = defaultdict(list)
    rows: dict[int, list[Timed]] = defaultdict(list)
    for _ in range(ROUNDS):
        for text, other in zip(texts, [*texts[1:], texts[0]], strict=True):
            for context in CONTEXTS:
                start, *rest = cycles(answered(make(), other), text[-context - NEW :])
                first[context].append(start.micros / start.told)
                rows[context] += rest
    found: dict[str, Any] = {"at_equal_drafts": at_equal_drafts(rows)}
    for context, calls in rows.items():
        micros = [call.micros for call in calls]
        found[str(context)] = {
            "calls": len(calls),
            "median": median(micros),
            "mean": mean(micros),
            "nodes": mean(call.nodes for call in calls),
            "prompt_token": median(first[context]),
        }
    return found


def even(costs: Costs) -> Costs:
    """As if every further token of a forward cost the same; between 1 and 26."""
    last = costs.sizes.index(26)
    return Costs(costs.contexts, (1, 26), tuple((row[0], row[last]) for row in costs.target))


def kept(target: Target, told: list[Answer], costs: Costs) -> dict[str, Any]:
    """Every variant along the same answers: tokens per step, nodes per step, and modelled speed over no draft."""
    prices, found, rows = (costs, even(costs)), {}, {}
    for name, make in VARIANTS.items():
        drafter, rows[name] = make(), {}
        for number, one in enumerate(progress(told, name, len(told))):
            records = recorded(one, replay(target, drafter, one, Budget()))
            counts = [sum(row["committed"] for row in records), len(records), sum(row["nodes"] for row in records)]
            seconds = [price.modelled(side) for price in prices for side in (plain(one), records)]
            rows[name][number] = [*counts, *seconds]
        best = rows["ngram" if name == "suffix" else name.partition(",")[0]]
        found[name] = {
            key: {
                "value": estimate({number: [row] for number, row in rows[name].items()}, statistic),
                "over_default": estimate_difference(best, rows[name], lambda number: number, statistic).estimate,
            }
            for key, statistic in {
                "tau": lambda sums: sums[0] / sums[1],
                "nodes": lambda sums: sums[2] / sums[1],
                "speed": lambda sums: sums[3] / sums[4],
                "speed_even": lambda sums: sums[5] / sums[6],
            }.items()
        }
    return found


def speed_table(results: dict[str, Any]) -> str:
    """Microseconds by drafter and kind of text, as Markdown."""
    short, long = map(str, CONTEXTS)
    lines = [
        f"| drafter | text | median {short} | median {long} | mean {long} | {long} / {short} | at equal drafts |"
        f" nodes {short} | nodes {long} | prompt token |",
        "|---" * 10 + "|",
    ]
    for name, kinds in results["micros"].items():
        for kind, row in kinds.items():
            few, many = row[short], row[long]
            lines.append(
                f"| {name} | {kind} | {few['median']:.1f} | {many['median']:.1f} | {many['mean']:.1f} |"
                f" {many['median'] / few['median']:.2f} | {row['at_equal_drafts']:.2f} | {few['nodes']:.1f} |"
                f" {many['nodes']:.1f} | {many['prompt_token']:.2f} |"
            )
    return "\n".join(lines)


def kept_table(results: dict[str, Any]) -> str:
    """What every variant keeps, as Markdown; in brackets its speed over the default's."""
    keys = ("tau", "nodes", "speed", "speed_even")
    lines = [f"| T | drafter | {' | '.join(keys)} | over the default |", "|---" * 7 + "|"]
    for heat, variants in results["kept"].items():
        for name, row in variants.items():
            value, low, high = row["speed"]["over_default"]
            cells = " | ".join(f"{row[key]['value'][0]:.3f}" for key in keys)
            lines.append(f"| {heat} | {name} | {cells} | {value:+.3f} [{low:+.3f}, {high:+.3f}] |")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """Measure, write, print."""
    args = command_line("bench.lookup_speed", __doc__).parse_intermixed_args(argv)
    recipe = Recipe.load(args.recipe, args.overrides)
    target, asked = load_target(recipe), questions(recipe)
    known, costs = texts(recipe, target), bare_costs(target)
    found: dict[str, Any] = {"machine": {}, "micros": {}, "kept": {}}
    for name in TIMED:
        found["micros"][name] = {kind: speed(VARIANTS[name], said) for kind, said in known.items()}
    for heat in recipe.eval.temperatures:
        told = answers(recipe, target, asked, NoDrafter(), heat)
        found["kept"][f"{heat:g}"] = kept(target, told, costs)
    found["machine"] = made_on(
        target=Path(recipe.target.path).name,
        prompts=len(asked),
        new_tokens=recipe.eval.max_new_tokens,
        texts=len(known["real"]),
        rounds=ROUNDS,
    )
    OUT.write_text(json.dumps(found) + "\n")
    found = json.loads(OUT.read_text())
    print(speed_table(found), kept_table(found), sep="\n\n")


if __name__ == "__main__":
    script(main)
