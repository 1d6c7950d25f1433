"""Packed weights against plain ones: forwards, loading, memory, LM heads; `python -m bench.packed_speed MODEL`.

A small chat model is widened to sizes that are worth packing. Its two targets take turns in every round, and the
figures that count are medians of ratios within one round.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from bench.machine import made_on, markdown, take_turns, write_results
from bench.widen import CONTEXT, TOKENS, widened_model
from eagle import Target
from eagle.core.tree import DraftTree
from eagle.decoding.cycle_times import clock_of
from eagle.log import progress, script
from eagle.target.loading import load_model, parse_dtype
from eagle.target.weights.packed import pack_head

SIZES = {"0.025 B": ("float32", "bfloat16"), "0.3 B": ("float32", "bfloat16"), "1 B": ("bfloat16",)}
LONG = 512  # tokens of a forward as extraction reads them
HEADS = ((384, 8192), (2048, 32768))  # width and vocabulary of LM heads
ROWS = (1, 4, 8, 10, 16, 64)
DTYPES = ("float32", "bfloat16")
SIDES = {"plain": False, "packed": True}
LOAD = """
import json, sys
from time import process_time
import torch
from eagle import Target
torch.set_num_threads(1)
start = process_time()
target = Target.load(sys.argv[1], dtype=sys.argv[2], packed=sys.argv[3] == "packed")
seconds = process_time() - start
with torch.inference_mode():
    target.model(input_ids=torch.ones(1, 4, dtype=torch.long))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
held, peak = (int(status[name].split()[0]) // 1024 for name in ("VmRSS", "VmHWM"))
print(json.dumps({"s": round(seconds, 1), "MB": held, "peak MB": peak}))
"""


def measure_load(folder: Path, dtype: str) -> dict[str, dict[str, float]]:
    """CPU seconds of loading, and megabytes of a process that then reads a text, at most and in the end."""
    figures = {}
    for side in SIDES:
        command = [sys.executable, "-c", LOAD, str(folder), dtype, side]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        figures[side] = json.loads(output.splitlines()[-1])
    return figures


def time_run(run: Callable[[], Any]) -> float:
    """Seconds of one run, by the clock of costs."""
    clock = clock_of(torch.device("cpu"))
    start = clock()
    run()
    return clock() - start


def compare_times(sides: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """The median milliseconds of the plain side, and the median ratio of the packed one to it."""
    for run in sides.values():
        run()
    turns = take_turns(rounds, {side: partial(time_run, run) for side, run in sides.items()})
    ratios = [packed / plain for plain, packed in zip(turns["plain"], turns["packed"], strict=True)]
    return {"plain, ms": round(1000 * median(turns["plain"]), 2), "ratio": round(median(ratios), 3)}


def measure_forwards(targets: dict[str, Target], rounds: int) -> dict[str, Any]:
    """Of forwards of each number of tokens behind a text: times, and the largest relative difference of logits."""
    figures = {}
    for tokens in (*TOKENS, LONG):
        sides = {}
        for side, target in targets.items():
            state = target.open()
            state.admit(0, [1 + number % 97 for number in range(CONTEXT)], room=tokens)
            while state.prompts:
                state.read_prompts()
            sides[side] = partial(state.read, {0: DraftTree.chain([1] * tokens)})
        plain, packed = (run()[0].logits for run in sides.values())
        worst = float((plain - packed).abs().max() / plain.abs().max())
        few = rounds if tokens < LONG else max(rounds // 3, 1)
        figures[str(tokens)] = {**compare_times(sides, few), "worst": float(f"{worst:.1g}")}
    return figures


def measure_head(width: int, vocab_size: int, dtype: str, rounds: int) -> dict[str, Any]:
    """Of an LM head alone: times by number of rows."""
    plain = nn.Linear(width, vocab_size, bias=False, dtype=parse_dtype(dtype)).requires_grad_(False)
    packed = pack_head(nn.Linear(width, vocab_size, bias=False, dtype=parse_dtype(dtype)).requires_grad_(False))
    figures = {}
    with torch.inference_mode():
        for rows in ROWS:
            x = torch.randn(1, rows, width, dtype=parse_dtype(dtype))
            sides = {"plain": lambda x=x: plain(x), "packed": lambda x=x: packed(x)}
            figures[str(rows)] = compare_times(sides, rounds)
    return figures


def ratio_row(name: str, figures: dict[str, Any]) -> tuple[object, ...]:
    """A line of ratios."""
    return (name, f"{figures['1']['plain, ms']:g} ms", *(f"{each['ratio']:.2f}" for each in figures.values()))


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    forwards = [ratio_row(name, figures) for name, figures in results["forwards"].items()]
    heads = [ratio_row(name, figures) for name, figures in results["LM heads"].items()]
    loads = [
        (name, *(figures[side][key] for key in ("s", "MB", "peak MB") for side in SIDES))
        for name, figures in results["loading"].items()
    ]
    titles = [f"{key}, {side}" for key in ("s", "MB held", "MB at most") for side in SIDES]
    parts = [markdown(("packed / plain, tokens", "one token, plain", *TOKENS, LONG), forwards)]
    parts += [markdown(("loading", *titles), loads)] if loads else []
    parts += [markdown(("LM head alone, rows", "one row, plain", *ROWS), heads, results["machine"])]
    return "\n\n".join(parts)


def measure_size(args: argparse.Namespace, size: str, dtype: str, results: dict[str, Any]) -> None:
    """Measure a widened model."""
    model = load_model(args.model, parse_dtype(dtype)).eval()
    weights = 1e9 * float(size.split()[0])
    wide = model if weights < 1e8 else widened_model(model, weights)
    with TemporaryDirectory() as folder:
        wide.save_pretrained(folder)
        del model, wide
        results["loading"][f"{size}, {dtype}"] = measure_load(Path(folder), dtype)
        targets = {side: Target.load(folder, dtype=dtype, packed=packed) for side, packed in SIDES.items()}
    for threads in args.threads:
        torch.set_num_threads(threads)
        name = f"{size}, {dtype}, {threads} {'threads' if threads > 1 else 'thread'}"
        results["forwards"][name] = measure_forwards(targets, args.rounds)
    torch.set_num_threads(1)


def main(argv: Sequence[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--out", type=Path, default=Path("docs/results/packed.json"))
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    load_model(args.model, torch.float32)  # refuses a wrong path before anything is timed
    results: dict[str, Any] = {"machine": made_on(target=args.model.name), "context": CONTEXT}
    results |= {"forwards": {}, "LM heads": {}, "loading": {}}
    for width, vocab_size in HEADS:
        for dtype in DTYPES:
            results["LM heads"][f"{width} x {vocab_size}, {dtype}"] = measure_head(
                width, vocab_size, dtype, args.rounds
            )
    runs = [(size, dtype) for size in args.sizes for dtype in SIZES[size]]
    for size, dtype in progress(runs, "sizes", len(runs)):
        measure_size(args, size, dtype, results)
        write_results(args.out, results)
    print(table(results))


if __name__ == "__main__":
    script(main)
