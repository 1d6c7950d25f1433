"""Compare both lossless rules for sampled drafts: `python -m tests.core.compare_rules --out FILE`.

Expected numbers of accepted tokens are enumerated on small trees, over random pairs of a target and a draft. With
`--target`, `--head` and `--prompts`, a head drafts at temperature 1, and the expectations of both rules are enumerated
on each of its drafts.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

from bench.machine import made_on, markdown, write_results
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core import verify as verification
from eagle.core.tree import PUBLISHED_TREE, DraftTree, chain_paths
from eagle.core.verify import Probs, sample_block, sample_tree
from eagle.log import progress, script
from eval.result_files.statistics import Estimate, estimate, format_number
from tests.enumerate_law import (
    Chance,
    Laws,
    Rule,
    distance,
    drawn_trees,
    emitted,
    every_outcome,
    futures,
    random_laws,
)

PAIRS = 100  # of random distributions of a target and a draft, for each shape
SEEDS = 2  # of each prompt, since answers differ by chance
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
Rows = dict[int, list[tuple[float, ...]]]
"""By prompt, a row for each cycle: the expected accepted tokens of each rule, and 1."""


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


def measure_drafts(args: argparse.Namespace) -> dict[str, Any]:
    """Return the expected number of accepted tokens a cycle, by rule, on the same drafts of a head, for each shape."""
    target = Target.load(args.target, dtype="bfloat16")
    drafter = load_drafter(args.head, target)
    lines = args.prompts.read_text(encoding="utf-8").splitlines()[: args.count]
    prompts = [target.chat(json.loads(line)["turns"][0]) for line in lines]
    measured = {}
    for name, paths in DRAFTS.items():
        budget = Budget.fixed(paths, "sampled")
        rows: Rows = {}
        keys = list(product(range(len(prompts)), range(SEEDS)))
        for i, seed in progress(keys, name, len(keys), unit="answers"):
            sampling = Sampling(1.0, seed=seed, request=i)
            with record_expected(rows.setdefault(i, [])):
                generate(
                    target,
                    drafter,
                    prompts[i],
                    sampling=sampling,
                    max_new_tokens=NEW_TOKENS,
                    budget=budget,
                )
        # the cycles of a prompt are resampled together
        figures = {
            rule: estimate(rows, partial(mean_of, column)) for column, rule in enumerate(RULES)
        }
        figures["gain"] = estimate(rows, lambda sums: (sums[1] - sums[0]) / sums[2])
        measured[name] = {"cycles": sum(map(len, rows.values())), **figures}
    return measured


def mean_of(column: int, sums: Any) -> Any:
    """Return the mean of a column over cycles, which the last column counts."""
    return sums[column] / sums[-1]


@contextmanager
def record_expected(rows: list[tuple[float, ...]]) -> Iterator[None]:
    """Append a row for each sampled draft that is verified: the expected accepted tokens of each rule, and 1.

    The answer goes on as the token rule has it.
    """

    def verify_and_record(tree: DraftTree, target_probs: Probs, *options: Any, **named: Any) -> Any:
        probs = lru_cache(None)(target_probs)
        rows.append((*(expect_on_draft(rule, tree, probs) for rule in RULES.values()), 1.0))
        return sample_tree(tree, probs, *options, **named)

    verification.sample_tree = verify_and_record
    try:
        yield
    finally:
        verification.sample_tree = sample_tree


def expect_on_draft(rule: Rule, tree: DraftTree, target_probs: Probs) -> float:
    """Return the expected number of accepted tokens of a draft, over all coins that the rule may toss."""

    def count_accepted(chance: Chance) -> int:
        # the token after the accepted ones does not matter
        path, _ = rule(tree, target_probs, chance.coin, lambda probs: 0)
        return len(path) - 1

    return sum(accepted * odds for accepted, odds in every_outcome(count_accepted))


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
    """Return the expected numbers of accepted tokens on a head's drafts as a Markdown table."""
    header = ("sampled draft", "cycles", *RULES, "gain")
    rows = []
    for name, figures in results["measured"].items():
        cells = [format_number(Estimate(*figures[key])) for key in (*RULES, "gain")]
        rows.append((name, figures["cycles"], *cells))
    return markdown(header, rows)


def main(argv: list[str]) -> None:
    """Draft, enumerate, write the result file and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--head", type=Path)
    parser.add_argument("--prompts", type=Path, help="questions, a JSON object with `turns` a line")
    parser.add_argument("--count", type=int, default=12)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    inputs = (args.target, args.head, args.prompts)
    if any(inputs) != all(inputs):
        parser.error("drafts of a head need --target, --head and --prompts")
    # the head drafts before the enumeration, so that a wrong path is found at once
    measured = measure_drafts(args) if all(inputs) else {}
    results = {
        "machine": made_on(prompts=args.count if measured else 0),
        "shapes": {name: enumerate_shape(*shape) for name, shape in SHAPES.items()},
        "measured": measured,
    }
    write_results(args.out, results)
    print(law_table(results), table(results), sep="\n\n")


if __name__ == "__main__":
    script(main)
