"""What becomes of every causal type as a target: `python -m tests.target.type_outcomes` writes the result file."""

from __future__ import annotations

import copy
import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from eagle import Sampling, Target, generate
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree
from eagle.log import progress
from eagle.target.structure import cache_name_of
from eagle.target.trees.read_modes import Probe
from tests.every_type import TYPES, build
from tests.families import RandomTrees, own_answer
from tests.target.test_families import HandedIn

COUNT = 14
DICE = random.Random(3)
PROMPTS = [
    DICE.choices(range(4, 90), k=count) for count in (9, 30)
]  # windows of 8 are crossed while answering
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "every_type.json"


def gumbel(position: int) -> torch.Tensor:
    """[96], the noise of the token at this position."""
    return -torch.empty(96).exponential_(generator=torch.Generator().manual_seed(position)).log()


class Noise(HandedIn):
    """The same noise where the decoder looks for its own, for any vocabulary."""

    def __call__(self, positions: list[int], vocab_size: int, device: torch.device) -> torch.Tensor:
        return torch.stack([gumbel(position)[:vocab_size] for position in positions])


class Bushes(RandomTrees):
    """Trees of wrong branches around the next right tokens, in random order."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(text)
        self.text = text

    def begin(self, noise: Any = None) -> Any:
        """Back to the start of the text."""
        self.read = 0
        return self

    def propose(self, update: Committed, budget: Any) -> DraftTree:
        """The right path, and two wrong ones from each of its nodes, mixed up."""
        self.read += len(update.tokens)
        right = self.text[self.read + 1 :][: min(3, budget.depth)]
        wrong = [[*right[:step], (token + 1) % 90, token] for step, token in enumerate(right)]
        paths = [
            right,
            *wrong,
            *([*right[:step], (token + 2) % 90] for step, token in enumerate(right)),
        ]
        self.dice.shuffle(paths)
        return DraftTree.from_paths(update.root, paths)


@torch.no_grad()
def stepped_answer(model: PreTrainedModel, prompt: list[int], noise: Any = None) -> list[int]:
    """The model's own answer by steps of one token over its own cache."""
    name, text, held = cache_name_of(model), list(prompt), None
    while len(text) < len(prompt) + COUNT:
        inputs = torch.tensor([text[len(prompt) - 1 :][-1:] if held is not None else text])
        output = model(input_ids=inputs, use_cache=True, **{name: held})
        held, scores = getattr(output, name), output.logits[0, -1]
        text.append(int((scores if noise is None else scores + noise(len(text))).argmax()))
    return text[len(prompt) :]


def compare(model: PreTrainedModel, target: Target) -> str:
    """ "right", or the first difference between drafted and untouched answers, at T = 0 and T = 1."""
    for temperature in (0.0, 1.0):
        noise = (lambda position: gumbel(position)[: target.vocab_size]) if temperature else None
        if target.reader.follows_steps:
            answers = [stepped_answer(model, prompt, noise) for prompt in PROMPTS]
        else:
            answers = [own_answer(model, prompt, COUNT, None, noise) for prompt in PROMPTS]
        options: dict[str, Any] = {
            "sampling": Sampling(temperature=temperature),
            "max_new_tokens": COUNT,
            "stop": [],
        }
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            for drafter in (Bushes(prompt + answer), RandomTrees(answer)):
                tokens = generate(target, drafter, prompt, **options).tokens
                if tokens != answer:
                    return f"wrong at T = {temperature} after {len(prompt)} tokens: {tokens}, expected {answer}"
        beside = generate(target, RandomTrees([*answers[0], *answers[1]]), PROMPTS, **options)
        if [trace.tokens for trace in beside] != answers:
            return f"wrong at T = {temperature} side by side: {[trace.tokens for trace in beside]}, expected {answers}"
    return "right"


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Return copies of a model's weights and buffers, and of its config's values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in tensors} | {
        "config": model.config.to_dict()
    }


def find_change(model: PreTrainedModel, before: dict[str, Any]) -> str | None:
    """Return what of a model is another than before, bit for bit."""
    now = snapshot(model)
    if now.keys() != before.keys():
        return f"tensors {sorted(now.keys() ^ before.keys())[:3]}"
    for name, value in now.items():
        is_same = (
            torch.equal(value, before[name])
            if isinstance(value, torch.Tensor)
            else value == before[name]
        )
        if not is_same:
            return name
    return None


@cache
def outcome(model_type: str) -> dict[str, Any]:
    """Return what became of a type: right, refused, not built, changed, wrong or raw; means, and the worst difference.

    The model is changed if the target that reads it left any of its tensors or its config as others than before.
    """
    try:
        model = build(model_type)
        own_answer(model, PROMPTS[0], 1)
    except Exception as error:  # of transformers alone
        return {
            "outcome": "not built",
            "why": f"{type(error).__name__}: {str(error)[:120]}".replace("\n", " "),
        }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle.core.verify.Noise", Noise)
        copied = copy.deepcopy(model)
        before = snapshot(copied)
        try:
            target = Target(copied)
            means = target.describe()
            result = compare(model, target)
            if change := find_change(copied, before):
                return {"outcome": f"changed {change}"}
            worst = measure_worst(target.reader)
        except ValueError as error:
            change = find_change(copied, before)
            return {"outcome": f"changed {change}" if change else "refused", "why": str(error)}
        except Exception as error:
            return {"outcome": "raw", "why": f"{type(error).__name__}: {str(error)[:200]}"}
    return {"outcome": result, "means": means, "worst": float(f"{worst:.1e}")}


@torch.inference_mode()
def measure_worst(reader: Any) -> float:
    """The largest relative difference of a node's states from the model's own."""
    probe = Probe(reader)
    expected, _ = probe.read_expected()
    nodes = probe.read_tree(reader.new_cache())
    return float(((nodes - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def main() -> None:
    """Try every type and write the result file."""
    from bench.machine import made_on  # measures the machine

    types = {
        model_type: outcome(model_type)
        for model_type in progress(TYPES, "types", len(TYPES), unit="types")
    }
    command = "python -m tests.target.type_outcomes"
    RESULTS.write_text(
        json.dumps({"run": made_on(command=command), "types": types}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
