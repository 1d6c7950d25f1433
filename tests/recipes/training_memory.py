"""Memory of training: what `recipes.forecast` says, against the loop itself, over tensors without numbers or with.

    python -m tests.recipes.training_memory [--out FILE]

The loop's own steps run (`eagle.training.train`). Small heads are trained for real, and the CPU's allocator tells
every byte; big ones on tensors without numbers, whose storages are looked at from outside after every operation.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig

from bench.machine import made_on, markdown, write_results
from eagle.core.examples import Example
from eagle.drafters import settings_of
from eagle.log import script
from eagle.recipe import Recipe, TrainSection
from eagle.shipped import STAGES
from eagle.training.train import Run
from recipes.footprint import EmptyRun, Footprint, large_chunks
from recipes.forecast import GB, PRECISION, SUPERVISED, empty_head, sizes_of, training_bytes

ROOT = Path(__file__).parents[2]
# methods of published sizes
HEADS: dict[str, dict[str, Any]] = {
    "EAGLE-1": {"kind": "eagle1", "fc_bias": False},
    "HASS": {"kind": "hass", "fc_bias": False},
    "EAGLE-3": {"kind": "eagle3"},
    "EAGLE-3, 32,000 drafted": {"kind": "eagle3", "draft_vocab": 32_000},
    "EAGLE-3.1": {"kind": "eagle3", "draft_vocab": 32_000, "fc_norm": True, "norm_output": True},
    "draft model": {"kind": "draft_model", "hidden_size": 1024},
}
TARGETS = (
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen3-30B-A3B",
    "meta-llama/Llama-3.1-70B-Instruct",
)
LENGTHS = (2_048, 2_048)
# small enough to train with real numbers
SMALL = LlamaConfig(
    vocab_size=8_000,
    hidden_size=512,
    intermediate_size=1_408,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
)
SMALL_LENGTHS = (256, 256)


class Texts:
    """Features in memory, of sequences whose last tokens are supervised."""

    # read in this thread
    together = True
    sampled = False

    def __init__(self, run: EmptyRun, lengths: Sequence[int], supervised: float) -> None:
        batch = run.batch(lengths, supervised)
        self.identity: dict[str, Any] = {}
        self.taps = batch.taps
        tensors = (batch.tokens, batch.loss_mask, batch.features)
        columns = [tensor.split(batch.lengths) for tensor in tensors]
        self.examples = [Example(*rows) for rows in zip(*columns, strict=True)]

    def __len__(self) -> int:
        return len(self.examples)

    def mask(self, index: int) -> Tensor:
        return self.examples[index].loss_mask

    def supervised_tokens(self, index: int) -> Tensor:
        return self.examples[index].tokens

    def read(self, indices: Sequence[int]) -> list[Example]:
        return [self.examples[index] for index in indices]


def run_loop(
    head: Any,
    config: Any,
    lengths: Sequence[int],
    supervised: float,
    **train: Any,
) -> None:
    """Run two steps of the loop itself, each over these sequences."""
    tiny = Recipe.load(STAGES / "recipes/tiny/eagle1.yaml")
    section = TrainSection(
        out="nowhere",
        batch_size=len(lengths),
        epochs=2,
        validation=0,
        **train,
    )
    recipe = tiny.model_copy(update={"train": section})
    # another run in this process may have used another precision
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(
        cpu=True,
        device_placement=False,
        mixed_precision="bf16" if section.dtype == "bfloat16" else "no",
        gradient_accumulation_steps=section.accumulation,
    )
    empty = EmptyRun(head, config, PRECISION[section.dtype])
    # without numbers it cannot move
    empty.head.to = lambda *_, **__: empty.head  # type: ignore[method-assign]
    texts = Texts(empty, lengths, supervised)
    try:
        run = Run(
            accelerator,
            recipe,
            empty.head,
            empty.target_head,
            texts,
            None,
            "",
        )
        batches: Any = run.dealer.batches(0)
        for step in range(2):
            run._advance(step, batches)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


class Watched(TorchDispatchMode):
    """The bytes of all storages that operations have read or made and that are still there, at most."""

    most = 0

    def __init__(self) -> None:
        super().__init__()
        # storages by address, without keeping them alive
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run an operation, and look which storages are left."""
        output = function(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs, output)):
            if isinstance(tensor, Tensor):
                storage = StorageWeakRef(tensor.untyped_storage())
                self.seen.setdefault(storage.cdata, (storage, tensor.untyped_storage().nbytes()))

        self.seen = {key: entry for key, entry in self.seen.items() if not entry[0].expired()}
        self.most = max(self.most, sum(size for _, size in self.seen.values()))
        return output


def live_bytes(
    head: Any,
    config: Any,
    lengths: Sequence[int],
    supervised: float = SUPERVISED,
    **train: Any,
) -> int:
    """Return the most bytes that two steps of the loop hold, on tensors without numbers."""
    with Footprint().on_accelerator(), Watched() as watched:
        run_loop(head, config, lengths, supervised, **train)
    return watched.most


def allocated_bytes(run: Callable[[], None]) -> int:
    """Return the most bytes that the CPU's allocator had given at once."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as traced, large_chunks():
        run()
    events = traced.profiler.kineto_results.events()
    changes = [event for event in events if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    # freed bytes are negative
    return max(accumulate(event.nbytes() for event in changes))


def measure_big() -> Iterator[dict[str, Any]]:
    """Yield a row of every method at published sizes."""
    for path in TARGETS:
        config = sizes_of(path).config
        for name, section in HEADS.items():
            head = empty_head(settings_of(section, "bench"), config)
            forecast = training_bytes(head, config, LENGTHS, torch.bfloat16)
            live = live_bytes(head, config, LENGTHS, dtype="bfloat16")
            print(f"{path} {name}: {forecast / live:.3f}", flush=True)
            yield {
                "target": path,
                "head": name,
                "forecast": forecast,
                "measured": live,
            }


def measure_small() -> Iterator[dict[str, Any]]:
    """Yield a row of every method at a width of 512, by the allocator."""
    narrow = {"draft_vocab": 2_000, "hidden_size": 256}
    for name, section in HEADS.items():
        small = {**section, **{key: narrow[key] for key in narrow if key in section}}
        head = empty_head(settings_of(small, "bench"), SMALL)
        for dtype in ("bfloat16", "float32"):
            forecast = training_bytes(head, SMALL, SMALL_LENGTHS, PRECISION[dtype])
            run = partial(run_loop, head, SMALL, SMALL_LENGTHS, 1.0, dtype=dtype)
            allocated = allocated_bytes(run)
            print(f"{name} {dtype}: {forecast / allocated:.3f}", flush=True)
            yield {
                "head": name,
                "dtype": dtype,
                "forecast": forecast,
                "measured": allocated,
            }


def table(results: Any) -> str:
    """Return what the loop holds, and how far the forecast lies above it, as Markdown."""
    targets = dict.fromkeys(row["target"].split("/")[1] for row in results["big"])
    dtypes = dict.fromkeys(f"width 512, {row['dtype']}" for row in results["small"])
    cells: dict[str, list[str]] = {}
    for row in [*results["big"], *results["small"]]:
        held = f"{row['measured'] / GB:.2f} GB"
        if "dtype" in row:
            held = f"{1e3 * row['measured'] / GB:.0f} MB"
        excess = row["forecast"] / row["measured"] - 1
        cells.setdefault(row["head"], []).append(f"{held} ({excess:+.1%})")

    rows = [[head, *figures] for head, figures in cells.items()]
    return markdown(["head", *targets, *dtypes], rows, results["machine"])


def main(argv: list[str]) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("docs/results/memory.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = {
        "machine": made_on(),
        "big": [*measure_big()],
        "small": [*measure_small()],
    }
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    script(main)
