"""What becomes of every causal type as a target: `python -m tests.target.type_outcomes` writes the result file."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from eagle import Sampling, Target
from eagle.core.drafter import Committed
from eagle.core.tree import DraftTree
from eagle.log import progress
from eagle.target.trees.read_modes import Probe
from tests.every_type import TYPES, build
from tests.families import RandomTrees, own_answer
from tests.own_answers import cached_steps
from tests.target.decoded import decode, decode_batch
from tests.target.test_families import HandedIn, gumbel

COUNT = 14
DICE = random.Random(3)
# windows of 8 are crossed while answering
PROMPTS = [DICE.choices(range(4, 90), k=count) for count in (9, 30)]
RESULTS = Path(__file__).parents[2] / "docs" / "results" / "every_type.json"


class Noise(HandedIn):
    """The same noise where the decoder looks for its own, for any vocabulary."""

    def __call__(self, positions: list[int], vocab_size: int, device: torch.device) -> Tensor:
        # some types round their vocabulary down
        return super().__call__(positions, vocab_size, device)[:, :vocab_size]


class Bushes(RandomTrees):
    """Trees of wrong branches around the next right tokens, in random order."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(text)
        self.text = text

    def begin(self, noise: Any = None) -> Any:
        """Go back to the start of the sequence."""
        self.read = 0
        return self

    def propose(self, update: Committed, budget: Any) -> DraftTree:
        """Return the right path, and two wrong nodes beside each of its nodes, mixed up."""
        self.read += len(update.tokens)
        right = self.text[self.read + 1 :][: min(3, budget.depth)]
        paths = [right]

        for depth, token in enumerate(right):
            parent = right[:depth]
            # the right token below a wrong one must not be accepted
            paths.append([*parent, (token + 1) % 90, token][: budget.depth])
            paths.append([*parent, (token + 2) % 90])

        self.dice.shuffle(paths)
        return DraftTree.from_paths(update.root, paths)


@torch.no_grad()
def answer_by_steps(model: PreTrainedModel, prompt: list[int], noise: Any = None) -> list[int]:
    """Return the model's own answer by steps of one token over its own cache."""
    read = cached_steps(model)
    tokens = list(prompt)

    for _ in range(COUNT):
        scores = read(tokens)
        if noise is not None:
            scores = scores + noise(len(tokens))
        tokens.append(int(scores.argmax()))

    return tokens[len(prompt) :]


def compare(model: PreTrainedModel, target: Target) -> str:
    """Return "right", or the first difference between drafted and untouched answers, at T = 0 and T = 1."""

    def noise(position: int) -> Tensor:
        return gumbel(position)[: target.vocab_size]

    for temperature in (0.0, 1.0):
        given = noise if temperature else None
        sampling = Sampling(temperature=temperature)
        answers = []
        for prompt in PROMPTS:
            # where a model's own steps differ from its forward over a sequence, `generate` takes
            # the steps
            if target.reader.follows_steps:
                answer = answer_by_steps(model, prompt, given)
            else:
                answer = own_answer(model, prompt, COUNT, warp=None, noise=given)
            answers.append(answer)
            for drafter in (Bushes(prompt + answer), RandomTrees(answer)):
                tokens = decode(target, drafter, prompt, COUNT, sampling=sampling)
                if tokens != answer:
                    return (
                        f"wrong at T = {temperature}, {len(prompt)} tokens: {tokens}, not {answer}"
                    )
        # in a batch, by one drafter for both
        drafter = RandomTrees([*answers[0], *answers[1]])
        batch = decode_batch(target, drafter, PROMPTS, COUNT, sampling=sampling)
        if batch != answers:
            return f"wrong at T = {temperature} in a batch: {batch}, not {answers}"

    return "right"


def snapshot(model: PreTrainedModel) -> dict[str, Any]:
    """Return copies of a model's weights and buffers, and of its config's values."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    copies = {name: tensor.detach().clone() for name, tensor in tensors}
    return {**copies, "config": model.config.to_dict()}


def find_change(model: PreTrainedModel, before: dict[str, Any]) -> str | None:
    """Return what of a model differs from a snapshot, bit for bit."""
    now = snapshot(model)
    if now.keys() != before.keys():
        return f"tensors {sorted(now.keys() ^ before.keys())[:3]}"

    for name, value in now.items():
        # a config is a dictionary, all else tensors
        is_same = value == before[name] if name == "config" else torch.equal(value, before[name])
        if not is_same:
            return name

    return None


def find_outcome(model_type: str) -> dict[str, Any]:
    """Return what became of a type: right, refused, not built, changed, wrong or raw; means, and the worst difference.

    The model is changed if the target that reads it left any of its tensors or its config as others than before.
    """
    # what transformers itself cannot build or run is no fault of a target
    try:
        model = build(model_type)
        own_answer(model, PROMPTS[0], 1)
    except Exception as error:  # of transformers alone
        why = f"{type(error).__name__}: {str(error)[:120]}".replace("\n", " ")
        return {"outcome": "not built", "why": why}

    copied = copy.deepcopy(model)
    before = snapshot(copied)
    result: dict[str, Any]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle.core.verify.Noise", Noise)
        try:
            target = Target(copied)
            means = target.describe()
            result = {"outcome": compare(model, target), "means": means}
            worst = measure_worst(target.reader)
            result["worst"] = float(f"{worst:.1e}")
        except ValueError as error:
            result = {"outcome": "refused", "why": str(error)}
        except Exception as error:
            return {"outcome": "raw", "why": f"{type(error).__name__}: {str(error)[:200]}"}

    # also a refused model has to be left as it was
    change = find_change(copied, before)
    return {"outcome": f"changed {change}"} if change else result


@torch.inference_mode()
def measure_worst(reader: Any) -> float:
    """Return the largest relative difference of a node's states from the model's own."""
    probe = Probe(reader)
    expected, _ = probe.read_expected()
    nodes = probe.read_tree(reader.new_cache())
    return float(((nodes - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def main() -> None:
    """Try every type and write the result file."""
    from bench.machine import made_on  # measures the machine

    types = {}

    for model_type in progress(TYPES, "types", len(TYPES), unit="types"):
        types[model_type] = find_outcome(model_type)

    result = {"run": made_on(command="python -m tests.target.type_outcomes"), "types": types}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
