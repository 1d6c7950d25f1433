"""Two batches through every stage of a recipe, then what the whole run will need: `train_eagle.py RECIPE --check`."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import shorten
from time import perf_counter
from typing import Any

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
from eagle.drafters import settings_of
from eagle.drafters.none import NoDrafter
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.recipe import Recipe
from eagle.target.target import Target
from eagle.target.weights.quantised import method_of, read_quantization, why_not_here
from eagle.training.first_head import first_head
from eagle.training.trackers import check_trackers
from recipes.forecast import (
    GB,
    TFLOPS,
    card_bytes,
    conversations_of,
    count_conversations,
    empty_head,
    forecast,
    parameters,
    sizes_of_config,
    sizes_of_target,
)

STEPS = 2
FEW = 8  # texts of a step on a CPU, where 128 take minutes: the rate is the same


def check(recipe: Recipe) -> None:
    """Every stage on a little data, each with its time; what is wrong in one of them ends it with a message."""
    settings = settings_of(recipe.drafter.model_dump(), "recipe")
    check_trackers(recipe.train)
    planned, recipe = recipe, with_head_that_is_there(with_data_that_is_there(recipe))
    is_local = Path(recipe.data.train).exists()  # else what is known comes before what is fetched
    count = say_conversations(recipe) if is_local else None
    with stage("forecast"):
        fits = say_forecast(planned, count)
    count = say_conversations(recipe) if count is None else count
    with stage("tokens and masks"):
        examples, read = first_examples(recipe)
        lengths = [len(example.tokens) for example in examples]
        share = sum(int(example.loss_mask.sum()) for example in examples) / sum(lengths)
        say(f"{len(examples)} examples of {read} conversations, {sum(lengths):,} tokens, {share:.0%} supervised")
    if not fits:
        return
    with stage("target"):
        target = load_target(recipe)
        say(f"{parameters(target.model) / 1e9:.3f} B parameters on {target.device} in {target.model.dtype}")
    with stage("memory"):
        sizes = sizes_of_config(target.config)
        memory = card_bytes(recipe, empty_head(settings, sizes.config), sizes, 1, target.model.dtype.itemsize)
        say(f"{memory / GB:,.2f} GB of memory while training in one process, where texts are as long as they may be")
    with stage("features") as timed:
        made = identity(recipe, roles_of(settings, target.config))
        live = LiveFeatures(target, examples, made, recipe.features.batch_tokens)
        size = texts_at_once(recipe, target.device.type)
        say(f"of {STEPS} steps of {size} texts, of {recipe.train.batch_size} in a batch")
        batches = [collate(live.read(range(at, at + size)), live.taps) for at in range(0, STEPS * size, size)]
    extracting = sum(lengths[: STEPS * size]) / timed["seconds"]
    with stage("loss and update"):
        torch.manual_seed(recipe.train.seed)
        head: Any = first_head(recipe, settings, target, live).to(target.device)
        training = time_training(recipe, head, target, batches)
    with stage("save and load"), tempfile.TemporaryDirectory() as folder:
        save_head(Path(folder) / "head", head, recipe.dump(), live.identity)
        again = load_head(Path(folder) / "head")
        assert all(torch.equal(a.cpu(), b) for a, b in zip(head.parameters(), again.parameters(), strict=True))
    with stage("decode"):
        check_decoding(target, head, examples[0])
    with stage("export"), tempfile.TemporaryDirectory() as folder:
        head.bind(target.head)  # some layouts hold the target's embedding, and all say so of a scaled one
        for line in describe_exports(head, target.config, folder):
            say(line)
    tokens = round(count * sum(lengths) / read)
    for line in measured_run(recipe, head, target, tokens, share, extracting, training):
        say(line)


def say_conversations(recipe: Recipe) -> int:
    """How many conversations there are."""
    with stage("conversations"):
        count = count_conversations(recipe.data, recipe.data.train)
        say(f"{count:,} in {recipe.data.train}")
    return count


def texts_at_once(recipe: Recipe, device: str) -> int:
    """The texts of a step that is timed: those that one process holds at once, and few of them on a CPU."""
    texts = -(-recipe.train.batch_size // ((recipe.train.processes or 1) * recipe.train.accumulation))
    return min(texts, FEW) if device == "cpu" else texts


def describe_exports(head: Any, config: Any, folder: str) -> Iterator[str]:
    """The engines that the head is ready for, and a line of those that refuse it for the same reason."""
    ready, refusals = [], defaultdict(list)
    for engine in EXPORTERS:
        try:
            export(head, config, engine, folder)
            ready.append(engine)
        except ValueError as error:
            text = str(error).removeprefix(f"{engine}: ")
            reason = re.sub(rf"(?<![`\w]){engine}\b(?!-)", "it", text)  # but in the names of programs
            refusals[shorten(reason, 110, placeholder=" ...")].append(engine)
    yield f"ready for {', '.join(ready) or 'no engine'}"
    yield from (f"not for {', '.join(engines)}: {reason}" for reason, engines in refusals.items())


def say_forecast(recipe: Recipe, count: int | None) -> bool:
    """Tell the target's sizes before anything is loaded; returns whether this machine can hold the target."""
    try:
        sizes = sizes_of_target(recipe.target)
    except (OSError, ValueError) as error:
        say(f"none, as the config of {recipe.target.path} cannot be read: {str(error).splitlines()[0]}")
        return True
    try:
        count = count or conversations_of(recipe)
    except ValueError:
        count = 1_000
        say("for 1,000 conversations, as how many there are is not known before they are read")
    cards = recipe.train.processes or devices_here()
    run = forecast(recipe, sizes, count, cards)
    disk = f"{run.features / GB:,.2f} GB of disk for features" if run.features else "no disk for features"
    where = f"each of {cards} GPUs that train" if cards > 1 else "the GPU or CPU that trains"
    say(f"{run.memory / GB:,.2f} GB on {where}, {disk}")
    say(f"{run.extract_hours:,.1f} GPU hours for features, {run.train_hours:,.1f} to train, at {TFLOPS:.0f} TFLOP/s")
    if recipe.train.on_policy is not None:
        say("the answers that are written while training, and what is learned from their drafts, come on top")
    say_quantisation(recipe, sizes.bits)
    room = memory_here()
    if fits := run.target <= room:
        return fits
    precision = f"{sizes.bits} bits" if sizes.bits else "bf16"
    say(
        f"the target needs {run.target / GB:,.0f} GB in {precision}, this machine has {room / GB:,.0f} GB: what reads "
        "it is not checked here. Give the command again where it fits"
    )
    return fits


def say_quantisation(recipe: Recipe, bits: int | None) -> None:
    """Tell the bits of a quantised target, and why it cannot be loaded here: its stage will end with that."""
    quantization = read_quantization(recipe.target.path, revision=recipe.target.revision)
    if quantization is None:
        return
    held = f"{bits} bits" if bits else "16 bits, as they are unpacked or their config does not say"
    say(f"quantised by {method_of(quantization)}: the weights of its layers are counted as {held}")
    if reason := why_not_here(quantization, best_device()):
        say(f"it {reason}")


def devices_here() -> int:
    """The accelerators of this machine; 1 for its CPU."""
    return max(torch.accelerator.device_count(), 1) if torch.accelerator.is_available() else 1


def memory_here() -> int:
    """Bytes of all accelerators together, else of the machine."""
    if torch.accelerator.is_available():
        return sum(torch.accelerator.get_memory_info(place)[1] for place in range(torch.accelerator.device_count()))
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def load_target(recipe: Recipe) -> Target:
    """The target; where it is not here, that is said, and that the forecast holds nevertheless."""
    try:
        return Target.load(**recipe.target.model_dump())
    except (OSError, ValueError):
        say("it cannot be loaded here; the forecast above needs its config alone")
        raise


def with_data_that_is_there(recipe: Recipe) -> Recipe:
    """The recipe on the conversations that will be regenerated, as long as their new answers are not there."""
    again = recipe.regenerate
    if again is None or Path(recipe.data.train).exists() or recipe.data.train != again.out:
        return recipe
    say(f"{again.out} is not there yet: checked with the answers of {again.source}")
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"train": again.source})})


def with_head_that_is_there(recipe: Recipe) -> Recipe:
    """The recipe with fresh weights, as long as the head that it starts from is not there."""
    init = recipe.train.init
    if init is None or Path(init).exists():
        return recipe
    say(f"{init} is not there yet: checked with fresh weights")
    return recipe.model_copy(update={"train": recipe.train.model_copy(update={"init": None})})


def first_examples(recipe: Recipe) -> tuple[list[Example], int]:
    """Enough examples for two batches, and how many conversations it took."""
    wanted, found = STEPS * recipe.train.batch_size, []
    plain = recipe.model_copy(update={"regenerate": None})
    tally = Tally()
    for read, (_, more) in enumerate(tokenize_each(plain, load_tokenizer(recipe), tally), start=1):
        found += [example for example in more if example.loss_mask[2:].any()]
        if len(found) >= wanted:
            return found[:wanted], read
    if not found:
        raise ValueError(explain_nothing(recipe.data.train, tally))
    raise ValueError(
        f"{recipe.data.train} gives {len(found)} usable examples, {STEPS} steps need {wanted}: lower train.batch_size, "
        "or look at `eagle inspect-mask RECIPE`"
    )


def time_training(recipe: Recipe, head: TrainableDrafter, target: Target, batches: list[Batch]) -> float:
    """Tokens a second of the last step; the losses of each are shown and must be finite."""
    dtype = getattr(torch, recipe.train.dtype)
    frozen = target.head.cast(dtype)
    optimizer = torch.optim.AdamW(head.parameters(), lr=recipe.train.lr, fused=True)
    for batch in batches:
        begun = perf_counter()
        with torch.autocast(target.device.type, torch.bfloat16, enabled=dtype == torch.bfloat16):
            losses = head.train()(batch.to(target.device), frozen)
        losses["total"].backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = {name: loss.item() for name, loss in losses.items()}
        say(", ".join(f"{name} {value:.3f}" for name, value in shown.items()))
        if not losses["total"].isfinite():
            raise ValueError(f"the loss is {shown['total']}: set train.dtype=float32, or look at the target's features")
    return len(batches[-1].tokens) / (perf_counter() - begun)


def check_decoding(target: Target, head: TrainableDrafter, example: Example) -> None:
    """Sixteen tokens with the head and without."""
    drafter: Any = in_dtype(copy.deepcopy(head).to(target.device), target.model.dtype).bind(target.head)
    prompt = example.tokens[: max(int(example.loss_mask.nonzero()[0]), 1)]
    traces = [
        generate(target, each_drafter, prompt, budget=Budget(4, 4, 1), max_new_tokens=16, stop=[])
        for each_drafter in (drafter, NoDrafter())
    ]
    same = traces[0].tokens == traces[1].tokens
    exact = target.model.dtype == torch.float32 and not getattr(target.model, "is_quantized", False)
    if exact and not same:
        raise ValueError("drafting changed what this target says: report it with the target's config")
    near = "identical" if same else f"differs, as near-ties may in {target.model.dtype} and in quantised layers"
    say(f"{len(traces[0].tokens)} tokens with an untrained head, {near}")


def measured_run(
    recipe: Recipe,
    head: TrainableDrafter,
    target: Target,
    tokens: int,
    share: float,
    extracting: float,
    training: float,
) -> Iterator[str]:
    """The whole run, at the rates that were just measured."""
    features, settings, sizes = recipe.features, recipe.train, sizes_of_config(target.config)
    parts = parts_of(tap_identity(roles_of(head.settings, target.config)))
    size = token_bytes(parts, features.dtype, sizes.hidden_size, share)
    yield f"the whole run: {tokens:,} tokens, {settings.epochs} epochs; one process of this machine needs"
    if features.store:
        disk = f"{tokens * size / GB:,.2f} GB of disk for the features, {size:,.0f} bytes a token"
        yield f"  {disk}, {tokens / extracting / 3600:,.2f} h to make them"
    each_epoch = tokens / training + (0 if features.store else tokens / extracting)
    yield f"  {settings.epochs * each_epoch / 3600:,.2f} h to train; divide by the number of processes"


@contextmanager
def stage(name: str) -> Iterator[dict[str, float]]:
    """Say what is being checked, and how long it took."""
    print(f"{name} ...", flush=True)
    timed: dict[str, float] = {}
    begun = perf_counter()
    yield timed
    timed["seconds"] = perf_counter() - begun
    say(f"{timed['seconds']:.1f} s")


def say(line: str) -> None:
    """One line of a stage."""
    print(f"  {line}", flush=True)
