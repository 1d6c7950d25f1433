"""Lookahead: the trees of every cycle are those of a naive loop over the published rows, which knows no trees."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from eagle import Budget, Sampling, Target, generate
from eagle.core.drafter import Committed, DraftSequence
from eagle.core.tree import DraftTree, chain_paths
from eagle.core.verify import Choose, walk
from eagle.drafters.self_speculation.lookahead import (
    LookaheadDrafter,
    LookaheadSequence,
    LookaheadState,
)
from tests.enumerate_law import texts_of
from tests.families import own_logits, small_llama

# from the tokens of a text to the next one of a greedy target
Predict = Callable[[list[int]], int]
PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]
LIMIT = 40


def predict_by_hash(vocab: int, last: int) -> Predict:
    """Return a target whose next token depends on the last few tokens in no simple way."""
    return lambda text: hash(tuple(text[-last:])) % 1009 % vocab


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """Return the tokens on the way to every node but the root."""
    return set(texts_of(tree)) - {()}


def decode(
    draft: DraftSequence,
    predict: Predict,
    budgets: Sequence[Budget],
    limit: int = LIMIT,
) -> Iterator[DraftTree]:
    """Yield the trees that are drafted while a text is written; each node is answered after its own path alone."""
    text = [*PROMPT]
    update = Committed(torch.tensor(PROMPT), None, predict(PROMPT))
    for cycle in range(limit):
        tree = draft.propose(update, budgets[cycle % len(budgets)])
        yield tree
        # as verification does it: what the target says after every node
        tokens = tree.tokens.tolist()
        choices = []
        for node in range(len(tree)):
            path = [tokens[step] for step in tree.path(node)]
            choices.append(predict([*text, *path]))
        accepted = walk(tree, choices)
        text += [tokens[node] for node in accepted]
        # the choices feed the window in the next cycle
        likeliest = torch.tensor(choices)[:, None]
        update = Committed(
            tree.tokens[accepted],
            features=None,
            root=choices[accepted[-1]],
            tree=tree,
            choices=likeliest,
        )


class NaiveLookahead:
    """Lookahead decoding as its paper describes it: rows of tokens, and a list of all n-grams, oldest first."""

    def __init__(
        self,
        drafter: LookaheadDrafter,
        predict: Predict,
        first: int,
    ) -> None:
        self.window = drafter.window
        self.level = drafter.level
        self.guesses = drafter.guesses
        self.from_prompt = drafter.from_prompt
        self.predict = predict
        self.text = [*PROMPT, first]
        # column 0 of the first row stands for the text's last token, whatever it holds
        self.rows = [random.Random(0).choices(self.text, k=self.window + self.level - 2)]
        self.grams: list[tuple[int, ...]] = []
        for end in range(self.level, len(self.text) + 1):
            self.add_text_gram(end)

    def add_gram(self, gram: Sequence[int]) -> None:
        """Put an n-gram last, once; the oldest of too many with its first token goes."""
        new = tuple(gram)
        self.grams = [known for known in self.grams if known != new] + [new]
        same = [known for known in self.grams if known[0] == new[0]]
        if len(same) > self.guesses:
            self.grams.remove(same[0])

    def add_text_gram(self, end: int) -> None:
        """Add the n-gram of the text that ends there, if the prompt's count."""
        if self.from_prompt:
            self.add_gram(self.text[end - self.level : end])

    def column(self, index: int) -> list[int]:
        """Return what stands before a column's next token: the first row up to it, then the rows below."""
        return [
            *self.rows[0][1 : index + 1],
            *(row[index] for row in self.rows[1:]),
        ]

    def paths(self) -> set[tuple[int, ...]]:
        """Return all that is read after the text: n-grams that continue it, and the columns."""
        whole = [list(gram[1:]) for gram in self.grams if gram[0] == self.text[-1]]
        whole += [self.column(index) for index in range(len(self.rows[0]))]
        paths = set()
        for path in whole:
            paths |= {tuple(path[:end]) for end in range(1, len(path) + 1)}
        return paths

    def add_row(self) -> None:
        """Add what the target says after each column; once there are enough rows, each column leaves an n-gram."""
        columns = [self.column(index) for index in range(len(self.rows[0]))]
        new = [self.predict([*self.text, *column]) for column in columns]
        if len(self.rows) < self.level - 1:
            # while the rows fill up, the window narrows to its size
            self.rows = [row[1:] for row in [*self.rows, new]]
            return
        first_row = [self.text[-1], *self.rows[0][1:]]
        for gram in zip(first_row, *self.rows[1:], new, strict=True):
            self.add_gram(gram)
        self.rows = [*self.rows[1:], new]

    def step(self) -> tuple[set[tuple[int, ...]], int]:
        """Read everything, move the window, and return the paths that were read and how many tokens were accepted."""
        known = self.paths()
        self.add_row()
        accepted: list[int] = []
        while not accepted or tuple(accepted) in known:
            accepted.append(self.predict([*self.text, *accepted]))
        # the window turns to the position after the accepted tokens
        passed = (len(accepted) - 1) % len(self.rows[0])
        self.rows = [row[passed:] + row[:passed] for row in self.rows]
        for token in accepted:
            self.text.append(token)
            self.add_text_gram(len(self.text))
        return known, len(accepted) - 1


def find_difference(drafter: LookaheadDrafter, predict: Predict) -> int | None:
    """Return the first cycle whose tree is not the naive loop's."""
    naive = NaiveLookahead(drafter, predict, predict(PROMPT))
    for cycle, tree in enumerate(decode(drafter.begin(), predict, [drafter.budget])):
        if paths_of(tree) != naive.step()[0]:
            return cycle
    return None


SIZES = st.tuples(
    st.integers(4, 7),
    st.integers(2, 5),
    st.integers(1, 4),
    st.booleans(),
)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    sizes=SIZES,
    vocab=st.integers(2, 9),
    last=st.integers(1, 5),
)
def test_every_tree_is_the_naive_loops(
    sizes: Any,
    vocab: int,
    last: int,
) -> None:
    """This holds for all window sizes, n-grams and guesses, whatever is accepted."""
    assert find_difference(LookaheadDrafter(*sizes), predict_by_hash(vocab, last)) is None


def test_a_fault_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If each node's choice is that of the node before, the naive loop's trees are others."""
    assert find_difference(LookaheadDrafter(5, 4, 2), predict_by_hash(7, 3)) is None
    advance = LookaheadSequence.advance

    def shift_choices(
        text: Any,
        tree: DraftTree,
        choices: Any,
    ) -> None:
        advance(text, tree, [choices[-1], *choices[:-1]])

    monkeypatch.setattr(LookaheadSequence, "advance", shift_choices)
    assert find_difference(LookaheadDrafter(5, 4, 2), predict_by_hash(7, 3)) is not None


@pytest.fixture(scope="module")
def small() -> Target:
    """Return a random model of 24 tokens."""
    return Target(small_llama())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_real_target_reads_window_and_guesses(temperature: float, small: Target) -> None:
    """Masks, positions and noise are right: each tree is what the untouched model says after single texts."""
    sampling = Sampling(temperature=temperature, seed=3)
    drafter = LookaheadDrafter(5, 4, 3)
    trace = generate(
        small,
        drafter,
        PROMPT,
        sampling=sampling,
        max_new_tokens=LIMIT,
        stop=[],
    )
    noise = Choose(sampling).noise

    def predict(text: list[int]) -> int:
        logits = own_logits(small.model, text)[-1]
        if noise is not None:
            logits = logits + noise([len(text)], small.vocab_size, small.device)[0]
        return int(logits.argmax())

    naive = NaiveLookahead(drafter, predict, predict(PROMPT))
    compared = 0
    for cycle in trace.cycles:
        # near the limit, trees are cut
        if LIMIT - cycle.context + len(PROMPT) > drafter.budget.depth:
            assert (paths_of(cycle.tree), cycle.accepted) == naive.step()
            compared += 1
    assert compared > 3


@pytest.mark.parametrize("draw", ["noise", "sampled"])
def test_sampled_drafts_keep_the_noise_out_of_choices(
    draw: Any,
    small: Target,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where coins verify drafts, these must not depend on the noise: choices are the likeliest tokens alone."""
    # what the target tells the drafter after each cycle
    updates: list[Committed] = []
    propose = LookaheadState.propose

    def record(
        state: Any,
        asked: Any,
        budgets: Any,
    ) -> Any:
        updates.extend(asked.values())
        return propose(state, asked, budgets)

    monkeypatch.setattr(LookaheadState, "propose", record)
    trace = generate(
        small,
        LookaheadDrafter(),
        PROMPT,
        sampling=Sampling(temperature=1.0, seed=3),
        budget=Budget.fixed(chain_paths(3), draw),
        max_new_tokens=12,
        stop=[],
    )
    text = [*PROMPT, *trace.tokens]
    is_likeliest = []
    for update, cycle in zip(updates[1:], trace.cycles, strict=False):
        assert update.choices is not None
        # with `draw="noise"` the choices are samples, and some are not the likeliest
        best = own_logits(small.model, text[: cycle.context + 1])[-1].argmax()
        is_likeliest.append(int(update.choices[0, 0]) == int(best))
    assert len(is_likeliest) > 5
    assert all(is_likeliest) == (draw == "sampled")


def test_a_full_match_keeps_the_targets_own_token(small: Target) -> None:
    """An n-gram of four tokens brings three drafts, and the target a fourth token."""
    # one column, so that no two n-grams compete
    drafter = LookaheadDrafter(1, 4, 3)
    trace = generate(small, drafter, PROMPT, max_new_tokens=LIMIT, stop=[])
    assert max(cycle.committed for cycle in trace.cycles) == 4


BUDGETS = st.builds(
    Budget,
    st.integers(0, 60),
    st.integers(0, 9),
    st.integers(0, 7),
)


@settings(max_examples=60, deadline=None)
# columns that begin alike share nodes
@example(
    sizes=(4, 5, 1, False),
    budgets=[Budget(2, 2, 2), Budget(8, 4, 2)],
    vocab=2,
)
@given(
    sizes=SIZES,
    budgets=st.lists(BUDGETS, min_size=1, max_size=5),
    vocab=st.integers(2, 9),
)
def test_trees_stay_within_budgets_that_change(
    sizes: Any,
    budgets: list[Budget],
    vocab: int,
) -> None:
    """Nodes, levels and children stay within the budget of their cycle."""
    trees = decode(
        LookaheadDrafter(*sizes).begin(),
        predict_by_hash(vocab, 3),
        budgets,
        20,
    )
    for cycle, tree in enumerate(trees):
        budget = budgets[cycle % len(budgets)]
        assert len(tree) - 1 <= budget.nodes
        assert max(tree.depths()) <= budget.depth
        assert max(map(len, tree.children())) <= budget.top_k


def test_other_drafters_trees_leave_the_window_alone() -> None:
    """In a list of drafters, a tree under another root, or without the window's nodes, tells nothing."""
    text: Any = LookaheadDrafter(3, 3, 3).begin()
    text.propose(Committed(torch.tensor(PROMPT), None, 9), Budget(40, 9, 9))
    state = text.state.sequences[0]
    before = [[*column] for column in state.columns]
    for tree in (DraftTree.chain([8, 1, 2, 3]), DraftTree.chain([9])):
        state.advance(tree, [0] * len(tree))
        assert [*state.columns][1:] == before[1:]


@pytest.mark.parametrize("wrong", [{"window": 0}, {"level": 1}, {"guesses": 0}])
def test_sizes_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    """The message says what is expected of all three."""
    with pytest.raises(ValueError, match="window, level and guesses"):
        LookaheadDrafter(**wrong)  # type: ignore[arg-type]
