"""Speed of batches against transformers' own batched `generate`: `python bench/batch_speed.py --model M --chats FILE`.

One thread, CPU seconds, runs that take turns; the figures that count are medians of ratios within one round.
"""

from __future__ import annotations

import argparse
import os
import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.decode_speed import RandomTrees
from bench.machine import made_on, markdown, time_inside, write_results
from data_prep.conversations import Tally, read_conversations
from eagle import Budget, Target, generate
from eagle.core.drafter import Drafter
from eagle.core.tree import chain_paths
from eagle.decoding.cycle_times import measure_costs, time_cycles
from eagle.decoding.forward_costs import Costs
from eagle.drafters.none import NoDrafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import load_drafter
from eagle.log import progress, script
from eagle.target.loading import parse_dtype

BATCHES = (4, 8, 16)
NEW_TOKENS = 64
LONGEST = 256, 1024  # tokens of a real prompt, and of a real answer
SIDE_BY_SIDE, MODELLED_CONTEXT = (1, 4, 16), 200  # of modelled cycles
TREES, CALIBRATION = (Budget(3, 3, 1), Budget(8, 3, 4), Budget(25, 5, 5)), Budget(12, 4, 4)
WAVES, REAL_ROUNDS = 4, 1  # batches of texts of real lengths in a round, and rounds

Text = tuple[list[int], int]  # a prompt, and how long its answer is


def generate_batch(model: Any, texts: Sequence[Text]) -> list[list[int]]:
    """Answers by transformers, padded on the left; the batch runs until its longest answer has ended."""
    width, longest = max(len(prompt) for prompt, _ in texts), max(count for _, count in texts)
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt, _ in texts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in texts])
    options = {"max_new_tokens": longest, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    output = model.generate(ids, attention_mask=mask, **options)
    return [row[width : width + count].tolist() for row, (_, count) in zip(output, texts, strict=True)]


def theirs(model: Any, texts: Sequence[Text], size: int) -> tuple[float, list[list[int]]]:
    """CPU seconds and answers of transformers, batch by batch."""
    start = process_time()
    answers = [
        answer for first in range(0, len(texts), size) for answer in generate_batch(model, texts[first : first + size])
    ]
    return process_time() - start, answers


def ours(target: Target, drafter: Drafter, texts: Sequence[Text], size: int, budget: Any = None) -> tuple[float, Any]:
    """CPU seconds and answers here: a text begins as soon as one has ended."""
    start = process_time()
    options = {"max_new_tokens": [count for _, count in texts], "stop": [], "batch_size": size, "budget": budget}
    traces = generate(target, drafter, [prompt for prompt, _ in texts], **options)
    return process_time() - start, [trace.checked().tokens for trace in traces]


def compare(model: Any, target: Target, waves: Sequence[list[Text]], size: int) -> dict[str, Any]:
    """Tokens per second of both, and the median ratio over the waves."""
    rows = []
    for texts in waves:
        (plain, expected), (batched, answers) = theirs(model, texts, size), ours(target, NoDrafter(), texts, size)
        equal = sum(own == other for own, other in zip(answers, expected, strict=True))
        rows.append((plain, batched, sum(count for _, count in texts), equal, len(texts)))
    speeds = [median(row[2] / row[place] for row in rows) for place in (0, 1)]
    return {
        "transformers": round(speeds[0], 1),
        "ours": round(speeds[1], 1),
        "ratio": round(median(row[0] / row[1] for row in rows), 3),
        "equal": f"{sum(row[3] for row in rows)} of {sum(row[4] for row in rows)}",
    }


def equal_texts(target: Target, size: int, seed: int) -> list[Text]:
    """Random ragged prompts, whose answers are equally long."""
    dice = random.Random(seed)
    lengths = [dice.randrange(40, 160) for _ in range(size)]
    return [([dice.randrange(target.vocab_size) for _ in range(length)], NEW_TOKENS) for length in lengths]


def real_texts(target: Target, chats: Path) -> list[Text]:
    """First questions and the lengths of their answers, in the order of the file."""
    texts: list[Text] = []
    for chat in read_conversations(str(chats), Tally()):
        if len(chat.messages) > 1 and [turn["role"] for turn in chat.messages[:2]] == ["user", "assistant"]:
            prompt = target.chat(chat.messages[:1])[-LONGEST[0] :]
            count = len(target.tokenizer.encode(chat.messages[1]["content"], add_special_tokens=False))
            texts.append((prompt, min(max(count, 1), LONGEST[1])))
    return texts


def share_outside(target: Target, drafter: Any, size: int, budget: Budget) -> float:
    """The share of decoding that is spent outside of the forwards of target and head."""
    names = [name for name in ("read", "fuse_taps", "logits") if isinstance(drafter, torch.nn.Module)]
    with time_inside((target.reader.base, target.head.output), [(drafter, name) for name in names]) as inside:
        spent, _ = ours(target, drafter, equal_texts(target, size, seed=size), size, budget)
    return 1 - inside[0] / spent


def overhead(target: Target, head: str | None, rounds: int) -> dict[str, float]:
    """What the loop spends beside its forwards, by drafter and batch."""
    drafters: dict[str, tuple[Any, Budget]] = {
        "none": (NoDrafter(), Budget()),
        "random trees of 8": (RandomTrees(9, target.vocab_size), Budget(8, 8)),
    }
    if head:
        drafters["head, chain of 3"] = load_drafter(head, target), Budget.fixed(chain_paths(3))
        drafters["head, tree of 8"] = load_drafter(head, target), Budget(8, 3, 4)
    return {
        f"{name}, B = {size}": round(median(share_outside(target, *drafter, size, budget) for _ in range(rounds)), 4)
        for name, (*drafter, budget) in drafters.items()
        for size in (1, 8)
    }


def model_cycles(target: Target, drafter: Drafter, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of cycles by batch and nodes, and modelled over measured ones: the median of rounds.

    Each round measures costs of its own, at one budget, and then cycles of all trees.
    """
    prompts = [prompt for prompt, _ in equal_texts(target, max(SIDE_BY_SIDE), seed=0)]
    prompts = [(prompt * MODELLED_CONTEXT)[:MODELLED_CONTEXT] for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": 4 * NEW_TOKENS}
    figures: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for _, size in progress(list(product(range(rounds), SIDE_BY_SIDE)), "cycles", rounds * len(SIDE_BY_SIDE)):
        rows = {1, 2, 9, 26, *(number * size for number in (1, 2, 3, 4, 5))}
        tables: dict[str, Any] = {"sizes": rows, "batch_sizes": (size,), "batch_tokens": (1, 2, 4, 5, 9, 26)}
        tables |= {"contexts": (MODELLED_CONTEXT,), "rounds": 3}
        costs, timed = measure_costs(target, drafter, prompts, CALIBRATION, options, **tables)
        cycles = {0: [cycle for cycle in timed[size] if not cycle.levels]}
        for tree in TREES:
            timed_tree = time_cycles(costs, target, drafter, prompts[:size], tree, **options, stop=[])
            cycles[tree.nodes] = [cycle for cycle in timed_tree if cycle.levels == tree.depth]
        for nodes, alike in cycles.items():
            measured = median(sum(cycle.seconds.values()) for cycle in alike)
            places = [(cycle.nodes, cycle.rows or (), cycle.context) for cycle in alike]
            modelled, bare = (
                median(each.cycle(*place, size) for place in places) for each in (costs, without_overhead(costs))
            )
            figures[f"B = {size}, {nodes} nodes"].append((1000 * measured, modelled / measured, bare / measured))
    return {case: round_figures(*zip(*rows, strict=True)) for case, rows in figures.items()}


def round_figures(*columns: Sequence[float]) -> dict[str, float]:
    """The median of each column by its name."""
    names = ("measured, ms", "modelled", "forwards alone")
    return {name: float(f"{median(column):.3g}") for name, column in zip(names, columns, strict=True)}


def without_overhead(costs: Costs) -> Costs:
    """The costs of forwards alone."""
    return replace(costs, outside=(0.0, 0.0), batches=tuple(map(without_overhead, costs.batches)))


def cycle_table(results: dict[str, Any]) -> str:
    """Modelled cycles as Markdown."""
    rows = [(case, *row.values()) for case, row in results["cycles"].items()]
    return markdown(("cycle", *next(iter(results["cycles"].values()))), rows, results["machine"])


def peak_bytes() -> int:
    """Peak memory of this process since its counter was reset (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def load(target: Target, prompts: int, size: int, room: int) -> dict[str, Any]:
    """Prompts of random lengths through a cache of fixed room: what was answered, and the peak beside the forecast."""
    dice = random.Random(0)
    lengths = [(dice.randrange(1, 300), dice.randrange(1, 60)) for _ in range(prompts)]
    texts = [([dice.randrange(target.vocab_size) for _ in range(length)], count) for length, count in lengths]
    ours(target, NoDrafter(), texts[:2], 2)
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_bytes(), process_time()
    traces = generate(
        target,
        NoDrafter(),
        [prompt for prompt, _ in texts],
        max_new_tokens=[count for _, count in texts],
        stop=[],
        batch_size=size,
        max_tokens_in_cache=room,
    )
    peak, forecast = peak_bytes() - before, target.cache_bytes(room)
    answered = sum(len(trace.tokens) == count for trace, (_, count) in zip(traces, texts, strict=True))
    return {
        "prompts": prompts,
        "answered": answered,
        "seconds": round(process_time() - start, 1),
        "peak_mb": round(peak / 2**20, 1),
        "forecast_mb": round(forecast / 2**20, 1),
        "peak_over_forecast": round(peak / forecast, 3),
    }


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    rows = []
    for dtype, figures in results["speed"].items():
        for name, row in figures.items():
            rows.append((f"{name}, {dtype}", f"{row['transformers']}", f"{row['ours']}", row["ratio"], row["equal"]))
    parts = [markdown(("tokens a second", "transformers", "here", "ratio", "equal answers"), rows)]
    parts.append(markdown(("beside the forwards", "share"), [(k, f"{v:.1%}") for k, v in results["outside"].items()]))
    parts.append(markdown(("load", ""), results["load"].items(), results["machine"]))
    return "\n\n".join(parts)


def measure(model: Path, texts: Path, rounds: int, dtype: str) -> dict[str, Any]:
    """Ratios with answers of one length, and with those of real lengths."""
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=parse_dtype(dtype)).eval()
    plain.generation_config.eos_token_id = None
    target, figures = Target.load(model, dtype=dtype), {}
    real = real_texts(target, texts)
    for size in progress(BATCHES, f"batches, {dtype}", len(BATCHES)):
        waves = [equal_texts(target, size, seed=round) for round in range(rounds)]
        figures[f"B = {size}, answers of {NEW_TOKENS} tokens"] = compare(plain, target, waves, size)
        count = WAVES * size
        waves = [real[number * count : (number + 1) * count] for number in range(min(rounds, REAL_ROUNDS))]
        figures[f"B = {size}, answers of real lengths"] = compare(plain, target, waves, size)
    return figures


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--chats", type=Path, help="conversations, for the lengths of real answers")
    parser.add_argument("--head", help="a head for the share of time beside the forwards")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1000, help="of the load")
    parser.add_argument("--out", type=Path, default=Path("docs/results/batch_speed.json"))
    parser.add_argument("--cycles", type=Path, help="measure nothing but modelled cycles, of a new head without one")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = Target.load(args.model, dtype="float32")
    if args.cycles:
        torch.manual_seed(0)
        new = Eagle1.for_target(Eagle1.Settings(), target.config).bind(target.head)
        cycles = model_cycles(target, load_drafter(args.head, target) if args.head else new, args.rounds)
        results = {"machine": made_on(target=args.model.name), "cycles": cycles}
        print(cycle_table(results))
        return write_results(args.cycles, results)
    results = {
        "machine": made_on(target=args.model.name),
        "load": load(target, args.prompts, size=16, room=8000),
        "outside": overhead(target, args.head, args.rounds),
        "speed": {dtype: measure(args.model, args.chats, args.rounds, dtype) for dtype in ("float32", "bfloat16")},
    }
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
