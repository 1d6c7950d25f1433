"""Speed and memory of training steps that guess blocks, beside `speculators`: `python bench/block_speed.py PYTHON`.

PYTHON is the interpreter of an environment with speculators 0.9. Both sides draw as many anchors or elements of one
text, compare the same probs and train as many weights; each is a process of its own on one thread, and both take turns.
The limit is the floating-point operations that a step cannot do without, at the peak of matrix products measured
beside them. Seconds are the CPU's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import LlamaForCausalLM

from bench.machine import made_on, markdown, write_results
from bench.rivals.serve import DTYPES, Work
from bench.train_cost import Sizes, block_flops
from bench.train_speed import EAGLE3_RESULTS, ROOT, answers, measure, rounded
from eagle.log import script

RESULTS = ROOT / "docs/results/block_speed.json"
SIZES = Sizes(8192, 512, 1408, 8, 4, 64)
HEADS: dict[str, dict[str, Any]] = {
    "dflash": {"blocks": 5, "taps": [1, 2, 3, 5, 6], "slots": 8, "anchors": 256, "loss": "cross_entropy"},
    "dspark": {"blocks": 5, "taps": [1, 2, 3, 5, 6], "slots": 7, "anchors": 256},
    "peagle": {"blocks": 4, "taps": [2, 4, 5], "depths": 8, "keep": 0.7, "train_lm_head": False},
}
FASTER, SMALLER = 2.0, 0.4  # what was aimed at


def rows(args: argparse.Namespace, share: float, target: str) -> Iterator[dict[str, Any]]:
    """Rows of both steps, on a text that is supervised everywhere and on one that is in part."""
    LlamaForCausalLM(SIZES.target_config(SIZES.vocab)).save_pretrained(target)
    for method, length, dtype, supervised in product(args.methods, args.lengths, args.dtypes, [1.0, share]):
        text = (length, answers(length, supervised))
        head = {"kind": method, **HEADS[method]}
        work = Work(target, SIZES.vocab, [[text]], dtype, head=head)
        row = measure(work, SIZES, {"speculators": args.python}, args.rounds)
        mask = work.tokens_and_mask(text)[1].tolist()
        row["limit"] = length * row["peak"] / block_flops(SIZES, mask, head)
        row |= {"ratio": row["ours"] / row["speculators"], "of_limit": row["ours"] / row["limit"]}
        row |= {"memory": row["ours_mb"] / row["speculators_mb"], "share": sum(mask) / length}
        yield {"method": method, "dtype": dtype, "length": length, "all": supervised == 1, **rounded(row)}


def table(results: dict[str, Any]) -> str:
    """Speed and memory of every step; what was aimed at stands in brackets."""
    header = ["method", "numbers", "T", "supervised", "limit, tokens/s", "speculators", "ours", "ours / speculators"]
    header += ["best / best", "of the limit", "memory, speculators", "ours", "ratio"]
    lines = []
    for row in results["rows"]:
        cells = [row["method"], row["dtype"], f"{row['length']:,}", "all" if row["all"] else f"{row['share']:.2f}"]
        cells += [f"{row[name]:,.0f}" for name in ("limit", "speculators", "ours")]
        best = row["ours_best"] / row["speculators_best"]
        cells += [f"**{row['ratio']:.2f}** ({FASTER:.1f})", f"{best:.2f}", f"{row['of_limit']:.0%}"]
        cells += [f"{row[f'{side}_mb']:,.0f} MB" for side in ("speculators", "ours")]
        lines.append([*cells, f"{row['memory']:.2f} ({SMALLER:.1f})"])
    return markdown(header, lines, results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("python", help="the Python of an environment that has speculators")
    parser.add_argument("--methods", choices=HEADS, nargs="+", default=list(HEADS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048], help="tokens of a text")
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    share = json.loads(EAGLE3_RESULTS.read_text())["texts"]["share"]
    results: dict[str, Any] = {"machine": made_on(rounds=args.rounds, **SIZES._asdict()), "rows": []}
    with TemporaryDirectory() as target:
        for row in rows(args, share, target):
            results["rows"].append(row)
            print(row, file=sys.stderr, flush=True)
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
