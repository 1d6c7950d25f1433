"""Train the small chat models of the demo and of `recipes/tiny`; a stopped run is resumed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from eagle.disk import replacing

BATCH = 4
WARMUP = 40  # steps
SAVE_EVERY = 20  # steps
MATRIX_LR = 0.02
LR = 2.5e-2
WEIGHT_DECAY = 0.1


def make_optimizers(
    matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], lr: float
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, which makes them learn much faster, and AdamW for the rest."""
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True),
    ]


def decay(steps: int) -> Callable[[int], float]:
    """Return the schedule of the learning rate: a warmup, then a linear decay to zero."""
    return lambda step: min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP))


def train(model: Any, rows: torch.Tensor, steps: int, seed: int, bf16: bool, begun: Path) -> None:
    """Train a model in place on every token, each row once an epoch.

    The state is saved in the file `begun`, from which a stopped run is resumed.
    """
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    matrix_ids = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in matrix_ids]
    optimizers = make_optimizers(matrices, others, LR)
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(optimizer, decay(steps)) for optimizer in optimizers
    ]

    # All epochs are shuffled at once, so that a resumed run goes on in the same order.
    generator = torch.Generator().manual_seed(seed)
    num_epochs = steps * BATCH // len(rows) + 1
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(num_epochs)])
    done = restore(begun, [model, *optimizers, *schedules])
    batches: Sequence[torch.Tensor] = ()
    if done < steps:
        batches = order[done * BATCH : steps * BATCH].split(BATCH)
    bar = tqdm(batches, desc="training", unit="step", initial=done, total=steps)
    for row_ids in bar:
        batch = rows[row_ids]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(input_ids=batch, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
        update(model, loss, [*optimizers, *schedules])
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
        done += 1
        if done % SAVE_EVERY == 0:
            save(begun, done, [model, *optimizers, *schedules])
    model.eval()


def update(model: Any, loss: torch.Tensor, steppers: Sequence[Any]) -> None:
    """Compute the gradients of a loss, clip them, and step optimizers and schedules."""
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for stepper in steppers:
        stepper.step()
    model.zero_grad()


def save(begun: Path, done: int, parts: Sequence[Any]) -> None:
    """Save the state of model, optimizers and schedules after `done` steps; an older one is replaced at once."""
    with replacing(begun) as path:
        torch.save({"done": done, "states": [part.state_dict() for part in parts]}, path)


def restore(begun: Path, parts: Sequence[Any]) -> int:
    """Load the state that a stopped run saved, if there is one; return the number of its steps."""
    if not begun.is_file():
        return 0
    state = torch.load(begun, weights_only=True)
    for part, values in zip(parts, state["states"], strict=True):
        part.load_state_dict(values)
    print(f"training goes on behind step {state['done']}, where an earlier run was stopped")
    return int(state["done"])
