"""Speed and memory of a training step beside the published one and the machine's limit: `python bench/train_speed.py`.

In one run on one thread, in CPU seconds: the limit is the floating-point operations that a step cannot do without, at
the matrix-product peak measured then and there; both loops take turns. On an accelerator (`--device cuda --size
llama-3.1-8b`) seconds are those of the clock, after all work is done.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import product
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter, process_time
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import LlamaConfig

from bench.published_eagle1 import PublishedHead, padded, published_loss, published_optimizer, published_step
from bench.resident import beyond
from bench.train_report import plot, table
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.data.examples import Batch, Example, collate
from eagle.drafters.eagle1 import Eagle1
from eagle.log import script
from eagle.recipe import Recipe
from eval.results import commit

Text = tuple[int, list[list[int]]]  # how long, and where the assistant speaks
SMALL: tuple[Text, ...] = ((64, [[8, 60]]),)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Sizes(NamedTuple):
    """The sizes of a head."""

    vocab: int
    width: int
    mlp: int
    heads: int
    key_heads: int


@dataclass(frozen=True)
class Case:
    """A head, and batches of texts for it."""

    sizes: Sizes
    batches: tuple[tuple[Text, ...], ...]
    dtype: str
    device: str

    def shape(self) -> LlamaConfig:
        """The head's sizes as a configuration."""
        vocab, width, mlp, heads, key_heads = self.sizes
        shape = LlamaConfig(vocab_size=vocab, hidden_size=width, intermediate_size=mlp, head_dim=width // heads)
        shape.num_attention_heads, shape.num_key_value_heads = heads, key_heads
        return shape

    def cost(self) -> dict[str, float]:
        """Tokens, slots and necessary operations: what follows a text's last answer is left out, the rest is read."""
        vocab, width, mlp, heads, key_heads = self.sizes
        texts = [text for batch in self.batches for text in batch]
        counted = [[place for span in spans for place in range(*span)] for _, spans in texts]
        slots, rows = sum(map(len, counted)), sum(places[-1] - 1 for places in counted)
        pairs = sum(place - 1 for places in counted for place in places)  # of a query and a key that it sees
        fuse, law = rows * 2 * width**2, slots * vocab * width
        block = rows * 2 * width * key_heads * width // heads + slots * (2 * width**2 + 3 * width * mlp)
        block += 2 * pairs * width
        # forward: both laws; backward: the weights of fc, the hidden states of one law, weights and inputs of the block
        flops = 2 * (fuse + 2 * law + block + fuse + law + 2 * block)
        tokens, places = sum(length for length, _ in texts), sum(len(b) * max(n for n, _ in b) for b in self.batches)
        return {"tokens": tokens, "slots": slots, "fill": tokens / places, "share": slots / tokens, "flops": flops}


def made(case: Case) -> tuple[nn.Embedding, nn.Linear, list[list[Example]]]:
    """A random embedding and LM head in fp32, and the case's batches with random tokens and features."""
    torch.manual_seed(0)
    vocab, width = case.sizes[:2]
    with torch.device(case.device):
        embedding, output = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
    batches: list[list[Example]] = []
    for batch in case.batches:
        batches.append([])
        for length, spans in batch:
            mask = torch.zeros(length, dtype=torch.bool)
            for start, stop in spans:
                mask[start:stop] = True
            features = torch.randn(length, 1, width)
            batches[-1].append(Example(torch.randint(vocab, (length,)), mask, features))
    return embedding.requires_grad_(False), output.requires_grad_(False), batches


def published(case: Case) -> Callable[[int], None]:
    """The rendering: a step of it on batch i."""
    embedding, output, batches = made(case)
    head = PublishedHead(case.shape()).to(case.device)
    optimizer, inputs = published_optimizer(head), [padded(batch, case.device) for batch in batches]

    def step(i: int) -> None:
        loss = partial(published_loss, head, inputs[i], embedding.weight, output.weight, noise_seed=i)
        published_step(loss, optimizer, bf16=case.dtype == "bf16")

    return step


def ours(case: Case) -> Callable[[int], None]:
    """This project's step on batch i, with masters in fp32 and what is frozen in the dtype of the case."""
    embedding, output, batches = made(case)
    frozen = TargetHead(embedding.to(DTYPES[case.dtype]), output.to(DTYPES[case.dtype]))
    head = Eagle1.for_target(Eagle1.Settings(), case.shape()).to(case.device)
    optimizer = torch.optim.AdamW(head.parameters(), lr=3e-5, betas=(0.9, 0.95), fused=True)
    inputs = [collate(batch, (-1,)).to(torch.device(case.device)) for batch in batches]

    return lambda i: our_step(head, inputs[i], frozen, optimizer, bf16=case.dtype == "bf16")


def our_step(
    head: TrainableDrafter, batch: Batch, frozen: TargetHead, optimizer: torch.optim.Optimizer, *, bf16: bool
) -> None:
    """One update as the training loop makes it."""
    with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=bf16):
        total = head(batch, frozen)["total"]
    total.backward()
    nn.utils.clip_grad_norm_(head.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


SIDES = {"published": published, "ours": ours}


def clock(device: str) -> float:
    """CPU seconds of this process, or seconds once an accelerator has done all it was told."""
    if device == "cpu":
        return process_time()
    torch.accelerator.synchronize()
    return perf_counter()


def peak(case: Case, tries: int = 2) -> float:
    """The most operations a second of several big products: a square one, and the step's own shapes."""
    dtype, best, (vocab, width, mlp, *_) = DTYPES[case.dtype], 0.0, case.sizes
    for m, k, n in [(2048, 2048, 2048), (1024, width, mlp), (256, width, min(vocab, 32768))]:
        left, right = (torch.randn(*size, device=case.device, dtype=dtype) for size in ((m, k), (n, k)))
        repeats = max(int(1e10 // (2 * m * k * n)), 1) if case.device == "cpu" else 100
        for _ in range(tries):
            begun = clock(case.device)
            for _ in range(repeats):
                left @ right.T
            best = max(best, repeats * 2 * m * k * n / (clock(case.device) - begun))
    return best


def speeds(case: Case, rounds: int) -> dict[str, Any]:
    """Useful tokens a second of both, taking turns, and of the limit."""
    steps = {name: side(case) for name, side in SIDES.items()}
    times: dict[str, list[float]] = {name: [] for name in SIDES}
    small = replace(case, batches=(SMALL,))
    for side in SIDES.values():
        side(small)(0)
    cost, peaks = case.cost(), []
    for _ in range(rounds):
        peaks.append(peak(case))
        for name, step in steps.items():
            begun = clock(case.device)
            for i in range(len(case.batches)):
                step(i)
            times[name].append(clock(case.device) - begun)
    seconds = {name: median(found) for name, found in times.items()}
    speed = {name: cost["tokens"] / spent for name, spent in seconds.items()}
    return {
        **cost,
        "peak": max(peaks),
        "limit": cost["tokens"] * max(peaks) / cost["flops"],
        **speed,
        "ratio": speed["ours"] / speed["published"],
        "of_limit": cost["flops"] / max(peaks) / seconds["ours"],
    }


def memory(case: Case, name: str) -> float:
    """Megabytes that one step needs at its peak, beyond what was held before it; in a process of its own."""
    torch.set_num_threads(1)
    step = SIDES[name](replace(case, batches=(SMALL, case.batches[0])))
    step(0)
    if case.device != "cpu":
        held = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        step(1)
        return (torch.accelerator.max_memory_allocated() - held) / 1e6
    return beyond(lambda: step(1))


def both(case: Case, rounds: int) -> dict[str, Any]:
    """Speed here, memory of each side in a fresh process."""
    row = speeds(case, rounds)
    for name in SIDES:
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
            row[f"{name}_mb"] = fresh.submit(memory, case, name).result()
    return {key: float(f"{value:.4g}") for key, value in row.items()}


# -- texts -------------------------------------------------------------------------------------------------------------


def read(data: Path, tokenizer: Path, count: int) -> list[Text]:
    """How long real conversations are and where the assistant speaks in them, of `count` drawn at random."""
    overrides = [f"target.path={tokenizer}", f"data.train={data}", "data.max_length=2048", "data.limit=1000"]
    recipe = Recipe.load(Path(__file__).parent.parent / "recipes/tiny/eagle1.yaml", overrides)
    texts = []
    for example in tokenize_data(recipe, load_tokenizer(recipe))[0]:
        edges = torch.nn.functional.pad(example.loss_mask.int(), (1, 1)).diff().nonzero()[:, 0].tolist()
        texts.append((len(example.tokens), [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]))
    return Random(0).sample([text for text in texts if cut(text, 256)], count)


def cut(text: Text, longest: int) -> Text | None:
    """A text's first tokens, without answers that no slot predicts; None where no answer is left."""
    length, spans = min(text[0], longest), [[max(start, 2), min(stop, longest)] for start, stop in text[1]]
    kept = [span for span in spans if span[0] < span[1]]
    return (length, kept) if kept else None


def full(length: int) -> Text:
    """A text with four answers that make three quarters of it."""
    quarter = length // 4
    return length, [[place + quarter // 4, place + quarter] for place in range(0, length, quarter)]


# the head, and conversations a batch: two where four would take the published step 10 GB
SIZES: dict[str, list[tuple[Sizes, int]]] = {
    "small": [(Sizes(8192, 256, 704, 4, 4), 4), (Sizes(131072, 512, 1408, 8, 8), 2)],
    "llama-3.1-8b": [(Sizes(128256, 4096, 14336, 32, 8), 4)],
}


def cells(texts: list[Text], size: str, device: str, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """All rows of the table, each printed when it is there."""
    rows = []
    for dtype, (sizes, batch), length in product(DTYPES, SIZES[size], lengths):
        short = [text for text in (cut(text, length) for text in texts) if text]
        used = short[: (4 if sizes.vocab < 100000 else 2) * batch]
        batches = tuple(tuple(used[i : i + batch]) for i in range(0, len(used), batch))
        for kind, chosen in (("real", batches), ("full", ((full(length),),))):
            facts = {"texts": kind, "dtype": dtype, "length": length, "vocab": sizes.vocab, "batch": len(chosen[0])}
            rows.append({**facts, **both(Case(sizes, chosen, dtype, device), rounds)})
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def curves(device: str, rounds: int) -> dict[str, list[dict[str, Any]]]:
    """How the cost of a token grows with the length of a text and with the vocabulary, in fp32."""
    found: dict[str, list[dict[str, Any]]] = {"length": [], "vocabulary": []}
    for length in (256, 512, 1024, 2048):
        case = Case(Sizes(8192, 256, 704, 4, 4), ((full(length),),), "fp32", device)
        found["length"].append({"at": length, **speeds(case, rounds)})
    for vocab in (2048, 8192, 32768, 131072):
        case = Case(Sizes(vocab, 256, 704, 4, 4), ((full(512),),), "fp32", device)
        found["vocabulary"].append({"at": vocab, **speeds(case, rounds)})
    keys = ("at", "limit", "published", "ours")
    return {name: [{key: round(row[key], 1) for key in keys} for row in rows] for name, rows in found.items()}


def main(argv: list[str]) -> None:
    """Measure, print the table, write the result file and the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=SIZES, default="small")
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--data", type=Path, help="conversations; without, the lengths and answers of the last result")
    parser.add_argument("--tokenizer", type=Path, help="a folder with a tokenizer and a chat template, for --data")
    parser.add_argument("--out", type=Path, default=Path("docs/results/train_speed.json"))
    parser.add_argument("--picture", type=Path, default=Path("docs/images/train_speed.svg"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    last = Path("docs/results/train_speed.json")
    texts = read(args.data, args.tokenizer, 16) if args.data else json.loads(last.read_text())["texts"]
    results = {
        "machine": {
            "device": platform.machine() if args.device == "cpu" else torch.cuda.get_device_name(),
            "size": args.size,
            "torch": torch.__version__,
            "date": str(date.today()),
            "commit": commit(),
        },
        "rows": cells(texts, args.size, args.device, args.lengths, args.rounds),
        "curves": curves(args.device, args.rounds) if args.size == "small" else {},
        "texts": texts,
    }
    print(table(results))
    args.out.write_text(json.dumps(results) + "\n")
    if results["curves"]:
        args.picture.write_text(plot(results))


if __name__ == "__main__":
    script(main)
