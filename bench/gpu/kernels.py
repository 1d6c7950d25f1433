"""Stage 5, what a training step's time goes into, where stage 2 reached too little of the device's peak."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.gpu.common import Context, Figures, Unit, synchronize
from bench.gpu.training import GOAL, STORED, Case, make_case, open_run

STEPS = 3
TOP = 15
# of operations by a word of their name; the first that matches counts, products of logits are told by their shapes
KINDS = {
    "attention": ("flex_attention", "attention", "flash"),
    "optimizer": ("adam", "foreach", "norm_out", "_amp_"),
    "copies": ("copy", "memcpy", "memset"),
    "products": ("mm", "gemm", "cutlass", "nvjet", "linear", "dot"),
}


def units(context: Context) -> dict[str, Unit]:
    """Return a profile of each head that stage 2 has found slow; in a rehearsal of one."""
    case = make_case(context)
    names = ["eagle1"] if context.rehearse else slow_heads(context, case)
    return {name: partial(profile_steps, case, context.device, name) for name in names}


def slow_heads(context: Context, case: Case) -> list[str]:
    """Return the heads whose steps on stored features reached less than the goal, the slowest first."""
    file = context.results / "gpu_training.json"
    measured = json.loads(file.read_text())["units"] if file.exists() else {}
    peak = measured.get("peak", {}).get("FLOP/s")
    if not peak:
        return list(case.heads)
    rates = {name: measured.get(f"{name}, {STORED}", {}).get("FLOP/s", 0.0) / peak for name in case.heads}
    return sorted((name for name in rates if rates[name] < GOAL), key=rates.__getitem__)


def profile_steps(case: Case, device: torch.device, name: str) -> Figures:
    """Return the operations that take most, shares by kind, and the time in which the device had nothing to do."""
    run = open_run(case, device, name, STORED, compiled=False)
    for _ in range(2):
        run.step()
    synchronize(device)
    accelerated = device.type != "cpu"
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * accelerated
    with profile(activities=activities, record_shapes=True) as profiler:
        for _ in range(STEPS):
            run.step()
        synchronize(device)
    rows = []
    for event in profiler.key_averages(group_by_input_shape=True):
        micro = event.self_device_time_total if accelerated else event.self_cpu_time_total
        rows.append((micro / 1e3 / STEPS, event.key, event.input_shapes))
    rows.sort(key=lambda row: -row[0])
    busy = sum(row[0] for row in rows)
    vocabulary = {case.config.vocab_size, case.heads[name].get("draft_vocab", case.config.vocab_size)}
    kinds: dict[str, float] = {}
    for milliseconds, key, shapes in rows:
        kind = kind_of(key, shapes, vocabulary)
        kinds[kind] = kinds.get(kind, 0.0) + milliseconds / busy
    # the spans of time between the first kernel and the last, without the profiler's own overhead
    events = [event for event in profiler.events() if accelerated and event.device_type.name == "CUDA"]
    spans = sorted((event.time_range.start, event.time_range.end) for event in events)
    gaps = idle_share(spans)
    shares = ", ".join(f"{kind} {share:.0%}" for kind, share in sorted(kinds.items(), key=lambda kind: -kind[1]))
    top = [{"ms": row[0], "name": row[1], "shapes": row[2], "share": row[0] / busy} for row in rows[:TOP]]
    line = f"{busy:.1f} ms a step: {shares}" + (f"; idle {gaps:.0%}" if gaps is not None else "")
    return {"line": line, "busy ms": busy, "kinds": kinds, "idle": gaps, "top": top}


def kind_of(name: str, shapes: Any, vocabulary: set[int]) -> str:
    """Return what an operation is a part of."""
    sizes = {size for shape in shapes for size in shape if isinstance(size, int)}
    if sizes & vocabulary:
        return "logits"
    lower = name.lower()
    for kind, words in KINDS.items():
        if any(word in lower for word in words):
            return kind
    return "others"


def idle_share(spans: list[tuple[float, float]]) -> float | None:
    """Return the share of time in which no kernel ran, from the starts and ends of all kernels."""
    if not spans:
        return None
    idle, end = 0.0, spans[0][1]
    for start, stop in spans[1:]:
        idle += max(start - end, 0.0)
        end = max(end, stop)
    return idle / (end - spans[0][0])
