"""What every drafter must hold in decoding: the output, the trees, what is kept of texts, the noise of their places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, zip_longest
from typing import Any

import numpy as np
import torch

from eagle.conformance.own_answers import chi_square_p, own_logits
from eagle.conformance.trial import (
    Fault,
    Make,
    begin_text,
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

DYNAMIC = [Budget(8, 4, 3), Budget(3, 1, 3), Budget(5, 5, 1), Budget(0, 0, 0), Budget(8, 4, 3, draw="likeliest")]
SHAPES = [chain_paths(4), PUBLISHED_TREE, best_tree([[0.5, 0.2, 0.1], [0.4, 0.3]], 12, 4)]
RANKED = [*DYNAMIC, *map(Budget.fixed, SHAPES), Budget.fixed(PUBLISHED_TREE, "likeliest")]
DRAWN = [Budget.fixed(shape, "sampled") for shape in SHAPES]
SAMPLINGS = [
    Sampling(seed=3),
    Sampling(temperature=0.5, seed=3),
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.0, top_p=0.8, seed=3),
    Sampling(temperature=0.5, top_k=5, seed=3),
]
REQUESTS = 600  # whose first three tokens are counted


def check_output(
    make: Make,
    target: Target,
    prompt: list[int],
    sampling: Sampling,
    budgets: Sequence[Budget],
    expected: list[int],
) -> None:
    """Whatever is drafted, in whatever tree, the output is plain decoding's."""
    drafter = make()
    for budget in budgets:
        options: dict[str, Any] = {"sampling": sampling, "budget": budget, "stop": []}
        got = generate(target, drafter, prompt, max_new_tokens=len(expected), **options).tokens
        if got != expected:
            raise Fault(
                f"{describe_sampling(sampling)} with {describe_budget(budget)} the output is not the untouched "
                f"model's: token {first_difference(got, expected)}; a tree starts at update.root, and drawn drafts "
                "hold their probs"
            )


def check_law(make: Make, letters: Target, sampling: Sampling, budget: Budget) -> None:
    """The first three tokens of many requests with drawn drafts follow the law of the untouched model."""
    prompt, drafter, counts = [1, 2, 3, 0, 1], make(), np.zeros([4] * 3)
    for request in range(REQUESTS):
        options: dict[str, Any] = {"sampling": replace(sampling, request=request), "budget": budget, "stop": []}
        counts[tuple(generate(letters, drafter, prompt, max_new_tokens=4, **options).tokens[:3])] += 1
    law = np.ones_like(counts)
    with torch.no_grad():
        for said in product(range(4), repeat=3):
            for end in range(3):
                scores = warp(own_logits(letters.model, [*prompt, *said[:end]])[-1:], sampling)
                law[said] *= scores.softmax(-1)[0, said[end]].item()
    expected = REQUESTS * law / law.sum()
    rare = expected < 5  # for which together the statistic is what it is taken for
    seen, due = (np.array([*cells[~rare], cells[rare].sum()]) for cells in (counts, expected))
    impossible = int(counts[law == 0].sum())
    p = chi_square_p(seen[due > 0].tolist(), due[due > 0].tolist())
    if impossible or p <= 1e-4:
        raise Fault(
            f"{describe_sampling(sampling)} with {describe_budget(budget)} the target's law is changed: {impossible} "
            f"answers that it never gives, and counts as far from it as chance makes them with probability {p:.1e}, "
            "expected above 1e-4; the tree must hold the probs by which each child was drawn, as `grow` does"
        )


def check_begin(make: Make, target: Target, earlier: list[int], prompt: list[int], sampling: Sampling) -> None:
    """A second text is drafted as if it were the first, by the noise of its own places."""
    used = make()
    generate(target, used, earlier, max_new_tokens=8, stop=[])
    got, expected = (
        generate(target, drafter, prompt, sampling=sampling, max_new_tokens=16, stop=[]) for drafter in (used, make())
    )
    if got.cycles != expected.cycles or trees_of(got) != trees_of(expected):
        raise Fault(
            f"{describe_sampling(sampling)} a second text is not drafted as if it were the first: cycle "
            f"{first_difference(trees_of(got), trees_of(expected))}; what is kept of a text belongs to the object "
            "that begin returns, not to the drafter"
        )


def check_fork(make: Make, target: Target, budget: Budget) -> None:
    """After a fork both rows, and the second once the first is gone, draft as texts that were told all of it do."""
    drafter = make()
    if drafter.reads.view:
        drafter.bind_target(target.view())
    shared = [5, 6, 7, 8, 5, 6, 7]
    texts = {0: [*shared, 8, 5, 9, 5, 6, 7, 8], 1: [*shared, 9, 5, 6, 7, 8, 5, 6]}

    def tell(state: Any, start: int, end: int, rows: list[int]) -> Any:
        updates = {}
        for row in rows:
            tokens = torch.tensor(texts[row])
            features = target.features(tokens[None, :end], drafter.taps)[0, start:] if drafter.taps else None
            updates[row] = Committed(tokens[start:end], features, texts[row][end])
        trees = state.propose(updates, dict.fromkeys(rows, budget))
        return [(row, trees[row].tokens.tolist(), trees[row].parents.tolist()) for row in rows]

    def open_state(rows: list[int]) -> Any:
        state = drafter.open()
        for row in rows:
            state.admit(row)
        return state

    forked, alone = open_state([0]), open_state([0, 1])
    tell(forked, 0, 6, [0])
    forked.fork(0, 1)
    tell(alone, 0, 6, [0, 1])
    both = tell(forked, 6, 10, [0, 1]), tell(alone, 6, 10, [0, 1])
    forked.release(0)
    second = tell(forked, 10, 12, [1]), tell(alone, 10, 12, [1])
    for got, expected in (both, second):
        if got != expected:
            raise Fault(
                f"a text that was forked is drafted for otherwise than one that was told all of it: row "
                f"{first_difference(got, expected)}; fork(row, other) copies all that is kept of the row"
            )


def draft_alone(make: Make, target: Target, prompts: list[list[int]], sampling: Sampling) -> list[Trace]:
    """An answer to each prompt, one after the other, each with a drafter of its own."""
    options: dict[str, Any] = {"max_new_tokens": 12, "stop": []}
    samplings = [replace(sampling, request=row) for row in range(len(prompts))]
    pairs = zip(prompts, samplings, strict=True)
    return [generate(target, make(), prompt, sampling=own, **options) for prompt, own in pairs]


def draft_beside(make: Make, target: Target, prompts: list[list[int]], sampling: Sampling) -> list[Trace]:
    """The same answers in one batch of one drafter."""
    options: dict[str, Any] = {"sampling": sampling, "max_new_tokens": 12, "stop": [], "batch_size": len(prompts)}
    return generate(target, make(), prompts, **options)


def check_side_by_side(make: Make, target: Target, prompts: list[list[int]], sampling: Sampling) -> None:
    """Cycle by cycle as each alone: a batch of three, and two streams on one drafter that are asked in turn."""
    alone, drafter = draft_alone(make, target, prompts, sampling), make()
    beside = draft_beside(make, target, prompts, sampling)
    _compare_traces(beside, alone, "in a batch", sampling)
    traces = [Trace([]), Trace([])]
    options: dict[str, Any] = {"max_new_tokens": 12, "stop": []}
    streams = [
        stream(target, drafter, alone[row].prompt, sampling=replace(sampling, request=row), trace=trace, **options)
        for row, trace in enumerate(traces)
    ]
    for _ in zip_longest(*streams):
        pass
    _compare_traces(traces, alone[:2], "in streams that are asked in turn", sampling)


def _compare_traces(got: list[Trace], expected: list[Trace], how: str, sampling: Sampling) -> None:
    for row, (one, other) in enumerate(zip(got, expected, strict=True)):
        if (one.tokens, one.cycles) != (other.tokens, other.cycles):
            raise Fault(
                f"{describe_sampling(sampling)} text {row} {how} is drafted otherwise than alone: cycle "
                f"{first_difference(trees_of(one), trees_of(other))}; what is kept of a text must not be shared"
            )


def check_noise(make: Make, target: Target) -> None:
    """What follows a root behind n tokens stands at place n + 1; two tokens more, and it stands two places further."""
    drafter, choose = make(), Choose(SAMPLINGS[2])
    noise = choose.offer(target.vocab_size, target.device)
    assert choose.noise is not None
    text, update = begin_text(drafter, target, [5, 6, 7, 5, 6], choose, noise)
    more = Committed(torch.tensor([7, 8]), None if update.features is None else update.features[:2], 9)
    for told, first in ((Committed(update.tokens, update.features, 7), 6), (more, 8)):
        choose.noise.forget(99)
        if drafter.reads.texts and told is more:
            text.read([7, 8])
        text.propose(told, Budget(8, 3, 2))
        got, expected = sorted(choose.noise.rows), [first, first + 1, first + 2]
        if got != expected:
            raise Fault(
                f"three levels behind a root at place {first - 1} are drafted with the noise of the places {got}, "
                f"expected {expected}; count the tokens of the text: the root is behind all that were committed"
            )


def check_tree(make: Make, target: Target, budget: Budget) -> None:
    """The root is the token that the target chose; nodes, levels and children stay within the budget."""
    text, update = begin_text(make(), target, [5, 6, 7, 5, 6], Choose(Sampling()))
    tree = text.propose(Committed(update.tokens, update.features, 7), budget)
    most = max(budget.top_k, 0 if budget.nodes == 0 else 1)
    if int(tree.tokens[0]) != 7:
        raise Fault(f"a tree is rooted at {int(tree.tokens[0])}, expected 7, the root of its update")
    for what, got, limit in (
        ("nodes behind its root", len(tree) - 1, budget.nodes),
        ("levels", max(tree.depths()), budget.depth),
        ("children of one node", max(len(children) for children in tree.children()), most),
    ):
        if got > limit:
            raise Fault(
                f"with {describe_budget(budget)} a tree has {got} {what}, expected at most {limit}: keep to the budget"
            )
