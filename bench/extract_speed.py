"""Speed, memory, padding and float8 error of extraction: `python bench/extract_speed.py --model DIR --data FILE`.

The ways take turns over the same conversations on one thread: the model's own forward that keeps nothing, extraction
into a store, and one `torch.save` a conversation after a forward with `output_hidden_states=True`. The figures that
count are ratios of medians of CPU seconds, in which the writing thread is included.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch

from bench.machine import made_on, markdown, take_turns, write_results
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle import Target
from eagle.core.examples import Example
from eagle.data.features import extract
from eagle.data.packing import pack_features, unpack_features
from eagle.data.shard_plan import make_batches, plan_shards
from eagle.data.store import FeatureStore
from eagle.log import progress, script
from eagle.recipe import Recipe

WAYS = {
    "bare": "bare: a forward that keeps nothing",
    "stored": "extraction of 4 taps in bf16 with checksums",
    "saved": "saved: `output_hidden_states=True` and a `torch.save` a conversation",
    "reference": "reference: the same, with the argmax and softmax that EAGLE's script computes and drops",
}


def read_examples(model: Path, data: Path, limit: int) -> list[Example]:
    """Real conversations as the target reads them."""
    recipe = Recipe.load(
        "recipes/tiny/eagle1.yaml",
        [f"target.path={model}", f"data.train={data}", f"data.limit={limit}", "data.max_length=2048"],
    )
    return tokenize_data(recipe, load_tokenizer(recipe))[0]


def bare(target: Target, examples: list[Example], folder: Path) -> None:
    """The model's own forward; nothing is kept."""
    with torch.no_grad():
        for example in examples:
            target.model.model(input_ids=example.tokens[None], use_cache=False)


def stored(target: Target, examples: list[Example], folder: Path) -> None:
    """Extraction as the script does it, with checksums and waiting for the disk."""
    for _ in extracting(target, examples, folder):
        pass


def extracting(target: Target, examples: list[Example], folder: Path) -> Iterator[int]:
    """The tokens of each batch that extraction has stored."""
    taps = taps_of(target)
    plan = plan_shards([len(example.tokens) for example in examples], 1, 1_000_000)
    settings = {"taps": list(taps), "dtype": "bfloat16"}
    store = FeatureStore.create(folder, examples, settings, plan, width=target.config.hidden_size)
    return extract(target, store, range(len(plan)))


def saved_one_by_one(target: Target, examples: list[Example], folder: Path, probabilities: bool = False) -> None:
    """All hidden states of one conversation a forward, and one pickle a conversation.

    `probabilities` adds what EAGLE's reference script computes and drops: the likeliest tokens and their probabilities.
    """
    folder.mkdir()
    with torch.no_grad():
        for number, example in enumerate(examples):
            read = target.model(input_ids=example.tokens[None], output_hidden_states=True)
            if probabilities:
                read.logits.argmax(-1)
                read.logits.softmax(-1)[0].amax(-1)
            kept = torch.stack([read.hidden_states[tap][0] for tap in taps_of(target)]).to(torch.bfloat16)
            row = {"input_ids": example.tokens, "loss_mask": example.loss_mask, "hidden_states": kept}
            torch.save(row, folder / f"{number}.pt")


def taps_of(target: Target) -> tuple[int, ...]:
    """Three layers and the LM head's input, as EAGLE-3 reads them."""
    count = target.config.num_hidden_layers
    return (2, count // 2, count - 3, -1)


def speeds(target: Target, examples: list[Example], rounds: int) -> dict[str, Any]:
    """Tokens a second of each way, and the time of the others in that of extraction."""
    ways: dict[str, Callable[..., None]] = {
        "bare": bare,
        "stored": stored,
        "saved": saved_one_by_one,
        "reference": partial(saved_one_by_one, probabilities=True),
    }

    def measure(way: Callable[..., None]) -> tuple[float, float]:
        with tempfile.TemporaryDirectory() as folder:
            cpu, wall = process_time(), perf_counter()
            way(target, examples, Path(folder) / "out")
            return process_time() - cpu, perf_counter() - wall

    bare(target, examples[:4], Path())
    seconds = take_turns(rounds, {name: partial(measure, way) for name, way in ways.items()})
    medians = {name: [median(column) for column in zip(*pairs, strict=True)] for name, pairs in seconds.items()}
    tokens = sum(len(example.tokens) for example in examples)
    rows: dict[str, Any] = {"conversations": len(examples), "tokens": tokens, "rounds": rounds}
    for name, (cpu, wall) in medians.items():
        rows[name] = {"tokens_per_cpu_second": round(tokens / cpu), "wall": round(tokens / wall)}
    for column, kind in enumerate(("cpu", "wall")):
        for name in ("bare", "saved", "reference"):
            rows[f"stored_over_{name}_{kind}"] = round(medians[name][column] / medians["stored"][column], 3)
    return rows


def memory(target: Target, examples: list[Example]) -> dict[str, float]:
    """Resident megabytes after a tenth, a half and all of an extraction, once every length was seen.

    The kernels keep something for each new length, with or without an extraction.
    """
    bare(target, examples, Path())
    with tempfile.TemporaryDirectory() as folder:
        total, done, seen = sum(len(example.tokens) for example in examples), 0, {}
        for tokens in progress(extracting(target, examples, Path(folder) / "out"), "memory", total, size=int):
            done += tokens
            for share in (0.1, 0.5, 1.0):
                if done >= share * total and f"{share:.0%}" not in seen:
                    pages = int(Path("/proc/self/statm").read_text().split()[1])
                    seen[f"{share:.0%}"] = round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6)
    return seen


def padding(lengths: list[int]) -> dict[str, float]:
    """The share of computed slots that hold no token, for batches of several sizes."""
    shares = {}
    for size in (4096, 8192, 16384):
        batches = make_batches(lengths, size)
        slots = sum(len(batch) * lengths[batch[0]] for batch in batches)
        shares[str(size)] = round(1 - sum(lengths) / slots, 4)
    return shares


def float8_error(target: Target, examples: list[Example]) -> dict[str, Any]:
    """Relative error of each token's state, by tap, with a scale per token or per block of numbers; bf16 beside it."""
    taps = tuple(range(target.config.num_hidden_layers))
    states = torch.cat([target.features(example.tokens[None], (*taps, -1))[0].float() for example in examples])

    def error(rebuilt: torch.Tensor) -> dict[str, list[float]]:
        errors = (rebuilt - states).norm(dim=-1) / states.norm(dim=-1)
        return {
            "mean": [round(x, 4) for x in errors.mean(0).tolist()],
            "max": [round(x, 4) for x in errors.amax(0).tolist()],
        }

    def blocks(width: int) -> torch.Tensor:
        cut = states.unflatten(-1, (-1, width))
        return unpack_features(*pack_features(cut, "float8")).float().flatten(-2)

    ways = {"per token": unpack_features(*pack_features(states, "float8")).float(), "bf16": states.bfloat16().float()}
    ways |= {f"per {width}": blocks(width) for width in (128, 32)}
    return {"tokens": len(states), "taps": [*taps, -1], **{name: error(rebuilt) for name, rebuilt in ways.items()}}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    speed, error = results["speed"], results["float8_error"]
    rows = [
        *((f"{what}, tokens per CPU second", speed[way]["tokens_per_cpu_second"]) for way, what in WAYS.items()),
        *((f"extraction / {way}, CPU (wall)", _ratio(speed, way)) for way in ("bare", "saved", "reference")),
        ("memory after 10%, 50%, 100% of a run, MB", ", ".join(map(str, results["memory_mb"].values()))),
        *((f"padding, batches of {size} slots", f"{share:.1%}") for size, share in results["padding"].items()),
        *(
            (f"float8 error of a state, scale {name}, mean over taps (largest)", _error(error[name]))
            for name in ("per token", "per 128", "per 32")
        ),
        ("bf16 error of a state, mean over taps (largest)", _error(error["bf16"])),
    ]
    return markdown(["what", "figure"], rows, results["machine"])


def _ratio(speed: dict[str, Any], way: str) -> str:
    return f"{speed[f'stored_over_{way}_cpu']} ({speed[f'stored_over_{way}_wall']})"


def _error(row: dict[str, list[float]]) -> str:
    return f"{sum(row['mean']) / len(row['mean']):.2%} ({max(row['max']):.2%})"


def main(argv: list[str]) -> None:
    """Measure, print the table, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help="ShareGPT-style conversations")
    parser.add_argument("--dtype", default="bfloat16", help="of the model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, default=Path("docs/results/extract_speed.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    target = Target.load(args.model, dtype=args.dtype)
    examples = read_examples(args.model, args.data, 400)
    results = {
        "machine": made_on(model=f"{args.model.name} in {args.dtype}"),
        "speed": speeds(target, examples[:24], args.rounds),
        "memory_mb": memory(target, examples[:80]),
        "padding": padding([len(example.tokens) for example in examples]),
        "float8_error": float8_error(Target.load(args.model, dtype="float32"), examples[:24]),
    }
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
