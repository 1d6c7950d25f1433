"""Stage 2, a training step at the shapes of Llama-3.1-8B: tokens a second, share of the device's peak, memory."""

from __future__ import annotations

import gc
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig

from bench.gpu.worker import Context, Figures, Unit
from bench.machine import measure_peak
from bench.steps import Step, Text, Work, llama, our_side, published_side
from eagle.core.drafter import TrainableDrafter
from eagle.decoding.cycle_times import clock_of
from recipes.footprint import EmptyRun, Footprint

LLAMA_8B = llama(128256, 4096, 14336, heads=32, layers=32, key_heads=8)
GOAL = 0.35  # the share of the peak below which a step is profiled
SUPERVISED = 0.65
NUM_OPERATIONS = 15  # that a profile lists


def units(context: Context) -> dict[str, Unit]:
    """Return EAGLE-3 first, for which others have published figures, then the other heads."""
    heads: dict[str, dict[str, Any]] = {
        "eagle3": {"kind": "eagle3", "steps": 7, "draft_vocab": 32000},
        "eagle1": {"kind": "eagle1"},
        "dflash": {"kind": "dflash"},
        "medusa": {"kind": "medusa"},
    }
    config = LLAMA_8B
    texts = [make_text(2048)] * 4
    if context.rehearse:
        heads["eagle3"] |= {"steps": 2, "draft_vocab": 128}
        heads["dflash"] |= {"anchors": 8, "slots": 4}
        config = llama(512, 64, 128, heads=4, key_heads=2)
        texts = [make_text(256)] * 2
    measured: dict[str, Unit] = {}
    for name, head in heads.items():
        # two batches in turns, as no step reads the same features as the one before
        work = Work(
            config, [texts, texts], head, "bf16", features="bf16", device=context.device.type
        )
        measured[name] = partial(measure_step, work)
        # Medusa has no modules that torch compiles, and a CPU compiles for minutes
        if name != "medusa" and not context.rehearse:
            measured[f"{name}, compiled"] = partial(measure_step, work, compiled=True)
    # whose step pads, and computes logits at every position
    published = Work(config, [texts, texts], {"kind": "eagle1"}, "bf16", device=context.device.type)
    measured["eagle1, published"] = partial(measure_published, published)
    return measured


def make_text(length: int) -> Text:
    """Return a text with an answer at the end of every 256 tokens."""
    return length, [[end - round(256 * SUPERVISED), end] for end in range(256, length + 1, 256)]


@lru_cache
def find_peak(device: str) -> float:
    """Return the operations a second of a large bf16 product."""
    return measure_peak(torch.bfloat16, device, 2048 if device == "cpu" else 8192)


def time_step(step: Step, device: str, steps: int = 4, windows: int = 3) -> float:
    """Return the median seconds of a step, over windows of several steps with one wait at the end.

    A wait after every step would hide that the host runs ahead of the device.

    Args:
        step: Runs on batch 0 or 1, in turns.
        device: Whose clock is read.
        steps: How many are timed together.
        windows: How often that is repeated.
    """
    times = []
    clock = clock_of(torch.device(device))
    for _ in range(windows):
        start = clock()
        for i in range(steps):
            step(i % 2)
        times.append((clock() - start) / steps)
    return median(times)


def forecast_step(work: Work, head: TrainableDrafter) -> Footprint:
    """Count the operations of a step and the bytes that two steps hold, without the device."""
    lengths = [length for length, _ in work.batches[0]]
    with Footprint().on_accelerator() as footprint:
        run = EmptyRun(head.to("meta"), LlamaConfig(**work.config), torch.bfloat16)
        run.step(lengths, SUPERVISED)
        flops = footprint.flops
        # memory is that of a step beside the moments which the first one has made
        run.step(lengths, SUPERVISED)
    footprint.flops = flops
    return footprint


def profile_step(step: Step, device: str) -> str:
    """Return the operations that take most time, as a table."""
    activities = [ProfilerActivity.CPU]
    if device != "cpu":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities, record_shapes=True) as profiler:
        for i in range(2):
            step(i)
        # reading it waits for the device
        clock_of(torch.device(device))()
    averages = profiler.key_averages(group_by_input_shape=True)
    by = "self_cpu_time_total" if device == "cpu" else "self_device_time_total"
    return str(averages.table(sort_by=by, row_limit=NUM_OPERATIONS))


def measure_step(work: Work, compiled: bool = False) -> Figures:
    """Measure the steps of a head, and compare memory with what `eagle train --estimate` counts."""
    peak = find_peak(work.device)
    is_gpu = work.device != "cpu"
    # what other units left behind is no memory of this step
    held = 0
    if is_gpu:
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        held = torch.accelerator.memory_allocated()
    torch.manual_seed(0)
    step, head = our_side(work)
    if compiled:
        head.compile_parts()
    for i in range(2):
        # these compile attention, and make the moments
        step(i)

    seconds = time_step(step, work.device)
    memory = 0
    if is_gpu:
        memory = torch.accelerator.max_memory_allocated() - held
    tokens = sum(length for length, _ in work.batches[0])
    operations = profile_step(step, work.device)

    # the forecast needs the head alone
    del step
    gc.collect()
    footprint = forecast_step(work, head)
    rate = footprint.flops / seconds
    figures: Figures = {
        "step s": seconds,
        "tokens/s": tokens / seconds,
        "useful tokens/s": tokens * SUPERVISED / seconds,
        "FLOP/s": rate,
        "MFU": rate / peak,
        "peak GB": memory / 1e9,
        "forecast GB": footprint.most / 1e9,
    }
    if figures["MFU"] < GOAL:
        figures["profile"] = operations
    line = f"{figures['tokens/s']:,.0f} tokens/s, {figures['useful tokens/s']:,.0f} useful, {rate / 1e12:.3g} TFLOP/s"
    line += f", MFU {figures['MFU']:.0%}, {figures['peak GB']:.1f} GB, forecast {figures['forecast GB']:.1f} GB"
    return {"line": line, **figures}


def measure_published(work: Work) -> Figures:
    """Measure the published EAGLE-1 step on the same conversations."""
    step, _ = published_side(work)
    for i in range(2):
        step(i)
    seconds = time_step(step, work.device)
    rate = sum(length for length, _ in work.batches[0]) / seconds
    return {"line": f"{rate:,.0f} tokens/s", "step s": seconds, "tokens/s": rate}
