"""Speed and memory of the EAGLE-1 step against the published one: `python bench/train_speed.py`.

Both sides take turns on one thread, timed in CPU seconds. The limit is the floating-point operations that a step cannot
do without, at the measured peak of matrix products.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain, product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch

from bench.machine import DTYPES, made_on, markdown, measure_peak, write_results
from bench.steps import Step, Text, Work, llama, our_side, published_side
from bench.widen import count_weights
from eagle.log import script

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results/train_speed.json"
Row = dict[str, Any]


# targets, conversations of a batch, and batches: two where four would take the published step 10 GB
SIZES = [(llama(8192, 256, 704, heads=4), 4, 4), (llama(131072, 512, 1408, heads=8), 2, 2)]


def count_flops(config: dict[str, Any], texts: list[Text]) -> int:
    """Return the operations of an EAGLE-1 step: what follows a text's last answer is left out, the rest is read.

    Args:
        config: The sizes of the target, as `llama` gives them.
        texts: The conversations of one step.
    """
    width = config["hidden_size"]
    supervised = 0
    keys = 0  # positions whose keys are read
    pairs = 0  # of a query and a key that it reads
    for _, spans in texts:
        positions = list(chain.from_iterable(range(start, stop) for start, stop in spans))
        supervised += len(positions)
        keys += positions[-1] - 1
        pairs += sum(positions) - len(positions)
    fc = keys * 2 * width**2
    logits = supervised * config["vocab_size"] * width
    key_width = config["num_key_value_heads"] * config["head_dim"]
    # keys and values of what is read; queries, output and MLP of what is supervised; attention itself
    block = keys * 2 * width * key_width
    block += supervised * (2 * width**2 + 3 * width * config["intermediate_size"])
    block += 2 * pairs * width
    forward = fc + 2 * logits + block
    # the weights of fc, the input of the student's logits, weights and inputs of the block
    backward = fc + logits + 2 * block
    return 2 * (forward + backward)


def resident_kb(name: str) -> int:
    """Return a line of this process's status, VmRSS or VmHWM."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match
    return int(match[1])


def working_memory(step: Step) -> float:
    """Return the megabytes that a step needs at its peak, beyond what is held before it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # 5 lets the kernel forget the peak
    Path("/proc/self/clear_refs").write_text("5")
    resident = resident_kb("VmRSS")
    step(0)
    return (resident_kb("VmHWM") - resident) / 1e3


def measure(work: Work, rounds: int) -> Row:
    """Return memory and tokens per second of both sides.

    Raises:
        ValueError: They do not train the same number of weights.
    """
    sides = {"published": published_side(work), "ours": our_side(work)}
    trained = {}
    row: Row = {}
    for name, (step, head) in sides.items():
        # the first step makes the optimizer's moments
        step(0)
        row[f"{name}_mb"] = working_memory(step)
        trained[name] = count_weights(head)
    if trained["ours"] != trained["published"]:
        raise ValueError(f"the sides train {trained} weights, expected the same tensors")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    # sides take turns, so that a drifting machine slows both alike
    for _ in range(rounds):
        for name, (step, _) in sides.items():
            start = process_time()
            for i in range(len(work.batches)):
                step(i)
            seconds[name].append(process_time() - start)
    tokens = sum(length for length, _ in chain.from_iterable(work.batches))
    for name, times in seconds.items():
        row[name] = tokens / median(times)
    return row


def measure_rows(
    dtypes: list[str], lengths: list[int], rounds: int, texts: list[Text]
) -> Iterator[Row]:
    """Yield a row for real texts cut at each length, and for a text without padding.

    Args:
        dtypes: Keys of `DTYPES`.
        lengths: The tokens at which texts are cut.
        rounds: How often each side is timed.
        texts: The lengths and answers of real conversations.
    """
    for dtype, (config, batch, num_batches), length in product(dtypes, SIZES, lengths):
        real = cut_all(texts, length)[: batch * num_batches]
        batches = [real[i : i + batch] for i in range(0, len(real), batch)]
        for kind, batches_of_kind in (("real", batches), ("full", [[full_text(length)]])):
            work = Work(config, batches_of_kind, {"kind": "eagle1"}, dtype)
            row = {**measure(work, rounds), **describe_work(work)}
            row["ratio"] = row["ours"] / row["published"]
            row["of_limit"] = row["ours"] / row["limit"]
            about = {"texts": kind, "dtype": dtype, "length": length, "vocab": config["vocab_size"]}
            # more digits would be noise
            rounded = {name: float(f"{value:.4g}") for name, value in row.items()}
            yield {**about, "batch": len(batches_of_kind[0]), **rounded}


@lru_cache
def find_peak(dtype: str) -> float:
    """Return the operations a second of matrix products, which bound every step."""
    return measure_peak(DTYPES[dtype])


def describe_work(work: Work) -> Row:
    """Return the share of supervised tokens, that of padded positions which hold a token, and the limit."""
    texts = list(chain.from_iterable(work.batches))
    tokens = sum(length for length, _ in texts)
    supervised = 0
    for _, spans in texts:
        supervised += sum(stop - start for start, stop in spans)
    # the published step reads every text of a batch to the end of the longest
    padded = sum(len(batch) * max(batch)[0] for batch in work.batches)
    peak = find_peak(work.dtype)
    limit = tokens * peak / count_flops(work.config, texts)
    return {"fill": tokens / padded, "share": supervised / tokens, "peak": peak, "limit": limit}


def cut_all(texts: list[Text], max_length: int) -> list[Text]:
    """Return the first tokens of all texts that have an answer there which a head can predict."""
    cut = []
    for length, spans in texts:
        # nothing predicts the first two tokens
        clipped = [[max(start, 2), min(stop, max_length)] for start, stop in spans]
        kept = [span for span in clipped if span[0] < span[1]]
        if kept:
            cut.append((min(length, max_length), kept))
    return cut


def full_text(length: int) -> Text:
    """Return a text with four answers that make three quarters of it."""
    quarter = length // 4
    return length, [[start + quarter // 4, start + quarter] for start in range(0, length, quarter)]


# -- tables ------------------------------------------------------------------------------------------------------------


def table(results: Row) -> str:
    """Return speed and memory of the EAGLE-1 step."""
    header = ["numbers", "V", "T", "texts", "fill", "share", "limit, tokens/s", "published", "ours"]
    header += ["ours / published", "of the limit", "memory, published", "ours", "ratio"]
    lines = []
    for row in results["rows"]:
        texts = f"{row['batch']} real" if row["texts"] == "real" else "1 full"
        cells = [row["dtype"], f"{row['vocab']:,}", f"{row['length']:,}", texts]
        cells += [f"{row['fill']:.2f}", f"{row['share']:.2f}"]
        cells += [f"{row[name]:,.0f}" for name in ("limit", "published", "ours")]
        cells += [f"**{row['ratio']:.2f}**", f"{row['of_limit']:.0%}"]
        cells += [f"{row[f'{side}_mb']:,.0f} MB" for side in ("published", "ours")]
        cells.append(f"{row['ours_mb'] / row['published_mb']:.2f}")
        lines.append(cells)
    return markdown(header, lines, results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print the table and write the result file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[256, 1024], help="tokens of a text"
    )
    parser.add_argument("--dtypes", choices=DTYPES, nargs="+", default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    # the lengths and answers of real conversations
    texts = json.loads(RESULTS.read_text())["texts"]
    results: Row = {"machine": made_on(rounds=args.rounds), "texts": texts, "rows": []}
    for row in measure_rows(args.dtypes, args.lengths, args.rounds, texts):
        results["rows"].append(row)
        print(row, file=sys.stderr, flush=True)
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
