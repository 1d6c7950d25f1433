"""Rows whose drafts are sampled: each has the target's distribution, and none knows of another's coins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch

from eagle import Budget, Sampling, Target, generate
from eagle.core import verify
from eagle.core.tree import chain_paths
from eagle.core.verify import Choose
from eagle.decoding import loop
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.counts import Tables
from eagle.drafters.lookup.suffix import SuffixDrafter
from eagle.drafters.several import FirstOf
from tests.decoding import test_seed_reuse
from tests.decoding.test_seed_reuse import CHANCE, V
from tests.families import own_logits

target = test_seed_reuse.target  # a fixture: three tokens, none of them much preferred
PROMPTS = [[1, 2, 0, 1], [0], [2, 2, 1, 0, 1, 2, 0], [1, 0]]
COUNT = 3  # tokens of an answer that are looked at
PLAIN = Sampling(temperature=1.0)
CHAIN, TREE = (
    Budget.fixed(chain_paths(3), "sampled"),
    Budget.fixed(((0,), (1,), (0, 0), (1, 0)), "sampled"),
)
CASES = {
    "chain": (CHAIN, PLAIN),
    "tree": (TREE, PLAIN),
    "block": (CHAIN, replace(PLAIN, rule="block")),
    "top-p": (TREE, Sampling(temperature=0.7, top_p=0.9)),
    "one level": (Budget.fixed(chain_paths(1), "sampled"), PLAIN),
}


def drawing_drafter() -> BigramDrafter:
    """Draws the last token again far more often than the target chooses it, so that rows' drafts differ in law."""
    counts = 5 + 90 * torch.eye(V, dtype=torch.long)
    tables = Tables(
        counts.sum(0),
        torch.arange(0, V * V + 1, V),
        torch.arange(V).repeat(V),
        counts.flatten().clone(),
    )
    return BigramDrafter(tables)


def answer_batches(
    target: Target, rows: int, batches: int, case: str, drafter: Any = None, **options: Any
) -> Any:
    """[batches, rows, COUNT], the first tokens of batches of different seeds."""
    budget, sampling = CASES[case]
    drafter = drafter or drawing_drafter()
    answers = []
    for seed in range(batches):
        samplings: Any = replace(sampling, seed=seed, request=7)
        samplings = [samplings] * rows if options.get("alike") else samplings
        traces = generate(
            target,
            drafter,
            PROMPTS[:rows],
            budget=budget,
            sampling=samplings,
            max_new_tokens=COUNT + 2,
            stop=[],
            batch_size=options.get("batch_size", rows),
        )
        answers.append([trace.tokens[:COUNT] for trace in traces])
    return np.array(answers)


def joint_probs(target: Target, prompt: list[int], sampling: Sampling) -> np.ndarray:
    """[V] * COUNT, the joint probs of an answer's first tokens, from forwards of the untouched model."""
    probs = np.ones([V] * COUNT)
    for text in np.ndindex(probs.shape):
        logits = own_logits(target.model, [*prompt, *text])[len(prompt) - 1 : -1].double()
        each = verify.warp(logits, sampling).softmax(-1)
        probs[text] = each[range(COUNT), list(text)].prod().item()
    return probs


def worst_p_value(target: Target, answers: np.ndarray, case: str) -> float:
    """The least p-value of each row's answers under the target's joint probs, and of pairs of rows as independent."""
    values = []
    for row in range(answers.shape[1]):
        probs = joint_probs(target, PROMPTS[row], CASES[case][1]).ravel()
        counts = np.bincount(
            np.ravel_multi_index(answers[:, row].T, [V] * COUNT), minlength=V**COUNT
        )
        if counts[probs == 0].any():
            return 0.0
        due = len(answers) * probs / probs.sum()
        rare = due < 5
        pooled = [np.array([*cells[~rare], cells[rare].sum()]) for cells in (counts, due)]
        seen, expected = (cells[pooled[1] > 0] for cells in pooled)
        values.append(scipy.stats.chisquare(seen, expected).pvalue)
    for one in range(answers.shape[1]):
        for other in range(one):
            for place in range(COUNT):
                table = np.zeros([V, V])
                np.add.at(table, (answers[:, one, place], answers[:, other, place]), 1)
                table = table[table.sum(1) > 0][:, table.sum(0) > 0]
                values.append(scipy.stats.chi2_contingency(table).pvalue)
    return min(values) * len(values)  # for as many as were tried


@pytest.mark.slow
def test_two_rows_have_the_targets_probs(target: Target) -> None:
    """A chain of sampled drafts, in batches of two."""
    assert worst_p_value(target, answer_batches(target, 2, 250, "chain"), "chain") > CHANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "rows"), [("chain", 4), ("tree", 3), ("block", 2), ("top-p", 4), ("one level", 3)]
)
def test_rows_have_the_targets_probs(case: str, rows: int, target: Target) -> None:
    """Chains, trees and blocks, filtered or not; rows of one batch are independent."""
    assert worst_p_value(target, answer_batches(target, rows, 400, case), case) > CHANCE


@pytest.mark.slow
@pytest.mark.parametrize("case", ["chain", "tree"])
def test_rows_that_come_later_have_them_too(case: str, target: Target) -> None:
    """Four prompts, two of which are written at a time, with a lookup that remembers what the others drew."""
    remembering = FirstOf([SuffixDrafter(remember=1000), drawing_drafter()])
    answers = answer_batches(target, 4, 400, case, remembering, batch_size=2)
    assert worst_p_value(target, answers, case) > CHANCE


@pytest.mark.slow
def test_rows_of_one_request_draw_with_coins_of_their_own(target: Target) -> None:
    """The same sampling given four times is four uses of one seed and request."""
    assert (
        worst_p_value(target, answer_batches(target, 4, 400, "chain", alike=True), "chain") > CHANCE
    )


def share_coins(patch: pytest.MonkeyPatch) -> None:
    """Every row of a batch tosses and draws with the first one's numbers."""
    patch.setattr(Choose, "private_seed", property(lambda self: self.sampling.seed))
    build = Choose.__init__

    def same(self: Choose, sampling: Sampling, *args: Any, **kwargs: Any) -> None:
        build(self, replace(sampling, request=0), *args, **kwargs)

    patch.setattr(Choose, "__init__", same)


def swap_laws(patch: pytest.MonkeyPatch) -> None:
    """Drafts are verified by the probs that a neighbour's were drawn from."""
    honest = verify.verify_rows

    def wrong(rows: Any) -> Any:
        laws = [output.tree.draft_probs for output, _ in rows]
        swapped = []
        for (output, choose), other in zip(rows, [*laws[1:], *laws[:1]], strict=True):
            own = output.tree.draft_probs
            if own is not None and other is not None and own.shape == other.shape:
                tree = replace(
                    output.tree, draft_probs=other.where(other.isnan() | (other > 0), own)
                )
                output = replace(output, tree=tree)
            swapped.append((output, choose))
        return honest(swapped)

    patch.setattr(loop, "verify_rows", wrong)


def pick_by_used_coins(patch: pytest.MonkeyPatch) -> None:
    """The token behind a row's draft is picked by the last coin, which decided what was accepted."""
    last = [0.5]

    def remembered(self: Choose, probability: float) -> bool:
        last[0] = self.dice.random()
        return last[0] < probability

    def reused(self: Choose, probs: torch.Tensor) -> int:
        cumulative = probs.cumsum(-1)
        token = torch.searchsorted(cumulative, last[0] * cumulative[-1:], right=True)
        return min(int(token), int(probs.nonzero()[-1]))

    patch.setattr(Choose, "coin", remembered)
    patch.setattr(Choose, "pick", reused)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [share_coins, swap_laws, pick_by_used_coins])
def test_a_planted_fault_is_seen(
    fault: Any, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coins shared by rows, probs of another row's drafts, picks by used coins."""
    fault(monkeypatch)
    assert worst_p_value(target, answer_batches(target, 3, 400, "chain"), "chain") < CHANCE
