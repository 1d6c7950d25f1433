"""What drafts would keep of a target's own answers, which are made once for all heads."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bench.methods_arms import SHAPES
from eagle.core.drafter import Budget, Drafter
from eagle.core.verify import Sampling
from eagle.formats.checkpoint import load_drafter
from eagle.log import progress
from eagle.target.target import Target
from eval.prompts import Question
from eval.replay import Answer, answer, recorded, replay

NEW_TOKENS = 64


def told(
    args: argparse.Namespace, target: Target, asked: Sequence[Question], taps: tuple[int, ...], heat: float
) -> list[Answer]:
    """The target's own answers with these taps, kept for the next time."""
    path = Path(args.work) / f"answers-{len(asked)}-{heat:g}.pt"
    if path.exists():
        return list(torch.load(path, weights_only=False))
    found = [
        answer(
            target,
            taps,
            target.chat(one.turns[0]),
            limit=NEW_TOKENS,
            sampling=Sampling(heat, request=number),
            task=one.task or "",
        )
        for number, one in enumerate(progress(asked, f"answers at T = {heat:g}", len(asked)))
    ]
    torch.save(found, path)
    return found


@torch.no_grad()
def top_ten(target: Target, answers: Sequence[Answer]) -> float:
    """How much of the target's law its ten likeliest tokens hold, the mean over all places of its answers."""
    states = [one.features[one.prompt - 1 : -1, -1] for one in answers if one.features is not None]
    held = [target.head.logits(rows).softmax(-1).topk(10).values.sum(-1) for rows in states]
    return float(torch.cat(held).mean())


def along(target: Target, drafter: Drafter, answers: Sequence[Answer], budget: Budget) -> dict[str, Any]:
    """What a drafter keeps of every answer, and how often each level was asked for and kept."""
    rows, asked, kept = [], [0] * budget.depth, [0] * budget.depth
    for one in answers:
        cycles = recorded(one, replay(target, drafter, one, budget))
        rows.append([sum(cycle["committed"] for cycle in cycles), len(cycles)])
        for cycle in cycles:
            for level in range(min(cycle["accepted"] + 1, cycle["depth"])):
                asked[level] += 1
                kept[level] += cycle["accepted"] > level
    return {"rows": rows, "asked": asked, "kept": kept}


def decoded(
    target: Target, folder: Path, answers: dict[float, list[Answer]], taps: Sequence[int], shapes: Sequence[str]
) -> dict[str, Any]:
    """Every shape at every temperature, along answers with these taps."""
    drafter = load_drafter(folder, target)
    places = [taps.index(tap) for tap in drafter.taps]
    found = {}
    for heat, all_taps in answers.items():
        mine = [replace(one, features=one.features[:, places]) for one in all_taps if one.features is not None]
        for shape in shapes:
            found[f"{shape}, T = {heat:g}"] = along(target, drafter, mine, SHAPES[shape])
    return found
