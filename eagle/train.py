"""The loop. It calls the head, whose forward is the loss, and knows nothing else of methods."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from accelerate import Accelerator

from eagle.checkpoint import save_head
from eagle.drafter import TargetHead, TrainableDrafter
from eagle.examples import Batch, Features, collate
from eagle.log import Metrics, progress
from eagle.recipe import Recipe


def train(recipe: Recipe, head: TrainableDrafter, frozen: TargetHead, store: Features) -> Path:
    """Train a head on stored features and save it; returns its folder."""
    settings, out = recipe.train, Path(recipe.train.out)
    accelerator = Accelerator()
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if max(asked, accelerator.num_processes) > 1:
        raise ValueError(f"launched as {asked} processes: this loop trains on one so far; use --num_processes 1")
    torch.manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=settings.lr, betas=settings.betas, weight_decay=settings.weight_decay
    )
    steps = settings.epochs * -(-len(store) // settings.batch_size)
    warmup = max(round(settings.warmup * steps), 1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(steps - warmup, 1))
    )
    model, optimizer = accelerator.prepare(head.train(), optimizer)
    metrics = Metrics(out / "metrics.jsonl")
    for step, batch in enumerate(
        progress(_batches(store, settings.epochs, settings.batch_size, settings.seed), "train", steps)
    ):
        losses = model(batch.to(accelerator.device), frozen)
        accelerator.backward(losses["total"])
        torch.nn.utils.clip_grad_norm_(head.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 10 == 0 or step == steps - 1:
            terms = {name: loss.item() for name, loss in losses.items()}
            metrics.write(step=step, lr=schedule.get_last_lr()[0], **terms)
    save_head(out / "head", head, recipe.dump(), {"torch": torch.__version__, **store.identity})
    return out / "head"


def _batches(store: Features, epochs: int, size: int, seed: int) -> Iterator[Batch]:
    """Every epoch in an order of its own, that the seed decides."""
    for epoch in range(epochs):
        order = torch.randperm(len(store), generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        for start in range(0, len(order), size):
            yield collate(store.read(order[start : start + size]), store.taps)
