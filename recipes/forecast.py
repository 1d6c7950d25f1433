"""Disk, memory and hours before a run: `python -m recipes.forecast [RECIPE ...]` prints them as Markdown."""

from __future__ import annotations

import argparse
import json
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.data.examples import Batch
from eagle.data.features import taps_of
from eagle.data.shards import token_bytes
from eagle.drafters import DRAFTERS, settings_of
from eagle.log import script
from eagle.recipe import Recipe

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / "docs/results/sizes.json"
SHIPPED = ("vicuna-7b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b")
METHODS = ("eagle1", "hass", "eagle3", "eagle3.1")
CONVERSATIONS = {"Aeala/ShareGPT_Vicuna_unfiltered": 68_000}
TOKENS = 1_330  # of a ShareGPT conversation cut at 2,048: its published 740 GB at a width of 4,096 in bf16
SUPERVISED = 0.75  # share of these tokens
CARDS = 8
TEXT = 512  # tokens of a text in a step that is measured
FEW = 16  # tokens of a text whose products are counted
TFLOPS = 300.0  # a second on a card, 30% of what an H100 is sold with
GB = 1e9


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a forecast must know of a target."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    head_dim: int
    tie_word_embeddings: bool
    parameters: int
    active: int  # parameters that one token visits

    @property
    def config(self) -> LlamaConfig:
        """As much of the target's config as a head is made from."""
        return LlamaConfig(**{field.name: getattr(self, field.name) for field in fields(self)[:8]})

    @property
    def frozen(self) -> int:
        """Parameters that a head borrows: embedding and LM head."""
        return (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class Forecast:
    """One run: parameters of the head, bytes, and hours of one card."""

    parameters: int
    width: int  # of the head's MLP
    tokens: int  # of the data
    features: int  # bytes on disk
    memory: int  # bytes on each card, training on stored features
    target: int  # bytes of the target's weights, on all cards together, while features are made
    extract_hours: float
    train_hours: float


def forecast(recipe: Recipe, sizes: Sizes, conversations: int, cards: int = CARDS, tflops: float = TFLOPS) -> Forecast:
    """What a recipe will need."""
    settings, train = settings_of(recipe.drafter.model_dump(), "recipe"), recipe.train
    head = empty_head(settings, sizes.config)
    tokens = min(conversations, recipe.data.limit or conversations) * min(TOKENS, recipe.data.max_length)
    stored, target = recipe.features.store is not None, 2 * sizes.parameters
    # a step of texts that are all as long as may be
    step = -(-train.batch_size // (cards * train.accumulation)) * recipe.data.max_length
    memory = training_bytes(head, sizes.config, stored * sizes.frozen, step, 2 if train.dtype != "float32" else 4)
    hours = 3600 * tflops * 1e12
    return Forecast(
        parameters(head),
        head.shape.intermediate_size,
        tokens,
        stored * tokens * token_bytes(recipe.features.dtype, len(taps_of(settings, sizes.config)), sizes.hidden_size),
        memory if stored else memory + target // (cards if recipe.features.shard_target else 1),
        target,
        (1 if stored else train.epochs) * 2 * sizes.active * tokens / hours,
        train.epochs * training_flops(head, sizes.config, tokens) / hours,
    )


def empty_head(settings: Any, config: Any) -> TrainableDrafter:
    """The head of a target's config, without its numbers."""
    method, frozen = DRAFTERS[settings.kind], empty_target_head(config, torch.float32)
    with torch.device("meta"):
        weights = {"weights": empty_weights(config).__getitem__} if method.reads.weights else {}
        return method.for_target(settings, config, frozen, supervised=(), **weights)


def empty_target_head(config: Any, dtype: torch.dtype) -> TargetHead:
    """What a head borrows, without its numbers."""
    with torch.device("meta"):
        embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=dtype)
        output = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=dtype)
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def empty_weights(config: Any) -> dict[str, Tensor]:
    """The target's tensors by name, without their numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).state_dict()


def parameters(module: nn.Module) -> int:
    """How many numbers a module has."""
    return sum(tensor.numel() for tensor in module.parameters())


def training_bytes(head: TrainableDrafter, config: Any, frozen: int, tokens: int, itemsize: int = 2) -> int:
    """On one card, for steps of so many tokens: the head, what it borrows, and the most that a step holds at once."""
    # weights in fp32 and a copy in which products are computed; gradients and two moments of what is learned
    learned = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    weights = parameters(head) * (4 + (itemsize if itemsize < 4 else 0)) + learned * 12
    return weights + frozen * itemsize + step_bytes(head, config, tokens, itemsize)


def step_bytes(head: TrainableDrafter, config: Any, tokens: int, itemsize: int = 2) -> int:
    """The most bytes that a step's forward holds at once beside weights and batch, all its tokens supervised."""
    head, batch, frozen = empty_step(head, config, tokens, 1.0, torch.float32 if itemsize == 4 else torch.bfloat16)
    borrowed = frozen.weight, frozen.embedding.get_parameter("weight")
    with Footprint([*head.state_dict().values(), *borrowed, batch.tokens, batch.features]) as footprint:
        head(batch, frozen)
    return footprint.most


def training_flops(head: TrainableDrafter, config: Any, tokens: int, supervised: float = SUPERVISED) -> float:
    """Of one pass over the data, but for what grows faster than the tokens: attention between them."""
    counts = []
    for count in (FEW, 2 * FEW):
        empty, batch, frozen = empty_step(head, config, count, supervised)
        with Footprint() as footprint:
            empty(batch, frozen)["total"].backward()
        counts.append(footprint.flops)
    return tokens * (counts[1] - counts[0]) / FEW


def empty_step(
    head: TrainableDrafter, config: Any, tokens: int, supervised: float, dtype: torch.dtype = torch.float32
) -> tuple[TrainableDrafter, Batch, TargetHead]:
    """All that a step computes with, without its numbers: the head, texts of so many tokens, and what it borrows."""
    with torch.device("meta"):
        empty = type(head)(head.settings, head.shape).to(dtype).eval()
        for part, weight in zip(empty.parameters(), head.parameters(), strict=True):
            part.requires_grad_(weight.requires_grad)
        taps = tuple(dict.fromkeys((*head.taps, *head.teacher_taps)))
        ids = torch.zeros(tokens, dtype=torch.long)
        features = torch.zeros(tokens, len(taps), config.hidden_size, dtype=dtype)
    lengths = [min(TEXT, tokens - start) for start in range(0, tokens, TEXT)]
    mask = torch.cat([torch.arange(length) >= 2 + round((length - 2) * (1 - supervised)) for length in lengths])
    batch = Batch(ids, mask, features, tuple(lengths), taps, tuple(range(len(lengths))))
    return empty, batch, empty_target_head(config, dtype)


class Footprint(TorchDispatchMode):
    """Of the operations under it: FLOPs, and bytes of the storages that they make while anything holds them."""

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self.flops = self.held = self.most = 0
        self.known = WeakIdKeyDictionary({tensor.untyped_storage(): True for tensor in known})

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Computes, and counts by torch's own formulas, which see what autograd functions compute too."""
        if function is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return True  # there is no number to ask; transformers asks whether all texts are whole, which they are
        output = function(*args, **(kwargs or {}))
        if formula := flop_registry.get(function.overloadpacket):
            self.flops += formula(*args, **(kwargs or {}), out_val=output)
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.is_meta and tensor.untyped_storage() not in self.known:
                storage = tensor.untyped_storage()
                self.known[storage] = True
                self._hold(storage.nbytes())
                weakref.finalize(storage, self._hold, -storage.nbytes())
        return output

    def _hold(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)


def sizes_of(path: str, revision: str | None = None) -> Sizes:
    """The sizes of a target: of a published one from the table, else from its config."""
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    if path in known and revision is None:
        return Sizes(**known[path])
    return sizes_of_config(AutoConfig.from_pretrained(path, revision=revision))


def sizes_of_config(config: Any) -> Sizes:
    """The sizes of the model that a config describes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = next((held for name in names if (held := getattr(config, name, None))), 1)
    idle = 1 - (getattr(config, "num_experts_per_tok", None) or 1) / count
    experts = sum(tensor.numel() for name, tensor in model.named_parameters() if ".experts." in name)
    return Sizes(
        config.vocab_size,
        config.hidden_size,
        config.intermediate_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.num_hidden_layers,
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        bool(config.tie_word_embeddings),
        parameters(model),
        round(parameters(model) - experts * idle),
    )


def conversations_of(recipe: Recipe) -> int:
    """How many conversations there are, as far as that is known without reading them."""
    source = recipe.regenerate.source if recipe.regenerate else recipe.data.train
    if recipe.data.limit or source in CONVERSATIONS:
        return recipe.data.limit or CONVERSATIONS[source]
    raise ValueError(f"how many conversations {source} holds is not known: give --conversations N")


def table(rows: dict[str, Forecast]) -> str:
    """Forecasts as Markdown."""
    lines = [
        "| run | head | MLP width | tokens | features on disk | a card, training | the target, extracting "
        "| card hours: features | training |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in rows.items():
        disk = f"{run.features / GB:,.0f} GB" if run.features else "none"
        lines.append(
            f"| {name} | {run.parameters / 1e9:.3f} B | {run.width:,} | {run.tokens / 1e6:.0f} M | {disk} | "
            f"{run.memory / GB:.1f} GB | {run.target / GB:.0f} GB | {run.extract_hours:.1f} | {run.train_hours:.1f} |"
        )
    return "\n".join(lines)


def of_recipes(paths: list[str], cards: int = CARDS, tflops: float = TFLOPS, conversations: int | None = None) -> str:
    """The table of some recipes."""
    rows = {}
    for path in paths:
        recipe = Recipe.load(path if Path(path).exists() else ROOT / path)
        sizes = sizes_of(recipe.target.path, recipe.target.revision)
        rows[f"`{path}`"] = forecast(recipe, sizes, conversations or conversations_of(recipe), cards, tflops)
    return table(rows)


def of_targets() -> str:
    """The table of known targets, each with what `llama-3.1-8b` says."""
    recipe = Recipe.load(ROOT / "recipes/llama-3.1-8b/eagle1.yaml")
    known = sorted(json.loads(KNOWN.read_text()).items(), key=lambda item: item[1]["parameters"])
    return table({name: forecast(recipe, Sizes(**sizes), 68_000) for name, sizes in known})


def main(argv: list[str]) -> None:
    """Print the forecasts of the recipes that are named, or of all shipped recipes and all known targets."""
    parser = argparse.ArgumentParser(prog="python -m recipes.forecast", description=__doc__)
    parser.add_argument("recipes", nargs="*", metavar="RECIPE")
    parser.add_argument("--cards", type=int, default=CARDS, help="that share a step")
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="that a card computes a second")
    parser.add_argument("--conversations", type=int, help="of the data, where that is not known")
    asked = parser.parse_args(argv)
    shipped = [f"recipes/{name}/{method}.yaml" for name in SHIPPED for method in METHODS]
    paths = asked.recipes or [path for path in shipped if (ROOT / path).exists()]
    print(of_recipes(paths, asked.cards, asked.tflops, asked.conversations))
    if not asked.recipes:
        print(f"\n{of_targets()}")


if __name__ == "__main__":
    script(main)
