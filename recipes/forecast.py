"""Disk, memory and hours before a run: `python -m recipes.forecast [RECIPE ...]` prints them as Markdown."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.extract import taps_of
from eagle.log import script
from eagle.objectives import LOGITS_ELSEWHERE
from eagle.recipe import Recipe
from eagle.shards import token_bytes

ROOT = Path(__file__).parent.parent
KNOWN = ROOT / "docs/results/sizes.json"
SHIPPED = ("vicuna-7b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-30b-a3b")
CONVERSATIONS = {"Aeala/ShareGPT_Vicuna_unfiltered": 68_000}
TOKENS = 1_330  # of a ShareGPT conversation cut at 2,048: its published 740 GB at a width of 4,096 in bf16
SUPERVISED = 0.75  # share of these tokens
CARDS = 8
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
    head_dim: int
    tie_word_embeddings: bool
    parameters: int
    active: int  # parameters that one token visits

    @property
    def config(self) -> LlamaConfig:
        """As much of the target's config as a head is made from."""
        return LlamaConfig(**{field.name: getattr(self, field.name) for field in fields(self)[:7]})

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
    taps = taps_of(DRAFTERS[settings.kind])
    # a step of texts that are all as long as may be
    step = -(-train.batch_size // (cards * train.accumulation)) * recipe.data.max_length
    hours = 3600 * tflops * 1e12
    return Forecast(
        parameters(head),
        head.shape.intermediate_size,
        tokens,
        tokens * token_bytes(recipe.features.dtype, len(taps), sizes.hidden_size),
        training_bytes(head, sizes.frozen, step, 2 if train.dtype != "float32" else 4),
        2 * sizes.parameters,
        2 * sizes.active * tokens / hours,
        train.epochs * training_flops(head, tokens) / hours,
    )


def empty_head(settings: Any, config: Any) -> TrainableDrafter:
    """The head without its numbers."""
    with torch.device("meta"):
        return DRAFTERS[settings.kind].for_target(settings, config)


def parameters(module: torch.nn.Module) -> int:
    """How many numbers a module learns."""
    return sum(tensor.numel() for tensor in module.parameters())


def training_bytes(head: TrainableDrafter, frozen: int, tokens: int, itemsize: int = 2) -> int:
    """On one card, for steps of so many tokens: the head, what it borrows, activations, and the logits of a chunk."""
    # weights, gradients and two moments in fp32, and a copy in which products are computed
    learned = parameters(head) * (16 + (itemsize if itemsize < 4 else 0))
    logits = min(LOGITS_ELSEWHERE, tokens * head.shape.vocab_size) * (2 * itemsize + 2 * 4)
    return learned + frozen * itemsize + activation_bytes(head.shape, tokens, itemsize) + logits


def activation_bytes(shape: Any, tokens: int, itemsize: int = 2) -> int:
    """What one block keeps for its backward pass, all of the tokens supervised."""
    attention = (2 * shape.num_attention_heads + 2 * shape.num_key_value_heads) * shape.head_dim
    # features, embedding and both side by side, residual stream, norm, predicted and true states; MLP
    return tokens * itemsize * (14 * shape.hidden_size + 2 * attention + 4 * shape.intermediate_size)


def training_flops(head: TrainableDrafter, tokens: int) -> float:
    """Of one pass over the data: every weight at every token, the LM head at supervised ones; attention is left out."""
    # of the LM head the teacher's logits, the student's, and the gradient at the student's states
    return tokens * (6.0 * parameters(head) + SUPERVISED * 6.0 * head.shape.vocab_size * head.shape.hidden_size)


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
        lines.append(
            f"| {name} | {run.parameters / 1e9:.3f} B | {run.width:,} | {run.tokens / 1e6:.0f} M | "
            f"{run.features / GB:,.0f} GB | {run.memory / GB:.1f} GB | {run.target / GB:.0f} GB | "
            f"{run.extract_hours:.1f} | {run.train_hours:.1f} |"
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
    paths = asked.recipes or [f"recipes/{name}/eagle1.yaml" for name in SHIPPED]
    print(of_recipes(paths, asked.cards, asked.tflops, asked.conversations))
    if not asked.recipes:
        print(f"\n{of_targets()}")


if __name__ == "__main__":
    script(main)
