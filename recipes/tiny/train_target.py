"""Train the small chat models of the demo and of `recipes/tiny`, so that a run that is stopped goes on later."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from tqdm.auto import tqdm

from eagle.disk import replacing

BATCH, WARMUP, SAVE_EVERY = 4, 40, 20
MATRIX_LR, LR, WEIGHT_DECAY = 0.02, 2.5e-2, 0.1


def optimizers(model: Any) -> list[Any]:
    """Muon for the matrices inside the layers, which learn much faster with it, and AdamW for all else."""
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    inside = {id(weight) for weight in matrices}
    others = [weight for weight in model.parameters() if id(weight) not in inside]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR, weight_decay=WEIGHT_DECAY),
        torch.optim.AdamW(others, lr=LR, betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY, fused=True),
    ]


def train(model: Any, rows: torch.Tensor, steps: int, seed: int, bf16: bool, begun: Path) -> None:
    """Train in place on every token, each row once an epoch, with warmup and linear decay to zero.

    The state is kept in the file `begun`, from which a run that was stopped goes on.
    """

    def rate(step: int) -> float:
        return min((step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP))

    steppers = optimizers(model)
    steppers += [torch.optim.lr_scheduler.LambdaLR(optimizer, rate) for optimizer in steppers]
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([torch.randperm(len(rows), generator=generator) for _ in range(steps * BATCH // len(rows) + 1)])
    done = restore(begun, [model, *steppers])
    batches = order[done * BATCH : steps * BATCH].split(BATCH) if done < steps else ()
    for row_ids in (bar := tqdm(batches, desc="training", unit="step", initial=done, total=steps)):
        batch = rows[row_ids]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(input_ids=batch, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for stepper in steppers:
            stepper.step()
        model.zero_grad()
        bar.set_postfix(loss=f"{loss.item():.2f}", refresh=False)
        done += 1
        if done % SAVE_EVERY == 0:
            with replacing(begun) as path:
                torch.save({"done": done, "states": [part.state_dict() for part in (model, *steppers)]}, path)
    model.eval()


def restore(begun: Path, parts: Sequence[Any]) -> int:
    """Load the state of model, optimizers and schedules where a stopped run left one; returns its number of steps."""
    if not begun.is_file():
        return 0
    state = torch.load(begun, weights_only=True)
    for part, values in zip(parts, state["states"], strict=True):
        part.load_state_dict(values)
    print(f"training goes on behind step {state['done']}, where an earlier run was stopped")
    return int(state["done"])
