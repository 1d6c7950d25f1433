"""Several drafters in turn: the output stays the same, and each drafts what it would alone."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import pytest
import torch

from eagle import Budget, Sampling, Target, generate
from eagle.conformance.drafting import check_law
from eagle.conformance.own_answers import make_letters, reference
from eagle.conformance.trial import make_head
from eagle.core.drafter import Committed, Drafter, Noise, Reads
from eagle.core.tree import PUBLISHED_TREE, DraftTree
from eagle.decoding.goodput import Goodput
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.several import FirstOf
from tests.families import PlantedTrees, build, own_answer, random_tokens


def head_of(name: str, target: Target) -> Any:
    """Return an untrained head, the same every time."""
    return make_head(name, target).bind(target.head)


class Recorded(Drafter):
    """A drafter, with its updates and its trees."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self.taps = drafter.taps
        self.updates: list[Committed] = []
        self.trees: list[DraftTree] = []

    def begin(self, noise: Noise | None = None) -> Any:
        """Begin a sequence; its updates and trees follow those of the one before."""
        self.text = self.drafter.begin(noise)
        return self

    def propose(
        self,
        update: Committed,
        budget: Budget,
    ) -> DraftTree:
        """Return the drafter's tree."""
        self.updates.append(update)
        self.trees.append(self.text.propose(update, budget))
        return self.trees[-1]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=5)], ids=["T=0", "T=1"]
)
def test_the_output_is_the_untouched_models(sampling: Sampling) -> None:
    """Lookup and then two heads, each of which reads every token at most once."""
    target = Target(build("llama"))
    # of 96 random tokens some occur again, so that lookup drafts now and then
    prompt = random_tokens(20, seed=1)
    expected = reference(target, prompt, sampling, 16)
    lookup = Recorded(NgramDrafter())
    head = Recorded(head_of("eagle3", target))
    never_asked = Recorded(head_of("eagle1", target))
    several = FirstOf([lookup, head, never_asked])
    further_taps = [tap for tap in never_asked.taps if tap not in head.taps]
    assert several.taps == (*head.taps, *further_taps)
    # the second answer must not depend on the first
    for _ in range(2):
        for drafter in (lookup, head):
            drafter.updates.clear()
            drafter.trees.clear()
        trace = generate(
            target,
            several,
            prompt,
            sampling=sampling,
            max_new_tokens=16,
            stop=[],
        )
        assert trace.tokens == expected
        silent = [tree for tree in lookup.trees if len(tree) == 1]
        assert 0 < len(silent) < len(lookup.trees)
        assert len(head.trees) == len(silent)
        for drafter in (lookup, head):
            # each token once, in order
            read = torch.cat([update.tokens for update in drafter.updates]).tolist()
            whole = [*prompt, *expected]
            assert read == whole[: len(read)]
            assert drafter.updates[-1].root == whole[len(read)]
    assert not never_asked.updates


class ReadsStates(Recorded):
    """A head that also reads the target's states after each node of the last tree."""

    def __init__(self, drafter: Any) -> None:
        super().__init__(drafter)
        self.reads = Reads(states=True)


def test_a_drafter_of_a_list_gets_the_states_it_reads() -> None:
    """Asked second, it gets those of its own taps, as it does alone."""
    target = Target(build("llama"))
    prompt = random_tokens(20, seed=1)
    alone = ReadsStates(head_of("eagle1", target))
    second = ReadsStates(head_of("eagle1", target))
    # never drafts, but moves the taps of the second one within those of the list
    silent = Recorded(NgramDrafter(shortest=30, longest=30))
    silent.taps = (1,)
    for drafter in (alone, FirstOf([silent, second])):
        generate(target, drafter, prompt, max_new_tokens=12, stop=[])
    assert len(second.updates) == len(alone.updates) > 1
    for got, expected in zip(second.updates[1:], alone.updates[1:], strict=True):
        assert got.states is not None and expected.states is not None
        assert got.states.shape == expected.states.shape
        assert torch.equal(got.states, expected.states)
        assert got.tree is not None
    assert all(update.states is None for update in silent.updates)


class EverySecond(PlantedTrees):
    """A drafter that knows the answer, and drafts nothing after an even number of tokens."""

    def propose(
        self,
        update: Committed,
        budget: Budget,
    ) -> DraftTree:
        """Return a chain of at most two right tokens."""
        self.read += len(update.tokens)
        right = []
        if self.read % 2:
            right = self.text[self.read + 1 :][: min(2, budget.depth)]
        return DraftTree.chain([update.root, *right])


@pytest.mark.parametrize("name", ["eagle1", "eagle3"])
def test_a_head_drafts_what_it_would_alone(name: str, tiny_target: Target) -> None:
    """Wherever it is asked, after all tokens that it was not told of at once."""
    prompt = tiny_target.chat("What does copy do?")
    text = [*prompt, *own_answer(tiny_target.model, prompt, 20)]
    # its own tap, so that the head's are not the first
    first = EverySecond(text, taps=(1,))
    head = Recorded(head_of(name, tiny_target))
    generate(
        tiny_target,
        FirstOf([first, head]),
        prompt,
        max_new_tokens=20,
        stop=[],
    )
    assert len(head.trees) > 2
    assert max(len(update.tokens) for update in head.updates[1:]) > 2

    # alone, it is told of every token as it comes
    alone = head_of(name, tiny_target).begin()
    features = tiny_target.features(torch.tensor([text]), head.taps)[0]
    ends = list(accumulate(len(update.tokens) for update in head.updates))
    expected = []
    start = 0
    for end in range(len(prompt), ends[-1] + 1):
        update = Committed(
            torch.tensor(text[start:end]),
            features[start:end],
            text[end],
        )
        # no draft is deeper than what is left of the answer
        tree = alone.propose(update, Budget(depth=len(text) - end - 2))
        if end in ends:
            expected.append(tree)
        start = end
    for tree, alone_tree in zip(head.trees, expected, strict=True):
        assert torch.equal(tree.tokens, alone_tree.tokens)
        assert torch.equal(tree.parents, alone_tree.parents)


def test_nothing_is_drafted_where_all_are_silent() -> None:
    """The tree is the root alone; an empty list is refused."""
    several = FirstOf([NgramDrafter(), NgramDrafter(longest=2)])
    update = Committed(torch.tensor([1, 2, 3]), None, 4)
    assert len(several.begin().propose(update, Budget())) == 1
    with pytest.raises(ValueError, match="expected at least one"):
        FirstOf([])


@pytest.mark.slow
def test_lookup_and_sampled_drafts_in_turn_keep_the_targets_law() -> None:
    """Drafts with probs from a head, without probs from lookup, as deep as a policy chooses."""
    letters = make_letters()
    # the prompt holds some pairs of tokens: about a quarter of the requests is drafted by lookup
    lookup = Recorded(NgramDrafter(longest=2, shortest=2))
    several = FirstOf([lookup, head_of("eagle1", letters)])
    depth = max(map(len, PUBLISHED_TREE))
    policy: Any = Goodput(
        [0.1 * level for level in range(depth + 1)],
        [1.0] * (depth + 1),
        Budget.fixed(PUBLISHED_TREE, "sampled"),
        share=1,
        memory=3,
    )
    check_law(
        lambda: several,
        letters,
        Sampling(temperature=1.0, seed=3),
        policy,
    )
    # both kinds of drafts are part of what was counted
    drafted = sum(len(tree) > 1 for tree in lookup.trees)
    assert 0.1 < drafted / len(lookup.trees) < 0.9
