"""Stage 3, decoding where speculation is earned: a trained head on a small model that costs what a large one costs.

The small model is widened (`bench.widen`): its tokens are the small model's, its time is a large model's. So this is a
simulation of acceptance, and a measurement of time.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch

from bench.gpu.worker import Context, Figures, Unit
from bench.rehearsal import make_target, write_conversations
from bench.speed_arms import ASSISTED, PEERS, PLAIN, POLICY, SHAPES, THEIRS, WideTarget
from bench.widen import count_weights
from data_prep.conversations import read_conversations
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.static_loop import capture_cuda
from eagle.formats.checkpoint import save_head
from eval.tune import chain

SIZES = {"8 B": 8e9, "1 B": 1e9}
NUM_PROMPTS = 8
CAPTURED = "captured"
COMPILED = "compiled"
# the fastest of these is what tuning would find
ALL_SHAPES = {
    **SHAPES,
    "chain 1": chain(1),
    "chain 2": chain(2),
    "chain 5": chain(5),
    "dynamic 4": Budget(4, 3, 2),
}


def units(context: Context) -> dict[str, Unit]:
    """Return the arms, single requests of the large model first, and what torch compiles last."""
    cases = []
    sizes = context.pick(list(SIZES), ["8 B"])
    batches = context.pick((1, 8, 32), (1, 2))
    for size, batch in product(sizes, batches):
        cases += [(size, batch, arm) for arm in list_arms(context, batch)]
    if not context.rehearse:
        cases += [("8 B", 1, f"{arm}, {COMPILED}") for arm in (PLAIN, "eagle1, chain 3")]
    measured: dict[str, Unit] = {}
    for size, batch, arm in cases:
        measured[f"{size}, batch {batch}, {arm}"] = partial(
            measure_arm, context, size, batch=batch, arm=arm
        )
    return measured


def list_arms(context: Context, batch: int) -> list[str]:
    """Return what decodes so many requests; transformers assists and looks up a single one alone."""
    shapes = context.pick([*ALL_SHAPES, POLICY], ["chain 3", POLICY])
    arms = [PLAIN, THEIRS, *(f"eagle1, {shape}" for shape in shapes)]
    if batch > 1:
        return arms
    arms += ["ngram, chain 7", f"eagle1, chain 3, {CAPTURED}", f"eagle1, dynamic 8, {CAPTURED}"]
    # a draft model is there if it was trained, too
    has_draft_model = context.inputs != "" and (Path(context.inputs) / "draft_model/head").is_dir()
    if has_draft_model:
        arms.append("draft_model, chain 5")
    for name in PEERS:
        needs_draft_model = name.startswith(ASSISTED)
        if name != THEIRS and (has_draft_model or not needs_draft_model):
            arms.append(name)
    return arms


@lru_cache(1)  # only one of these models fits on the device
def open_target(context: Context, size: str) -> tuple[WideTarget, list[list[int]]]:
    """Return the widened model of this size, and its prompts."""
    gc.collect()
    folder = Path(context.inputs or make_inputs(Path(context.work) / "decoding"))
    small = Target.load(
        folder / "target", dtype="bfloat16", device=context.device.type, packed=False
    )
    weights = context.pick(SIZES[size], 1.5 * count_weights(small.model))

    def load(name: str, target: Target) -> Any:
        if name == "ngram":
            return load_drafter(name, target)
        return load_drafter(folder / name / "head", target)

    prompts = []
    conversations = read_conversations(str(folder / "data/heldout.jsonl"))
    for conversation in islice(conversations, NUM_PROMPTS):
        question = conversation.messages[0]["content"]
        prompts.append(small.chat(question))
    return WideTarget(small, weights, load, ["draft_model"]), prompts


def make_inputs(folder: Path) -> Path:
    """Make a small random target with a random head and questions, which tell time and no acceptance."""
    if not folder.exists():
        (folder / "data").mkdir(parents=True)
        write_conversations(folder / "data")
        make_target(folder / "target", "small")
        target = Target.load(folder / "target", dtype="bfloat16", device="cpu")
        head = Eagle1.for_target(Eagle1.Settings(), target.config)
        save_head(folder / "eagle1/head", head, "", {})
    return folder


@lru_cache
def decode_plain(
    context: Context, size: str, batch: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the prompts of a batch, the first ones again where there are fewer, and plain decoding's answers."""
    wide, questions = open_target(context, size)
    prompts = [questions[i % len(questions)] for i in range(batch)]
    _, answers = wide.runner(PLAIN, None)(prompts, Sampling(), context.pick(64, 8))
    return prompts, answers


def measure_arm(context: Context, size: str, batch: int, arm: str) -> Figures:
    """Time the answers of one arm, and compare them with plain decoding's in the same dtype.

    Args:
        context: What the units of this call are run with.
        size: A key of `SIZES`.
        batch: How many prompts are decoded together.
        arm: A drafter and its shape, perhaps captured or compiled, or one of `PEERS`.
    """
    wide, _ = open_target(context, size)
    prompts, expected = decode_plain(context, size, batch)
    new_tokens = context.pick(64, 8)
    name = arm.partition(", ")[0]
    shape = arm.removeprefix(f"{name}, ").partition(", ")[0]
    plan: Any = ALL_SHAPES.get(shape)
    if shape == POLICY:
        plan = wide.policy(name, prompts, chain(3))
    with changed(context, wide, arm):
        run = wide.runner(arm, plan)
        # not timed: what only a first call does
        run(prompts, Sampling(), 4)
        figures, answers = run(prompts, Sampling(), new_tokens)
        if arm not in PEERS and batch == 1:
            figures["seconds of a cycle"] = time_parts(wide, name, plan, prompts[0])
    identical = sum(map(list.__eq__, answers, expected))
    rate = figures["tokens"] / figures["seconds"]
    line = f"{rate:,.1f} tokens/s"
    if figures.get("cycles"):
        line += f", tau {figures['committed'] / figures['cycles']:.2f}"
    line += f", {identical} of {batch} as plain"
    return {"line": line, "tokens/s": rate, "identical": identical, **figures}


def time_parts(wide: WideTarget, name: str, plan: Any, prompt: list[int]) -> dict[str, float]:
    """Return the mean seconds of each part of a cycle.

    Args:
        wide: The target and its drafters.
        name: The drafter.
        plan: The budget or policy of its cycles.
        prompt: Is decoded once more, with each part timed.
    """
    trace = generate(
        wide.target,
        wide.drafter(name),
        prompt,
        budget=plan,
        max_new_tokens=16,
        stop=[],
        timing=True,
    )
    seconds: dict[str, float] = {}
    for cycle in trace.cycles:
        for part, value in (cycle.seconds or {}).items():
            seconds[part] = seconds.get(part, 0.0) + value / len(trace.cycles)
    return seconds


@contextmanager
def changed(context: Context, wide: WideTarget, arm: str) -> Iterator[None]:
    """Capture the head's draft loop as a CUDA graph, or compile the target's layers, while this lasts."""
    captured: list[Any] = []
    if arm.endswith(CAPTURED) and context.device.type == "cuda":
        captured.append(wide.drafter("eagle1"))
    compiled: list[Any] = []
    if arm.endswith(COMPILED):
        compiled += wide.target.layers
    forwards = [layer.forward for layer in compiled]
    for head in captured:
        head.capture = capture_cuda
    for layer in compiled:
        layer.forward = torch.compile(layer.forward, dynamic=True)
    try:
        yield
    finally:
        for head in captured:
            head.capture = None
        for layer, forward in zip(compiled, forwards, strict=True):
            layer.forward = forward
