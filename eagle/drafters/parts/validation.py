"""Validation of a head on sequences, without decoding: at every supervised slot as if a draft began there."""

# T tokens of one sequence, S or N supervised slots, D width, V vocabulary, K steps

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle.core.drafter import TargetHead, TrainableDrafter
from eagle.core.examples import Batch
from eagle.core.tree import Paths

Logits = Callable[[Tensor], Tensor]
"""Returns logits [.., V] of the inputs [.., D] of an LM head."""
ROWS = 128  # rows of logits that are in memory at a time
NO_RANK = torch.iinfo(torch.long).max  # a rank that no node of a tree has


class ValidatedHead(TrainableDrafter):
    """A head whose validation follows from `draft_levels`."""

    def on_all_tokens(self, logits: Tensor) -> Tensor:
        """Return the head's logits as logits of all tokens of the target; by default they are that."""
        return logits

    @torch.no_grad()
    def validate(
        self, batch: Batch, target_head: TargetHead, trees: dict[str, Paths]
    ) -> dict[str, Tensor]:
        """Return sums over a batch's supervised slots (tokens): loss terms, and how often levels are accepted.

        `figures` makes figures of them. `trees` are fixed trees by name: the paths of their nodes, as ranks of children
        from the root.
        """
        max_depth = max(len(path) for paths in trees.values() for path in paths)
        # of each level: the LM head's inputs, and the function from these to logits
        states, heads = zip(*self.draft_levels(batch, target_head, max_depth), strict=True)

        def on_all_tokens(head: Logits) -> Logits:
            """Return a level's LM head with logits of all tokens, to compare them with the target's."""
            return lambda state: self.on_all_tokens(head(state))

        students = [on_all_tokens(head) for head in heads]
        return validate_batch(batch, states, (students, target_head.logits), trees)


def add_sums(sums: dict[str, Tensor], more: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return two dictionaries of sums of validation, of two batches or two processes, added up by name.

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
        first step; and for each tree, by level [levels], "NAME/reached" and "NAME/accepted", see `_Descent`.
    """
    students, teacher = logits
    # slot i predicts token i + 2
    slots = supervised[2:].nonzero()[:, 0].to(tokens.device)
    # [S], the token that the target would choose after token i + 1, and the rank that the head gives it
    chosen, ranks, sums = _compare(states[0], target_hidden[slots + 1], students[0], teacher)
    # [T], the target's likeliest token after each token; only those after slots are read
    choices = torch.zeros_like(tokens)
    choices[slots + 1] = chosen
    descents = {name: _Descent(paths, len(slots), tokens.device) for name, paths in trees.items()}
    max_depth = max((descent.depth for descent in descents.values()), default=0)
    # A step is judged only while its token is in the answer and the sequence's tokens so far are the target's choices:
    # after any other token the sequence does not tell what the target would choose.
    is_inside = F.pad(supervised, (0, max_depth)).to(tokens.device)
    is_known = torch.ones_like(slots, dtype=torch.bool)
    for step in range(1, max_depth + 1):
        # [S], the index of the token that a draft reads last in this step; it predicts the target's choice after that;
        # beyond the end, where nothing is known, any index serves
        read = (slots + step).clamp(max=len(tokens) - 1)
        is_known = is_known & is_inside[slots + step + 1]
        if step > 1:
            is_known = is_known & (tokens[read] == choices[read - 1])
            # a tree deeper than the head drafts gets ranks that no node has, which are never accepted
            ranks = torch.full_like(slots, NO_RANK)
        if 1 < step <= len(states):
            # logits cost most: they are made for the drafts that are still in a tree alone
            is_read = is_known & torch.stack([tree.goes_on for tree in descents.values()]).any(0)
            ranks[is_read] = _ranks(
                students[step - 1], states[step - 1][is_read], choices[read[is_read]]
            )
        for descent in descents.values():
            descent.advance(ranks, is_known)
    for name, descent in descents.items():
        sums[f"{name}/reached"], sums[f"{name}/accepted"] = descent.counts()
    return sums


def validate_batch(
    batch: Batch,
    states: Sequence[Tensor],
    logits: tuple[Sequence[Logits], Logits],
    trees: dict[str, Paths],
) -> dict[str, Tensor]:
    """Return sums over the supervised slots (tokens) of all sequences of a batch, for the figures of validation.

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
    """Turn sums of validation into means per slot (supervised token) and figures of each tree.

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
    """Return the rate at which a chain of drafts is accepted down to each level: the products of the levels' rates.

    `means` come from `figures`. The list is empty if they have no tree "chain".
    """
    # the depth of the chain is not known; it is at most the number of figures
    names = [f"chain/{depth}" for depth in range(1, len(means) + 1)]
    return list(accumulate((means[name] for name in names if name in means), mul))


def _ranks(student: Logits, states: Tensor, wanted: Tensor) -> Tensor:
    """Return the rank [N] of the wanted token [N] among the student's logits at each of N states [N, width].

    Logits are made for ROWS states at a time, because those of all may not fit in memory. A rank is the number of
    tokens with a higher logit: 0 for the likeliest.
    """
    chunks = zip(states.split(ROWS), wanted.split(ROWS), strict=True)
    return torch.cat([_rank_in(student(rows), tokens) for rows, tokens in chunks])


def _rank_in(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return [N], how many tokens have a higher logit than the wanted one, in each row of logits [N, V]."""
    return (logits > logits.gather(1, wanted[:, None])).sum(-1)


def _compare(
    states: Tensor, target_hidden: Tensor, student: Logits, teacher: Logits
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Compare the student's (head's) probs q with the teacher's (target's) p at N slots (tokens).

    Args:
        states: The inputs of the student's LM head [N, width].
        target_hidden: The inputs of the teacher's LM head [N, width], which predict the same tokens.
        student: Makes the student's logits, minus infinity at tokens outside of its draft vocabulary.
        teacher: Makes the teacher's logits.

    Returns:
        The teacher's likeliest token at each slot [N], its rank among the student's [N], and sums over the slots: their
        number, the cross-entropy, the top-1 agreement and the overlap sum min(p, q), which is the chance of acceptance.
    """

    def compare(states: Tensor, target_hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the teacher's likeliest tokens and their ranks [2, n], and three terms [3, n], at n of the slots."""
        logits = student(states)
        target_logits = teacher(target_hidden)
        chosen = target_logits.max(-1).indices
        ranks = _rank_in(logits, chosen)
        log_probs = logits.float().log_softmax(-1)
        target_probs = target_logits.float().softmax(-1)
        agreement = log_probs.argmax(-1) == target_probs.argmax(-1)
        overlap = torch.minimum(log_probs.exp(), target_probs).sum(-1)
        # The cross-entropy leaves out tokens outside of the draft vocabulary, whose log-probs are minus infinity, and
        # renormalises the target's probs. The clamp avoids 0 * infinity.
        target_probs = target_probs.masked_fill(log_probs.isneginf(), 0)
        finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
        cross_entropy = -(target_probs * finite).sum(-1) / target_probs.sum(-1)
        terms = torch.stack([cross_entropy, agreement.float(), overlap])
        return torch.stack([chosen, ranks]), terms

    chunks = [
        compare(*rows) for rows in zip(states.split(ROWS), target_hidden.split(ROWS), strict=True)
    ]
    chosen, ranks = torch.cat([tokens for tokens, _ in chunks], dim=1)
    # float64 on the host, as not every device has it
    terms = torch.cat([terms for _, terms in chunks], dim=1).cpu().double().sum(1)
    sums = dict(zip(("cross_entropy", "agreement", "overlap"), terms, strict=True))
    # in the dtype of the other sums
    return chosen, ranks, {"slots": terms.new_tensor(len(states)), **sums}


class _Descent:
    """How far drafts get in a fixed tree, along the target's tokens.

    A draft begins at every slot. It takes the child whose rank is that of the target's token, and ends where the tree
    has no such child or the token is not known.
    """

    def __init__(self, paths: Paths, slots: int, device: torch.device) -> None:
        """Put every draft at the root of the tree.

        Args:
            paths: The tree: for each node the ranks of the children to take from the root.
            slots: S, the number of drafts: one begins at each supervised slot (token).
            device: The device of the ranks that `advance` gets.
        """
        self.depth = max(len(path) for path in paths)
        # the number of each node, by its path; the root is 0
        nodes: dict[tuple[int, ...], int] = {(): 0}
        for path in sorted(set(paths), key=len):
            nodes[path] = len(nodes)
        # [nodes, ranks + 1]: the child of each rank of each node, or -1 if the tree has none; the last column is for
        # all ranks that no node has
        self.max_rank = 1 + max(path[-1] for path in paths)
        child_of = torch.full((len(nodes), self.max_rank + 1), -1)
        for path in paths:
            child_of[nodes[path[:-1]], path[-1]] = nodes[path]
        self.child_of = child_of.to(device)
        # [S], the node that each draft has reached, at first the root; -1 once it has left the tree
        self.node = torch.zeros(slots, dtype=torch.long, device=device)
        self.level_counts: list[Tensor] = []

    @property
    def goes_on(self) -> Tensor:
        """[S] bool, whether each of S drafts is still in the tree.

        It has left the tree once the target's token is no child of its node.
        """
        return self.node >= 0

    def advance(self, ranks: Tensor, is_known: Tensor) -> None:
        """Let every draft descend one level of the tree; below the tree's last level nothing is counted.

        Args:
            ranks: [S], the rank that the head gives the target's token; any number where the draft has ended.
            is_known: [S] bool, whether the target's token is known.
        """
        if len(self.level_counts) == self.depth:
            return
        is_reached = self.goes_on & is_known
        child = self.child_of[self.node, ranks.clamp(max=self.max_rank)]
        self.node = torch.where(is_reached, child, -1)
        self.level_counts.append(torch.stack([is_reached.sum(), self.goes_on.sum()]))

    def counts(self) -> tuple[Tensor, Tensor]:
        """Return how many drafts reached each level, and how many were accepted there, float64 [levels] on the host.

        A level counts as reached if the level above was accepted and its token is known. Their quotients are the
        acceptance rates by level.
        """
        reached, accepted = torch.stack(self.level_counts).cpu().double().unbind(1)
        return reached, accepted
