"""Validation of a head on texts, without decoding: every slot counts."""

# T tokens of one text, S slots counted, D width, V vocabulary, K steps

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.examples import Batch
from eagle.core.tree import Paths

Logits = Callable[[Tensor], Tensor]
ROWS = 128  # of logits held at once


def add_sums(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums of two batches, or of two processes."""
    return {name: sums[name] + value if name in sums else value for name, value in more.items()}


def validate_text(
    states: Sequence[Tensor],
    true: Tensor,
    tokens: Tensor,
    counted: Tensor,
    logits: tuple[Sequence[Logits], Logits],
    trees: dict[str, Paths],
) -> dict[str, Tensor]:
    """Sums over the slots of one text: slot i guesses token i + 2, and is there where `counted` [T] marks that token.

    `states` are K times [S, D]: in step n the head reads the state that it made in the step before, and the text's next
    token. `true` [T, D] are the target's, in row i for token i + 1. `logits` are functions of both: the head's of each
    step, and the target's.
    """
    students, teacher = logits
    choices = _rows(lambda rows: teacher(rows).max(-1).indices, true)  # [T], after each token
    slots = counted[2:].nonzero()[:, 0].to(tokens.device)
    sums = {
        "slots": torch.tensor(float(len(slots)), dtype=torch.float64),
        **_compare(states[0], true[slots + 1], students[0], teacher),
    }
    deepest = max([len(states), *(len(path) for paths in trees.values() for path in paths)])
    # beyond the answer nothing is guessed; beyond a token that the target would not choose its choices are unknown
    inside = F.pad(counted, (0, deepest)).to(tokens.device)
    ranks, seen = [], [torch.ones_like(slots, dtype=torch.bool)]
    for step in range(1, deepest + 1):
        place = (slots + step).clamp(max=len(tokens) - 1)
        watched = seen[-1] & inside[slots + step + 1]
        seen.append(watched & (tokens[place] == choices[place - 1]) if step > 1 else watched)
        if step <= len(states):
            ranks.append(_rows(partial(_rank, students[step - 1]), states[step - 1], choices[place]))
        else:  # deeper than the head drafts
            ranks.append(torch.full_like(slots, torch.iinfo(slots.dtype).max))
    for name, paths in trees.items():
        sums[f"{name}/reached"], sums[f"{name}/accepted"] = _descent(ranks, seen[1:], paths)
    return sums


def validate_batch(
    batch: Batch, states: Sequence[Tensor], logits: tuple[Sequence[Logits], Logits], trees: dict[str, Paths]
) -> dict[str, Tensor]:
    """Sums of `validate_text` over the slots of all texts of a batch, for which `states` are K times [S, D]."""
    counts = [int(mask[2:].sum()) for mask in batch.loss_mask.split(batch.lengths)]
    columns = (batch.select_taps((-1,))[:, 0], batch.tokens, batch.loss_mask)
    texts = zip(*(column.split(batch.lengths) for column in columns), strict=True)
    parts = zip(*(state.split(counts) for state in states), strict=True)
    sums: dict[str, Tensor] = {}
    for mine, (true, tokens, counted) in zip(parts, texts, strict=True):
        if len(mine[0]):
            sums = add_sums(sums, validate_text(mine, true, tokens, counted, logits, trees))
    return sums


def figures(sums: dict[str, Tensor]) -> dict[str, float]:
    """Means per slot; per tree the acceptance of each level where the one before was accepted, and the predicted τ."""
    means: dict[str, float] = {}
    for name, value in sums.items():
        tree, _, kind = name.partition("/")
        if kind == "accepted":
            rates = (value / sums[f"{tree}/reached"].clamp(min=1)).tolist()
            means |= {f"{tree}/{depth}": rate for depth, rate in enumerate(rates, start=1)}
            means[f"{tree}/tau"] = 1 + sum(accumulate(rates, mul))
        elif not kind and name != "slots":
            means[name] = float(value) / float(sums["slots"])
    return means


def chain_rates(means: dict[str, float]) -> list[float]:
    """The rate at which a chain is accepted up to each level, from `figures`; empty without a chain."""
    names = [f"chain/{depth}" for depth in range(1, len(means) + 1)]
    return list(accumulate((means[name] for name in names if name in means), mul))


def _rows(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """The function of a few rows at a time: what lies between is as wide as the vocabulary."""
    return torch.cat([function(*parts) for parts in zip(*(tensor.split(ROWS) for tensor in rows), strict=True)])


def _rank(student: Logits, states: Tensor, wanted: Tensor) -> Tensor:
    """The number of tokens that the student ranks above the wanted one."""
    logits = student(states)
    return (logits > logits.gather(1, wanted[:, None])).sum(-1)


def _compare(state: Tensor, true: Tensor, student: Logits, teacher: Logits) -> dict[str, Tensor]:
    """Sums of top-1 agreement, overlap and cross-entropy, the last over the draft vocabulary."""

    def compare(state: Tensor, true: Tensor) -> Tensor:
        log_probs = student(state).float().log_softmax(-1)
        target_probs = teacher(true).float().softmax(-1)
        agreement = log_probs.argmax(-1) == target_probs.argmax(-1)
        overlap = torch.minimum(log_probs.exp(), target_probs).sum(-1)
        target_probs = target_probs.masked_fill(log_probs.isneginf(), 0)
        finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
        entropy = -(target_probs * finite).sum(-1) / target_probs.sum(-1)
        return torch.stack([entropy, agreement.float(), overlap], dim=1)

    sums = _rows(compare, state, true).double().sum(0).cpu()
    return dict(zip(("cross_entropy", "agreement", "overlap"), sums, strict=True))


def _descent(ranks: list[Tensor], seen: list[Tensor], paths: Paths) -> tuple[Tensor, Tensor]:
    """Per level of a tree: how many slots were still inside it and can be watched, and how many of them stay inside."""
    nodes = {(): 0} | {path: node for node, path in enumerate(sorted(set(paths), key=len), start=1)}
    widest = 1 + max(path[-1] for path in paths)
    table = torch.full((len(nodes), widest + 1), -1)
    for path in paths:
        table[nodes[path[:-1]], path[-1]] = nodes[path]
    table, at, counts = table.to(ranks[0].device), torch.zeros_like(ranks[0]), []
    for rank, watched in zip(ranks, seen[: max(map(len, paths))], strict=False):
        reached = (at >= 0) & watched
        at = torch.where(reached, table[at, rank.clamp(max=widest)], -1)
        counts.append(torch.stack([reached.sum(), (at >= 0).sum()]))
    reached, accepted = torch.stack(counts).double().cpu().unbind(1)
    return reached, accepted
