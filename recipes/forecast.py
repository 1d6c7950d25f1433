"""Disk, memory and hours before a run: `eagle forecast [RECIPE ...]` prints them as Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from data_prep.conversations import read_conversations
from data_prep.tokens import read_options
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import MAX_PENDING
from eagle.data.features import BATCH_TOKENS, roles_of
from eagle.data.identity import tap_identity
from eagle.data.stored_rows import parts_of, token_bytes
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.decoder_block import head_shape
from eagle.log import script
from eagle.recipe import DataSection, Recipe, TargetSection, recipe_parser
from eagle.shipped import RECIPES, STAGES
from eagle.target.weights.quantised import quantization_of, weight_bits
from recipes.footprint import EmptyRun, Footprint, empty_target_head
from recipes.text_memory import TextMemory, count_in_words, table_of_states, text_memory

KNOWN = STAGES / "docs/results/sizes.json"
SHIPPED = (
    *("vicuna-7b", "llama-3.1-8b", "llama-3.1-70b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "mimo-7b"),
    *("qwen3-next-80b", "qwen3.5-9b", "nemotron-3-nano", "gemma-3n", "llama-4-scout"),
)
CONVERSATIONS = {"Aeala/ShareGPT_Vicuna_unfiltered": 68_000}
TOKENS = 1_330  # of a ShareGPT conversation cut at 2,048: its published 740 GB at a width of 4,096 in bf16
SUPERVISED = 0.75  # share of these tokens
CARDS = 8
ZERO_BUCKET = 500_000_000  # gradients that DeepSpeed, left to itself, sends at a time
PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16}
TFLOPS = 300.0  # a second on a card, 30% of what an H100 is sold with
GB = 1e9


@dataclass(frozen=True, slots=True)
class Sizes:
    """The facts of a target that a forecast needs."""

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
    text: TextMemory | None = None  # of a target that keeps states of a text
    bits: int | None = None  # of a weight of the layers, where they are quantised

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
    token_bytes: int  # of a token's features, stored
    features: int  # bytes on disk
    memory: int  # bytes on each card, training on stored features
    target: int  # bytes of the target's weights, on all cards together, while features are made
    extract_hours: float
    train_hours: float


def forecast(recipe: Recipe, sizes: Sizes, conversations: int, cards: int = CARDS, tflops: float = TFLOPS) -> Forecast:
    """The memory, disk and time that a recipe will need."""
    if recipe.joint is not None:
        raise ValueError("no forecast is made of a target that trains with its heads: joint=null forecasts them alone")
    settings, train = settings_of(recipe.drafter.model_dump(), "recipe"), recipe.train
    head = empty_head(settings, sizes.config)
    tokens = min(conversations, recipe.data.limit or conversations) * min(TOKENS, recipe.data.max_length)
    stored = recipe.features.store is not None
    parts = parts_of(tap_identity(roles_of(settings, sizes.config)))
    size = round(token_bytes(parts, recipe.features.dtype, sizes.hidden_size, SUPERVISED))
    hours = 3600 * tflops * 1e12
    return Forecast(
        parameters(head),
        head.shape.intermediate_size,
        tokens,
        size,
        stored * tokens * size,
        card_bytes(recipe, head, sizes, cards),
        target_bytes(sizes),
        (1 if stored else train.epochs) * 2 * sizes.active * tokens / hours,
        train.epochs * tokens * token_flops(head, sizes.config, recipe.data.max_length) / hours,
    )


def empty_head(settings: Any, config: Any) -> TrainableDrafter:
    """The head of a target's config, without its numbers."""
    method = DRAFTERS[settings.kind]
    with torch.device("meta"):
        weights = {"weights": empty_weights(config).__getitem__} if method.reads.weights else {}
        return method.for_target(settings, config, empty_target_head(config, torch.float32), supervised=(), **weights)


def empty_weights(config: Any) -> dict[str, Tensor]:
    """The target's tensors by name, without their numbers."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).state_dict()


def parameters(module: nn.Module) -> int:
    """How many numbers a module has."""
    return sum(tensor.numel() for tensor in module.parameters())


def card_bytes(
    recipe: Recipe, head: TrainableDrafter, sizes: Sizes, cards: int, itemsize: int = 2, stage: int = 0
) -> int:
    """The most that one card holds at worst, where texts are as long as may be, and all of them supervised."""
    train, length = recipe.train, recipe.data.max_length
    texts = -(-train.batch_size // (cards * train.accumulation))
    held = training_bytes(head, sizes.config, texts * [length], PRECISION[train.dtype], train.accumulation)
    held += exchange_bytes(learned(head), cards, stage)
    if recipe.features.store and not train.decode and train.on_policy is None:
        return held
    split = cards if recipe.features.shard_target else 1
    held += target_bytes(sizes, split, itemsize)
    if PRECISION[train.dtype].itemsize == itemsize:
        held -= itemsize * sizes.frozen  # what is borrowed is the target's own
    if recipe.features.store:
        return held
    states = texts * length * len({*head.taps, *head.teacher_taps}) * sizes.hidden_size * itemsize
    ahead = 0 if recipe.features.shard_target else MAX_PENDING
    return held + (1 + ahead) * states + reading_bytes(sizes, texts, length)


def learned(head: nn.Module) -> int:
    """How many numbers training changes."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


def exchange_bytes(learned: int, ranks: int, stage: int = 0) -> int:
    """The memory that ZeRO's stages 2 and 3 add to a process; DDP, whose gradients are its buckets, adds nothing."""
    if ranks == 1 or stage == 0:
        return 0
    # gradients, moments and with stage 3 weights are split, and so is the copy of weights that ZeRO updates
    split = {2: 12, 3: 16}[stage]
    return round(learned * (4 / ranks - split * (1 - 1 / ranks))) + 4 * ZERO_BUCKET


def target_bytes(sizes: Sizes, split: int = 1, itemsize: int = 2) -> int:
    """The target on a card: whole, or a share of its layers, two of which are whole while they are read."""
    layers = (sizes.parameters - sizes.frozen) * (sizes.bits or 8 * itemsize) // 8
    gathered = 2 * layers // sizes.num_hidden_layers if split > 1 else 0
    return itemsize * sizes.frozen + layers // split + gathered


def reading_bytes(sizes: Sizes, texts: int, length: int) -> int:
    """The memory of the target beside its weights while it reads: that of one dense layer of its sizes, in bf16."""
    config = LlamaConfig(**{**sizes.config.to_dict(), "num_hidden_layers": 1, "vocab_size": 8})
    texts = max(min(texts, BATCH_TOKENS // length), 1)
    with Footprint() as footprint, torch.no_grad():
        model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
        footprint.most = weights = footprint.held
        model(torch.zeros(texts, length, dtype=torch.long), use_cache=False)
    return footprint.most - weights


def training_bytes(
    head: TrainableDrafter, config: Any, lengths: Sequence[int], dtype: torch.dtype, accumulation: int = 1
) -> int:
    """The most that two whole steps hold at once, of parts with texts of these lengths, all of them supervised."""
    with Footprint().on_accelerator() as footprint:
        run = EmptyRun(head, config, dtype)
        for _ in range(2):  # the second beside AdamW's moments
            run.step(lengths, 1.0, min(accumulation, 2))  # a second part beside the first one's gradients
    return footprint.most


def token_flops(head: TrainableDrafter, config: Any, max_length: int, supervised: float = SUPERVISED) -> float:
    """Of a step, for each token of a usual text."""
    length = min(TOKENS, max_length)
    with Footprint().on_accelerator() as footprint:
        EmptyRun(head, config, torch.float32).step([length], supervised)
    return footprint.flops / length


def sizes_of(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Sizes:
    """The sizes of a target: of a published one from the table, else from its config."""
    known = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    if path in known and revision is None:
        return read_sizes(known[path])
    config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
    return replace(sizes_of_config(config.get_text_config()), bits=weight_bits(quantization_of(config)))


def sizes_of_target(target: TargetSection) -> Sizes:
    """The sizes of a recipe's target."""
    return sizes_of(target.path, target.revision, trust_remote_code=target.trust_remote_code)


def read_sizes(row: dict[str, Any]) -> Sizes:
    """The sizes of a row of the table."""
    return Sizes(**{**row, "text": TextMemory(*row["text"]) if "text" in row else None})


def sizes_of_config(config: Any) -> Sizes:
    """The sizes of the model that a config describes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    idle = 1 - (getattr(config, "num_experts_per_tok", None) or 1) / next(filter(None, counts), 1)
    experts = sum(tensor.numel() for name, tensor in model.named_parameters() if ".experts." in name)
    shape = head_shape(config)  # configs without attention, as Mamba's, or with other names lack some of its sizes
    return Sizes(
        config.vocab_size,
        config.hidden_size,
        shape.intermediate_size,
        shape.num_attention_heads,
        shape.num_key_value_heads,
        config.num_hidden_layers,
        shape.head_dim,
        bool(getattr(config, "tie_word_embeddings", False)),
        parameters(model),
        round(parameters(model) - experts * idle),
        text_memory(model),
        weight_bits(quantization_of(config)),
    )


def conversations_of(recipe: Recipe) -> int:
    """How many conversations there are, as far as that is known without fetching them."""
    again = None if Path(recipe.data.train).exists() else recipe.regenerate
    source = again.source if again else recipe.data.train
    if Path(source).exists():
        return count_conversations(recipe.data, source, answered=again is None)
    if recipe.data.limit or source in CONVERSATIONS:
        return recipe.data.limit or CONVERSATIONS[source]
    raise ValueError(f"how many conversations {source} holds is not known: give --conversations N")


def count_conversations(data: DataSection, source: str, *, answered: bool = True) -> int:
    """How many conversations a source holds, by reading it."""
    return sum(1 for _ in read_conversations(source, answered=answered, **read_options(data)))


def table(rows: dict[str, Forecast]) -> str:
    """Forecasts as Markdown."""
    lines = [
        "| run | head | MLP width | tokens | bytes a token | features on disk | a GPU, training "
        "| the target, extracting | GPU hours: features | training |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, run in rows.items():
        disk = f"{run.features / GB:,.0f} GB" if run.features else "none"
        lines.append(
            f"| {name} | {count_in_words(run.parameters, 3)} | {run.width:,} | {count_in_words(run.tokens)} | "
            f"{run.token_bytes:,} | {disk} | {run.memory / GB:.1f} GB | {run.target / GB:.0f} GB | "
            f"{run.extract_hours:.1f} | {run.train_hours:.1f} |"
        )
    return "\n".join(lines)


def of_recipes(words: list[str], cards: int = CARDS, tflops: float = TFLOPS, conversations: int | None = None) -> str:
    """The table of some recipes, each with `key=value` of the words, and of the states that their targets keep."""
    overrides = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word] or shipped()
    rows, texts = {}, dict[str, TextMemory]()
    for path in paths:
        recipe = Recipe.load(path, overrides)
        sizes = sizes_of_target(recipe.target)
        rows[f"`{path}`"] = forecast(recipe, sizes, conversations or conversations_of(recipe), cards, tflops)
        texts |= {recipe.target.path: sizes.text} if sizes.text else {}
    return f"{table(rows)}\n\n{table_of_states(texts)}" if texts else table(rows)


def shipped() -> list[str]:
    """The recipes for cards that come with the project, but for those that train the target too."""
    paths = [path for folder in SHIPPED for path in sorted((RECIPES / folder).glob("*.yaml"))]
    return [str(path.relative_to(STAGES)) for path in paths if Recipe.load(path).joint is None]


def of_targets() -> str:
    """The table of known targets, each with what `llama-3.1-8b` says."""
    recipe = Recipe.load("llama-3.1-8b/eagle1")
    known = sorted(json.loads(KNOWN.read_text()).items(), key=lambda item: item[1]["parameters"])
    return table({name: forecast(recipe, read_sizes(sizes), 68_000) for name, sizes in known})


def main(argv: list[str]) -> None:
    """Print the forecasts of the recipes that are named, or of all shipped recipes and all known targets."""
    parser = recipe_parser("eagle forecast", __doc__)
    parser.add_argument("words", nargs="*", metavar="RECIPE|key=value", help="recipes, and key=value laid over each")
    parser.add_argument("--cards", type=int, default=CARDS, help="that share a step")
    parser.add_argument("--tflops", type=float, default=TFLOPS, help="that a card computes a second")
    parser.add_argument("--conversations", type=int, help="of the data, where that is not known")
    asked = parser.parse_intermixed_args(argv)
    print(of_recipes(asked.words, asked.cards, asked.tflops, asked.conversations))
    if not asked.words:
        print(f"\n{of_targets()}")


if __name__ == "__main__":
    script(main)
