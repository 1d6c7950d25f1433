"""Stage 3, decoding where speculation is earned: a trained head on a small model that costs what a large one costs.

The model is the one of `bench.gpu.prepare`, widened (`bench.widen`): its tokens are the small model's, its time is a
large model's. So this is a simulation of acceptance, and a measurement of time.
"""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.gpu.common import Context, Figures, Unit
from bench.rehearsal_stages import make_target
from bench.speed_arms import (
    ASSISTED,
    LOOKUP,
    PEERS,
    SHAPES,
    THEIRS,
    count_weights,
    decode_here,
    decode_there,
    widen_drafter,
)
from bench.widen import widened_model
from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.decoding.goodput import Goodput
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.static_loop import capture_cuda
from eagle.formats.checkpoint import save_head
from eval.tune import chain

SIZES = {"8 B": 8e9, "1 B": 1e9}
BATCHES = (1, 8, 32)
PLAIN, CAPTURED, COMPILED, POLICY = "plain", "captured", "compiled", "policy"
INVARIANT = "bits that no batch changes"
# the fastest of these is what tuning would find
MORE_SHAPES = {"chain 1": chain(1), "chain 2": chain(2), "chain 5": chain(5), "dynamic 4": Budget(4, 3, 2)}
SMALL_TREE = "dynamic 8"


class Setting:
    """A widened model with its drafters, and how they are asked."""

    def __init__(self, context: Context, size: str) -> None:
        self.context, self.size = context, size
        self.new_tokens = 8 if context.rehearse else 64
        folder = context.inputs or make_inputs(context.work)
        model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.bfloat16).to(context.device)
        weights = count_weights(model) * 1.5 if context.rehearse else SIZES[size]
        self.model = widened_model(model.eval(), weights)
        self.target = Target(self.model, Target.load(folder / "target", device="cpu").tokenizer)
        self.folder = folder
        self.weights = weights
        lines = (folder / "prompts.jsonl").read_text().splitlines()
        self.prompts = [self.target.chat(json.loads(line)["prompt"]) for line in lines]
        self.drafter = lru_cache(self._load_drafter)
        self.answers: dict[int, list[list[int]]] = {}  # of plain decoding, by batch size

    def _load_drafter(self, name: str) -> Any:
        drafter = load_drafter(self.folder / name, self.target)
        widen_drafter(drafter, self.weights)
        return drafter

    def ask(self, batch: int) -> list[list[int]]:
        """Return as many prompts, the first ones again where there are fewer."""
        return [self.prompts[i % len(self.prompts)] for i in range(batch)]


@lru_cache(1)  # only one of these models fits beside another stage's
def open_setting(context: Context, size: str) -> Setting:
    """Return the model of this size; the one before is dropped."""
    gc.collect()
    return Setting(context, size)


def units(context: Context) -> dict[str, Unit]:
    """Return the arms, single requests of the large model first, and what torch compiles last."""
    sizes = ["8 B"] if context.rehearse else list(SIZES)
    batches = (1, 2) if context.rehearse else BATCHES
    listed: dict[str, Unit] = {}
    for size in sizes:
        for batch in batches:
            for arm in list_arms(context, batch):
                listed[f"{size}, batch {batch}, {arm}"] = partial(measure_arm, context, size, batch, arm)
        listed[f"{size}, {INVARIANT}"] = partial(measure_invariance, context, size)
    if not context.rehearse:  # a CPU compiles for minutes
        for arm in (f"{PLAIN}, {COMPILED}", f"eagle1, chain 3, {COMPILED}"):
            listed[f"{sizes[0]}, batch 1, {arm}"] = partial(measure_arm, context, sizes[0], 1, arm)
    return listed


def list_arms(context: Context, batch: int) -> list[str]:
    """Return what decodes so many requests; transformers assists and looks up a single one alone."""
    shapes = [*SHAPES, *MORE_SHAPES, POLICY]
    if context.rehearse:
        shapes = ["chain 3", POLICY]
    arms = [PLAIN, THEIRS, *(f"eagle1, {shape}" for shape in shapes)]
    if batch > 1:
        return arms
    arms += ["ngram, chain 7", f"eagle1, chain 3, {CAPTURED}", f"eagle1, {SMALL_TREE}, {CAPTURED}", LOOKUP]
    if context.inputs is not None and (context.inputs / "draft").is_dir():
        arms += ["draft, chain 5", *(name for name in PEERS if name.startswith(ASSISTED))]
    return arms


def measure_invariance(context: Context, size: str) -> Figures:
    """Compare drafted answers with plain decoding's, read by the fastest kernels and invariantly, and time both."""
    setting = open_setting(context, size)
    prompts, limit = setting.ask(4), setting.new_tokens
    invariant = Target(setting.model, setting.target.tokenizer, None, True)
    figures: Figures = {"variance": invariant.variance()}
    drafter = find_drafter(setting, "eagle1")
    for name, target in (("fastest", setting.target), ("invariant", invariant)):
        none = load_drafter("none", target)
        decode_here(target, none, prompts, None, Sampling(), 4)
        timed, plain = decode_here(target, none, prompts, None, Sampling(), limit)
        drafted = decode_here(target, drafter, prompts, SHAPES["chain 3"], Sampling(), limit)[1]
        figures[f"identical, {name}"] = sum(map(list.__eq__, drafted, plain))
        figures[f"plain tokens/s, {name}"] = timed["tokens"] / timed["wall"]
    ratio = figures["plain tokens/s, invariant"] / figures["plain tokens/s, fastest"]
    line = f"{figures['identical, fastest']} of {len(prompts)} as plain by the fastest kernels, "
    line += f"{figures['identical, invariant']} invariantly, at {ratio:.2f} of the speed"
    return {"line": line, **figures}


def measure_arm(context: Context, size: str, batch: int, arm: str) -> Figures:
    """Time the answers of one arm, and compare them with plain decoding's in the same dtype."""
    setting = open_setting(context, size)
    prompts, limit = setting.ask(batch), setting.new_tokens
    if batch not in setting.answers:
        setting.answers[batch] = decode_here(
            setting.target, load_drafter("none", setting.target), prompts, None, Sampling(), limit
        )[1]
    name, _, rest = arm.partition(", ")
    shape, _, how = rest.partition(", ")
    with changed(setting, name, how or shape):
        if arm in PEERS:
            run = partial(decode_there, setting.model, **peer_options(setting, arm))
        else:
            drafter = load_drafter("none", setting.target) if name == PLAIN else find_drafter(setting, name)
            plan = plan_of(setting, drafter, shape, prompts)
            run = partial(decode_here, setting.target, drafter, plan=plan)
        run(prompts=prompts, sampling=Sampling(), limit=4)  # what only a first call does
        figures, answers = run(prompts=prompts, sampling=Sampling(), limit=limit)
        if arm not in PEERS and not context.rehearse and batch == 1:
            figures |= split_cycle(setting, drafter, plan, prompts[0])
    expected = setting.answers[batch]
    identical = sum(map(list.__eq__, answers, expected))
    rate = figures["tokens"] / figures["wall"]
    tau = figures["committed"] / figures["cycles"] if figures.get("cycles") else None
    line = f"{rate:,.1f} tokens/s" + (f", tau {tau:.2f}" if tau else "") + f", {identical} of {batch} as plain"
    return {"line": line, "tokens/s": rate, "tau": tau, "identical": identical, **figures}


def find_drafter(setting: Setting, name: str) -> Any:
    """Return a trained drafter, or a method without weights."""
    if name == "ngram":
        return load_drafter(name, setting.target)
    return setting.drafter({"eagle1": "head"}.get(name, name))


def plan_of(setting: Setting, drafter: Any, shape: str, prompts: list[list[int]]) -> Any:
    """Return the budget of that name, or a policy that has measured the costs of cycles."""
    if shape == POLICY:
        options: dict[str, Any] = {} if len(prompts) == 1 else {"batch_sizes": (1, len(prompts))}
        asked: Any = prompts[0] if len(prompts) == 1 else prompts
        return Goodput.measure(setting.target, drafter, asked, chain(3), contexts=(128,), **options)
    return (SHAPES | MORE_SHAPES).get(shape)


def peer_options(setting: Setting, arm: str) -> dict[str, Any]:
    """Return what transformers' `generate` is asked for."""
    if not arm.startswith(ASSISTED):
        return dict(PEERS[arm])
    assistant = setting.drafter("draft").model
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    for key, value in PEERS[arm].items():
        setattr(assistant.generation_config, key, value)
    return {"assistant_model": assistant}


@contextmanager
def changed(setting: Setting, name: str, how: str) -> Iterator[None]:
    """Capture the head's draft loop as a CUDA graph, or compile the target's layers, while this lasts."""
    if how == CAPTURED and setting.context.device.type == "cuda":
        head = find_drafter(setting, name)
        head.capture = capture_cuda
        try:
            yield
        finally:
            head.capture = None
    elif how == COMPILED:
        layers = list(setting.target.layers)
        forwards = [layer.forward for layer in layers]
        for layer in layers:
            layer.forward = torch.compile(layer.forward, dynamic=True)
        try:
            yield
        finally:
            for layer, forward in zip(layers, forwards, strict=True):
                layer.forward = forward
    else:
        yield


def split_cycle(setting: Setting, drafter: Any, plan: Any, prompt: list[int]) -> Figures:
    """Return the seconds of a cycle's parts, and how often the host waits for the device in a cycle."""
    options: dict[str, Any] = {"budget": plan, "max_new_tokens": setting.new_tokens, "stop": []}
    trace = generate(setting.target, drafter, prompt, timing=True, **options)
    parts = [cycle.seconds for cycle in trace.cycles if cycle.seconds]
    seconds = {name: sum(part[name] for part in parts) / len(parts) for name in parts[0]} if parts else {}
    waits = None
    if setting.context.device.type == "cuda":
        torch.cuda.set_sync_debug_mode("warn")
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            trace = generate(setting.target, drafter, prompt, **options)
        torch.cuda.set_sync_debug_mode("default")
        count = sum("synchronizing" in str(warning.message) for warning in seen)
        waits = count / max(len(trace.cycles), 1)
    return {"seconds of a cycle": seconds, "waits of a cycle": waits}


def make_inputs(work: Path) -> Path:
    """Make a small random target with a random head and some prompts: only a rehearsal has nothing better."""
    folder = work / "decoding"
    if not folder.exists():
        make_target(folder / "target", "small")
        target = Target.load(folder / "target", dtype="bfloat16", device="cpu")
        save_head(folder / "head", Eagle1.for_target(Eagle1.Settings(), target.config), "", {})
        lines = [json.dumps({"prompt": f"What is the number {number}?"}) for number in range(2)]
        (folder / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    return folder
