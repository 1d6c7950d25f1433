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
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
LENGTHS = [7 + 5 * (index * 7 % 11) for index in range(26)]
PATIENCE = 900  # seconds: a limit that ends what hangs


def on_ranks(
    count: int,
    work: Callable[[int], object],
    folder: Path,
    launched: bool = True,
) -> list[str]:
    """Do some work in `count` forked processes, connected as a launcher would; return what each printed.

    If one fails, the others are ended, and an AssertionError has all that was printed.

    Args:
        count: how many processes.
        work: what each does, given its rank.
        folder: where each prints.
        launched: whether the environment has a launcher's variables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"rank-{rank}.txt" for rank in range(count)]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    # the children, which a failure of any ends
    running = set()
    for rank in range(count):
        env = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} if launched else {}
        pid = os.fork()
        if not pid:
            _do(work, rank, env, logs[rank])
        running.add(pid)
    end = time.monotonic() + PATIENCE
    failed = False
    while running and not failed:
        # any child that has ended, without waiting for one
        pid, status = os.waitpid(-1, os.WNOHANG)
        running.discard(pid)
        failed = bool(status) or time.monotonic() > end
        if not pid:
            time.sleep(0.01)
    for pid in running:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    printed = [log.read_text() for log in logs]
    assert not failed, "\n".join(printed)
    return printed


def _do(work: Callable[[int], object], rank: int, env: dict[str, str], log: Path) -> None:
    """Become a process of the run, work, and end without what the test's process would do at its end."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
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
    """Conversations and features drawn from a seed, which keep a list of what was read."""

    taps: tuple[int, ...]
    identity: dict[str, Any] = field(default_factory=lambda: {"made": "up"})
    together: bool = False
    sampled: bool = False
    reads: list[list[int]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(LENGTHS)

    def mask(self, index: int) -> Tensor:
        """Return [T], by which the second half of each text is an answer."""
        return torch.arange(LENGTHS[index]) >= LENGTHS[index] // 2

    def supervised_tokens(self, index: int) -> Tensor:
        """Return the supervised tokens of an example."""
        return self._draw(index).tokens[self.mask(index)]

    def read(self, indices: Sequence[int]) -> list[Example]:
        """Return the examples at these indices."""
        self.reads.append([*indices])
        return [self._draw(index) for index in indices]

    def _draw(self, index: int) -> Example:
        generator = torch.Generator().manual_seed(index)
        length = LENGTHS[index]
        tokens = torch.randint(CONFIG.vocab_size, (length,), generator=generator)
        size = (length, len(self.taps), CONFIG.hidden_size)
        return Example(tokens, self.mask(index), torch.randn(size, generator=generator))


def made_target_head() -> TargetHead:
    """Return a random embedding and LM head, as if borrowed from a target."""
    generator = torch.Generator().manual_seed(5)
    shape = (CONFIG.vocab_size, CONFIG.hidden_size)
    embedding = nn.Embedding(*shape, _weight=torch.randn(shape, generator=generator))
    output = nn.Linear(shape[1], shape[0], bias=False)
    output.weight.data.copy_(torch.randn(shape, generator=generator) / 4)
    return TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))


def train_made(out: Path, drafter: dict[str, Any], *overrides: str) -> tuple[Any, MadeFeatures]:
    """Train on made-up features in fp32; return the head as this process holds it, and the features.

    Args:
        out: the folder of the run.
        drafter: the settings of a head.
        overrides: further keys of the recipe.
    """
    every_override = [
        "train.dtype=float32",
        "train.lr=1e-3",
        "train.validation=0.1",
        f"train.out={out}",
        *overrides,
    ]
    # the tiny recipe with another drafter
    section = DrafterSection(**drafter)
    recipe = Recipe.load(RECIPE, every_override).model_copy(update={"drafter": section})
    accelerator = launch(recipe.train)
    settings = settings_of(recipe.drafter.model_dump(), "test")
    method = DRAFTERS[settings.kind]
    # every tap once, in the order in which they are named
    taps = dict.fromkeys((*method.taps_for(settings, CONFIG), *method.teacher_taps))
    features = MadeFeatures(tuple(taps))
    target_head = made_target_head()
    torch.manual_seed(recipe.train.seed)
    supervised = (features.supervised_tokens(index) for index in range(len(features)))
    head = method.for_target(settings, CONFIG, target_head, supervised)
    train(accelerator, recipe, head, target_head, features=features)
    return head, features
