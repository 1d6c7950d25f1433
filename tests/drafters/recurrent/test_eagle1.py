"""EAGLE-1's trees are cut where a budget ends.

Its loss, its states in training and its drafts are those of HASS (`test_hass`), which a loop over single tokens checks
(`test_unroll`, `test_unroll_steps`); trees with siblings, noise and sampled nodes are checked in `test_eagle3_trees`.
"""

from __future__ import annotations

import pytest
import torch

from eagle import Budget, Sampling, Target
from eagle.core.tree import PUBLISHED_TREE
from eagle.core.verify import Choose
from eagle.drafters.recurrent.eagle1 import Eagle1
from tests.enumerate_law import Text, texts_of


@pytest.fixture(scope="module")
def head(tiny_target: Target) -> Eagle1:
    """Return an untrained head, bound to the target's embedding and LM head."""
    torch.manual_seed(0)
    return Eagle1.for_target(Eagle1.Settings(noise=0.0), tiny_target.config).bind(tiny_target.head)


def draft(head: Eagle1, target: Target, depth: int) -> set[Text]:
    """Return the texts of the nodes that a published tree of this depth holds after a prompt."""
    prompt = target.chat("What does copy do?")
    update = target.open((-1,)).begin(prompt, Choose(Sampling()))
    budget = Budget.fixed(PUBLISHED_TREE).within(depth)
    return set(texts_of(head.begin().propose(update, budget)))


def test_a_fixed_tree_is_cut_at_the_depth_allowed(head: Eagle1, tiny_target: Target) -> None:
    """Deeper nodes are left out, and the others stay as they are."""
    whole = draft(head, tiny_target, 9)
    assert len(whole) == 1 + len(PUBLISHED_TREE)
    for depth in (3, 1, 0):
        expected = {text for text in whole if len(text) <= depth}
        assert draft(head, tiny_target, depth) == expected
