"""How much of its attention an EAGLE-3 head spends on the token it stands on, and how often it then agrees.

`python bench/own_token.py --target T --store FEATURES --heads NAME=FOLDER ...` tells of each head the query head that
looks at its own row most, over the supervised slots of some conversations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from bench.machine import made_on
from bench.methods_report import made
from eagle.core.tree import chain_paths
from eagle.data.examples import collate
from eagle.data.store import FeatureStore
from eagle.doctor.own_token import own_token_shares
from eagle.drafters.parts.validation import figures
from eagle.formats.checkpoint import load_head
from eagle.log import progress, script
from eagle.target.target import Target


def measured(target: Target, store: FeatureStore, folder: str, count: int) -> dict[str, float]:
    """Of one head: the share of the query head that has most, and its agreement."""
    head = load_head(folder).eval()
    texts = collate(store.read(range(count)), store.taps)
    shares = own_token_shares(head, target.head, texts)
    assert shares is not None, f"{folder} does not read its token by attention alone"
    agreement = figures(head.judge(texts, target.head, {"chain": chain_paths(1)}))["agreement"]
    return {"own": shares.mean(-1).max().item(), "agreement": agreement, "slots": shares.shape[1]}


def table(results: dict[str, Any]) -> str:
    """Shares and agreement, head by head, as Markdown."""
    lines = ["| head | attention on its own token | agreement |", "|---|---|---|"]
    for name, row in results["heads"].items():
        lines.append(f"| {name} | {row['own']:.2f} | {row['agreement']:.3f} |")
    return "\n".join([*lines, "", made(results)])


def main(argv: list[str]) -> None:
    """Measure every head and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--heads", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--texts", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("docs/results/own_token.json"))
    args = parser.parse_args(argv)
    target, store = Target.load(args.target, dtype="float32"), FeatureStore(args.store)
    named = dict(one.split("=", 1) for one in args.heads)
    rows = {
        name: measured(target, store, folder, args.texts)
        for name, folder in progress(named.items(), "heads", len(named))
    }
    about = made_on(target=Path(args.target).name, texts=args.texts)
    args.out.write_text(json.dumps({"machine": about, "heads": rows}) + "\n")
    print(table({"machine": about, "heads": rows}))


if __name__ == "__main__":
    script(main)
