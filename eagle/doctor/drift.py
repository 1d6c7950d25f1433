"""How much less a head accepts on a fine-tune than on the fine-tune's base, and what to do about it."""

# M prompts

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from eagle.core.verify import Sampling
from eagle.decoding.decode import generate
from eagle.device import in_dtype
from eagle.doctor.examine import open_head, read_template_kwargs
from eagle.doctor.target_answers import BATCH_SIZE, NEW_TOKENS, read_prompts, render_prompts
from eagle.doctor.verdict import Cycles, Diagnosis, Gain
from eagle.target.borrowed import target_config
from eagle.target.target import Target

TEMPERATURES = (0.0, 1.0)
# shares of the tokens that drafts add on the base
KEEP = 0.9  # from which on a head is good enough: heads of other seeds differ by 0.05
TRAIN_ON = 0.25  # from which on a head is a better start than fresh weights: it was at 0.26, no less was tried
SIZES = ("hidden_size", "num_hidden_layers")


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
        if self.kept >= KEEP:
            return f"keep the head: {what}"
        # `errors` is the gain in standard errors: this loss is within the two-sided 95 % interval around zero
        if self.pooled.errors > -1.96:
            return f"keep the head for now: {what}, which chance may explain over {self.prompts} prompts; give more"
        if self.kept >= TRAIN_ON:
            return (
                f"train the head further: {what}; set train.init to it, on answers of the fine-tune"
            )
        return f"train a new head: {what}, too little for a start"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict with its figures."""
        return {"verdict": self.verdict, "kept": self.kept, **asdict(self)}

    def __str__(self) -> str:
        """Return the report that `eagle doctor --base` prints."""
        lines = [
            f"verdict: {self.verdict}",
            "",
            f"acceptance length on {self.prompts} prompts, base -> fine-tune:",
        ]
        lines += [
            f"  T = {temperature:g}: {gain}" for temperature, gain in self.by_temperature.items()
        ]
        lines.append("")
        lines.append(
            "- part of a loss may be answers that are harder to guess: with train.init, training prints what comes back"
        )
        return "\n".join(lines)


def measure_drift(
    folder: str | Path, base_path: str, target_path: str, prompts: str | None = None
) -> Drift | Diagnosis:
    """Decode the same prompts with a base and with its fine-tune, drafted by the base's head.

    Args:
        folder: The head's folder.
        base_path: The model that the head was trained for.
        target_path: The fine-tune: a model, or an adapter of the base.
        prompts: A JSONL file; the built-in prompts if it is None.

    Returns:
        The drift, or a diagnosis where the head cannot be read, or cannot fit both.
    """
    head, refusal = open_head(folder, base_path)
    if refusal:
        return refusal
    # an adapter has the sizes of its base by construction, so only a whole model is compared
    is_adapter = _is_adapter(Path(target_path))
    if not is_adapter:
        base_config = target_config(base_path)
        config = target_config(target_path)
        vocab_size = getattr(base_config, "vocab_size", None)
        if getattr(config, "vocab_size", None) != vocab_size:
            return Diagnosis(
                f"train a new head: {target_path} has other than the {vocab_size} tokens of {base_path}"
            )
        expected = {name: getattr(base_config, name, None) for name in SIZES}
        sizes = {name: getattr(config, name, None) for name in SIZES}
        if sizes != expected:
            raise ValueError(
                f"{target_path} is no fine-tune of {base_path}: got {sizes}, expected {expected}"
            )
    questions = read_prompts(prompts)
    template_kwargs = read_template_kwargs(folder)
    base = Target.load(base_path)
    base_counts = count_cycles(base, head, render_prompts(base, questions, **template_kwargs))
    if is_adapter:
        tuned = base.with_adapter(target_path)
    else:
        del base  # the memory of one model is enough
        tuned = Target.load(target_path)
    return compare_cycles(
        base_counts, count_cycles(tuned, head, render_prompts(tuned, questions, **template_kwargs))
    )


def _is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter, and no model."""
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def count_cycles(target: Target, head: Any, prompts: Sequence[list[int]]) -> dict[float, Cycles]:
    """Return, by temperature, tokens [M] and cycles [M] of the target's answers to M prompts with the head's drafts.

    A cycle is one draft and the forward that verifies it. The head itself stays: a copy is bound to the target.
    """
    drafter = copy.deepcopy(head).to(target.device)
    drafter = in_dtype(drafter, target.model.dtype).bind(target.head)
    counts = {}
    for temperature in TEMPERATURES:
        # requests are numbered alike on both models, so that an answer is sampled with the same noise
        traces = generate(
            target,
            drafter,
            list(prompts),
            sampling=[Sampling(temperature, request=i) for i in range(len(prompts))],
            max_new_tokens=NEW_TOKENS,
            batch_size=BATCH_SIZE,
        )
        tokens = []
        cycles = []
        for trace in traces:
            # raises the error of an answer that failed
            trace.checked()
            tokens.append(sum(cycle.committed for cycle in trace.cycles))
            cycles.append(len(trace.cycles))
        counts[temperature] = (torch.tensor(tokens).double(), torch.tensor(cycles).double())
    return counts


def compare_cycles(base: dict[float, Cycles], tuned: dict[float, Cycles]) -> Drift:
    """Return the differences between the acceptance lengths on a base and on a fine-tune, paired by prompt.

    Args:
        base: By temperature, the tokens and the cycles of each prompt on the base.
        tuned: The same on the fine-tune.
    """
    gains = {
        temperature: Gain.between(base[temperature], tuned[temperature]) for temperature in base
    }
    base_tokens, base_cycles = pool_cycles(base)
    pooled = Gain.between((base_tokens, base_cycles), pool_cycles(tuned))
    return Drift(gains, pooled, len(base_tokens))


def pool_cycles(counts: dict[float, Cycles]) -> Cycles:
    """Return tokens [M] and cycles [M] of each of M prompts, summed over all temperatures."""
    tokens, cycles = zip(*counts.values(), strict=True)
    return torch.stack(tokens).sum(0), torch.stack(cycles).sum(0)
