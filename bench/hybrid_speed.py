"""Cycles of a hybrid target by the means that read its trees, beside its plain one-token step and a forecast.

A model of Qwen3.5-like layers with random weights reads chains and trees and keeps half of the longest path. CPU
seconds; medians of runs that take turns.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from heapq import nlargest
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5 import Qwen3_5TextConfig

from bench.machine import made_on, markdown, take_turns, write_results
from eagle import DraftTree, Target
from eagle.core.tree import PUBLISHED_TREE, Paths
from eagle.log import progress, script
from eagle.target.state import TargetState
from eagle.target.trees.means import Means
from eagle.target.trees.tree_plan import Plan

MEANS = {"paths": Means(), "levels": Means(levels=True), "by cost": Means(cheaper=True), "whole": Means(whole=True)}
SHAPE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "vocab_size": 4096,
}
CONTEXT = 128  # tokens of the prompt
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def random_hybrid(dtype: torch.dtype, **shape: int) -> Any:
    """Three layers of linear attention and one of full attention, with random weights."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**{**SHAPE, **shape}))
    return model.to(dtype).eval()


def grown_tree(nodes: int, depth: int, top_k: int = 10) -> Paths:
    """The shape of a tree grown as EAGLE-2 does, by random confidences."""
    generator = torch.Generator().manual_seed(0)
    level: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    grown: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(depth):
        children = []
        for weight, path in level:
            rates = torch.randn(top_k, generator=generator).mul(2.5).softmax(0).sort(descending=True).values.tolist()
            children += [(weight * rate, (*path, rank)) for rank, rate in enumerate(rates)]
        level = nlargest(top_k, children)
        grown += children
    return tuple(sorted((path for _, path in nlargest(nodes, grown)), key=lambda path: (len(path), path)))


def shapes() -> dict[str, DraftTree]:
    """The drafts that are read; every number counts the root."""
    trees = {f"tree of {len(paths) + 1}": paths for paths in (PUBLISHED_TREE, grown_tree(60, 7))}
    return {
        **{f"chain of {size}": DraftTree.chain(list(range(1, size + 1))) for size in (1, 4, 8)},
        **{
            name: DraftTree.from_paths(1, [[2 + rank for rank in path] for path in paths])
            for name, paths in trees.items()
        },
    }


def longest_path(tree: DraftTree) -> list[int]:
    """The nodes of the first of the longest paths."""
    depths = tree.depths()
    return tree.path(depths.index(max(depths)))


class Side:
    """A target whose text grows by trees that it reads by given means."""

    def __init__(self, model: Any, means: Means, prompt: list[int]) -> None:
        target = Target(model)
        target.reader.take(means)
        target.reader.checked = True  # the means that are asked for, not the cheapest that pass
        self.state, self.model = target.open(), model
        self.state.admit(0, prompt, room=1024)
        self.state.finish_prompts()
        self.state.cache.measure()  # as the check of means does

    def cycle(self, tree: DraftTree) -> tuple[float, float]:
        """CPU seconds of reading a tree, and of keeping half of its longest path."""
        path = longest_path(tree)
        begun = process_time()
        self.state.read({0: tree})
        read = process_time()
        self.state.keep({0: path[: -(-len(path) // 2)]})
        return read - begun, process_time() - read

    @torch.inference_mode()
    def difference(self, tree: DraftTree) -> float:
        """The largest relative difference from the untouched model's plain logits along the longest path."""
        path = longest_path(tree)
        found = self.state.read({0: tree})[0].logits[path].float()
        text = torch.tensor([[*self.state.text(0), *tree.tokens[path].tolist()]])
        expected = self.model(text, use_cache=False, logits_to_keep=len(path)).logits[0].float()
        return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


class Stepped:
    """The untouched model, which goes on by one token with its own cache."""

    @torch.inference_mode()
    def __init__(self, model: Any, prompt: list[int]) -> None:
        self.model = model
        self.cache = model(torch.tensor([prompt]), logits_to_keep=1, use_cache=True).past_key_values

    @torch.inference_mode()
    def cycle(self, tree: DraftTree) -> tuple[float, float]:
        """CPU seconds of a step, whatever the draft."""
        begun = process_time()
        self.model(tree.tokens[None, :1], past_key_values=self.cache)
        return process_time() - begun, 0.0


def measure(dtype: str, rounds: int, **shape: int) -> dict[str, Any]:
    """Milliseconds of every draft by all means, which take turns."""
    model = random_hybrid(DTYPES[dtype], **shape)
    prompt = torch.randint(model.config.vocab_size, (CONTEXT,), generator=torch.Generator().manual_seed(1)).tolist()
    sides = {name: Side(model, means, prompt) for name, means in MEANS.items()}
    turns: dict[str, Any] = {"plain": Stepped(model, prompt), **sides}
    rows = {}
    for draft, tree in progress(shapes().items(), f"drafts, {dtype}", len(shapes())):
        runs = {name: lambda side=side, tree=tree: side.cycle(tree) for name, side in turns.items()}
        times = take_turns(rounds + 1, runs)
        rows[draft] = {name: milliseconds(figures[1:]) for name, figures in times.items()}  # the first warms up
    last = shapes()["tree of 61"]
    return {
        "read and keep, ms": rows,
        "difference": {name: side.difference(last) for name, side in sides.items()},
        "states": states_of(sides["paths"].state),
    }


def milliseconds(times: Sequence[tuple[float, float]]) -> list[float]:
    """The medians of reading and of keeping."""
    return [round(1000 * median(part), 2) for part in zip(*times, strict=True)]


def states_of(state: TargetState) -> dict[str, int]:
    """Bytes of the mixers' states of one text, as they are held and as the config has them."""
    config = state.target.config
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    recurrent = config.linear_key_head_dim * values * 4  # fp32
    convolution = (2 * keys + values) * config.linear_conv_kernel_dim * state.target.model.dtype.itemsize
    assert state.cache.states
    held = state.cache.states.slots[0].held
    return {
        "held": sum(tensor.nbytes for part in held[max(held)].values() for tensor in part.values()),
        "forecast": config.layer_types.count("linear_attention") * (recurrent + convolution),
        "token": state.cache.column_bytes,
    }


def forecast(dtype: str, **shape: int) -> dict[str, Any]:
    """What a mixer ought to do for each draft: rows of its scan, and bytes of weights and states that it touches."""
    with torch.device("meta"):
        mixer = next(
            part
            for part in random_hybrid(DTYPES[dtype], **shape).modules()
            if type(part).__name__.endswith("GatedDeltaNet")
        )
    weights = sum(part.weight.nbytes for part in mixer.modules() if isinstance(part, nn.Linear))
    state = mixer.num_v_heads * mixer.head_k_dim * mixer.head_v_dim * 4  # fp32
    rows = {}
    for draft, tree in shapes().items():
        plan = Plan([tree.parents.tolist()], len(tree), len(tree))
        paths, longest, levels = len(plan.to_leaves.paths), plan.to_leaves.longest, len(plan.levels)
        rows[draft] = {
            "paths": {"rows": paths * longest, "bytes": weights + 2 * paths * state},
            "levels": {"rows": len(tree), "bytes": levels * weights + 2 * len(tree) * state},
        }
    return {"weights": weights, "state": state, "drafts": rows}


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    measured = results["measured"]
    head = ("plain step", *MEANS, "paths : levels", "paths : by cost", "by cost : plain step")
    parts = [
        markdown((f"{dtype}, ms", *head), [_row(*row) for row in figures["read and keep, ms"].items()])
        for dtype, figures in measured.items()
    ]
    head = ("rows of paths", "rows of levels", "traffic of paths", "traffic of levels")
    drafts = results["forecast"]["drafts"].items()
    parts.append(markdown(("forecast of a mixer, bfloat16", *head), [_forecast_row(*row) for row in drafts]))
    head = ("held", "forecast", "keys and values of a token", "tokens with as many bytes")
    rows = [_state_row(dtype, **figures["states"]) for dtype, figures in measured.items()]
    parts.append(markdown(("states of one text", *head), rows, results["machine"]))
    return "\n\n".join(parts)


def _forecast_row(draft: str, row: dict[str, Any]) -> Sequence[Any]:
    sides = row["paths"], row["levels"]
    return draft, *(side["rows"] for side in sides), *(f"{side['bytes'] / 1e6:,.0f} MB" for side in sides)


def _state_row(dtype: str, held: int, forecast: int, token: int) -> Sequence[Any]:
    sizes = [f"{size / 2**20:.4g} MiB" for size in (held, forecast)]
    return dtype, *sizes, f"{token / 2**10:g} KiB", f"{held / token:,.0f}"


def _row(draft: str, row: dict[str, Any]) -> Sequence[Any]:
    totals = {name: sum(row[name]) for name in ("plain", *MEANS)}
    cells = [f"{row[name][0]:.0f} + {row[name][1]:.0f}" for name in MEANS]
    pairs = [("paths", "levels"), ("paths", "by cost"), ("by cost", "plain")]
    ratios = [f"{totals[one] / totals[other]:.2f}" for one, other in pairs]
    return draft, f"{totals['plain']:.0f}", *cells, *ratios


def main(argv: list[str]) -> None:
    """Measure, print and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=list(DTYPES), choices=list(DTYPES))
    parser.add_argument("--out", type=Path, default=Path("docs/results/hybrid_speed.json"))
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    results = {
        "machine": made_on(**SHAPE, context=CONTEXT, rounds=args.rounds),
        "forecast": forecast("bfloat16"),
        "measured": {dtype: measure(dtype, args.rounds) for dtype in args.dtypes},
    }
    print(table(results))
    write_results(args.out, results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    script(main)
