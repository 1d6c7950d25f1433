"""Validation of a head on sequences, without decoding: at every supervised slot as if a draft began there."""

# T tokens of one sequence, S or N supervised slots, D width, V vocabulary, K steps

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
"""Returns logits [.., V] of the inputs [.., D] of an LM head."""
ROWS = 128  # rows of logits that are in memory at a time


def add_sums(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return two dictionaries of sums (`validate_sequence`) added up by name, those of two batches or two processes.

    Both have the same names, or one is empty: it had no supervised slot.
    """
    if not (sums and more):
        return sums or more
    return {name: value + more[name] for name, value in sums.items()}


def validate_sequence(
    states: Sequence[Tensor],
    target_hidden: Tensor,
    tokens: Tensor,
    supervised: Tensor,
    logits: tuple[Sequence[Logits], Logits],
    trees: dict[str, Paths],
) -> dict[str, Tensor]:
    """Return sums over the S supervised slots of one sequence of T tokens, as if a draft began at each of them.

    Slot i predicts token i + 2 in the first step, and one token further in each next step, where the head reads the
    state of the step before and the sequence's next token.

    Args:
        states: For each of K steps (levels of a draft) the inputs of the head's LM head at the slots [S, width].
        target_hidden: The inputs of the target's LM head [T, width]: row i predicts token i + 1.
        tokens: The sequence [T].
        supervised: [T] bool, the supervised tokens. Each of them is predicted by a slot.
        logits: The LM heads: the draft head's of each step, and the target's.
        trees: Fixed trees, by name, whose acceptance is counted; a tree is the paths of its nodes, as ranks of children
            from the root.

    Returns:
        "slots", their number; "cross_entropy", "agreement" of the likeliest tokens and "overlap" sum min(p, q) of the
        first step; and for each tree, by level [levels], "NAME/reached" and "NAME/accepted", see `_descend`.
    """
    students, teacher = logits
    # [T], the target's likeliest token after each token
    choices = _in_chunks(lambda rows: teacher(rows).max(-1).indices, target_hidden)
    # slot i predicts token i + 2
    slots = supervised[2:].nonzero()[:, 0].to(tokens.device)
    sums = {"slots": torch.tensor(float(len(slots)), dtype=torch.float64)}
    sums |= _compare(states[0], target_hidden[slots + 1], students[0], teacher)
    tree_depths = [max(map(len, paths)) for paths in trees.values()]
    max_depth = max([len(states), *tree_depths])
    # A step is judged only while its token is in the answer and the sequence's tokens so far are the target's choices:
    # after any other token the sequence does not tell what the target would choose.
    is_inside = F.pad(supervised, (0, max_depth)).to(tokens.device)
    is_known = torch.ones_like(slots, dtype=torch.bool)
    ranks = []  # for each level [S], the rank that the head gives the target's token
    known = []  # for each level [S], whether the level is judged
    for step in range(1, max_depth + 1):
        # [S], the index of the token that a draft reads last in this step; it predicts the target's choice after that;
        # beyond the end, where nothing is known, any index serves
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
            # the tree is deeper than the head drafts: a rank that no node has is never accepted
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
    """Return sums over the supervised slots of all sequences of a batch, as `validate_sequence` does for one.

    They are the number of slots, terms that compare the head's probs with the target's, and how often the levels of
    each tree are reached and accepted. Empty if there is no supervised slot.

    Args:
        batch: The sequences, with the target's states.
        states: For each step (level of a draft) the inputs of the head's LM head at the supervised slots of all
            sequences [slots, width].
        logits: The LM heads: the draft head's of each step, and the target's.
        trees: Fixed trees, by name, whose acceptance is counted.
    """
    masks = batch.loss_mask.split(batch.lengths)
    # slot i predicts token i + 2
    slot_counts = [int(mask[2:].sum()) for mask in masks]
    # tap -1 is the input of the target's LM head
    target_hidden = batch.select_taps((-1,))[:, 0].split(batch.lengths)
    tokens = batch.tokens.split(batch.lengths)
    by_step = [state.split(slot_counts) for state in states]
    # a sequence without slots has nothing to count
    sums: dict[str, Tensor] = {}
    for index, count in enumerate(slot_counts):
        if count:
            seq_states = [state[index] for state in by_step]
            seq_sums = validate_sequence(
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
    """Turn sums of `validate_batch` into means per slot and figures of each tree.

    "cross_entropy", "agreement" and "overlap" become means. For each tree, by its name, "TREE/1", "TREE/2" and so on
    are the rates at which a level is accepted if the level above was. "TREE/tau" is the acceptance length: tokens per
    target forward.
    """
    means: dict[str, float] = {}
    for name, value in sums.items():
        tree, _, kind = name.partition("/")
        if kind == "accepted":
            # a level that no draft reached has the rate 0
            rates = (value / sums[f"{tree}/reached"].clamp(min=1)).tolist()
            for depth, rate in enumerate(rates, start=1):
                means[f"{tree}/{depth}"] = rate
            # tau = 1 + r1 + r1 r2 + ..., as the target adds one token to those that are accepted
            means[f"{tree}/tau"] = 1 + sum(accumulate(rates, mul))
        # "TREE/reached" has served already, as the divisor of the rates
        elif not kind and name != "slots":
            means[name] = float(value) / float(sums["slots"])
    return means


def chain_rates(means: dict[str, float]) -> list[float]:
    """Return the rate at which a chain is accepted down to each level, the products of the rates by level.

    `means` come from `figures`. The list is empty if they have no tree "chain".
    """
    # the depth of the chain is not known; it is at most the number of figures
    names = [f"chain/{depth}" for depth in range(1, len(means) + 1)]
    return list(accumulate((means[name] for name in names if name in means), mul))


def _in_chunks(function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Return the function's results for all rows [N, ..], computed for ROWS rows at a time.

    The function makes logits, and those of all rows may not fit in memory. `rows` are its arguments, each with N rows.
    """
    chunks = zip(*(tensor.split(ROWS) for tensor in rows), strict=True)
    return torch.cat([function(*chunk) for chunk in chunks])


def _rank(student: Logits, states: Tensor, wanted: Tensor) -> Tensor:
    """Return the rank [N] of the wanted token [N] among the student's logits at each of N states [N, width].

    The rank is the number of tokens that are likelier.
    """
    logits = student(states)
    return (logits > logits.gather(1, wanted[:, None])).sum(-1)


def _compare(
    states: Tensor, target_hidden: Tensor, student: Logits, teacher: Logits
) -> dict[str, Tensor]:
    """Return sums over N slots that compare the student's probs q with the teacher's p.

    They are the cross-entropy, the top-1 agreement and the overlap sum min(p, q), which is the chance of acceptance.

    Args:
        states: The inputs of the student's LM head [N, width].
        target_hidden: The inputs of the teacher's LM head [N, width], which predict the same tokens.
        student: Makes the student's logits, minus infinity at tokens outside of its draft vocabulary.
        teacher: Makes the teacher's logits.
    """

    def compare(states: Tensor, target_hidden: Tensor) -> Tensor:
        """Return cross-entropy, agreement and overlap [n, 3] at each of n slots."""
        log_probs = student(states).float().log_softmax(-1)
        target_probs = teacher(target_hidden).float().softmax(-1)
        agreement = log_probs.argmax(-1) == target_probs.argmax(-1)
        overlap = torch.minimum(log_probs.exp(), target_probs).sum(-1)
        # The cross-entropy leaves out tokens outside of the draft vocabulary, whose log-probs are minus infinity, and
        # renormalises the target's probs. The clamp avoids 0 * infinity.
        target_probs = target_probs.masked_fill(log_probs.isneginf(), 0)
        finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
        cross_entropy = -(target_probs * finite).sum(-1) / target_probs.sum(-1)
        return torch.stack([cross_entropy, agreement.float(), overlap], dim=1)

    sums = _in_chunks(compare, states, target_hidden).double().sum(0).cpu()
    cross_entropy, agreement, overlap = sums
    return {"cross_entropy": cross_entropy, "agreement": agreement, "overlap": overlap}


def _descend(ranks: list[Tensor], known: list[Tensor], paths: Paths) -> tuple[Tensor, Tensor]:
    """Return how many drafts reach each level of a fixed tree, and how many of them are accepted there.

    A draft begins at every slot and descends the tree along the target's tokens: it takes the child whose rank is that
    of the target's token, and ends where the tree has no such child or the token is not known.

    Args:
        ranks: For each level [S], the rank that the head gives the target's token, at each of S slots.
        known: For each level [S], whether the target's token is known.
        paths: The tree: for each node the ranks of the children to take from the root.

    Returns:
        The two counts as float64 tensors [levels], on the host. A level counts as reached if the level above was
        accepted and its token is known.
    """
    # the number of each node, by its path; the root is 0
    nodes: dict[tuple[int, ...], int] = {(): 0}
    for path in sorted(set(paths), key=len):
        nodes[path] = len(nodes)
    # [nodes, ranks + 1]: the child of each rank of each node, or -1 if the tree has none; the last column is for all
    # ranks that no node has
    max_rank = 1 + max(path[-1] for path in paths)
    child_of = torch.full((len(nodes), max_rank + 1), -1)
    for path in paths:
        child_of[nodes[path[:-1]], path[-1]] = nodes[path]
    child_of = child_of.to(ranks[0].device)
    # [S], the node that each draft has reached, at first the root; -1 once it has left the tree
    node = torch.zeros_like(ranks[0])
    counts = []
    depth = max(len(path) for path in paths)
    for rank, is_known in zip(ranks[:depth], known[:depth], strict=True):
        is_reached = (node >= 0) & is_known
        node = torch.where(is_reached, child_of[node, rank.clamp(max=max_rank)], -1)
        counts.append(torch.stack([is_reached.sum(), (node >= 0).sum()]))
    reached, accepted = torch.stack(counts).double().cpu().unbind(1)
    return reached, accepted
