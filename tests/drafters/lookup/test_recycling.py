"""Token recycling: trees are those of a naive dictionary that the untouched model fills; ties have a fixed order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle import Budget, Sampling, Target, generate, load_drafter
from eagle.core import sampling as sampling_module
from eagle.core.drafter import Committed, Followers
from eagle.core.sampling import rank_tokens
from eagle.core.trace import Cycle
from eagle.core.tree import chain_paths
from eagle.decoding.loop import Decoding
from eagle.drafters.lookup.recycling import WIDTH, RecyclingDrafter, RecyclingState, levels_of
from eagle.drafters.several import FirstOf
from tests.enumerate_law import texts_of
from tests.families import own_logits, small_llama

# different first tokens, so that no prompt's prefix is still in the cache; the second has two chunks of logits
PROMPTS = [[1, 2, 3, 4, 5, 1, 2, 3], [7 * i % 24 for i in range(1, 80)], [9, 5, 2]]
TREE = Budget.fixed(((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 0, 1), (0, 0, 1, 0)))
LIMIT = 24

Table = dict[int, list[int]]


@pytest.fixture(scope="module")
def small() -> Target:
    """Return a random model of 24 tokens, in fp64, as near-ties would be ordered by rounding."""
    return Target(small_llama().double())


# -- a naive dictionary ---------------------------------------------------------------------------


def write(table: Table, target: Target, text: list[int]) -> None:
    """Write the row of a text's last token, from a forward of the untouched model over this text alone."""
    logits = own_logits(target.model, text)[-1].tolist()
    best = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    table[text[-1]] = best[:WIDTH]


def naive_paths(table: Table, root: int, shape: Sequence[tuple[int, ...]]) -> set[tuple[int, ...]]:
    """Return the tokens on the way to every node of a tree of this shape, as far as the table knows them."""
    paths = set()
    for ranks in shape:
        path = [root]
        for rank in ranks:
            path += table.get(path[-1], [])[rank : rank + 1]
        if len(path) == len(ranks) + 1:
            paths.add(tuple(path[1:]))
    return paths


def read_cycle(table: Table, target: Target, text: list[int], cycle: Cycle) -> None:
    """Write the rows of all nodes of a cycle's tree; `text` ends before its root."""
    tokens = cycle.tree.tokens.tolist()
    for node in range(len(tokens)):
        path = [tokens[step] for step in cycle.tree.path(node)]
        write(table, target, [*text, *path])


def find_difference(
    target: Target,
    drafter: Any,
    sampling: Sampling,
    budget: Budget = TREE,
) -> str | None:
    """Return where the trees of several prompts are not those of the dictionary; None if they all are."""
    table: Table = {}
    for prompt in PROMPTS:
        trace = generate(
            target,
            drafter,
            prompt,
            sampling=sampling,
            budget=budget,
            max_new_tokens=LIMIT,
            stop=[],
        )
        for end in range(1, len(prompt) + 1):
            write(table, target, prompt[:end])
        text = [*prompt]
        answer = trace.tokens
        for index, cycle in enumerate(trace.cycles):
            tokens = cycle.tree.tokens.tolist()
            shape = [
                path
                for path in budget.paths or ()
                if len(path) <= LIMIT - len(text) + len(prompt) - 2
            ]
            expected = naive_paths(table, tokens[0], shape)
            if {*texts_of(cycle.tree)} - {()} != expected:
                return f"prompt {prompt[:3]}, cycle {index}"
            # the last cycle's logits come after the last draft: the drafter never sees them
            if index + 1 < len(trace.cycles):
                read_cycle(table, target, text, cycle)
            text = [*prompt, *answer[: len(text) - len(prompt) + cycle.accepted + 1]]
    return None


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["T=0", "T=1"]
)
def test_drafts_are_those_of_a_naive_dictionary(sampling: Sampling, small: Target) -> None:
    """Over several prompts: every token that the target reads writes its row, in prompts and in rejected drafts."""
    drafter = RecyclingDrafter()
    assert find_difference(small, drafter, sampling) is None
    assert (
        find_difference(small, RecyclingDrafter(), sampling, Budget.fixed(chain_paths(3))) is None
    )


def test_a_table_of_rejected_nodes_alone_is_seen(
    small: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison with the dictionary finds a table that leaves out what was accepted."""
    propose = RecyclingState.propose

    def leave_out_accepted(state: Any, updates: Any, budgets: Any) -> Any:
        changed = {}
        for row, update in updates.items():
            accepted = update.tokens.tolist()
            # tokens that are accepted in this cycle, wherever they stand in the tree
            kept = [
                index
                for index, token in enumerate(update.followers.tokens.tolist())
                if token not in accepted
            ]
            followers = Followers(update.followers.tokens[kept], update.followers.likeliest[kept])
            changed[row] = Committed(
                update.tokens,
                None,
                update.root,
                followers=followers,
            )
        return propose(state, changed, budgets)

    monkeypatch.setattr(RecyclingState, "propose", leave_out_accepted)
    assert find_difference(small, RecyclingDrafter(), Sampling()) is not None


# -- the output -----------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_output_is_that_of_plain_decoding(
    temperature: float,
    batch_size: int,
    small: Target,
) -> None:
    """Whatever the table holds, by itself or before another drafter, and drafts are accepted."""
    for name in ("recycling", "recycling,ngram", "ngram,recycling"):
        drafter = load_drafter(name, small)
        accepted = 0
        for seed in range(2):
            options: dict[str, Any] = {
                "sampling": Sampling(temperature=temperature, seed=seed),
                "max_new_tokens": LIMIT,
                "stop": [],
                "batch_size": batch_size,
            }
            got = generate(small, drafter, PROMPTS, **options)
            plain = generate(
                small,
                load_drafter("none", small),
                PROMPTS,
                **options,
            )
            assert [trace.tokens for trace in got] == [trace.tokens for trace in plain]
            accepted += sum(cycle.accepted for trace in got for cycle in trace.cycles)
        assert accepted > 10


# -- the table ------------------------------------------------------------------------------------


def followers_of(tokens: list[int], likeliest: list[list[int]]) -> Followers:
    """Return what a target says after these tokens."""
    return Followers(torch.tensor(tokens), torch.tensor(likeliest))


def draft(drafter: RecyclingDrafter, root: int, budget: Budget, *read: Followers) -> list[Any]:
    """Return the texts of a draft after an update for each batch of followers, each in a row of its own."""
    state = drafter.open()
    updates = {}
    for row, followers in enumerate([*read, None]):
        updates[row] = Committed(
            torch.tensor([0]),
            None,
            root,
            followers=followers,
        )
    return sorted(texts_of(state.propose(updates, dict.fromkeys(updates, budget))[len(read)]))[1:]


def test_rows_that_were_never_written_propose_nothing() -> None:
    """A new table drafts nothing, token 0 neither; an unknown token has no children."""
    budget = Budget.fixed(((0,), (1,), (2,), (0, 0), (1, 0), (1, 1)))
    drafter = RecyclingDrafter()
    assert draft(drafter, 0, budget) == []
    known = followers_of([5], [[6, 5, 7]])
    assert draft(drafter, 5, budget, known) == [(5,), (5, 5), (5, 6), (6,), (7,)]
    assert draft(drafter, 6, budget) == []


def test_of_one_token_the_last_row_is_kept() -> None:
    """In the order of rows of the batch, and of nodes in a tree; later prompts and other states see the same table."""
    drafter = RecyclingDrafter()
    budget = Budget(1, 1, 1)
    first = followers_of([5, 5, 6], [[1, 2], [2, 1], [3, 4]])
    assert draft(drafter, 5, budget, first) == [(2,)]
    second = followers_of([5], [[4, 3]])
    assert draft(drafter, 5, budget, second, first) == [(2,)]
    assert draft(drafter, 5, budget, first, second) == [(4,)]
    assert draft(drafter, 5, budget) == [(4,)]


def test_budgets_are_honoured() -> None:
    """A chain takes the likeliest token of each row; the default tree has nearly the paper's numbers of nodes."""
    assert levels_of(Budget(3, 3, 1)) == [[(0,)], [(0, 0)], [(0, 0, 0)]]
    # all nodes are used where the levels and children leave room for them
    for budget in (Budget(8, 4, 4), Budget(25, 6, 8), Budget(80, 6, 8), Budget(3, 1, 8)):
        levels = levels_of(budget)
        assert len(levels) <= budget.depth
        assert sum(map(len, levels)) == budget.nodes
        assert max(max(path) for level in levels for path in level) < budget.top_k
    # what the decoder has no levels left for is cut, and a row has no token of rank 8
    fixed = Budget.fixed(((0,), (8,), (0, 0), (0, 0, 0))).within(2)
    assert levels_of(fixed) == [[(0,)], [(0, 0)]]


def test_a_drafter_that_waited_learns_all_that_was_read(small: Target) -> None:
    """Beside a drafter that is asked first, and in cycles without a draft, no row is lost."""
    recycling = RecyclingDrafter()
    generate(
        small,
        FirstOf([load_drafter("ngram", small), recycling]),
        PROMPTS[0],
        max_new_tokens=9,
        stop=[],
    )
    # three cycles, of which the second has read nothing for this drafter
    alone = RecyclingDrafter()
    updates = [
        Committed(torch.tensor([1]), None, 2, followers=followers_of([5], [[1, 2]])),
        Committed(torch.tensor([2]), None, 3),
        Committed(torch.tensor([3]), None, 5, followers=followers_of([6, 5], [[1, 2], [7, 8]])),
    ]
    joined = Committed.join(updates)
    assert joined.followers is not None
    assert joined.followers.tokens.tolist() == [5, 6, 5]
    assert draft(alone, 5, Budget(1, 1, 1), joined.followers) == [(7,)]
    # the prompt was read while n-grams drafted
    assert all(row[0] >= 0 for row in recycling.likely_after(PROMPTS[0]))


def test_followers_of_a_prompt_do_not_depend_on_its_chunks(small: Target) -> None:
    """A prompt that is read in several forwards has the same followers, and other drafters get none."""
    for reads, expected in ((RecyclingDrafter(), WIDTH), (load_drafter("ngram", small), 0)):
        decoding = Decoding(small, reads)
        assert decoding.state.num_followers == expected
    # twelve forwards
    state = small.open()
    state.num_followers = WIDTH
    state.admit(0, PROMPTS[1])
    (prompt,) = state.finish_prompts(most=7).values()
    assert prompt.followers is not None
    logits = own_logits(small.model, PROMPTS[1])
    assert torch.equal(prompt.followers.likeliest, rank_tokens(logits, WIDTH))
    assert prompt.followers.tokens.tolist() == PROMPTS[1]


# -- the order of equal logits --------------------------------------------------------------------


def rank_by_sort(logits: Tensor, count: int) -> Tensor:
    """Return the tokens of the highest logits, by a sort of the whole vocabulary that keeps equals in order."""
    return logits.sort(dim=-1, descending=True, stable=True).indices[:, :count]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_logits_are_ranked_by_token_id(
    dtype: torch.dtype,
    on_device: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inside the best tokens and at their end, where the host may look and where it would wait for a device."""
    monkeypatch.setattr(sampling_module, "must_wait", lambda device: on_device)
    generator = torch.Generator().manual_seed(0)
    for size in (3, 8, 9, 700):
        for scale in (0.0, 0.5, 3.0, 100.0):
            logits = (torch.randn(40, size, generator=generator) * scale).round().to(dtype)
            # as a vocabulary that is padded has them
            logits[::7, ::2] = -torch.inf
            assert torch.equal(rank_tokens(logits, WIDTH), rank_by_sort(logits, WIDTH))


@pytest.mark.parametrize("on_device", [False, True])
def test_nan_gives_different_tokens_of_the_vocabulary(
    on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The decoder refuses such logits later, and then says so."""
    monkeypatch.setattr(sampling_module, "must_wait", lambda device: on_device)
    for row in rank_tokens(torch.full((2, 30), torch.nan), WIDTH).tolist():
        assert len({*row}) == WIDTH
        assert {*row} <= {*range(30)}
