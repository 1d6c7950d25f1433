"""What regenerated answers do to acceptance, on the tiny target of `make demo`: `python bench/regenerated_data.py`.

The same questions and the same training; only who answered differs: the data, the target greedily, the target at T = 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

from eagle.data.store import FeatureStore
from eagle.log import script
from eval.results import ACCEPTANCE_LENGTH, commit, read_results

RECIPE = "recipes/tiny/eagle1.yaml"
ANSWERS: dict[str, list[str]] = {
    "the data's": ["data.train=runs/tiny/data/train.jsonl"],
    "the target's, greedy": ["data.train={}/answers.jsonl", "regenerate.temperature=0"],
    "the target's, drawn at T = 1": ["data.train={}/answers.jsonl", "regenerate.temperature=1"],
}


def measured(overrides: list[str], conversations: int, prompts: int) -> dict[str, Any]:
    """Tokens learned from and acceptance lengths of one head, through all stages."""
    with tempfile.TemporaryDirectory() as folder:
        common = [f"data.limit={conversations}", f"eval.count={prompts}", f"regenerate.out={folder}/answers.jsonl"]
        common += [f"features.store={folder}/features", f"train.out={folder}/head"]
        command = [RECIPE, *common, *(override.format(folder) for override in overrides)]
        stages = [["-m", "data_prep.extract"], ["recipes/train_eagle.py"], ["-m", "eval.measure"]]
        if overrides[1:]:
            stages.insert(0, ["-m", "data_prep.regenerate"])
        for stage in stages:
            subprocess.run([sys.executable, *stage, *command], check=True)
        store = FeatureStore(f"{folder}/features")
        groups = read_results(f"{folder}/head/results.jsonl").groups()
        lengths = {
            f"{group.temperature:g}": group.estimate(ACCEPTANCE_LENGTH).value
            for group in groups
            if group.drafter == "eagle1"
        }
        supervised = int(store.loss_mask.sum())
        return {"examples": len(store), "supervised": supervised, "acceptance_length": lengths}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = ["| answers | examples | supervised tokens | τ at T = 0 | τ at T = 1 |", "|---|---|---|---|---|"]
    for name, row in results["answers"].items():
        lengths = " | ".join(f"{length:.2f}" for length in row["acceptance_length"].values())
        lines.append(f"| {name} | {row['examples']} | {row['supervised']:,} | {lengths} |")
    made = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    return "\n".join([*lines, "", f"<sub>{made}</sub>"])


def main(argv: list[str]) -> None:
    """Run the stages for each, print the table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("docs/results/regenerated_data.json"))
    args = parser.parse_args(argv)
    results = {
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "prompts": args.prompts,
            "torch": torch.__version__,
            "date": str(date.today()),
            "commit": commit(),
        },
        "answers": {name: measured(overrides, args.conversations, args.prompts) for name, overrides in ANSWERS.items()},
    }
    print(table(results))
    args.out.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    script(main)
