"""A target that drafts for itself behind sparse caches: `python bench/sparse_cache.py TARGET QUESTIONS`.

TARGET is a model, QUESTIONS a Spec-Bench file, of which some long first turns are answered. Each answer is written with
chains of both lengths behind every budget and choice of columns, at T = 0, and at T = 1 with drawn chains. Forwards are
timed by themselves, at the median length, in CPU seconds; speed is what the closed form gives of both:
tau * target / (length * draft + read). One thread.
"""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.tree import chain_paths
from eagle.log import progress, script
from eval.costs import bare_costs
from eval.result_files.statistics import estimate

CHAINS, BUDGETS, SELECTS = (3, 7), (64, 128, 256, 512), ("recent", "snap")
SHORTEST = 1000  # tokens of a prompt
SAMPLINGS = {0: Sampling(), 1: Sampling(temperature=1.0, seed=0)}


def read_prompts(questions: Path, target: Target, count: int, new_tokens: int) -> list[list[int]]:
    """First turns of all lengths from `SHORTEST` on that leave room for an answer."""
    turns = [json.loads(line)["turns"][0] for line in questions.read_text().splitlines()]
    room = (target.max_positions or 10**9) - new_tokens
    prompts = sorted((prompt for prompt in map(target.chat, turns) if SHORTEST <= len(prompt) <= room), key=len)
    return prompts[:: max(len(prompts) // count, 1)][:count]


def count_tokens(target: Target, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    """Tokens per cycle of each cache, chain and temperature."""
    sums: dict[Any, dict[int, list[tuple[int, int]]]] = defaultdict(dict)
    cases = list(product(SELECTS, BUDGETS, CHAINS, SAMPLINGS))
    for number, prompt in progress(enumerate(prompts), "prompts", len(prompts)):  # each is read by the target once
        for case in cases:
            select, budget, length, temperature = case
            drafter = load_drafter("sparse_kv", target, budget=budget, select=select)
            chain = Budget.fixed(chain_paths(length), "sampled" if temperature else "noise")
            options: dict[str, Any] = {"budget": chain, "sampling": SAMPLINGS[temperature]}
            answer = generate(target, drafter, prompt, max_new_tokens=new_tokens, stop=[], **options)
            full = [cycle for cycle in answer.cycles if cycle.depth == length]  # but the last, which are cut short
            sums[case][number] = [(cycle.accepted + 1, 1) for cycle in full]
    names = ("select", "budget", "chain", "temperature")
    return [{**dict(zip(names, case, strict=True)), "tau": list(estimate(sums[case]))} for case in cases]


def time_forwards(target: Target, context: int, rounds: int) -> dict[str, Any]:
    """A draft's forward behind each budget and the target's of whole chains, as shares of the target's of one token."""
    sizes, shares, whole = [1, *(length + 1 for length in CHAINS)], {}, list[float]()
    for budget in BUDGETS:
        costs = bare_costs(target, load_drafter("sparse_kv", target, budget=budget), [context], sizes, rounds)
        single, draft = costs.read(1, context), costs.draft((1, 1, 1), context) / 3
        reads = {length: costs.read(length + 1, context) / single for length in CHAINS}
        shares[budget] = {"draft": draft / single, "read": reads}
        whole.append(1000 * single)
    return {"context": context, "target_ms": median(whole), "shares": shares}


def speed(tau: float, length: int, shares: dict[str, Any]) -> float:
    """tau * target / (length * draft + read), where forwards are given in the target's of one token."""
    return tau / (length * shares["draft"] + shares["read"][length])


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    cells = {tuple(row[name] for name in ("select", "budget", "chain", "temperature")): row for row in results["rows"]}
    header = [
        "columns",
        "chosen",
        "draft",
        "τ of 3, T = 0",
        "T = 1",
        "τ of 7, T = 0",
        "T = 1",
        "modelled, T = 0",
        "T = 1",
    ]
    rows = []
    for budget, select in product(BUDGETS, SELECTS):
        of_case = [cells[select, budget, length, temperature] for length in CHAINS for temperature in SAMPLINGS]
        taus = ["{:.2f} ({:.2f} to {:.2f})".format(*row["tau"]) for row in of_case]
        best = [max(row["speed"] for row in of_case if row["temperature"] == temperature) for temperature in SAMPLINGS]
        draft = results["costs"]["shares"][str(budget)]["draft"]
        rows.append([budget, select, f"{draft:.2f}", *taus, *(f"{value:.2f} ×" for value in best)])
    return markdown(header, rows, results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("docs/results/sparse_kv.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = Target.load(args.target, dtype="float32")
    prompts = read_prompts(args.questions, target, args.count, args.new_tokens)
    lengths = list(map(len, prompts))
    costs = time_forwards(target, int(median(lengths)), args.rounds)
    rows = count_tokens(target, prompts, args.new_tokens)
    for row in rows:
        row["speed"] = speed(row["tau"][0], row["chain"], costs["shares"][row["budget"]])
    about = {"target": Path(args.target).name, "dtype": "float32", "prompts": len(prompts)}
    about |= {"prompt tokens": f"{min(lengths)} to {max(lengths)}", "new tokens": args.new_tokens}
    results = json.loads(json.dumps({"machine": made_on(**about), "costs": costs, "rows": rows}))
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
