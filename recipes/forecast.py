"""Forecast disk, memory and hours of a run: `eagle train [RECIPE ...] --estimate` prints them as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, LlamaConfig

from data_prep.conversations import read_conversations
from data_prep.read_once import counted_tokens
from data_prep.tokens import read_options
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import MAX_PENDING
from eagle.data.features import BATCH_TOKENS, roles_of
from eagle.data.identity import tap_identity
from eagle.data.stored_rows import parts_of, token_bytes
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.parts.decoder_block import head_shape
from eagle.log import JSON_HELP, json_alone, script
from eagle.recipe import DataSection, Recipe, TargetSection, TrainSection
from eagle.recipe.command_lines import recipe_parser
from eagle.shipped import RECIPES, STAGES
from eagle.target.gguf import model_folder
from eagle.target.weights.quantised import quantization_of, weight_bits
from eagle.training.plan import Plan
from recipes.footprint import EmptyRun, Footprint, empty_target_head
from recipes.text_memory import TextMemory, count_in_words, table_of_states, text_memory

KNOWN = STAGES / "docs/results/sizes.json"
SHIPPED = (
    *(
        "vicuna-7b",
        "llama-3.1-8b",
        "llama-3.1-70b",
        "qwen3-8b",
        "qwen3-30b-a3b",
        "gpt-oss-20b",
        "mimo-7b",
    ),
    *("qwen3-next-80b", "qwen3.5-9b", "nemotron-3-nano", "gemma-3n", "llama-4-scout"),
)
CONVERSATIONS = {"Aeala/ShareGPT_Vicuna_unfiltered": 68_000}
# Mean tokens of a ShareGPT conversation cut at 2,048, from its published 740 GB at a width of 4,096 in bf16.
TOKENS = 1_330
SUPERVISED = 0.75  # share of these tokens
CARDS = 8
# Gradients that DeepSpeed sends at a time by default.
ZERO_BUCKET = 500_000_000
PRECISION = {"float32": torch.float32, "bfloat16": torch.bfloat16, "auto": torch.bfloat16}
# Per second and GPU: 30% of the peak of an H100.
TFLOPS = 300.0
GB = 1e9


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a target that a forecast needs."""

    # The first eight are named as in transformers' LlamaConfig, which `config` fills with them.
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    head_dim: int
    tie_word_embeddings: bool
    parameters: int
    active: int  # parameters used for one token: not all experts
    text: TextMemory | None = None  # of a target with recurrent states
    bits: int | None = None  # per weight of quantised layers

    @property
    def config(self) -> LlamaConfig:
        """Return the part of the target's config that a head is made from."""
        return LlamaConfig(**{field.name: getattr(self, field.name) for field in fields(self)[:8]})

    @property
    def frozen(self) -> int:
        """Return the number of parameters that a head shares with the target: embedding and LM head."""
        matrices = 1 if self.tie_word_embeddings else 2
        return matrices * self.vocab_size * self.hidden_size


@dataclass(frozen=True, slots=True)
class Forecast:
    """Size, memory and time of one run."""

    parameters: int  # of the head
    width: int  # of the head's MLP
    tokens: int  # in the data
    token_bytes: int  # of the stored features of one token
    features: int  # bytes on disk
    memory: int  # bytes on each GPU while training on stored features
    target: int  # bytes of the target's weights over all GPUs, during extraction
    extract_hours: float  # of one GPU
    train_hours: float  # of one GPU
    conversations: int
    steps: int  # of training
    is_counted: bool  # whether the tokens were counted, not assumed


def forecast(
    recipe: Recipe,
    sizes: Sizes,
    conversations: int,
    cards: int = CARDS,
    tflops: float = TFLOPS,
    counted: int | None = None,
) -> Forecast:
    """Return the memory, disk and time that a recipe needs.

    Args:
        recipe: The recipe.
        sizes: Those of its target.
        conversations: How many its data hold.
        cards: GPUs that share a step.
        tflops: What a GPU computes in a second.
        counted: The tokens of the data; by default `TOKENS` for each conversation.
    """
    if recipe.joint is not None:
        raise ValueError(
            "no forecast is made of a target that trains with its heads: joint=null forecasts them alone"
        )
    settings = settings_of(recipe.drafter.model_dump(), "recipe")
    head = empty_head(settings, sizes.config)
    max_length = recipe.data.max_length
    is_stored = recipe.features.store is not None

    num_conversations = min(conversations, recipe.data.limit or conversations)
    tokens = counted or num_conversations * min(TOKENS, max_length)
    steps, epochs = count_steps(recipe.train, num_conversations)
    tensors = parts_of(tap_identity(roles_of(settings, sizes.config)))
    bytes_per_token = round(
        token_bytes(tensors, recipe.features.dtype, sizes.hidden_size, SUPERVISED)
    )

    # A forward pass costs two FLOPs per active parameter; without a store it is repeated in every epoch.
    extractions = 1 if is_stored else epochs
    extract_flops = extractions * 2 * sizes.active * tokens
    train_flops = epochs * tokens * token_flops(head, sizes.config, max_length)
    flops_per_hour = 3600 * tflops * 1e12
    return Forecast(
        parameters=parameters(head),
        width=head.shape.intermediate_size,
        tokens=tokens,
        token_bytes=bytes_per_token,
        features=tokens * bytes_per_token if is_stored else 0,
        memory=card_bytes(recipe, head, sizes, cards),
        target=target_bytes(sizes),
        extract_hours=extract_flops / flops_per_hour,
        train_hours=train_flops / flops_per_hour,
        conversations=num_conversations,
        steps=steps,
        is_counted=bool(counted),
    )


def count_steps(train: TrainSection, num_examples: int) -> tuple[int, float]:
    """Return the steps of a run, and how often it reads the data: fewer than `epochs` if `max_steps` ends it."""
    # a plan knows what is held out for validation
    plan = Plan([1] * max(num_examples, 1), train)
    return len(plan), len(plan) / plan.steps_an_epoch


def empty_head(settings: Any, config: Any) -> TrainableDrafter:
    """Return the head that a recipe would train on a target, on the device `meta`."""
    method = DRAFTERS[settings.kind]
    options: dict[str, Any] = {"supervised": ()}
    if method.reads.weights:
        options["weights"] = empty_weights(config).__getitem__
    with torch.device("meta"):
        target_head = empty_target_head(config, torch.float32)
        return method.for_target(settings, config, target_head, **options)


def empty_weights(config: Any) -> dict[str, Tensor]:
    """Return the target's tensors by name, on the device `meta`."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).state_dict()


def parameters(module: nn.Module) -> int:
    """Return the number of parameters of a module."""
    return sum(tensor.numel() for tensor in module.parameters())


def card_bytes(
    recipe: Recipe,
    head: TrainableDrafter,
    sizes: Sizes,
    cards: int,
    itemsize: int = 2,
    stage: int = 0,
) -> int:
    """Return the peak memory of one GPU if all sequences have maximum length and are supervised throughout.

    `itemsize` is that of the target's weights, `stage` that of ZeRO.
    """
    train = recipe.train
    features = recipe.features
    dtype = PRECISION[train.dtype]
    length = recipe.data.max_length
    sequences = math.ceil(train.batch_size / (cards * train.accumulation))
    total = training_bytes(
        head, sizes.config, sequences * [length], dtype, accumulation=train.accumulation
    )
    total += exchange_bytes(learned(head), cards, stage)
    if features.store and not train.decode and train.on_policy is None:
        return total

    # From here on the target is in memory too.
    num_shards = cards if features.shard_target else 1
    total += target_bytes(sizes, num_shards, itemsize)
    if dtype.itemsize == itemsize:
        # The head uses the target's embedding and LM head directly; in another precision it keeps a copy.
        total -= itemsize * sizes.frozen
    if features.store:
        return total
    taps = {*head.taps, *head.teacher_taps}
    batch_bytes = sequences * length * len(taps) * sizes.hidden_size * itemsize
    # Batches that a thread computes ahead; a sharded target computes each one when it is needed.
    ahead = 0 if features.shard_target else MAX_PENDING
    return total + (1 + ahead) * batch_bytes + reading_bytes(sizes, sequences, length)


def learned(head: nn.Module) -> int:
    """Return the number of trainable parameters."""
    return sum(weight.numel() for weight in head.parameters() if weight.requires_grad)


def exchange_bytes(learned: int, ranks: int, stage: int = 0) -> int:
    """Return the memory that ZeRO-2 or ZeRO-3 adds to a process; DDP adds none, as its gradients are its buckets."""
    if ranks == 1 or stage == 0:
        return 0
    # Bytes per parameter that are sharded: ZeRO-2 gradients and moments (4 + 8), ZeRO-3 also weights (4).
    sharded = {2: 12, 3: 16}[stage]
    # The fp32 copy of the weights that ZeRO updates is sharded as well.
    per_parameter = 4 / ranks - sharded * (1 - 1 / ranks)
    return round(learned * per_parameter) + 4 * ZERO_BUCKET


def target_bytes(sizes: Sizes, split: int = 1, itemsize: int = 2) -> int:
    """Return the bytes of the target's weights on one of `split` GPUs."""
    layers = (sizes.parameters - sizes.frozen) * (sizes.bits or 8 * itemsize) // 8
    # A sharded target gathers the running layer and the next one.
    gathered = 2 * layers // sizes.num_hidden_layers if split > 1 else 0
    return itemsize * sizes.frozen + layers // split + gathered


def reading_bytes(sizes: Sizes, sequences: int, length: int) -> int:
    """Return the peak activation memory of the target's forward pass over `sequences` sequences of this length.

    It is measured on one dense bf16 layer of the target's sizes, as layers run one after another.
    """
    config = sizes.config
    config.num_hidden_layers = 1
    config.vocab_size = 8
    batch_size = max(min(sequences, BATCH_TOKENS // length), 1)
    with Footprint() as footprint, torch.no_grad():
        model = AutoModel.from_config(config, dtype=torch.bfloat16).eval()
        weights = footprint.held
        # Initialising the weights may have taken more for a moment.
        footprint.most = weights
        model(torch.zeros(batch_size, length, dtype=torch.long), use_cache=False)
    return footprint.most - weights


def training_bytes(
    head: TrainableDrafter,
    config: Any,
    lengths: Sequence[int],
    dtype: torch.dtype,
    accumulation: int = 1,
) -> int:
    """Return the peak memory of two training steps over sequences of these lengths, supervised throughout."""
    # With accumulation, a second micro-batch meets the gradients of the first; a third needs no more.
    micro_batches = min(accumulation, 2)
    with Footprint().on_accelerator() as footprint:
        run = EmptyRun(head, config, dtype)
        # The peak comes in the second step, when AdamW's moments exist.
        for _ in range(2):
            run.step(lengths, 1.0, micro_batches)
    return footprint.most


def token_flops(
    head: TrainableDrafter, config: Any, max_length: int, supervised: float = SUPERVISED
) -> float:
    """Return the FLOPs of a training step per token, for a sequence of average length."""
    length = min(TOKENS, max_length)
    with Footprint().on_accelerator() as footprint:
        EmptyRun(head, config, torch.float32).step([length], supervised)
    return footprint.flops / length


def sizes_of(path: str, revision: str | None = None, *, trust_remote_code: bool = False) -> Sizes:
    """Return the sizes of a target from the table of published targets, else from its config."""
    table = json.loads(KNOWN.read_text()) if KNOWN.exists() else {}
    # The table describes the default revision.
    if path in table and revision is None:
        return read_sizes(table[path])
    config = AutoConfig.from_pretrained(
        model_folder(path, revision), revision=revision, trust_remote_code=trust_remote_code
    )
    return replace(
        sizes_of_config(config.get_text_config()), bits=weight_bits(quantization_of(config))
    )


def sizes_of_target(target: TargetSection) -> Sizes:
    """Return the sizes of a recipe's target."""
    return sizes_of(target.path, target.revision, trust_remote_code=target.trust_remote_code)


def read_sizes(row: dict[str, Any]) -> Sizes:
    """Return the sizes in a row of the table."""
    memory = TextMemory(*row["text"]) if "text" in row else None
    return Sizes(**{**row, "text": memory})


def sizes_of_config(config: Any) -> Sizes:
    """Return the sizes of the model that a config describes."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    # Each token uses `num_experts_per_tok` of the experts, which families count under different names.
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = [getattr(config, name, None) for name in names]
    num_experts = next(filter(None, counts), 1)
    num_active = getattr(config, "num_experts_per_tok", None) or 1
    in_experts = sum(
        tensor.numel() for name, tensor in model.named_parameters() if ".experts." in name
    )
    total = parameters(model)
    # `head_shape` fills what configs without attention (Mamba) lack or call otherwise.
    shape = head_shape(config)
    return Sizes(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        num_hidden_layers=config.num_hidden_layers,
        head_dim=shape.head_dim,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        parameters=total,
        active=round(total - in_experts * (1 - num_active / num_experts)),
        text=text_memory(model),
        bits=weight_bits(quantization_of(config)),
    )


def conversations_of(recipe: Recipe) -> int:
    """Return the number of conversations in a recipe's data, without downloading anything."""
    source = recipe.data.train
    is_answered = True
    if recipe.regenerate and not Path(source).exists():
        # The data will be the target's answers to these questions.
        source = recipe.regenerate.source
        is_answered = False
    if Path(source).exists():
        return count_conversations(recipe.data, source, answered=is_answered)
    if recipe.data.limit or source in CONVERSATIONS:
        return recipe.data.limit or CONVERSATIONS[source]
    raise ValueError(f"how many conversations {source} holds is not known: give --conversations N")


def count_conversations(data: DataSection, source: str, *, answered: bool = True) -> int:
    """Return the number of conversations in a source by reading it."""
    return sum(1 for _ in read_conversations(source, answered=answered, **read_options(data)))


def table(rows: dict[str, Forecast]) -> str:
    """Return forecasts as a Markdown table."""
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


def describe_assumptions(runs: dict[str, Forecast]) -> str:
    """Return a line for each run: how its tokens were counted, and its training steps."""
    lines = []
    for name, run in runs.items():
        counted = "as counted when they were tokenised"
        if not run.is_counted:
            each = run.tokens // max(run.conversations, 1)
            counted = f"assuming {each:,} for each, as in ShareGPT: your own may be shorter"
        lines.append(
            f"`{name}`: {run.tokens:,} tokens in {run.conversations:,} conversations, {counted}; "
            f"about {run.steps:,} training steps"
        )
    return "\n".join(lines)


def forecasts_of(
    words: list[str], cards: int = CARDS, tflops: float = TFLOPS, conversations: int | None = None
) -> tuple[dict[str, Forecast], dict[str, TextMemory]]:
    """Return forecasts by recipe, and recurrent states by target; `key=value` words apply to each recipe."""
    overrides = [word for word in words if "=" in word]
    paths = [word for word in words if "=" not in word]
    forecasts = {}
    states = {}
    for path in paths or shipped():
        recipe = Recipe.load(path, overrides)
        sizes = sizes_of_target(recipe.target)
        count = conversations or conversations_of(recipe)
        counted = None if conversations else counted_tokens(recipe)
        forecasts[path] = forecast(
            recipe, sizes, count, cards=cards, tflops=tflops, counted=counted
        )
        if sizes.text:
            states[recipe.target.path] = sizes.text
    return forecasts, states


def tables_of(forecasts: dict[str, Forecast], states: dict[str, TextMemory]) -> str:
    """Return the tables of forecasts by recipe and of recurrent states."""
    text = table({f"`{path}`": run for path, run in forecasts.items()})
    if not states:
        return text
    return f"{text}\n\n{table_of_states(states)}"


def shipped() -> list[str]:
    """Return the paths of the shipped GPU recipes that train a head alone."""
    paths: list[Path] = []
    for folder in SHIPPED:
        paths += sorted((RECIPES / folder).glob("*.yaml"))
    return [str(path.relative_to(STAGES)) for path in paths if Recipe.load(path).joint is None]


def of_targets() -> dict[str, Forecast]:
    """Return forecasts of published targets, each with the recipe llama-3.1-8b/eagle1."""
    recipe = Recipe.load("llama-3.1-8b/eagle1")
    targets = sorted(json.loads(KNOWN.read_text()).items(), key=lambda item: item[1]["parameters"])
    return {name: forecast(recipe, read_sizes(row), 68_000) for name, row in targets}


def main(argv: list[str]) -> None:
    """Print the forecasts of the recipes that are named, or of all shipped recipes and published targets."""
    parser = recipe_parser("eagle train --estimate", __doc__)
    parser.add_argument(
        "words",
        nargs="*",
        metavar="RECIPE|key=value",
        help="recipes, and overrides for all of them",
    )
    parser.add_argument(
        "--processes", "--cards", type=int, default=CARDS, help="number of GPUs (default: 8)"
    )
    parser.add_argument(
        "--tflops", type=float, default=TFLOPS, help="TFLOP/s of a GPU (default: 300)"
    )
    parser.add_argument(
        "--conversations", type=int, help="number of conversations, if the recipe has no count"
    )
    parser.add_argument("--json", action="store_true", help=JSON_HELP)
    args = parser.parse_intermixed_args(argv)
    with json_alone(args.json) as write_json:
        runs, states = forecasts_of(args.words, args.processes, args.tflops, args.conversations)
        print(tables_of(runs, states))
        if any("=" not in word for word in args.words):
            print(f"\n{describe_assumptions(runs)}")
        # bytes and hours as they are, which the tables round
        values = {"runs": runs, "states": states}
        if not args.words:
            values["targets"] = targets = of_targets()
            print(f"\n{table(targets)}")
        write_json(values)


if __name__ == "__main__":
    script(main)
