"""Disk, memory and hours before a run: `python -m recipes.forecast [RECIPE ...]` prints them as Markdown."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.data.features import taps_of
from eagle.data.shards import token_bytes
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.objectives import LOGITS_ELSEWHERE
from eagle.drafters.parts.unroll import UnrolledDrafter
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
    if not isinstance(head, UnrolledDrafter):
        raise ValueError(
            f"a {settings.kind} has other parts than blocks, whose memory is counted here: a step of it is measured by "
            "`accelerate launch recipes/train_eagle.py RECIPE --check`"
        )
    tokens = min(conversations, recipe.data.limit or conversations) * min(TOKENS, recipe.data.max_length)
    stored, target = recipe.features.store is not None, 2 * sizes.parameters
    # a step of texts that are all as long as may be
    step = -(-train.batch_size // (cards * train.accumulation)) * recipe.data.max_length
    memory = training_bytes(head, stored * sizes.frozen, step, 2 if train.dtype != "float32" else 4)
    hours = 3600 * tflops * 1e12
    return Forecast(
        parameters(head),
        head.shape.intermediate_size,
        tokens,
        stored * tokens * token_bytes(recipe.features.dtype, len(taps_of(settings, sizes.config)), sizes.hidden_size),
        memory if stored else memory + target // (cards if recipe.features.shard_target else 1),
        target,
        (1 if stored else train.epochs) * 2 * sizes.active * tokens / hours,
        train.epochs * training_flops(head, tokens) / hours,
    )


def empty_head(settings: Any, config: Any) -> TrainableDrafter:
    """The head without its numbers."""
    with torch.device("meta"):
        embedding, output = nn.Embedding(config.vocab_size, 1), nn.Linear(config.hidden_size, config.vocab_size)
        return DRAFTERS[settings.kind].for_target(settings, config, TargetHead(embedding, output), supervised=())


def parameters(module: nn.Module) -> int:
    """How many numbers a module has."""
    return sum(tensor.numel() for tensor in module.parameters())


def training_bytes(head: UnrolledDrafter, frozen: int, tokens: int, itemsize: int = 2) -> int:
    """On one card, for steps of so many tokens: the head, what it borrows, activations, and the logits of a chunk."""
    steps, said = steps_of(head), said_of(head)
    # weights in fp32 and a copy in which products are computed; gradients and two moments of what is learned
    learned = sum(weight.numel() for weight in head.parameters() if weight.requires_grad)
    weights = parameters(head) * (4 + (itemsize if itemsize < 4 else 0)) + learned * 12
    # rows of the target's LM head cut out for those tokens; the gradient at its own that the forward pass finds
    heads = said * head.shape.hidden_size
    cut = heads * itemsize * (said < head.shape.vocab_size) + heads * 4 * trains_lm_head(head)
    # of all steps the student's, of one the teacher's, and in fp32 both laws and what lies between them
    logits = min(LOGITS_ELSEWHERE, steps * tokens * said) * (itemsize + (itemsize + 4 * 4) / steps)
    return weights + frozen * itemsize + cut + activation_bytes(head, tokens, itemsize) + round(logits)


def activation_bytes(head: UnrolledDrafter, tokens: int, itemsize: int = 2) -> int:
    """What the unroll keeps for its backward pass, all of the tokens supervised."""
    shape, width, settings = head.shape, head.shape.hidden_size, head.settings
    attention, taps = head.layers[0].self_attn, len(head.taps)
    heads = 2 * attention.q_proj.out_features + 2 * attention.k_proj.out_features
    # what attention and the MLP read, the state that is left, and the gradient at it
    vectors, rotary = 4 + getattr(settings, "norm_output", False), 2 * shape.head_dim * 4
    if attention.q_proj.in_features == width:  # features are compared, too
        once, vectors, compared = (taps + 2) * itemsize + 4 - itemsize, vectors + 1, width * (4 - itemsize)
    else:  # embedding and first state before and behind their norms, the taps, and the teacher's states
        once, compared = (taps * (1 + settings.fc_norm) + 3) * itemsize + 4, 0
    step = (vectors * width + heads + 2 * shape.intermediate_size) * itemsize + rotary + compared
    return tokens * (once * width + steps_of(head) * step)


def training_flops(head: UnrolledDrafter, tokens: int, supervised: float = SUPERVISED) -> float:
    """Of one pass over the data: products with weights; those of attention with its keys are left out."""
    steps, (once, known, drafted) = steps_of(head), token_flops(head)
    # the first step reads all tokens and drafts at supervised ones; the others do both there
    block = 3 * (known + supervised * (steps * drafted + (steps - 1) * known))
    # of LM heads the teacher's logits, and each step's with the gradient at its states, and at the matrix
    laws = (2 + steps * (4 + 2 * trains_lm_head(head))) * said_of(head) * head.shape.hidden_size
    # what is read is not learned, so that no gradient flows on
    return tokens * (2 * once + block + supervised * laws)


def token_flops(head: UnrolledDrafter) -> tuple[int, int, int]:
    """Of the forward at one token: what all steps share, what is behind a level's keys, and the rest of the level."""
    width, block = head.shape.hidden_size, head.layers[0]
    taps = block.self_attn.q_proj.weight.new_zeros(1, len(head.taps), width)
    with torch.no_grad():
        with FlopCounterMode(display=False) as once:
            tokens, hidden = head.tokens(taps[:, 0]), head.first(taps)
        with FlopCounterMode(display=False) as known:
            entered = head.entered(tokens, hidden)
            head.keys(entered)
        with FlopCounterMode(display=False) as drafted:
            query, kept = head.queries(entered)
            block.ended(kept + block.self_attn.o_proj(query))
    return once.get_total_flops(), known.get_total_flops(), drafted.get_total_flops()


def steps_of(head: UnrolledDrafter) -> int:
    """How many steps it is trained over."""
    return getattr(head.settings, "steps", 1)


def said_of(head: UnrolledDrafter) -> int:
    """How many tokens it may say."""
    return getattr(head.shape, "draft_vocab_size", None) or head.shape.vocab_size


def trains_lm_head(head: UnrolledDrafter) -> bool:
    """Whether it learns an LM head of its own."""
    return any(name == "lm_head.weight" and weight.requires_grad for name, weight in head.named_parameters())


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
