"""What answering conversations anew costs: `python bench/regenerate_speed.py --target T --data F --earlier CHECKOUT`.

The regeneration of this commit, with drafters and without, beside that of an earlier checkout on the same text. All
arms take turns, each in a process of its own with one thread; CPU seconds, and whether all answers are equal.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from bench.machine import made_on, markdown, take_turns, write_results
from eagle.log import script

HERE = Path(__file__).parent.parent
CHILD = HERE / "bench/rivals/regenerate.py"


def answer(checkout: Path, job: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Seconds, tokens and answers of one run by the code of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        job = {**job, "settings": settings, "out": f"{folder}/out.json"}
        Path(folder, "job.json").write_text(json.dumps(job))
        environment = {**os.environ, "PYTHONPATH": str(checkout.resolve()), "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, str(CHILD), f"{folder}/job.json"], env=environment, cwd=folder, check=True)
        return json.loads(Path(folder, "out.json").read_text())


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per arm: medians of seconds, the ratio to the earlier loop, and how many answers are equal to its."""
    job = {"target": str(args.target.resolve()), "data": str(args.data.resolve()), "dtype": args.dtype}
    job |= {"count": args.count, "max_length": args.max_length}
    settings = {"max_new_tokens": args.new_tokens, "temperature": args.temperature, "batch_size": args.batch_size}
    settings["keep_truncated"] = True
    arms = {"earlier": (args.earlier, settings)}
    arms |= {drafter: (HERE, {**settings, "drafter": drafter}) for drafter in args.drafters}
    runs = take_turns(
        args.rounds,
        {name: lambda checkout=checkout, own=own: answer(checkout, job, own) for name, (checkout, own) in arms.items()},
    )
    (first, *_), rows = runs["earlier"], []
    for name, results in runs.items():
        seconds = median(result["seconds"] for result in results)
        ratios = [
            before["seconds"] / result["seconds"] for before, result in zip(runs["earlier"], results, strict=True)
        ]
        equal = min(
            sum(result["answers"][key] == value for key, value in first["answers"].items()) for result in results
        )
        row = {"arm": name, "seconds": round(seconds, 1), "tokens": results[0]["tokens"]}
        rows.append({**row, "ratio": round(median(ratios), 3), "equal": equal, "conversations": len(first["answers"])})
    return rows


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    header = ("regeneration", "CPU seconds", "tokens", "times as fast", "equal conversations")
    rows = [
        (row["arm"], row["seconds"], row["tokens"], row["ratio"], f"{row['equal']} of {row['conversations']}")
        for row in results["rows"]
    ]
    return markdown(header, rows, results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="conversations")
    parser.add_argument("--earlier", type=Path, required=True, help="a checkout whose regeneration is the baseline")
    parser.add_argument("--drafters", nargs="+", default=["none", "suffix"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-length", type=int, default=768)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("docs/results/regenerate.json"))
    args = parser.parse_args(argv)
    settings = {key: vars(args)[key] for key in ("batch_size", "new_tokens", "max_length", "temperature", "dtype")}
    about = made_on(target=args.target.name, data=args.data.name, **settings, rounds=args.rounds)
    results = {"machine": {**about, "threads": 1}, "rows": measure(args)}
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
