"""Measure an engine with and without a draft head, beside this decoder: `tests.engines.engine_speed`.

All decode greedily on one thread, with chains of three drafts. Seconds are those of the CPU, prefill included.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from time import process_time
from typing import Any

from bench.machine import made_on
from eagle import Budget, Target, generate, load_drafter
from eagle.disk import write_text
from eagle.formats.export import export
from eagle.log import progress, script
from tests.engines.compare_engines import read_prompts, run_engine
from tests.engines.engine_reference import Job

CHAIN = 3  # drafted tokens


def measure_here(target: Target, job: Job, head: Any) -> list[dict[str, Any]]:
    """Return tokens and seconds of this decoder for each prompt; `head` is a drafter."""
    rows = []
    for prompt in progress(job.prompts, "this decoder", len(job.prompts), unit="prompts"):
        begun = process_time()
        trace = generate(
            target, head, prompt, max_new_tokens=job.new_tokens, budget=job.budget, stop=[]
        )
        rows.append({"tokens": trace.tokens, "seconds": process_time() - begun})
    return rows


def summarise(arm: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median tokens a second of an arm, and its answers."""
    speeds = [row.get("made", len(row["tokens"])) / row["seconds"] for row in rows]
    return {"arm": arm, "tokens/s": statistics.median(speeds), "rows": rows}


def table(results: dict[str, Any]) -> str:
    """Return the median tokens a second of each arm as a Markdown table."""
    lines = ["| decoded by | tokens/s | texts as without a head |", "|---|---:|---:|"]
    for arm in results["arms"]:
        lines.append(f"| {arm['arm']} | {arm['tokens/s']:.1f} | {arm['equal']} |")
    return "\n".join(lines)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the arms: the engine plain and with the head, then this decoder plain and with it."""
    target = Target.load(args.target, dtype=args.dtype)
    head = load_drafter(args.head, target)
    job = Job(
        args.target,
        prompts=read_prompts(target, args.prompts, args.count, 2 * args.new_tokens),
        budget=Budget(CHAIN, CHAIN, 1),
        new_tokens=args.new_tokens,
        dtype=args.dtype,
    )
    arms = []
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        export(head, target.config, args.engine, f"{work}/head")
        # the engine converts and loads for itself, so that each of its arms is a process
        for plain in (True, False):
            there = run_engine(
                job, args.engine, args.environment, target, work=folder, folder=folder, plain=plain
            )
            name = f"{args.engine} {there['version']}"
            arms.append(summarise(name if plain else f"{name}, head", there["answers"]))
    for name, drafter in (("eagle", load_drafter("none", target)), ("eagle, head", head)):
        arms.append(summarise(name, measure_here(target, job, drafter)))
    return arms


def compare_texts(alone: dict[str, Any], drafted: dict[str, Any], size: int) -> None:
    """Note how many answers have the same first `size` tokens without and with drafts, and drop the answers."""
    answers = alone.pop("rows")
    pairs = zip(answers, drafted.pop("rows"), strict=True)
    same = sum(one["tokens"][:size] == other["tokens"][:size] for one, other in pairs)
    alone["equal"] = ""
    drafted["equal"] = f"{same} of {len(answers)}"


def main(argv: list[str]) -> None:
    """Measure, write the result file and print its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", type=Path, help="the folder of a trained head")
    parser.add_argument("--engine", required=True, choices=["vllm", "openvino"])
    parser.add_argument("--environment", type=Path, required=True)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="conversations")
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    arms = measure(args)
    # the engine's two arms, then this decoder's
    for plain, drafted in (arms[:2], arms[2:]):
        compare_texts(plain, drafted, size=args.new_tokens)
    machine = made_on(target=args.target.name, head=args.head.name, dtype=args.dtype)
    results = {"machine": machine, "arms": arms}
    write_text(args.out, json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    script(main)
