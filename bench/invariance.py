"""What invariant reading costs in half precision, and what it keeps: `python -m bench.invariance TARGET`.

Steps by one token and forwards over chains are timed with `invariant` on and off, in turns, after several contexts.
Then drafted answers are compared with plain decoding's, both ways. TARGET is a folder of save_pretrained.
"""

# N nodes of a draft beside its root

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
from eval.tune import chain

RESULT = Path(__file__).parents[1] / "docs/results/invariance.json"
CONTEXTS = (30, 300, 1500, 3000)
NODES = (0, 8, 25)  # of a chain; 0 is a step by one token
REPEATS = 7
BUDGETS = (chain(3), chain(7), Budget(8), Budget(25))
TEMPERATURES = (0.0, 0.7, 1.0)
LONG = "Sum up this list in one sentence: " + ", ".join(
    f"item {i} costs {i * 7 % 90} dollars" for i in range(1, 75)
)
QUESTIONS = ("What is a tree?", "Write a short story about a dog.", "Count to twenty.", LONG)


def read_chain(target: Target, state: Any, nodes: int) -> float:
    """Return the CPU seconds of a forward over a root and a chain of N nodes, which the cache does not keep."""
    tokens = torch.arange(1, nodes + 2)[None] % target.vocab_size  # [1, 1 + N]
    tree_mask = torch.ones(1, nodes + 1, nodes + 1, dtype=torch.bool).tril()
    start = process_time()
    state.read_ahead([0], tokens, list(range(nodes + 1)), tree_mask)
    return process_time() - start


def open_state(target: Target, context: int) -> Any:
    """Return a cache that holds a prompt of `context` tokens, with room for a draft."""
    # any tokens but the special ones, which come first
    prompt = torch.arange(context) * 7 % (target.vocab_size - 4) + 3
    state = target.open()
    state.admit(0, prompt.tolist(), room=64)
    state.finish_prompts()
    return state


def time_forwards(targets: dict[str, Target], context: int) -> list[dict[str, Any]]:
    """Return a row for each number of nodes: medians, and the ratio of both with its range over the repeats.

    Args:
        targets: The same model under the names "invariant" and "fastest".
        context: The tokens that the cache holds before each forward.
    """
    states = {name: open_state(target, context) for name, target in targets.items()}
    rows = []
    for nodes in NODES:
        seconds: dict[str, list[float]] = {name: [] for name in targets}
        # both take turns, so that a drifting machine slows both alike
        for _ in range(1 + REPEATS):
            for name, target in targets.items():
                seconds[name].append(read_chain(target, states[name], nodes))
        # the first round warms up
        warm = {name: values[1:] for name, values in seconds.items()}
        pairs = zip(warm["invariant"], warm["fastest"], strict=True)
        ratios = sorted(invariant / fastest for invariant, fastest in pairs)
        spread = (ratios[0], median(ratios), ratios[-1])
        milliseconds = {name: round(1000 * median(values), 2) for name, values in warm.items()}
        rows.append(
            {
                "context": context,
                "nodes": nodes,
                "milliseconds": milliseconds,
                "ratio_low_median_high": [round(ratio, 3) for ratio in spread],
            }
        )
    return rows


def find_drafter(name: str, target: Target) -> Any:
    """Return a drafter by a name or a folder; a method with weights by its name is an untrained head."""
    if name in DRAFTERS and issubclass(DRAFTERS[name], TrainableDrafter):
        return make_head(name, target).bind(target.head)
    return load_drafter(name, target)


def count_identical(target: Target, name: str, new_tokens: int) -> dict[str, Any]:
    """Count drafted answers that are plain decoding's, alone and in batches.

    Args:
        target: The model, whose plain decoding is the reference.
        name: The drafter, as `find_drafter` takes it.
        new_tokens: The length of every answer.

    Returns:
        How many `answers` were compared, and how many are `identical`.
    """
    prompts = [target.chat(question) for question in QUESTIONS]
    drafter = find_drafter(name, target)
    plain = load_drafter("none", target)
    counts = {"identical": 0, "answers": 0}
    for temperature in progress(TEMPERATURES, "compare", len(TEMPERATURES), unit="temperatures"):
        options: dict[str, Any] = {
            "max_new_tokens": new_tokens,
            "stop": [],
            "sampling": [Sampling(temperature, seed=5, request=i) for i in range(len(prompts))],
        }
        plain_traces = generate(target, plain, prompts, batch_size=1, **options)
        expected = [trace.tokens for trace in plain_traces]
        # batches of three, where prompts of several lengths begin and end beside one another
        for budget, size in product(BUDGETS, (1, 3)):
            traces = generate(target, drafter, prompts, budget=budget, batch_size=size, **options)
            for trace, tokens in zip(traces, expected, strict=True):
                counts["answers"] += 1
                counts["identical"] += trace.tokens == tokens
    return counts


def measure(path: str, dtype: str, names: list[str], new_tokens: int) -> None:
    """Measure one target both ways, print the rows and write them.

    Args:
        path: A folder of save_pretrained.
        dtype: The precision in which it is loaded.
        names: The drafters whose answers are compared.
        new_tokens: The length of every answer.
    """
    targets = {
        "invariant": Target.load(path, dtype=dtype, device="cpu", invariant=True),
        "fastest": Target.load(path, dtype=dtype, device="cpu", invariant=False),
    }
    limit = targets["invariant"].max_positions or max(CONTEXTS) + 64
    forwards = []
    for context in progress(CONTEXTS, "time", len(CONTEXTS), unit="contexts"):
        if context + 64 <= limit:
            forwards += time_forwards(targets, context)
    print(*forwards, sep="\n")
    kernels = torch.backends.cpu.get_cpu_capability()
    result = made_on(
        target=repr(targets["invariant"]),
        kernels=kernels,
        tokens=new_tokens,
        described={name: target.describe() for name, target in targets.items()},
        forwards=forwards,
        answers={},
    )
    for name, target in targets.items():
        for drafter in names:
            counts = count_identical(target, drafter, new_tokens)
            result["answers"][f"{name}, {Path(drafter).name}"] = counts
            print(f"{name}, {drafter}: {counts['identical']} of {counts['answers']} identical")
    # beside those of other targets
    results = json.loads(RESULT.read_text()) if RESULT.is_file() else {}
    results[f"{Path(path).name}, {dtype}, {kernels}"] = result
    RESULT.write_text(json.dumps(results, indent=1) + "\n")


def main(argv: list[str]) -> None:
    """Measure a target."""
    parser = argparse.ArgumentParser(prog="python -m bench.invariance", description=__doc__)
    parser.add_argument("target", help="a folder of save_pretrained")
    parser.add_argument(
        "--drafters", nargs="+", default=["ngram", "suffix"], help="methods and folders of heads"
    )
    parser.add_argument(
        "--tokens", type=int, default=40, help="of an answer (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    measure(args.target, args.dtype, args.drafters, args.tokens)


if __name__ == "__main__":
    script(main)
