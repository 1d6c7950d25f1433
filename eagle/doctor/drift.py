"""How much less a head accepts on a fine-tune than on the fine-tune's base, and what to do about it."""

# M prompts

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.device import in_dtype
from eagle.doctor.examine import open_head, read_template_kwargs
from eagle.doctor.texts import NEW_TOKENS, TOGETHER, read_prompts, render_prompts
from eagle.doctor.verdict import Cycles, Diagnosis, Gain
from eagle.target.borrowed import target_config
from eagle.target.target import Target

TEMPERATURES = (0.0, 1.0)
KEPT = 0.9  # of what drafts add; heads of other seeds differ by 0.05 of it, so that less is hardly worth a run
FOLLOWED = 0.25  # of it: a head that kept 0.26 was a better start than fresh weights; no less was tried
SIZES = ("vocab_size", "hidden_size", "num_hidden_layers")


@dataclass(frozen=True)
class Drift:
    """A head's acceptance lengths on a base and on its fine-tune, paired by prompt."""

    by_temperature: dict[float, Gain]
    pooled: Gain  # over all temperatures
    prompts: int

    @property
    def kept(self) -> float:
        """What the head's drafts add on the fine-tune, as a share of what they add on the base."""
        return 1 + self.pooled.share

    @property
    def verdict(self) -> str:
        """Whether to keep the head, to train it on, or to train a new one."""
        what = f"its drafts add {self.kept:.0%} of the tokens that they add on the base"
        if self.kept >= KEPT:
            return f"keep the head: {what}"
        if self.pooled.errors > -1.96:
            return f"keep the head for now: {what}, which chance may explain over {self.prompts} prompts; give more"
        if self.kept >= FOLLOWED:
            return f"train the head on: {what}; set train.init to it, on answers of the fine-tune"
        return f"train a new head: {what}, too little for a start"

    def __str__(self) -> str:
        lines = [f"verdict: {self.verdict}", "", f"acceptance length on {self.prompts} prompts, base -> fine-tune:"]
        lines += [f"  T = {heat:g}: {gain}" for heat, gain in self.by_temperature.items()]
        note = (
            "- part of a loss may be answers that are harder to guess: with train.init, training prints what comes back"
        )
        return "\n".join([*lines, "", note])


def measure_drift(
    folder: str | Path, base_path: str, target_path: str, prompts: str | None = None
) -> Drift | Diagnosis:
    """Decode the same prompts with a base and with its fine-tune, a model or an adapter, drafted by the base's head.

    A diagnosis where the head cannot be read, or cannot fit both.
    """
    head, refusal = open_head(folder, base_path)
    if refusal:
        return refusal
    if not is_adapter(target_path):
        base_sizes, sizes = (
            {name: getattr(target_config(path), name, None) for name in SIZES} for path in (base_path, target_path)
        )
        if sizes.pop("vocab_size") != (vocab_size := base_sizes.pop("vocab_size")):
            return Diagnosis(f"train a new head: {target_path} has other than the {vocab_size} tokens of {base_path}")
        if sizes != base_sizes:
            raise ValueError(f"{target_path} is no fine-tune of {base_path}: got {sizes}, expected {base_sizes}")
    questions, template_kwargs = read_prompts(prompts), read_template_kwargs(folder)

    def count(target: Target) -> dict[float, Cycles]:
        return count_cycles(target, head, render_prompts(target, questions, **template_kwargs))

    base = Target.load(base_path)
    base_counts = count(base)
    if is_adapter(target_path):
        tuned = base.with_adapter(target_path)
    else:
        del base  # the memory of one model is enough
        tuned = Target.load(target_path)
    return compare_cycles(base_counts, count(tuned))


def is_adapter(path: str | Path) -> bool:
    """Whether a folder holds an adapter, and no model."""
    return (Path(path) / "adapter_config.json").is_file() and not (Path(path) / "config.json").is_file()


def count_cycles(target: Target, head: Any, prompts: Sequence[list[int]]) -> dict[float, Cycles]:
    """Tokens [M] and cycles [M] of the target's answers with the head's drafts, by temperature."""
    drafter = in_dtype(copy.deepcopy(head).to(target.device), target.model.dtype).bind(target.head)
    counts = {}
    for heat in TEMPERATURES:
        samplings = [Sampling(heat, request=number) for number in range(len(prompts))]
        options: dict[str, Any] = {"sampling": samplings, "max_new_tokens": NEW_TOKENS, "batch_size": TOGETHER}
        cycles = [trace.checked().cycles for trace in generate(target, drafter, list(prompts), **options)]
        committed = [sum(cycle.committed for cycle in each) for each in cycles]
        counts[heat] = (torch.tensor(committed).double(), torch.tensor([len(each) for each in cycles]).double())
    return counts


def compare_cycles(base: dict[float, Cycles], tuned: dict[float, Cycles]) -> Drift:
    """The differences between the acceptance lengths on a base and on a fine-tune, paired by prompt."""
    gains = {heat: Gain.between(base[heat], tuned[heat]) for heat in base}
    pooled = Gain.between(pool_cycles(base), pool_cycles(tuned))
    return Drift(gains, pooled, len(next(iter(base.values()))[0]))


def pool_cycles(counts: dict[float, Cycles]) -> Cycles:
    """Tokens [M] and cycles [M] of each prompt over all temperatures."""
    tokens, cycles = zip(*counts.values(), strict=True)
    return torch.stack(tokens).sum(0), torch.stack(cycles).sum(0)
