"""Speed and memory of training steps of heads that guess several tokens at once: `python bench/level_speed.py`.

Each method's step stands against a plain rendering of the released one, on the lengths and answers of real texts and
on a text without padding. Each side is a process of its own on one thread, and both take turns; seconds are the CPU's.
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

from bench.machine import made_on, markdown, write_results
from bench.rivals.level_heads import PLAIN
from bench.rivals.serve import DTYPES, Text, Work
from bench.train_cost import Sizes
from bench.train_speed import EAGLE1_RESULTS, ROOT, cut, full, measure, rounded
from eagle.log import script

RESULTS = ROOT / "docs/results/level_speed.json"
# heads of three levels, each as its release trains it
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"levels": 3, "layers": 1, "loss": "tokens"},
    "hydra": {"levels": 3, "layers": 4, "prefix": True, "dropout": 0.2, "loss": "cross_entropy"},
    "mlp_speculator": {"levels": 3, "loss": "tokens"},
    "blockwise": {"levels": 3, "drawn": True, "loss": "tokens"},
    "falcon": {"k": 2, "dropout": 0.1},
}
# sizes, and conversations of a batch: one where two would take a plain step 20 GB
SIZES = {8192: (Sizes(8192, 256, 704, 4, 4, 64), 4), 131072: (Sizes(131072, 512, 1408, 8, 8, 64), 1)}
GOALS = {8192: 0.25, 131072: 0.1}  # of the memory
FASTER = 2.0
LENGTH = 1024


def texts_of(kind: str, texts: list[Text], batch: int) -> list[list[Text]]:
    """A batch of real lengths, or one text without padding."""
    if kind == "full":
        return [[full(LENGTH)]]
    return [[text for text in (cut(text, LENGTH) for text in texts) if text][:batch]]


def rows(args: argparse.Namespace, texts: list[Text], target: str) -> Iterator[dict[str, Any]]:
    """Rows of the released step and ours; tokens per second are supervised ones."""
    for vocab, dtype, method, kind in product(args.vocabs, args.dtypes, args.methods, args.texts):
        sizes, batch = SIZES[vocab]
        sizes.target_config(vocab).save_pretrained(target)
        batches = texts_of(kind, texts, batch)
        row = measure(
            Work(target, vocab, batches, dtype, head={"kind": method, **HEADS[method]}), sizes, {}, args.rounds
        )
        flat = [text for batch in batches for text in batch]
        tokens = sum(length for length, _ in flat)
        share = sum(stop - start for _, spans in flat for start, stop in spans) / tokens
        row |= {name: row[name] * share for name in ("released", "ours", "released_best", "ours_best")}
        places = sum(len(batch) * max(length for length, _ in batch) for batch in batches)
        with torch.device("meta"):
            head = PLAIN[method](sizes.target_config(vocab), HEADS[method])
        row["gradients_mb"] = 4e-6 * sum(weight.numel() for weight in head.parameters())
        row |= {"share": share, "fill": tokens / places, "ratio": row["ours"] / row["released"]}
        about = {"method": method, "dtype": dtype, "vocab": vocab, "texts": kind, "batch": len(batches[0])}
        yield {**about, **rounded(row)}


def table(results: dict[str, Any]) -> str:
    """Speed and memory of every method's step; what was aimed at stands in brackets."""
    header = ["method", "numbers", "V", "texts", "fill", "share", "released, tokens/s", "ours", "ours / released"]
    lines = []
    for row in results["rows"]:
        texts = f"{row['batch']} real" if row["texts"] == "real" else "1 full"
        cells = [row["method"], row["dtype"], f"{row['vocab']:,}", texts, f"{row['fill']:.2f}", f"{row['share']:.2f}"]
        cells += [f"{row[side]:,.0f}" for side in ("released", "ours")]
        cells += [f"**{row['ratio']:.2f}** ({FASTER:.1f})"]
        cells += [f"{row[f'{side}_mb']:,.0f} MB" for side in ("released", "ours")]
        goal, gradients = GOALS[row["vocab"]], row["gradients_mb"]
        cells.append(f"{row['ours_mb'] / row['released_mb']:.2f} ({goal:.2f})")
        cells.append(f"{max(row['ours_mb'] - gradients, 0) / (row['released_mb'] - gradients):.2f} ({goal:.2f})")
        lines.append(cells)
    header += ["memory, released", "ours", "ratio", "without gradients"]
    return markdown(header, lines, results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", choices=HEADS, nargs="+", default=list(HEADS))
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--vocabs", type=int, choices=SIZES, nargs="+", default=list(SIZES))
    parser.add_argument("--texts", choices=["real", "full"], nargs="+", default=["real", "full"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    texts = json.loads(EAGLE1_RESULTS.read_text())["texts"]
    results: dict[str, Any] = {"machine": made_on(rounds=args.rounds, length=LENGTH), "rows": []}
    with TemporaryDirectory() as target:
        for row in rows(args, texts, target):
            results["rows"].append(row)
            print(row, file=sys.stderr, flush=True)
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
