"""Train the small chat models of the demo and of `recipes/tiny`; a stopped run is resumed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
MOMENTUM = 0.95
# of the quintic that brings singular values near 1 (Jordan et al., 2024)
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
LR = 2.5e-2
WEIGHT_DECAY = 0.1


class Muon(torch.optim.Optimizer):
    """Muon as in torch, with products in a chosen precision.

    torch's multiplies in bf16, which took 76 times as long as fp32 on a CPU without instructions for it.
    """

    def __init__(self, params: Iterable[torch.Tensor], lr: float, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": lr})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move each weight along its momentum, of which all singular values become about 1."""
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["momentum"] = torch.zeros_like(weight)
                momentum = state["momentum"].lerp_(weight.grad, 1 - MOMENTUM)
                # Nesterov's look ahead
                update = orthogonalize(weight.grad.lerp(momentum, MOMENTUM).to(self.dtype))
                rows, columns = weight.shape
                weight.mul_(1 - group["lr"] * WEIGHT_DECAY)
                weight.add_(update, alpha=-group["lr"] * math.sqrt(max(1, rows / columns)))


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """Return about U V^T of a matrix U S V^T, by five steps of Newton and Schulz.

    A step is X <- a X + (b A + c A^2) X, with A = X X^T.
    """
    if matrix.shape[0] > matrix.shape[1]:
        # the Gram matrix of the shorter side is smaller
        return orthogonalize(matrix.T).T
    a, b, c = NEWTON_SCHULZ
    x = matrix / matrix.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def make_optimizers(
    matrices: Sequence[torch.Tensor], others: Sequence[torch.Tensor], lr: float, bf16: bool
) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices inside the layers, which makes them learn much faster, and AdamW for the rest."""
    return [
        Muon(matrices, MATRIX_LR, torch.bfloat16 if bf16 else torch.float32),
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
    optimizers = make_optimizers(matrices, others, LR, bf16)
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
