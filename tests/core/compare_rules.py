"""Compare both lossless rules for sampled drafts: `python -m tests.core.compare_rules --out FILE`.

Expected numbers of accepted tokens are enumerated on small trees, over random pairs of a target and a draft. With
`--target` and `--head`, both rules also decode prompts at temperature 1.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core.tree import PUBLISHED_TREE, chain_paths
from eagle.core.verify import sample_block, sample_tree
from eagle.log import progress, script
from eval.result_files.statistics import Estimate, column_sums, estimate_difference, format_number
from tests.core.test_verify_law import random_laws
from tests.enumerate_law import Laws, Rule, distance, drawn_trees, emitted, futures

PAIRS = 100  # of random distributions of a target and a draft, for each shape
SEEDS = 4  # of each prompt, since answers differ by chance
NEW_TOKENS = 64
RULES: dict[str, Rule] = {"token": sample_tree, "block": sample_block}
# children of each node by depth, and vocabulary
SHAPES = {
    "chain of 2": ((1, 1), 6),
    "chain of 3": ((1, 1, 1), 4),
    "3 siblings": ((3,), 5),
    "2 children, then 1": ((2, 1), 4),
    "2 children, then 2": ((2, 2), 3),
}
DRAFTS = {
    "chain of 3": chain_paths(3),
    "chain of 7": chain_paths(7),
    "tree of 8": tuple(path for path in PUBLISHED_TREE if len(path) + max(path) < 4),
    "tree of 25": PUBLISHED_TREE,
}
Rows = dict[tuple[int, int], tuple[float, ...]]
"""By prompt and seed: committed tokens, cycles, milliseconds, tokens."""
# of the sums of a rule's rows
METRICS = {
    "acceptance length": lambda sums: sums[0] / sums[1],
    "ms per token": lambda sums: sums[2] / sums[3],
}


def expect_accepted(target: Laws, draft: Laws, branching: Sequence[int]) -> dict[str, float]:
    """Return the expected number of accepted draft tokens by rule.

    `walk` accepts what equals a sample of the target that knows nothing of the draft. `bias` is the larger distance of
    both rules' output from the target's distribution.
    """
    trees = list(drawn_trees(draft, branching))
    row = {"bias": 0.0, "walk": 0.0}
    for name, rule in RULES.items():
        joint, row[name] = emitted(rule, target, trees)
        row["bias"] = max(row["bias"], distance(joint, target))
    joint = futures(target)[0]
    for _, texts, weight in trees:
        # a node is accepted with the target's probability of the tokens up to it
        row["walk"] += weight * sum(float(joint[text].sum()) for text in texts[1:])
    return row


def enumerate_shape(branching: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """Return mean expectations over pairs of a target and a draft, and what the block rule gains."""
    rows = []
    for seed in range(PAIRS):
        target, draft = random_laws(seed, vocab_size, len(branching))
        rows.append(expect_accepted(target, draft, branching))
    gains = [row["block"] - row["token"] for row in rows]
    return {
        "means": {name: sum(row[name] for row in rows) / PAIRS for name in ("walk", *RULES)},
        "least gain": min(gains),
        "largest gain": max(gains),
        "ahead": sum(gain > 1e-9 for gain in gains),
        "behind": sum(gain < -1e-12 for gain in gains),
        "bias": max(row["bias"] for row in rows),
    }


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both rules on the prompts, for each shape of drafts."""
    target = Target.load(args.target, dtype="bfloat16")
    drafter = load_drafter(args.head, target)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.count]
    prompts = [target.chat(json.loads(line)["turns"][0]) for line in lines]
    decoded = {}
    for name, paths in DRAFTS.items():
        rows: dict[str, Rows] = {rule: {} for rule in RULES}
        keys = list(product(range(len(prompts)), range(SEEDS)))
        for i, seed in progress(keys, name, len(keys), unit="answers"):
            # the rules take turns at being first, so that other work on the machine slows both alike
            for rule in sorted(RULES, reverse=seed % 2 == 1):
                sampling = Sampling(1.0, seed=seed, request=i, rule=rule)
                begun = process_time()
                trace = generate(
                    target,
                    drafter,
                    prompts[i],
                    sampling=sampling,
                    max_new_tokens=NEW_TOKENS,
                    budget=Budget.fixed(paths, "sampled"),
                )
                spent = 1000 * (process_time() - begun)
                committed = sum(cycle.committed for cycle in trace.cycles)
                rows[rule][i, seed] = (
                    committed,
                    len(trace.cycles),
                    spent,
                    len(trace.tokens),
                )
        decoded[name] = compare_rows(rows)
    return decoded


def compare_rows(rows: dict[str, Rows]) -> dict[str, dict[str, Any]]:
    """Return each metric of both rules, and the block rule's minus the token rule's, paired by prompt."""
    compared = {}
    for name, metric in METRICS.items():
        figures = {}
        for rule in RULES:
            figures[rule] = metric(column_sums({rule: list(rows[rule].values())})[0]).item()
        # the seeds of a prompt are resampled together
        pairs = estimate_difference(
            rows["token"],
            rows["block"],
            lambda key: key[0],
            metric,
        )
        figures["difference"] = pairs.estimate
        compared[name] = figures
    return compared


def law_table(results: dict[str, Any]) -> str:
    """Return the expected numbers of accepted tokens as a Markdown table."""
    header = ("draft", "walk", *RULES, "largest gain", "ahead", "behind")
    rows = []
    for name, shape in results["shapes"].items():
        means = [f"{mean:.3f}" for mean in shape["means"].values()]
        gain = f"{shape['largest gain']:.3f}"
        rows.append(
            (
                name,
                *means,
                gain,
                shape["ahead"],
                shape["behind"],
            )
        )
    return markdown(header, rows)


def table(results: dict[str, Any]) -> str:
    """Return the acceptance lengths of both rules as a Markdown table, with CPU time per token."""
    header = ("sampled draft", "token", "block", "difference", "difference in ms per token")
    rows = []
    for name, metrics in results["decoded"].items():
        length = metrics["acceptance length"]
        means = [f"{length[rule]:.2f}" for rule in RULES]
        gain = format_number(Estimate(*length["difference"]))
        cost = format_number(Estimate(*metrics["ms per token"]["difference"]), digits=1)
        rows.append(
            (
                name,
                *means,
                gain,
                cost,
            )
        )
    return markdown(header, rows)


def main(argv: list[str]) -> None:
    """Decode, enumerate, write the result file and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--prompts", type=Path, help="questions, a JSON object with `turns` a line")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    inputs = (args.target, args.head, args.prompts)
    if any(inputs) != all(inputs):
        parser.error("decoding needs --target, --head and --prompts")
    # prompts are decoded before the enumeration, so that a wrong path is found at once
    decoded = decode(args) if all(inputs) else {}
    results = {
        "machine": made_on(prompts=args.count if decoded else 0),
        "shapes": {name: enumerate_shape(*shape) for name, shape in SHAPES.items()},
        "decoded": decoded,
    }
    write_results(args.out, results)
    print(law_table(results), table(results), sep="\n\n")


if __name__ == "__main__":
    script(main)
