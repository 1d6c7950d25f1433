"""What invariant reading costs in half precision, and what it keeps: `python -m bench.invariance TARGET`.

Steps by one token and forwards over chains are timed with `invariant` on and off, in turns, after several contexts.
Then drafted answers are compared with plain decoding's, both ways. TARGET is a folder of save_pretrained.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch

from bench.machine import made_on
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.conformance.trial import make_head
from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS
from eagle.log import progress, script

RESULT = Path(__file__).parents[1] / "docs/results/invariance.json"
CONTEXTS = (30, 300, 1500, 3000)
NODES = (0, 8, 25)  # of a chain beside the root; 0 is a step by one token
REPEATS = 7
LONG = "Sum up this list in one sentence: " + ", ".join(f"item {i} costs {i * 7 % 90} dollars" for i in range(1, 75))
TEMPERATURES = (0.0, 0.7, 1.0)


def read_chain(target: Target, state: Any, nodes: int) -> float:
    """CPU seconds of a forward over a root and a chain of this many nodes, of which nothing is kept."""
    tokens = torch.arange(1, nodes + 2)[None] % target.vocab_size
    seen = torch.ones(1, nodes + 1, nodes + 1, dtype=torch.bool).tril()
    begun = process_time()
    state.ahead([0], tokens, [*range(nodes + 1)], seen)
    return process_time() - begun


def time_forwards(targets: dict[str, Target], context: int) -> list[dict[str, Any]]:
    """A row for each number of nodes: medians, and the ratio of both with its range over the repeats."""
    states = {}
    for name, target in targets.items():
        states[name] = target.open()
        states[name].admit(0, [*(torch.arange(context) * 7 % (target.vocab_size - 4) + 3).tolist()], room=64)
        states[name].finish_prompts()
    rows = []
    for nodes in NODES:
        seconds: dict[str, list[float]] = {name: [] for name in targets}
        for _ in range(REPEATS + 1):
            for name, target in targets.items():
                seconds[name].append(read_chain(target, states[name], nodes))
        warm = {name: values[1:] for name, values in seconds.items()}
        ratios = sorted(on / off for on, off in zip(warm["invariant"], warm["fastest"], strict=True))
        medians = {name: round(1000 * median(values), 2) for name, values in warm.items()}
        spread = [round(ratios[i], 3) for i in (0, len(ratios) // 2, -1)]
        rows.append({"context": context, "nodes": nodes, "milliseconds": medians, "ratio_low_median_high": spread})
    return rows


def find_drafter(name: str, target: Target) -> Any:
    """A drafter by a name or a folder; a method with weights by its name is an untrained head."""
    if name in DRAFTERS and issubclass(DRAFTERS[name], TrainableDrafter):
        return make_head(name, target).bind(target.head)
    return load_drafter(name, target)


def compare_answers(target: Target, prompts: list[list[int]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """How many drafted answers are plain decoding's, by drafter, budget and temperature, alone and in batches."""
    rows = []
    budgets = {f"chain of {nodes}": Budget(nodes=nodes, top_k=1) for nodes in (3, 7)}
    budgets |= {f"tree of {nodes}": Budget(nodes=nodes) for nodes in (8, 25, 60)}
    budgets = {name: budget for name, budget in budgets.items() if budget.nodes <= args.largest}
    options: dict[str, Any] = {"max_new_tokens": args.tokens, "stop": []}
    drafters = {Path(name).name: find_drafter(name, target) for name in args.drafters}
    cases = [(rule, *case) for rule in TEMPERATURES for case in product(drafters, budgets, (1, len(prompts) - 1))]
    plain: dict[float, list[list[int]]] = {}
    for temperature, drafter, budget, size in progress(cases, "compare", len(cases), unit="arms"):
        rules = [Sampling(temperature, seed=5, request=i) for i in range(len(prompts))]
        if temperature not in plain:
            none = load_drafter("none", target)
            alone = [
                generate(target, none, prompt, sampling=rule, **options)
                for prompt, rule in zip(prompts, rules, strict=True)
            ]
            plain[temperature] = [trace.tokens for trace in alone]
        traces = generate(
            target, drafters[drafter], prompts, sampling=rules, budget=budgets[budget], batch_size=size, **options
        )
        same = sum(trace.tokens == tokens for trace, tokens in zip(traces, plain[temperature], strict=True))
        about = {"temperature": temperature, "drafter": drafter, "budget": budget, "batch_size": size}
        rows.append({**about, "identical": same, "answers": len(prompts)})
    return rows


def try_types(dtype: torch.dtype) -> dict[str, Any]:
    """What changes the bits of each causal type of transformers, as a tiny random model; None if nothing is known."""
    from tests.every_type import TYPES, build

    found: dict[str, Any] = {}
    for name in progress(TYPES, "try", len(TYPES), unit="types"):
        try:
            target = Target(build(name).to(dtype).eval())
            found[name] = target.variance()
        except Exception as error:  # a type that is no target is a row of the table, too
            found[name] = f"no target: {type(error).__name__}: {str(error)[:100]}"
    return found


def keep(name: str, result: dict[str, Any]) -> None:
    """Write a result beside the others."""
    kept = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    RESULT.write_text(json.dumps({**kept, name: result}, indent=1) + "\n")


def main(argv: list[str]) -> None:
    """Measure, print the rows and write the result file."""
    parser = argparse.ArgumentParser(prog="python -m bench.invariance", description=__doc__)
    parser.add_argument("target", help="a folder of save_pretrained, or `types` for every causal type as a tiny model")
    parser.add_argument("--drafters", nargs="+", default=["ngram", "suffix"], help="methods and folders of heads")
    parser.add_argument("--tokens", type=int, default=40, help="of an answer (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of every forward (default: %(default)s)")
    parser.add_argument("--largest", type=int, default=25, help="nodes of the largest draft (default: %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    if args.target == "types":
        found = try_types(getattr(torch, args.dtype))
        alike = sum(said is None for said in found.values())
        others = {name: said for name, said in found.items() if said is not None}
        print(f"{alike} of {len(found)} types give the same bits; the others:", *others.items(), sep="\n")
        keep(f"types, {args.dtype}", {"same bits": alike, "types": len(found), "others": others})
        return
    options = {"dtype": args.dtype, "device": "cpu"}
    targets = {
        "invariant": Target.load(args.target, **options, invariant=True),
        "fastest": Target.load(args.target, **options, invariant=False),
    }
    limit = targets["invariant"].max_positions or max(CONTEXTS)
    contexts = [context for context in CONTEXTS if context + 64 <= limit]
    timed = [time_forwards(targets, context) for context in progress(contexts, "time", len(contexts), unit="contexts")]
    asked = ["What is a tree?", "Write a short story about a dog.", "Count to twenty.", LONG]
    prompts = [targets["invariant"].chat(text) for text in asked]
    threads = f", {args.threads} threads" if args.threads > 1 else ""
    kernels = torch.backends.cpu.get_cpu_capability()
    result = made_on(
        target=repr(targets["invariant"]),
        kernels=kernels,
        tokens=args.tokens,
        described={name: target.describe() for name, target in targets.items()},
        forwards=[row for rows in timed for row in rows],
        answers={},
    )
    for row in result["forwards"]:
        print(row)
    for name, target in targets.items():
        rows = compare_answers(target, prompts, args)
        print(name, sum(row["identical"] for row in rows), "of", sum(row["answers"] for row in rows), "identical")
        result["answers"][name] = rows
        keep(f"{Path(args.target).name}, {args.dtype}, {kernels}{threads}", result)


if __name__ == "__main__":
    script(main)
