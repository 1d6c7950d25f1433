"""Validation of a head on sequences, without decoding: every slot counts."""

# T tokens of one sequence, S slots counted, D width, V vocabulary, K steps

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
    """Return the sums of two batches, or of two processes."""
    return {name: sums[name] + value if name in sums else value for name, value in more.items()}


def validate_text(
    states: Sequence[Tensor],
    true: Tensor,
    tokens: Tensor,
    counted: Tensor,
    logits: tuple[Sequence[Logits], Logits],
    trees: dict[str, Paths],
) -> dict[str, Tensor]:
    """Return sums over the slots of one sequence: slot i guesses token i + 2.

    Args:
        states: K times [S, D]: in step n the head reads the state that it made before, and the sequence's next token.
        true: The target's states [T, D]: row i predicts token i + 1.
        tokens: The sequence [T].
        counted: [T] bool; there is a slot for each token that is marked, which it guesses.
        logits: The head's of each step, and the target's, as functions of both kinds of states.
        trees: Trees whose acceptance is counted.
    """
    students, teacher = logits
    # [T], the target's token after each token
    choices = _in_chunks(lambda rows: teacher(rows).max(-1).indices, true)
    slots = counted[2:].nonzero()[:, 0].to(tokens.device)
    sums = {"slots": torch.tensor(float(len(slots)), dtype=torch.float64)}
    sums |= _compare(states[0], true[slots + 1], students[0], teacher)
    tree_depths = [max(map(len, paths)) for paths in trees.values()]
    max_depth = max([len(states), *tree_depths])
    # after the answer nothing is guessed; after a token that the target would not choose, what follows its own choice
    # is not known
    is_inside = F.pad(counted, (0, max_depth)).to(tokens.device)
    is_known = torch.ones_like(slots, dtype=torch.bool)
    ranks = []
    known = []
    for step in range(1, max_depth + 1):
        # [S], the token that a draft reads last in this step; the target's choice after it is what the step guesses
        read = (slots + step).clamp(max=len(tokens) - 1)
        is_known = is_known & is_inside[slots + step + 1]
        if step > 1:
            is_known = is_known & (tokens[read] == choices[read - 1])
        known.append(is_known)
        if step <= len(states):
            ranks.append(
                _in_chunks(partial(_rank, students[step - 1]), states[step - 1], choices[read])
            )
        else:
            # deeper than the head drafts
            ranks.append(torch.full_like(slots, torch.iinfo(slots.dtype).max))
    for name, paths in trees.items():
        sums[f"{name}/reached"], sums[f"{name}/accepted"] = _descend(ranks, known, paths)
    return sums


def validate_batch(
    batch: Batch,
    states: Sequence[Tensor],
    logits: tuple[Sequence[Logits], Logits],
    trees: dict[str, Paths],
) -> dict[str, Tensor]:
    """Return sums of `validate_text` over the slots of all sequences of a batch; `states` are K times [S, D]."""
    masks = batch.loss_mask.split(batch.lengths)
    slot_counts = [int(mask[2:].sum()) for mask in masks]
    target_hidden = batch.select_taps((-1,))[:, 0].split(batch.lengths)
    tokens = batch.tokens.split(batch.lengths)
    by_step = [state.split(slot_counts) for state in states]
    # a sequence without slots has nothing to count
    sums: dict[str, Tensor] = {}
    for index, count in enumerate(slot_counts):
        if count:
            seq_states = [state[index] for state in by_step]
            seq_sums = validate_text(
                seq_states,
                target_hidden[index],
                tokens[index],
                masks[index],
                logits=logits,
                trees=trees,
            )
            sums = add_sums(sums, seq_sums)
    return sums


def figures(sums: dict[str, Tensor]) -> dict[str, float]:
    """Return means per slot, and for each tree tau, and how often a level is accepted if the one above was."""
    means: dict[str, float] = {}
    for name, value in sums.items():
        tree, _, kind = name.partition("/")
        if kind == "accepted":
            rates = (value / sums[f"{tree}/reached"].clamp(min=1)).tolist()
            for depth, rate in enumerate(rates, start=1):
                means[f"{tree}/{depth}"] = rate
            # tau = 1 + r1 + r1 r2 + ..., as the target adds one token to what is accepted
            means[f"{tree}/tau"] = 1 + sum(accumulate(rates, mul))
        elif not kind and name != "slots":
            means[name] = float(value) / float(sums["slots"])
    return means


def chain_rates(means: dict[str, float]) -> list[float]:
    """Return the rate at which a chain is accepted up to each level, from `figures`; empty without a chain."""
    names = [f"chain/{depth}" for depth in range(1, len(means) + 1)]
    return list(accumulate((means[name] for name in names if name in means), mul))


def _in_chunks(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return the function of all rows, computed for a few at a time: on the way it makes logits of each."""
    chunks = zip(*(tensor.split(ROWS) for tensor in rows), strict=True)
    return torch.cat([function(*chunk) for chunk in chunks])


def _rank(student: Logits, states: Tensor, wanted: Tensor) -> Tensor:
    """Return the number of tokens that the student ranks above the wanted one."""
    logits = student(states)
    return (logits > logits.gather(1, wanted[:, None])).sum(-1)


def _compare(
    states: Tensor, target_hidden: Tensor, student: Logits, teacher: Logits
) -> dict[str, Tensor]:
    """Return sums of top-1 agreement, overlap and cross-entropy, the last over the draft vocabulary."""

    def compare(states: Tensor, target_hidden: Tensor) -> Tensor:
        log_probs = student(states).float().log_softmax(-1)
        target_probs = teacher(target_hidden).float().softmax(-1)
        agreement = log_probs.argmax(-1) == target_probs.argmax(-1)
        overlap = torch.minimum(log_probs.exp(), target_probs).sum(-1)
        # tokens outside of the draft vocabulary have log-probs of minus infinity
        target_probs = target_probs.masked_fill(log_probs.isneginf(), 0)
        finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
        entropy = -(target_probs * finite).sum(-1) / target_probs.sum(-1)
        return torch.stack([entropy, agreement.float(), overlap], dim=1)

    entropy, agreement, overlap = _in_chunks(compare, states, target_hidden).double().sum(0).cpu()
    return {"cross_entropy": entropy, "agreement": agreement, "overlap": overlap}


def _descend(ranks: list[Tensor], known: list[Tensor], paths: Paths) -> tuple[Tensor, Tensor]:
    """Return for each level of a tree how many slots are in it and known, and how many of them are accepted there.

    Args:
        ranks: For each level [S], the rank that the head gives the target's token.
        known: For each level [S], whether the target's token is known.
        paths: The tree, as ranks of children from the root.
    """
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for path in sorted(set(paths), key=len):
        nodes[path] = len(nodes)
    # [nodes, ranks]: the child of a node that has a rank, or -1; the last column is for ranks that no node has
    max_rank = 1 + max(path[-1] for path in paths)
    child_of = torch.full((len(nodes), max_rank + 1), -1)
    for path in paths:
        child_of[nodes[path[:-1]], path[-1]] = nodes[path]
    child_of = child_of.to(ranks[0].device)
    # [S], the node that each slot has come to, at first the root; -1 once it has left the tree
    node = torch.zeros_like(ranks[0])
    counts = []
    depth = max(len(path) for path in paths)
    for rank, is_known in zip(ranks[:depth], known[:depth], strict=True):
        is_reached = (node >= 0) & is_known
        node = torch.where(is_reached, child_of[node, rank.clamp(max=max_rank)], -1)
        counts.append(torch.stack([is_reached.sum(), (node >= 0).sum()]))
    reached, accepted = torch.stack(counts).double().cpu().unbind(1)
    return reached, accepted
