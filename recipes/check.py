"""Two batches through every stage of a recipe, then what the whole run will need: `train_eagle.py RECIPE --check`."""

from __future__ import annotations

import copy
import math
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import Any, NamedTuple

import torch

from data_prep.conversations import Tally
from data_prep.tokens import explain_nothing, load_tokenizer, tokenize_each
from eagle.core.budget import Budget
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Batch, Example, collate
from eagle.data.features import LiveFeatures, roles_of
from eagle.data.identity import identity, tap_identity
from eagle.data.stored_rows import parts_of, token_bytes
from eagle.decoding.decode import generate
from eagle.device import best_device, in_dtype
from eagle.disk import describe_bytes
from eagle.drafters import settings_of
from eagle.drafters.none import NoDrafter
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.recipe import Recipe
from eagle.target.target import Target
from eagle.target.weights.quantised import method_of, read_quantization, why_not_here
from eagle.training.start import first_head
from eagle.training.trackers import check_trackers
from recipes.forecast import (
    GB,
    TFLOPS,
    TOKENS,
    card_bytes,
    conversations_of,
    count_conversations,
    count_steps,
    empty_head,
    forecast,
    parameters,
    sizes_of_config,
    sizes_of_target,
)
from recipes.suggestions import find_unusual

STEPS = 2
# Sequences in a step on a CPU, where 128 take minutes; the rate is the same.
FEW = 8


class Sample(NamedTuple):
    """The first examples of a recipe's data."""

    examples: list[Example]
    conversations: int  # read to get them
    tokens: int
    supervised: float  # share of the tokens


def check(recipe: Recipe) -> None:
    """Run every stage of a recipe on a little data and print its time; the first problem ends it with a message."""
    settings = settings_of(recipe.drafter.model_dump(), "recipe")
    check_trackers(recipe.train)
    planned = recipe
    recipe = with_head_that_is_there(with_data_that_is_there(recipe))
    # A local file is counted before the forecast; anything else would first have to be downloaded.
    is_local = Path(recipe.data.train).exists()
    count = say_conversations(recipe) if is_local else None
    with stage("forecast"):
        fits = say_forecast(planned, count)
    if count is None:
        count = say_conversations(recipe)
    with stage("tokens and masks"):
        sample = read_sample(recipe)
        say(
            f"{len(sample.examples)} examples of {sample.conversations} conversations, {sample.tokens:,} tokens, "
            f"{sample.supervised:.0%} supervised"
        )
    if fits:
        check_target(recipe, settings, sample, count)


def check_target(recipe: Recipe, settings: Any, sample: Sample, count: int) -> None:
    """Run the stages that need the target, then print what the whole run of `count` conversations needs."""
    with stage("target"):
        target = load_target(recipe)
        say(
            f"{parameters(target.model) / 1e9:.3f} B parameters on {target.device} in {target.model.dtype}"
        )
    with stage("memory"):
        sizes = sizes_of_config(target.config)
        empty = empty_head(settings, sizes.config)
        memory = card_bytes(recipe, empty, sizes, cards=1, itemsize=target.model.dtype.itemsize)
        say(
            f"{memory / GB:,.2f} GB of memory while training in one process, where sequences are as long as they may be"
        )
    with stage("features") as timed:
        roles = roles_of(settings, target.config)
        features = LiveFeatures(
            target, sample.examples, identity(recipe, roles), recipe.features.batch_tokens
        )
        size = sequences_at_once(recipe, target.device.type)
        say(f"of {STEPS} steps of {size} sequences, of {recipe.train.batch_size} in a batch")
        starts = range(0, STEPS * size, size)
        batches = [
            collate(features.read(range(start, start + size)), features.taps) for start in starts
        ]
    extracted_per_second = sum(len(batch.tokens) for batch in batches) / timed["seconds"]
    with stage("loss and update"):
        # As in a run, the seed decides the initial weights.
        torch.manual_seed(recipe.train.seed)
        head: Any = first_head(recipe, settings, target, features).to(target.device)
        trained_per_second = time_training(recipe, head, target, batches)
    check_head(recipe, head, target, sample.examples[0], source=features.identity)
    tokens = round(count * sample.tokens / sample.conversations)
    num_examples = round(count * len(sample.examples) / sample.conversations)
    say_whole_run(
        recipe,
        tokens,
        num_examples,
        token_bytes(
            parts_of(tap_identity(roles)),
            recipe.features.dtype,
            sizes.hidden_size,
            sample.supervised,
        ),
        extract_seconds=tokens / extracted_per_second,
        epoch_seconds=tokens / trained_per_second,
    )


def check_head(
    recipe: Recipe, head: Any, target: Target, example: Example, source: dict[str, Any]
) -> None:
    """Save, load, decode with and export a head that has just been trained."""
    with stage("save and load"), tempfile.TemporaryDirectory() as folder:
        save_head(Path(folder) / "head", head, recipe.dump(), source)
        loaded = load_head(Path(folder) / "head")
        for saved, weight in zip(head.parameters(), loaded.parameters(), strict=True):
            assert torch.equal(saved.cpu(), weight)
    with stage("decode"):
        check_decoding(target, head, example)
    with stage("export"), tempfile.TemporaryDirectory() as folder:
        # Some layouts contain the target's embedding, and every layout refuses a scaled one.
        head.bind(target.head)
        for line in describe_exports(head, target.config, folder):
            say(line)


def say_conversations(recipe: Recipe) -> int:
    """Count the conversations, print how many there are, and return it."""
    with stage("conversations"):
        count = count_conversations(recipe.data, recipe.data.train)
        say(f"{count:,} in {recipe.data.train}")
    return count


def sequences_at_once(recipe: Recipe, device: str) -> int:
    """Return the size of a micro-batch of one process, at most `FEW` on a CPU."""
    processes = recipe.train.processes or 1
    size = math.ceil(recipe.train.batch_size / (processes * recipe.train.accumulation))
    return min(size, FEW) if device == "cpu" else size


def describe_exports(head: Any, config: Any, folder: str) -> Iterator[str]:
    """Yield the engines that can serve the head, then a line for each reason why others cannot."""
    ready = []
    refusals = defaultdict(list)
    for engine in EXPORTERS:
        try:
            export(head, config, engine, folder)
            ready.append(engine)
        except ValueError as error:
            text = str(error).removeprefix(f"{engine}: ")
            # Engines share a line if their reasons differ only in their name; names of programs stay.
            reason = re.sub(rf"(?<![`\w]){engine}\b(?!-)", "it", text)
            refusals[shorten(reason, 110, placeholder=" ...")].append(engine)
    yield f"ready for {', '.join(ready) or 'no engine'}"
    for reason, engines in refusals.items():
        yield f"not for {', '.join(engines)}: {reason}"


def say_forecast(recipe: Recipe, count: int | None) -> bool:
    """Print what the run needs before anything is loaded; return whether this machine can hold the target."""
    try:
        sizes = sizes_of_target(recipe.target)
    except (OSError, ValueError) as error:
        say(
            f"none, as the config of {recipe.target.path} cannot be read: {str(error).splitlines()[0]}"
        )
        # The stage that loads the target will say what is wrong.
        return True
    try:
        count = count or conversations_of(recipe)
    except ValueError:
        count = 1_000
        say("for 1,000 conversations, as how many there are is not known before they are read")
    gpus = recipe.train.processes or devices_here()
    run = forecast(recipe, sizes, count, gpus)
    disk = "no disk for features"
    if run.features:
        length = min(TOKENS, recipe.data.max_length)
        disk = (
            f"{describe_bytes(run.features)} of disk for features if each conversation has {length:,} tokens, as in "
            "ShareGPT"
        )
    say("an estimate from the config and the number of conversations, before anything is read:")
    where = f"each of {gpus} GPUs that train" if gpus > 1 else "the GPU or CPU that trains"
    say(f"{run.memory / GB:,.2f} GB on {where}, {disk}")
    say(
        f"on a GPU of {TFLOPS:.0f} TFLOP/s {run.extract_hours:,.1f} hours for features, {run.train_hours:,.1f} to "
        "train"
    )
    if recipe.train.on_policy is not None:
        say(
            "the answers that are written while training, and what is learned from their drafts, come on top"
        )
    say_quantisation(recipe, sizes.bits)
    for line in find_unusual(recipe, sizes, run.steps):
        say(f"unusual: {line}")
    available = memory_here()
    if run.target <= available:
        return True
    precision = f"{sizes.bits} bits" if sizes.bits else "bf16"
    say(
        f"the target needs {run.target / GB:,.0f} GB in {precision}, this machine has {available / GB:,.0f} GB: what "
        "reads it is not checked here. Give the command again where it fits"
    )
    return False


def say_quantisation(recipe: Recipe, bits: int | None) -> None:
    """Print how a quantised target is counted and, if so, why loading it will fail on this machine."""
    quantization = read_quantization(recipe.target.path, revision=recipe.target.revision)
    if quantization is None:
        return
    counted = (
        f"{bits} bits" if bits else "16 bits, as they are unpacked or their config does not say"
    )
    say(
        f"quantised by {method_of(quantization)}: the weights of its layers are counted as {counted}"
    )
    obstacle = why_not_here(quantization, best_device())
    if obstacle:
        say(f"it {obstacle}")


def devices_here() -> int:
    """Return the number of GPUs of this machine, or 1 for its CPU."""
    return max(torch.accelerator.device_count(), 1)


def memory_here() -> int:
    """Return the memory of all GPUs together, else of the machine, in bytes."""
    devices = range(torch.accelerator.device_count())
    gpu_memory = sum(torch.accelerator.get_memory_info(device)[1] for device in devices)
    return gpu_memory or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load_target(recipe: Recipe) -> Target:
    """Load the target; if it is not here, say that the forecast holds nevertheless."""
    try:
        return Target.load(**recipe.target.model_dump())
    except (OSError, ValueError):
        say("it cannot be loaded here; the forecast above needs its config alone")
        raise


def with_data_that_is_there(recipe: Recipe) -> Recipe:
    """Return the recipe on the conversations that will be regenerated, unless their new answers exist."""
    regenerate = recipe.regenerate
    if (
        regenerate is None
        or Path(recipe.data.train).exists()
        or recipe.data.train != regenerate.out
    ):
        return recipe
    say(f"{regenerate.out} is not there yet: checked with the answers of {regenerate.source}")
    data = recipe.data.model_copy(update={"train": regenerate.source})
    return recipe.model_copy(update={"data": data})


def with_head_that_is_there(recipe: Recipe) -> Recipe:
    """Return the recipe with fresh weights, unless the head that it starts from exists."""
    init = recipe.train.init
    if init is None or Path(init).exists():
        return recipe
    say(f"{init} is not there yet: checked with fresh weights")
    train = recipe.train.model_copy(update={"init": None})
    return recipe.model_copy(update={"train": train})


def read_sample(recipe: Recipe) -> Sample:
    """Tokenize as many conversations as give two batches of examples."""
    needed = STEPS * recipe.train.batch_size
    usable: list[Example] = []
    plain = recipe.model_copy(update={"regenerate": None})
    tally = Tally()
    tokenized = tokenize_each(plain, load_tokenizer(recipe), tally)
    for conversations, (_, examples) in enumerate(tokenized, start=1):
        # The first token that a head can predict is the third: it reads a state and the token after that.
        usable += [example for example in examples if example.loss_mask[2:].any()]
        if len(usable) >= needed:
            sample = usable[:needed]
            tokens = sum(len(example.tokens) for example in sample)
            supervised = sum(int(example.loss_mask.sum()) for example in sample)
            return Sample(sample, conversations, tokens, supervised / tokens)
    if not usable:
        raise ValueError(explain_nothing(recipe.data.train, tally))
    raise ValueError(
        f"{recipe.data.train} gives {len(usable)} usable examples, {STEPS} steps need {needed}: lower "
        "train.batch_size, or look at `eagle prepare RECIPE --only masks`"
    )


def time_training(
    recipe: Recipe, head: TrainableDrafter, target: Target, batches: list[Batch]
) -> float:
    """Train on each batch, print its losses, and return the tokens per second of the last step."""
    dtype = getattr(torch, recipe.train.dtype)
    target_head = target.head.cast(dtype)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.train.lr, fused=True)
    head.train()
    for batch in batches:
        start = perf_counter()
        with torch.autocast(target.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = head(batch.to(target.device), target_head)
        losses["total"].backward()
        optimizer.step()
        optimizer.zero_grad()
        # Reading the losses also waits for the GPU, so that the time is that of the whole step.
        values = {name: loss.item() for name, loss in losses.items()}
        say(", ".join(f"{name} {value:.3f}" for name, value in values.items()))
        if not math.isfinite(values["total"]):
            raise ValueError(
                f"the loss is {values['total']}: set train.dtype=float32, or look at the target's features"
            )
    return len(batches[-1].tokens) / (perf_counter() - start)


def check_decoding(target: Target, head: TrainableDrafter, example: Example) -> None:
    """Decode sixteen tokens with the head and without, and compare them."""
    drafter: Any = in_dtype(copy.deepcopy(head).to(target.device), target.model.dtype)
    drafter.bind(target.head)
    first_answer = int(example.loss_mask.nonzero()[0])
    prompt = example.tokens[: max(first_answer, 1)]
    options: dict[str, Any] = {"budget": Budget(4, 4, 1), "max_new_tokens": 16, "stop": []}
    drafted = generate(target, drafter, prompt, **options).tokens
    plain = generate(target, NoDrafter(), prompt, **options).tokens
    is_same = drafted == plain
    # In low precision, reading several tokens at once may round a near-tie to another token.
    is_exact = target.model.dtype == torch.float32 and not getattr(
        target.model, "is_quantized", False
    )
    if is_exact and not is_same:
        raise ValueError(
            "drafting changed what this target says: report it with the target's config"
        )
    verdict = (
        "identical"
        if is_same
        else f"differs, as near-ties may in {target.model.dtype} and in quantised layers"
    )
    say(f"{len(drafted)} tokens with an untrained head, {verdict}")


def say_whole_run(
    recipe: Recipe,
    tokens: int,
    num_examples: int,
    bytes_per_token: float,
    extract_seconds: float,
    epoch_seconds: float,
) -> None:
    """Print what the whole run needs; both times are for all tokens once."""
    steps, epochs = count_steps(recipe.train, num_examples)
    say(
        f"the whole run: {tokens:,} tokens, {epochs:.3g} epochs, about {steps:,} steps; one process of this machine "
        "needs"
    )
    if recipe.features.store:
        size = describe_bytes(tokens * bytes_per_token)
        disk = f"{size} of disk for the features, {bytes_per_token:,.0f} bytes a token"
        say(f"  {disk}, {extract_seconds / 3600:,.2f} h to make them")
    else:
        # Without a store the target computes the features again in every epoch.
        epoch_seconds += extract_seconds
    seconds = epochs * epoch_seconds
    say(
        f"  {seconds / 3600:,.2f} h to train, {seconds / steps:.3g} s a step; divide by the number of processes"
    )


@contextmanager
def stage(name: str) -> Iterator[dict[str, float]]:
    """Print the name of a stage and then its time, which is also put into the yielded dictionary."""
    print(f"{name} ...", flush=True)
    timed: dict[str, float] = {}
    start = perf_counter()
    yield timed
    timed["seconds"] = perf_counter() - start
    say(f"{timed['seconds']:.1f} s")


def say(line: str) -> None:
    """Print one line of a stage."""
    print(f"  {line}", flush=True)
