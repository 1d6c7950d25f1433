"""Lookahead: the trees of every cycle are those of a naive loop over the published rows, which knows no trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Budget, Sampling, Target, generate
from eagle.core.drafter import Committed, DraftText
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose, walk
from eagle.drafters.lookup.ngram import NgramDrafter
from eagle.drafters.none import NoDrafter
from eagle.drafters.self_speculation.lookahead import (
    LookaheadDrafter,
    LookaheadState,
    LookaheadText,
)
from eagle.drafters.several import FirstOf
from tests.families import own_logits

Predict = Callable[[list[int]], int]  # a text -> the token that a greedy target says next
Cycle = tuple[
    set[tuple[int, ...]], int
]  # all paths of a tree, and how many of its tokens were accepted
PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]
LIMIT = 40


def hashing(vocab: int, seen: int) -> Predict:
    """A target that says some function of the last few tokens."""
    return lambda text: hash(tuple(text[-seen:])) % 1009 % vocab


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens on the way to every node but the root."""
    return {tuple(tree.tokens[tree.path(node)].tolist()[1:]) for node in range(1, len(tree))}


def decode(
    draft: DraftText, predict: Predict, budgets: Sequence[Budget], limit: int = LIMIT
) -> Iterator[DraftTree]:
    """The trees that are drafted as a text is written; each node's choice comes from its own path alone."""
    text = [*PROMPT]
    update = Committed(torch.tensor(PROMPT), None, predict(PROMPT))
    for cycle in range(limit):
        tree = draft.propose(update, budgets[cycle % len(budgets)])
        yield tree
        tokens = tree.tokens.tolist()
        choices = [
            predict([*text, *(tokens[step] for step in tree.path(node))])
            for node in range(len(tree))
        ]
        path = walk(tree, choices)
        text += [tokens[node] for node in path]
        likeliest = torch.tensor(choices)[:, None]
        update = Committed(tree.tokens[path], None, choices[path[-1]], tree, likeliest)


class Naive:
    """Lookahead decoding as its description has it: rows of tokens, and a list of all n-grams, oldest first."""

    def __init__(self, drafter: LookaheadDrafter, predict: Predict, first: int) -> None:
        self.W, self.N, self.G = drafter.window, drafter.level, drafter.guesses
        self.from_prompt, self.predict = drafter.from_prompt, predict
        self.text = [*PROMPT, first]
        start = random.Random(0).choices(self.text, k=self.W + self.N - 2)
        self.rows = [
            start
        ]  # in the first place of the first row stands the last token of the text, whatever it holds
        self.grams: list[tuple[int, ...]] = []
        for end in range(self.N, len(self.text) + 1):
            self.keep_text(end)

    def keep(self, gram: Sequence[int]) -> None:
        """The n-gram comes last, once; of those with its first token the oldest goes."""
        self.grams = [known for known in self.grams if known != tuple(gram)] + [tuple(gram)]
        same = [known for known in self.grams if known[0] == gram[0]]
        if len(same) > self.G:
            self.grams.remove(same[0])

    def keep_text(self, end: int) -> None:
        """The n-gram of the text that ends there."""
        if self.from_prompt:
            self.keep(self.text[end - self.N : end])

    def column(self, c: int) -> list[int]:
        """What is read for the last token of a column: the first row up to it, then the rows below."""
        return [*self.rows[0][1 : c + 1], *(row[c] for row in self.rows[1:])]

    def paths(self) -> set[tuple[int, ...]]:
        """All that is read beside the text."""
        width = len(self.rows[0])
        whole = [list(gram[1:]) for gram in self.grams if gram[0] == self.text[-1]]
        whole += [self.column(c) for c in range(width)]
        return {tuple(path[:end]) for path in whole for end in range(1, len(path) + 1)}

    def step(self) -> Cycle:
        """Read everything, drop the first row, go on with what the target says, and turn the window to that place."""
        known, width, last = self.paths(), len(self.rows[0]), self.text[-1]
        new = [self.predict([*self.text, *self.column(c)]) for c in range(width)]
        if len(self.rows) < self.N - 1:
            self.rows = [row[1:] for row in [*self.rows, new]]
        else:
            for c in range(width):
                self.keep(
                    [
                        last if c == 0 else self.rows[0][c],
                        *(row[c] for row in self.rows[1:]),
                        new[c],
                    ]
                )
            self.rows = [*self.rows[1:], new]
        accepted: list[int] = []
        while True:
            accepted.append(self.predict([*self.text, *accepted]))
            if tuple(accepted) not in known:
                break
        passed = (len(accepted) - 1) % len(self.rows[0])
        self.rows = [row[passed:] + row[:passed] for row in self.rows]
        for token in accepted:
            self.text.append(token)
            self.keep_text(len(self.text))
        return known, len(accepted) - 1


def differs(drafter: LookaheadDrafter, predict: Predict, limit: int = LIMIT) -> int | None:
    """The first cycle whose tree is not the naive loop's."""
    naive = Naive(drafter, predict, predict(PROMPT))
    for number, tree in enumerate(decode(drafter.begin(), predict, [drafter.budget], limit)):
        if paths_of(tree) != naive.step()[0]:
            return number
    return None


SIZES = st.tuples(st.integers(4, 7), st.integers(2, 5), st.integers(1, 4), st.booleans())


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(sizes=SIZES, vocab=st.integers(2, 9), seen=st.integers(1, 5))
def test_every_tree_is_the_naive_loops(sizes: Any, vocab: int, seen: int) -> None:
    """Warm-up, shift, pool and its oldest n-grams, whatever is accepted."""
    assert differs(LookaheadDrafter(*sizes), hashing(vocab, seen)) is None


def wrong_shift(text: Any, tree: DraftTree, choices: Any) -> None:
    """Columns that move one step too far."""
    advance(text, tree, choices)
    text.columns.rotate(-1)


def wrong_column(text: Any, tree: DraftTree, choices: Any) -> None:
    """Each node's choice is that of the node before."""
    advance(text, tree, [choices[-1], *choices[:-1]])


def nothing_dropped(text: Any, tree: DraftTree, choices: Any) -> None:
    """The oldest n-gram stays."""
    text.drafter.guesses += 1
    advance(text, tree, choices)


advance = LookaheadText.advance


@pytest.mark.parametrize("fault", [wrong_shift, wrong_column, nothing_dropped])
def test_planted_faults_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The naive loop's trees are others."""
    assert differs(LookaheadDrafter(5, 4, 2), hashing(7, 3)) is None
    monkeypatch.setattr(LookaheadText, "advance", fault)
    assert differs(LookaheadDrafter(5, 4, 2), hashing(7, 3)) is not None


@pytest.fixture(scope="module")
def small() -> Target:
    """A random model."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=24, num_hidden_layers=2, bos_token_id=0, **sizes)
    )
    torch.nn.init.normal_(model.lm_head.weight, std=0.4)
    return Target(model)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["greedy", "T=1"]
)
def test_a_real_target_reads_window_and_guesses(sampling: Sampling, small: Target) -> None:
    """Masks, places, noise: each tree is what the untouched model says after every token's own ancestors, fed alone."""
    drafter, noise = LookaheadDrafter(5, 4, 3), Choose(sampling).noise
    trace = generate(small, drafter, PROMPT, sampling=sampling, max_new_tokens=LIMIT, stop=[])

    def predict(text: list[int]) -> int:
        added = noise([len(text)], small.vocab_size, small.device)[0] if noise else 0
        return int((own_logits(small.model, text)[-1] + added).argmax())

    naive = Naive(drafter, predict, predict(PROMPT))
    whole = [
        cycle
        for cycle in trace.cycles
        if LIMIT - cycle.context + len(PROMPT) > drafter.budget.depth
    ]
    assert len(whole) > 3
    for cycle in whole:
        assert (paths_of(cycle.tree), cycle.accepted) == naive.step()


@pytest.mark.parametrize("draw", ["noise", "sampled"])
def test_drawn_drafts_keep_the_noise_out_of_choices(
    draw: Any, small: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where coins verify, what is drafted must not depend on the noise: choices are the likeliest tokens alone."""
    updates: list[Committed] = []
    propose = LookaheadState.propose

    def record(state: Any, given: Any, budgets: Any) -> Any:
        updates.extend(given.values())
        return propose(state, given, budgets)

    monkeypatch.setattr(LookaheadState, "propose", record)
    budget = Budget.fixed(chain_paths(3), draw)
    sampling = Sampling(temperature=1.0, seed=3)
    trace = generate(
        small,
        LookaheadDrafter(),
        PROMPT,
        sampling=sampling,
        budget=budget,
        max_new_tokens=12,
        stop=[],
    )
    text, likeliest = [*PROMPT, *trace.tokens], []
    for update, cycle in zip(updates[1:], trace.cycles, strict=False):
        assert update.choices is not None
        best = own_logits(small.model, text[: cycle.context + 1])[-1].argmax()
        likeliest.append(int(update.choices[0, 0]) == int(best))
    assert len(likeliest) > 5 and all(likeliest) == (draw == "sampled")


def test_a_full_match_keeps_the_targets_own_token(
    small: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An n-gram of four tokens brings four; planted: guesses that lack their last token bring less."""

    def most() -> int:
        text = generate(small, LookaheadDrafter(1, 4, 3), PROMPT, max_new_tokens=LIMIT, stop=[])
        return max(cycle.committed for cycle in text.cycles)

    assert most() == 4
    keep = LookaheadText._keep
    monkeypatch.setattr(LookaheadText, "_keep", lambda text, gram: keep(text, list(gram)[:-1]))
    assert most() < 4


BUDGETS = st.builds(Budget, st.integers(0, 60), st.integers(0, 9), st.integers(0, 7))


@settings(max_examples=60, deadline=None)
@example(
    sizes=(4, 5, 1, False), budgets=[Budget(2, 2, 2), Budget(8, 4, 2)], vocab=2
)  # columns that begin alike
@given(sizes=SIZES, budgets=st.lists(BUDGETS, min_size=1, max_size=5), vocab=st.integers(2, 9))
def test_trees_stay_within_budgets_that_change(
    sizes: Any, budgets: list[Budget], vocab: int
) -> None:
    """Nodes, levels and children, at every moment of a text."""
    for cycle, tree in enumerate(
        decode(LookaheadDrafter(*sizes).begin(), hashing(vocab, 3), budgets, 20)
    ):
        budget = budgets[cycle % len(budgets)]
        assert len(tree) - 1 <= budget.nodes and max(tree.depths()) <= budget.depth
        assert max(map(len, tree.children())) <= budget.top_k


def test_columns_without_room_wait() -> None:
    """With room for two or three of five these move on, and the others stay as they are until there is room again."""
    drafter = LookaheadDrafter(5, 4, 1, from_prompt=False)
    draft: Any = drafter.begin()
    budgets = [drafter.budget] * 6 + [Budget(8, 9, 3)] * 6 + [drafter.budget] * 6
    columns = []
    for _ in decode(draft, hashing(1009, 3), budgets, 18):
        columns.append([column[1:] for column in draft.state.texts[0].columns])
    moves = [
        [one != other for one, other in zip(*pair, strict=True)] for pair in pairwise(columns[3:])
    ]
    assert moves[:3] == moves[9:12] == [[True] * 5] * 3
    assert all(
        move in ([True] * 2 + [False] * 3, [True] * 3 + [False] * 2) for move in moves[3:9]
    )  # guess or none


def test_other_drafters_trees_leave_the_window_alone(small: Target) -> None:
    """A tree under another root, or without the window, tells nothing; the output of a list stays the target's own."""
    text: Any = LookaheadDrafter(3, 3, 3).begin()
    text.propose(Committed(torch.tensor(PROMPT), None, 9), Budget(40, 9, 9))
    before = [[*column] for column in text.state.texts[0].columns]
    for tree in (DraftTree.chain([8, 1, 2, 3]), DraftTree.chain([9])):
        text.state.texts[0].advance(tree, [0] * len(tree))
        assert [*text.state.texts[0].columns][1:] == before[1:]
    several = FirstOf([NgramDrafter(longest=6, shortest=4), LookaheadDrafter(5, 4, 3)])
    plain, drafted = (
        generate(small, drafter, PROMPT, max_new_tokens=LIMIT, stop=[])
        for drafter in (NoDrafter(), several)
    )
    assert plain.tokens == drafted.tokens
    assert {True, False} == {cycle.tree.is_chain for cycle in drafted.cycles}  # both drafted


@pytest.mark.parametrize("wrong", [{"window": 0}, {"level": 1}, {"guesses": 0}])
def test_senseless_sizes_are_refused(wrong: dict[str, int]) -> None:
    """Said at once, with what was expected."""
    with pytest.raises(ValueError, match="window, level and guesses are"):
        LookaheadDrafter(**wrong)  # type: ignore[arg-type]
