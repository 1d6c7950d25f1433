"""Stage 2, a training step at the shapes of Llama-3.1-8B: tokens a second, share of the device's peak, memory."""

# N tokens of a batch, L taps, D target width, V vocabulary

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.util import find_spec
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from bench.gpu.common import LLAMA_8B, TINY, Context, Figures, Unit, peak_bytes, reset_peak, seconds_of
from bench.rivals.serve import Work
from bench.train_speed import answers
from eagle import Target
from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch, Example, collate, trim_mask
from eagle.data.features import LiveFeatures, taps_of
from eagle.device import PINNED
from eagle.drafters import DRAFTERS, settings_of
from recipes.footprint import EmptyRun, Footprint

# one H200, Llama-3.1-8B, EAGLE-3 with seven steps, packed, features on the device: SpecForge's own figures
ANCHOR = {"useful tokens/s": 25_400, "MFU": 0.42, "by": "SpecForge, one H200"}
GOAL = 0.35  # share of the peak below which stage 5 looks at kernels
SUPERVISED = 0.65
STORED, LIVE = "stored", "live"
COMPILED = ("eagle3", "eagle1", "dflash")  # Medusa has no parts that torch compiles


@dataclass(frozen=True)
class Case:
    """What a step is measured on."""

    config: LlamaConfig
    lengths: list[int]  # of the packed conversations
    steps: int  # in a window that is timed
    heads: dict[str, dict[str, Any]]

    @cached_property
    def mask(self) -> Tensor:
        """[N], the supervised tokens: an answer at the end of every 256."""
        masks = []
        for length in self.lengths:
            mask = torch.zeros(length, dtype=torch.bool)
            for start, stop in answers(length, SUPERVISED):
                mask[start:stop] = True
            masks.append(trim_mask(mask))
        return torch.cat(masks)


def make_case(context: Context) -> Case:
    """Return the sizes of the issue, or tiny ones."""
    heads: dict[str, dict[str, Any]] = {
        "eagle3": {"kind": "eagle3", "steps": 7, "draft_vocab": 32000},
        "eagle1": {"kind": "eagle1"},
        "dflash": {"kind": "dflash"},
        "medusa": {"kind": "medusa"},
    }
    if context.rehearse:
        heads["eagle3"] |= {"steps": 2, "draft_vocab": 128}
        heads["dflash"] |= {"anchors": 8, "slots": 4}
        return Case(LlamaConfig(**TINY), [256, 256], 1, heads)
    return Case(LlamaConfig(**LLAMA_8B), [2048] * 4, 4, heads)


def units(context: Context) -> dict[str, Unit]:
    """Return the peak first, then EAGLE-3, which the anchor is for, then the other heads."""
    case = make_case(context)
    measure = partial(measure_step, case, context.device)
    listed: dict[str, Unit] = {"peak": partial(measure_peak, context.device, 256 if context.rehearse else 8192)}
    for name in case.heads:
        listed[f"{name}, {STORED}"] = partial(measure, name, STORED, False)
    if not context.rehearse:  # a CPU compiles for minutes
        for name in COMPILED:
            listed[f"{name}, {STORED}, compiled"] = partial(measure, name, STORED, True)
    listed[f"eagle3, {LIVE}"] = partial(measure, "eagle3", LIVE, False)
    listed["eagle3, speculators"] = partial(measure_speculators, case, context.device, context.work)
    for name in case.heads:
        listed.setdefault(f"{name}, {LIVE}", partial(measure, name, LIVE, False))
    return listed


def measure_peak(device: torch.device, size: int) -> Figures:
    """Return the rate of a large bf16 product of random numbers, and of a large copy."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(left)
    torch.matmul(left, right, out=product)
    seconds = seconds_of(lambda: torch.matmul(left, right, out=product), device, 10)
    rate = 2 * size**3 / seconds
    source = torch.empty(size * size * 16, device=device, dtype=torch.uint8)
    copy = torch.empty_like(source)
    copied = 2 * source.numel() / seconds_of(lambda: copy.copy_(source), device, 10)
    line = f"bf16 {rate / 1e12:.3g} TFLOP/s, copies {copied / 1e9:.0f} GB/s"
    return {"line": line, "FLOP/s": rate, "bytes/s": copied}


# -- one step ----------------------------------------------------------------------------------------------------------


@dataclass
class StepRun:
    """A head in training on the device, as the training loop runs it: fp32 weights, bf16 products, fused AdamW."""

    head: TrainableDrafter
    frozen: TargetHead
    batches: Callable[[], Batch]
    device: torch.device

    def __post_init__(self) -> None:
        self.weights = [weight for weight in self.head.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-5, fused=True)

    def step(self) -> None:
        """Upload a batch, then forward, backward, clip, update."""
        batch = self.batches().to(self.device)
        with torch.autocast(self.device.type, torch.bfloat16):
            losses = self.head(batch, self.frozen)
        losses["total"].backward()
        norm = nn.utils.clip_grad_norm_(self.weights, 1.0)
        # as in the training loop: a fused optimizer skips what is not finite without a wait
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()


def make_target_head(config: LlamaConfig, device: torch.device) -> TargetHead:
    """Return a random embedding and LM head in bf16."""
    with torch.device(device):
        embedding = nn.Embedding(config.vocab_size, config.hidden_size, dtype=torch.bfloat16)
        output = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=torch.bfloat16)
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def make_head(case: Case, name: str, frozen: TargetHead, device: torch.device) -> TrainableDrafter:
    """Return an untrained head; its draft vocabulary is the target's first tokens."""
    settings = settings_of(case.heads[name], "bench.gpu")
    vocabulary = case.heads[name].get("draft_vocab", case.config.vocab_size)
    head = DRAFTERS[settings.kind].for_target(settings, case.config, frozen, [torch.arange(vocabulary)])
    return head.to(device).train()


def stored_batches(case: Case, taps: tuple[int, ...], device: torch.device) -> Callable[[], Batch]:
    """Return two batches of random features [N, L, D] in turns, in host memory as a store gives them."""
    batches = []
    for _ in range(2):
        features = torch.randn(len(case.mask), len(taps), case.config.hidden_size, dtype=torch.bfloat16)
        tokens = torch.randint(100, (len(case.mask),))
        seeds = tuple(range(len(case.lengths)))
        batch = Batch(tokens, case.mask, features, tuple(case.lengths), taps, seeds)
        batches.append(batch.pin_memory() if device.type in PINNED else batch)
    turns = cycle(batches)
    return lambda: next(turns)


def live_batches(case: Case, target: Target, head: dict[str, Any]) -> Callable[[], Batch]:
    """Return batches whose features the target computes on the spot."""
    taps = taps_of(settings_of(head, "bench.gpu"), case.config)
    masks = case.mask.split(case.lengths)
    examples = [Example(torch.randint(100, (len(mask),)), mask) for mask in masks]
    features = LiveFeatures(target, examples, {"taps": taps, "dtype": "bfloat16"})
    return lambda: collate(features.read(range(len(examples))), features.taps)


def open_run(case: Case, device: torch.device, name: str, source: str, compiled: bool) -> StepRun:
    """Return a head in training on stored or live features."""
    torch.manual_seed(0)
    if source == LIVE:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(case.config, dtype=torch.bfloat16).eval()
        target = Target(model)
        frozen, batches = target.head, live_batches(case, target, case.heads[name])
    else:
        frozen = make_target_head(case.config, device)
        taps = taps_of(settings_of(case.heads[name], "bench.gpu"), case.config)
        batches = stored_batches(case, taps, device)
    head = make_head(case, name, frozen, device)
    if compiled:
        head.compile_parts()
    return StepRun(head, frozen, batches, device)


def forecast_step(case: Case, head: TrainableDrafter) -> Footprint:
    """Count the operations of a step and the bytes that two steps hold, without the device."""
    share = float(case.mask.float().mean())
    with Footprint().on_accelerator() as footprint:
        run = EmptyRun(head.to("meta"), case.config, torch.bfloat16)
        run.step(case.lengths, share)
        flops = footprint.flops
        run.step(case.lengths, share)  # beside the moments that the first one has made
    footprint.flops = flops
    return footprint


def measure_step(case: Case, device: torch.device, name: str, source: str, compiled: bool) -> Figures:
    """Measure the steps of a head, and compare memory with what `eagle forecast` counts."""
    held = reset_peak(device)
    run = open_run(case, device, name, source, compiled)
    for _ in range(2):  # these compile attention, and make the moments
        run.step()
    seconds = seconds_of(run.step, device, case.steps)
    peak = peak_bytes(device) - held
    tokens, useful = len(case.mask), int(case.mask.sum())
    target_flops = 0
    if source == LIVE:
        inner = sum(weight.numel() for weight in LlamaBody(case.config).parameters())
        target_flops = 2 * inner * tokens
    head = run.head
    del run
    gc.collect()
    footprint = forecast_step(case, head)
    flops = footprint.flops + target_flops
    figures: Figures = {
        "step s": seconds,
        "tokens/s": tokens / seconds,
        "useful tokens/s": useful / seconds,
        "FLOP of a step": flops,
        "FLOP/s": flops / seconds,
        "peak GB": peak / 1e9,
        # features are live or travel from the host, so that the forecast's own copy of them stands for a batch
        "forecast GB": footprint.most / 1e9 if source == STORED else None,
    }
    line = f"{figures['tokens/s']:,.0f} tokens/s, {figures['useful tokens/s']:,.0f} useful"
    line += f", {flops / seconds / 1e12:.3g} TFLOP/s, {peak / 1e9:.1f} GB"
    return {"line": line, **figures}


class LlamaBody(nn.Module):
    """A target's layers without their numbers, whose products are those of a forward for features."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = AutoModelForCausalLM.from_config(config).model.layers


# -- a rival -----------------------------------------------------------------------------------------------------------


def measure_speculators(case: Case, device: torch.device, work: Path) -> Figures:
    """Measure the same EAGLE-3 step of speculators, where this Python has it; its LM head is frozen."""
    if find_spec("speculators") is None:
        return {"line": "not run: speculators is not installed"}
    from bench.rivals.speculators_step import side

    folder = work / "verifier"
    write_verifier(case.config, folder)
    head = case.heads["eagle3"]
    texts = [(length, answers(length, SUPERVISED)) for length in case.lengths]
    held = reset_peak(device)
    step, _ = side(Work(str(folder), head["draft_vocab"], [texts], "bf16", head["steps"], device=device.type))
    for _ in range(2):
        step(0)
    seconds = seconds_of(lambda: step(0), device, case.steps)
    tokens, useful = len(case.mask), int(case.mask.sum())
    peak = (peak_bytes(device) - held) / 1e9
    line = f"{tokens / seconds:,.0f} tokens/s, {useful / seconds:,.0f} useful, {peak:.1f} GB"
    return {"line": line, "step s": seconds, "tokens/s": tokens / seconds, "peak GB": peak}


def write_verifier(config: LlamaConfig, folder: Path) -> None:
    """Write a config, and of the weights those alone that speculators reads: embedding, norm and LM head."""
    folder.mkdir(parents=True, exist_ok=True)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    shape = (config.vocab_size, config.hidden_size)
    names = {"model.embed_tokens.weight": shape, "lm_head.weight": shape, "model.norm.weight": shape[1:]}
    tensors = {name: torch.randn(size, dtype=torch.bfloat16) * 0.02 for name, size in names.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
