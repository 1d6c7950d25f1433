"""What every drafter must hold in decoding: output, trees, what is kept of sequences, the noise of positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, zip_longest
from typing import Any

import torch

from eagle.conformance.own_answers import chi_square_p, own_logits
from eagle.conformance.trial import (
    Fault,
    Make,
    begin_sequence,
    describe_budget,
    describe_sampling,
    first_difference,
    trees_of,
)
from eagle.core.budget import Budget
from eagle.core.drafter import Committed
from eagle.core.trace import Trace
from eagle.core.tree import PUBLISHED_TREE, best_tree, chain_paths
from eagle.core.verify import Choose, Sampling, warp
from eagle.decoding.decode import generate, stream
from eagle.target.target import Target

# nodes, depth and children of a node
DYNAMIC = [
    Budget(8, 4, 3),
    Budget(3, 1, 3),
    Budget(5, 5, 1),
    Budget(0, 0, 0),
    Budget(8, 4, 3, draw="likeliest"),
]
SHAPES = [
    chain_paths(4),
    PUBLISHED_TREE,
    best_tree([[0.5, 0.2, 0.1], [0.4, 0.3]], 12, 4),
]
RANKED = [*DYNAMIC, *map(Budget.fixed, SHAPES), Budget.fixed(PUBLISHED_TREE, "likeliest")]
DRAWN = [Budget.fixed(shape, "sampled") for shape in SHAPES]
SAMPLINGS = [
    Sampling(seed=3),
    Sampling(temperature=0.5, seed=3),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.0, top_p=0.8, seed=3),
    Sampling(temperature=0.5, top_k=5, seed=3),
]
# of which the output's distribution is counted
LAW_SAMPLINGS = SAMPLINGS[2:4]
LAW_BUDGETS = DRAWN[:2]
REQUESTS = 600  # whose first three tokens are counted
LETTERS = 4  # tokens in the vocabulary of the target of these requests
MIN_COUNT = 5  # rarer answers are counted together, so that the statistic follows its law
NEW_TOKENS = 12  # of the answers that are drafted alone and in a batch


def check_output(
    make: Make,
    target: Target,
    prompt: list[int],
    sampling: Sampling,
    budgets: Sequence[Budget],
    expected: list[int],
) -> None:
    """Check that the output is plain decoding's, whatever is drafted and in whatever tree.

    The target's sampling noise depends on seed, request and position alone, so outputs are the same token by token.

    Args:
        make: Makes a drafter.
        target: The model that is drafted for.
        prompt: Token ids.
        sampling: How the target chooses.
        budgets: How much is drafted and how, one after the other.
        expected: The output of plain decoding.

    Raises:
        Fault: The output differs.
    """
    # one drafter for all budgets: it must keep no state from one answer to the next
    drafter = make()
    for budget in budgets:
        trace = generate(
            target,
            drafter,
            prompt,
            sampling=sampling,
            budget=budget,
            max_new_tokens=len(expected),
            stop=[],
        )
        if trace.tokens != expected:
            raise Fault(
                f"{describe_sampling(sampling)} with {describe_budget(budget)} the output is not the untouched "
                f"model's: token {first_difference(trace.tokens, expected)}; a tree starts at update.root, and drawn "
                "drafts hold their probs"
            )


def check_law(make: Make, letters: Target, sampling: Sampling, budget: Budget) -> None:
    """Check that the first three tokens of many requests have the distribution of the untouched model.

    Args:
        make: Makes a drafter for `letters`.
        letters: A target with a vocabulary of four tokens.
        sampling: How it samples.
        budget: A draft of sampled tokens.
    """
    prompt = [1, 2, 3, 0, 1]
    drafter = make()
    # how often each answer of three tokens was given
    counts = torch.zeros(LETTERS, LETTERS, LETTERS, dtype=torch.double)
    for request in range(REQUESTS):
        # another number gives other noise
        request_sampling = replace(sampling, request=request)
        trace = generate(
            letters,
            drafter,
            prompt,
            sampling=request_sampling,
            budget=budget,
            max_new_tokens=4,
            stop=[],
        )
        counts[tuple(trace.tokens[:3])] += 1
    # the probability of each, and from it the expected count
    law = _law_of_three(letters, prompt, sampling)
    expected = REQUESTS * law / law.sum()
    # Pearson's statistic: a cell for each common answer, and one for all rare ones
    is_rare = expected < MIN_COUNT
    observed_cells = [*counts[~is_rare].tolist(), float(counts[is_rare].sum())]
    expected_cells = [*expected[~is_rare].tolist(), float(expected[is_rare].sum())]
    # without rare answers the last cell would divide by zero
    if expected_cells[-1] == 0:
        observed_cells.pop()
        expected_cells.pop()
    # a right method fails this once in ten thousand times
    p = chi_square_p(observed_cells, expected_cells)
    impossible = int(counts[law == 0].sum())
    if impossible or p <= 1e-4:
        raise Fault(
            f"{describe_sampling(sampling)} with {describe_budget(budget)} the target's law is changed: {impossible} "
            f"answers that it never gives, and counts as far from it as chance makes them with probability {p:.1e}, "
            "expected above 1e-4; the tree must hold the probs by which each child was drawn, as `grow` does"
        )


@torch.no_grad()
def _law_of_three(letters: Target, prompt: list[int], sampling: Sampling) -> torch.Tensor:
    """Return [LETTERS, LETTERS, LETTERS], the probability of each three tokens after the prompt."""
    law = torch.ones(LETTERS, LETTERS, LETTERS, dtype=torch.double)
    # p(abc) = p(a) p(b | a) p(c | ab)
    for answer in product(range(LETTERS), repeat=3):
        for end in range(3):
            logits = own_logits(letters.model, [*prompt, *answer[:end]])
            probs = warp(logits[-1:], sampling).softmax(-1)[0]
            law[answer] *= probs[answer[end]].item()
    return law


def check_begin(
    make: Make, target: Target, earlier: list[int], prompt: list[int], sampling: Sampling
) -> None:
    """Check that a drafter keeps nothing of an earlier sequence: it drafts a second one as a new drafter does.

    Args:
        make: Makes a drafter.
        target: The model that is drafted for.
        earlier: Token ids of the prompt that is answered first.
        prompt: Token ids of the second prompt, whose drafts are compared.
        sampling: How the target chooses tokens of the second answer.
    """
    # an answer to another prompt comes first
    used = make()
    generate(target, used, earlier, max_new_tokens=8, stop=[])
    got = generate(target, used, prompt, sampling=sampling, max_new_tokens=16, stop=[])
    expected = generate(target, make(), prompt, sampling=sampling, max_new_tokens=16, stop=[])
    differs = got.tokens != expected.tokens
    # a drafter that learns from all sequences drafts the second one otherwise, but the answer is the same
    if not used.remembers:
        differs |= got.cycles != expected.cycles or trees_of(got) != trees_of(expected)
    if differs:
        raise Fault(
            f"{describe_sampling(sampling)} a second sequence is not drafted as if it were the first: cycle "
            f"{first_difference(trees_of(got), trees_of(expected))}; what is kept of a sequence belongs to the object "
            "that begin returns, not to the drafter"
        )


def check_fork(make: Make, target: Target, budget: Budget) -> None:
    """Check that a forked row is drafted for as a sequence that was read whole, also once the original is released.

    A fork copies a drafter's state for one sequence (row) to another row, as beam search needs it.
    """
    drafter = make()
    if drafter.reads.view:
        drafter.bind_target(target.view())
    shared = [5, 6, 7, 8, 5, 6, 7]
    # by row: token ids that begin alike and then part
    sequences = {
        0: [*shared, 8, 5, 9, 5, 6, 7, 8],
        1: [*shared, 9, 5, 6, 7, 8, 5, 6],
    }

    def propose(state: Any, start: int, end: int, rows: list[int]) -> list[Any]:
        """Commit tokens `start` to `end` of these rows to a drafter's state, and return their drafts.

        A draft is the row, and the tokens and parents of the nodes of its tree.
        """
        updates = {row: _commit(drafter, target, sequences[row], start, end) for row in rows}
        trees = state.propose(updates, dict.fromkeys(rows, budget))
        drafts = []
        for row in rows:
            tree = trees[row]
            drafts.append((row, tree.tokens.tolist(), tree.parents.tolist()))
        return drafts

    # one state reads the shared tokens once and forks; the other reads them for each row
    forked = drafter.open()
    forked.admit(0)
    propose(forked, 0, 6, [0])
    forked.fork(0, 1)
    whole = drafter.open()
    for row in sequences:
        whole.admit(row)
    propose(whole, 0, 6, [0, 1])
    # both rows are drafted for, then the second alone
    for start, end, rows in ((6, 10, [0, 1]), (10, 12, [1])):
        if rows == [1]:
            forked.release(0)
        got = propose(forked, start, end, rows)
        expected = propose(whole, start, end, rows)
        if got != expected:
            raise Fault(
                f"a sequence that was forked is drafted for otherwise than one that read all of it: row "
                f"{first_difference(got, expected)}; fork(row, other) copies all that is kept of the row"
            )


def _commit(drafter: Any, target: Target, sequence: list[int], start: int, end: int) -> Committed:
    """Return what a drafter learns when the target commits tokens `start` to `end` of a sequence.

    These are the tokens, the target's states at the drafter's taps, and the root: the token after them, which the
    target has chosen and not read.
    """
    tokens = torch.tensor(sequence[:end])
    features = target.features(tokens[None], drafter.taps)[0, start:] if drafter.taps else None
    return Committed(tokens[start:], features, sequence[end])


def draft_alone(
    make: Make, target: Target, prompts: list[list[int]], sampling: Sampling
) -> list[Trace]:
    """Return an answer to each prompt, one after the other, each with a new drafter.

    The index of a prompt is the request number, which decides the target's sampling noise.
    """
    traces = []
    for row, prompt in enumerate(prompts):
        row_sampling = replace(sampling, request=row)
        traces.append(
            generate(
                target, make(), prompt, sampling=row_sampling, max_new_tokens=NEW_TOKENS, stop=[]
            )
        )
    return traces


def draft_in_batch(
    make: Make, target: Target, prompts: list[list[int]], sampling: Sampling
) -> list[Trace]:
    """Return the answers to the same prompts as `draft_alone`, decoded in one batch with one drafter."""
    return generate(
        target,
        make(),
        prompts,
        sampling=sampling,
        max_new_tokens=NEW_TOKENS,
        stop=[],
        batch_size=len(prompts),
    )


def check_side_by_side(
    make: Make, target: Target, prompts: list[list[int]], sampling: Sampling
) -> None:
    """Check that sequences in a batch, and in streams that share a drafter, are drafted as each alone."""
    drafter = make()
    alone = draft_alone(make, target, prompts, sampling)
    batch = draft_in_batch(make, target, prompts, sampling)
    # it learns from all sequences, so that drafts depend on those beside; answers must not
    if drafter.remembers:
        alone = _without_cycles(alone)
        batch = _without_cycles(batch)
    _compare_traces(batch, alone, "in a batch", sampling)
    # two answers that are asked for in turn
    traces = []
    streams = []
    for row in range(2):
        trace = Trace([])
        traces.append(trace)
        row_sampling = replace(sampling, request=row)
        streams.append(
            stream(
                target,
                drafter,
                prompts[row],
                sampling=row_sampling,
                trace=trace,
                max_new_tokens=NEW_TOKENS,
                stop=[],
            )
        )
    for _ in zip_longest(*streams):  # takes one cycle of each stream in turn
        pass
    if drafter.remembers:
        traces = _without_cycles(traces)
    _compare_traces(traces, alone[:2], "in streams that are asked in turn", sampling)


def _without_cycles(traces: list[Trace]) -> list[Trace]:
    """Return the answers alone, of a drafter that learns from all sequences and so drafts otherwise beside others."""
    return [Trace(trace.tokens) for trace in traces]


def _compare_traces(got: list[Trace], expected: list[Trace], how: str, sampling: Sampling) -> None:
    """Raise a Fault where an answer or any of its drafts differs; `how` says how they were decoded."""
    # equal tokens would not show that drafts differ, so the cycles, which hold the trees, are compared too
    for row, (trace, alone) in enumerate(zip(got, expected, strict=True)):
        if trace.tokens != alone.tokens or trace.cycles != alone.cycles:
            raise Fault(
                f"{describe_sampling(sampling)} sequence {row} {how} is drafted otherwise than alone: cycle "
                f"{first_difference(trees_of(trace), trees_of(alone))}; what is kept of a sequence must not be shared"
            )


def check_noise(make: Make, target: Target) -> None:
    """Check that each level of a draft uses the noise of its position: after n tokens and the root, n + 1 and so on.

    The target adds noise to its logits that is fixed by the position, so that a sampled answer does not depend on
    drafts. A drafter that adds the same noise guesses the sampled tokens.
    """
    drafter = make()
    # temperature 1, as a greedy target has no noise
    choose = Choose(SAMPLINGS[2])
    noise = choose.offer(target.vocab_size, target.device)
    assert choose.noise is not None
    sequence, update = begin_sequence(drafter, target, [5, 6, 7, 5, 6], choose, noise=noise)
    features = update.features
    # first the prompt with the root 7, then 7 and 8 with the root 9
    begun = Committed(update.tokens, features, 7)
    more = Committed(torch.tensor([7, 8]), None if features is None else features[:2], 9)
    for committed, first in ((begun, 6), (more, 8)):
        # a row of noise is made when a position is drafted for: drop the earlier ones, to see which are made
        choose.noise.forget(position=99)
        # the target must read the tokens first where a drafter uses the target's own KV cache
        if drafter.reads.kv_cache and committed is more:
            sequence.read([7, 8])
        sequence.propose(committed, Budget(nodes=8, depth=3, top_k=2))
        positions = sorted(choose.noise.rows)
        expected = [first, first + 1, first + 2]
        if positions != expected:
            raise Fault(
                f"three levels behind a root at place {first - 1} are drafted with the noise of the places {positions}"
                f", expected {expected}; count the tokens of the sequence: the root is behind all that were committed"
            )


def check_tree(make: Make, target: Target, budget: Budget) -> None:
    """Check that a tree has the root of its update, and no more nodes, levels and children than the budget allows."""
    sequence, update = begin_sequence(make(), target, [5, 6, 7, 5, 6], Choose(Sampling()))
    tree = sequence.propose(Committed(update.tokens, update.features, 7), budget)
    if int(tree.tokens[0]) != 7:
        raise Fault(
            f"a tree is rooted at {int(tree.tokens[0])}, expected 7, the root of its update"
        )
    # a tree of one node needs one child, whatever top_k is
    max_children = max(len(children) for children in tree.children())
    for what, got, limit in (
        ("nodes behind its root", len(tree) - 1, budget.nodes),
        ("levels", max(tree.depths()), budget.depth),
        ("children of one node", max_children, max(budget.top_k, min(budget.nodes, 1))),
    ):
        if got > limit:
            raise Fault(
                f"with {describe_budget(budget)} a tree has {got} {what}, expected at most {limit}: keep to the budget"
            )
