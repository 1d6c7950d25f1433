"""Processes of a run, forked from a test: everything is imported, so that many start at once."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from trained import RECIPE, free_port
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example
from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import DrafterSection, Recipe
from eagle.training.launch import launch
from eagle.training.train import train

CONFIG = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=256,
)  # fmt: skip
LENGTHS = [7 + 5 * (place * 7 % 11) for place in range(26)]
PATIENCE = 900  # seconds: a limit that ends what hangs


def on_ranks(
    count: int, work: Callable[[int], object], folder: Path, launched: bool = True
) -> list[str]:
    """Do some work in `count` forked processes, connected as a launcher would; what each printed.

    AssertionError with what was printed if one fails; the others are ended then.
    """
    address = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
    }
    folder.mkdir(parents=True, exist_ok=True)
    prints = [folder / f"rank-{rank}.txt" for rank in range(count)]
    running = {}
    for rank in range(count):
        env = {
            **address,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(count),
        }
        if pid := os.fork():
            running[pid] = rank
        else:
            _do(work, rank, env if launched else {}, prints[rank])
    until, failed = time.monotonic() + PATIENCE, False
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG) if time.monotonic() < until else (0, 1)
        failed = failed or bool(status)
        if failed:
            for other in running.keys() - {pid}:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            break
        running.pop(pid, None)
        time.sleep(0 if pid else 0.01)
    said = [path.read_text() for path in prints]
    assert not failed, "\n".join(said)
    return said


def _do(work: Callable[[int], object], rank: int, env: dict[str, str], prints: Path) -> None:
    """Become a process of the run, work, and end without what the test's process would do at its end."""
    file = os.open(prints, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    status = 1
    try:
        os.environ.update(env)
        torch.set_num_threads(1)  # threads do not survive a fork
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        work(rank)
        status = 0
    except BaseException as error:
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        os._exit(status)


@dataclass
class MadeFeatures:
    """Conversations and features drawn from a seed; every reading is noted."""

    taps: tuple[int, ...]
    identity: dict[str, Any] = field(default_factory=lambda: {"made": "up"})
    together: bool = False
    sampled: bool = False
    reads: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(LENGTHS)

    def mask(self, index: int) -> Tensor:
        """[T], the second half of each text is an answer."""
        return torch.arange(LENGTHS[index]) >= LENGTHS[index] // 2

    def supervised_tokens(self, index: int) -> Tensor:
        """The supervised tokens of an example."""
        return self._draw(index).tokens[self.mask(index)]

    def read(self, indices: Sequence[int]) -> list[Example]:
        """The examples at these indices."""
        self.reads.append([*indices])
        return [self._draw(index) for index in indices]

    def _draw(self, index: int) -> Example:
        drawn, length = torch.Generator().manual_seed(index), LENGTHS[index]
        tokens = torch.randint(CONFIG.vocab_size, (length,), generator=drawn)
        features = torch.randn(length, len(self.taps), CONFIG.hidden_size, generator=drawn)
        return Example(tokens, self.mask(index), features)


def made_target_head() -> TargetHead:
    """What a head borrows of a target that was never there."""
    drawn = torch.Generator().manual_seed(5)
    shape = CONFIG.vocab_size, CONFIG.hidden_size
    embedding = nn.Embedding(*shape, _weight=torch.randn(shape, generator=drawn))
    output = nn.Linear(shape[1], shape[0], bias=False)
    output.weight.data.copy_(torch.randn(shape, generator=drawn) / 4)
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def train_made(out: Path, drafter: dict[str, Any], *overrides: str) -> tuple[Any, MadeFeatures]:
    """A run on made-up features in fp32; the head as this process holds it, and what was read."""
    asked = [
        "train.dtype=float32",
        "train.lr=1e-3",
        "train.validation=0.1",
        f"train.out={out}",
        *overrides,
    ]
    recipe = Recipe.load(RECIPE, asked).model_copy(update={"drafter": DrafterSection(**drafter)})
    accelerator = launch(recipe.train)
    settings, frozen = settings_of(recipe.drafter.model_dump(), "test"), made_target_head()
    method = DRAFTERS[settings.kind]
    taps = tuple(dict.fromkeys((*method.taps_for(settings, CONFIG), *method.teacher_taps)))
    features = MadeFeatures(taps)
    torch.manual_seed(recipe.train.seed)
    supervised = (features.supervised_tokens(place) for place in range(len(features)))
    head = method.for_target(settings, CONFIG, frozen, supervised)
    train(accelerator, recipe, head, frozen, features)
    return head, features
