"""Tables of counts: the probs made of them, their files, and drafts by them."""

# V vocabulary

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from data_prep.count_tokens import count_texts
from eagle import Budget, Sampling, Target
from eagle.core.drafter import Committed
from eagle.core.tree import TargetOutput, chain_paths
from eagle.core.verify import Choose, verify
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.counts import (
    CountDrafter,
    Tables,
    load_tables,
    save_tables,
    tokenizer_identity,
)
from eagle.drafters.lookup.unigram import UnigramDrafter
from tests.tables import held, some_tables, some_text

V = 30
BOTH: list[type[CountDrafter]] = [BigramDrafter, UnigramDrafter]


# -- probs --------------------------------------------------------------------------------------


def exact_probs(tables: Tables, previous: int | None = None) -> list[Fraction]:
    """Return the probs after a token, or of any token, by Witten and Bell (1991), in fractions."""
    singles, pairs = held(tables)
    size = tables.vocab_size
    if previous is None:
        counts = singles
        backoff = [Fraction(1, size)] * size
    else:
        counts = Counter()
        for (first, second), count in pairs.items():
            if first == previous:
                counts[second] = count
        backoff = exact_probs(tables)
    if not counts:
        return backoff
    # the share of what is new: distinct / (distinct + counted)
    total = counts.total()
    new = Fraction(len(counts), total + len(counts))
    return [(1 - new) * Fraction(counts[x], total) + new * backoff[x] for x in range(size)]


def test_probs_are_those_of_witten_and_bell() -> None:
    """Every row, in any order; a token that nothing follows has the probs of unigrams."""
    text = some_text(V, 150)
    text[text == 2] = 1
    text = torch.cat([text, torch.tensor([2])])
    tables = count_texts([(text, torch.ones_like(text, dtype=torch.bool))], V)
    rows = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    bigram = BigramDrafter(tables).logits(rows).exp().double()
    unigram = UnigramDrafter(tables).logits(rows).exp().double()
    # fractions leave no doubt about rounding; the tables compute in floats
    for index, token in enumerate(rows.tolist()):
        for got, expected in (
            (bigram[index], exact_probs(tables, token)),
            (unigram[index], exact_probs(tables)),
        ):
            assert sum(expected) == 1
            np.testing.assert_allclose(
                got.numpy(),
                list(map(float, expected)),
                rtol=3e-6,
            )
    assert torch.equal(bigram[rows == 2], unigram[rows == 2])


# -- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", BOTH)
def test_tables_from_disk_are_those_that_were_saved(
    method: type[CountDrafter],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Bit for bit, also over older tables; they never replace a model."""
    identity = tokenizer_identity(tiny_target.tokenizer)
    tables = replace(some_tables(tiny_target.vocab_size), tokenizer=identity)
    # a folder below one that does not exist
    folder = tmp_path / "deep/tables"
    save_tables(folder, some_tables(V), method.kind)
    method(tables).save(folder)
    loaded = method.load(folder, tiny_target).tables
    for name, tensor in tables.tensors().items():
        assert torch.equal(loaded.tensors()[name], tensor)
    assert loaded.tokenizer == identity
    assert json.loads((folder / "config.json").read_text()) == {
        "kind": method.kind,
        "vocab_size": tables.vocab_size,
        "tokens": 400,
        "tokenizer": identity,
    }
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a model"):
        save_tables(tmp_path, tables, method.kind)


def test_tables_of_other_tokens_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    """By size, tokenizer and kind; a tokenizer that is not known is not compared."""
    tables = some_tables(tiny_target.vocab_size)
    for wrong, words in (
        (some_tables(V), f"for {V} different tokens, the target has"),
        (replace(tables, tokenizer="another"), "tokenizer another, the target's is"),
    ):
        BigramDrafter(wrong).save(tmp_path)
        with pytest.raises(ValueError, match=words):
            BigramDrafter.load(tmp_path, tiny_target)
    BigramDrafter(tables).save(tmp_path)
    with pytest.raises(ValueError, match="'bigram', expected 'unigram'"):
        UnigramDrafter.load(tmp_path, tiny_target)
    assert BigramDrafter.load(tmp_path, tiny_target).tables.tokenizer is None
    assert tokenizer_identity(None) is None


Spoil = Callable[[Tensor], Tensor]
"""Makes a wrong tensor of one of the tables."""


def add(index: int, amount: int) -> Spoil:
    """Return a function that adds to one number of a table."""
    return lambda table: table.index_add(
        0,
        torch.tensor([index]),
        torch.tensor([amount]),
    )


# the table, what is done to it, and words of the error; one case for each condition
HOSTILE: list[tuple[str, Spoil, str]] = [
    (
        "starts",
        lambda table: table[:-1],
        "30 starts do not part",
    ),
    ("starts", add(4, 10**6), "starts do not part"),
    ("starts", add(0, 1), "starts do not part"),
    ("starts", add(V, -1), "starts do not part"),
    ("counts", lambda table: table[1:], "starts do not part"),
    (
        "successors",
        lambda table: table.clamp(min=V),
        "outside of the vocabulary",
    ),
    ("successors", add(0, -V), "outside of the vocabulary"),
    (
        "successors",
        lambda table: table * 0,
        "expected each once",
    ),
    ("counts", lambda table: table * 0, "are no counts"),
    ("singles", add(3, -(10**6)), "are no counts"),
    ("singles", lambda table: table * 0, "are no counts"),
    (
        "counts",
        lambda table: table + (1 << 62),
        "are no counts",
    ),
    (
        "counts",
        lambda table: table / 2,
        "counts is torch.float32",
    ),
    (
        "singles",
        lambda table: table[None],
        "singles is torch.int64 of shape",
    ),
]


@pytest.mark.parametrize(("name", "spoil", "words"), HOSTILE)
def test_tables_that_do_not_fit_are_refused(
    name: str,
    spoil: Spoil,
    words: str,
    tmp_path: Path,
) -> None:
    """Before anything is computed from them."""
    save_tables(tmp_path, some_tables(V), "bigram")
    tensors = some_tables(V).tensors()
    tensors[name] = spoil(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"holds no tables of counts .*{words}"):
        load_tables(tmp_path, "bigram")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("model.safetensors", "torn"),
        ("config.json", '{"kind": "bigram", "vocab_size": 7, "tokenizer": null}'),
        ("config.json", "[]"),
        ("config.json", "{}"),
        ("config.json", None),
    ],
)
def test_files_that_are_no_tables_are_refused(
    file: str,
    content: str | None,
    tmp_path: Path,
) -> None:
    """A torn file, a config of another size or another shape, and none at all."""
    save_tables(tmp_path, some_tables(V), "bigram")
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(ValueError, match="holds no tables of counts"):
        load_tables(tmp_path, "bigram")


# -- drafting -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "budget"),
    [
        (Sampling(), Budget(14, 3, 2)),
        (Sampling(temperature=0.7), Budget.fixed(chain_paths(3))),
        (Sampling(temperature=1.0, top_k=3), Budget.fixed(chain_paths(3), "sampled")),
    ],
    ids=["greedy", "noise", "sampled"],
)
@pytest.mark.parametrize("method", BOTH)
def test_a_target_that_is_the_table_accepts_whole_branches(
    method: type[CountDrafter],
    sampling: Sampling,
    budget: Budget,
) -> None:
    """Cycle after cycle, whether drafts share the target's noise or have their own."""
    drafter = method(some_tables(V))
    choose = Choose(sampling)
    text = [3, 1, 4]
    draft = drafter.begin(choose.offer(V, torch.device("cpu")))
    update = Committed(torch.tensor(text), None, 5)
    for _ in range(4):
        tree = draft.propose(update, budget)
        # the target's logits after each node are those of the table
        output = TargetOutput(
            tree,
            drafter.logits(tree.tokens),
            None,
            len(text),
            text,
        )
        path, root = verify(output, choose)
        assert len(path) == 1 + max(tree.depths())
        update = Committed(tree.tokens[path], None, root)
        text += update.tokens.tolist()


@pytest.mark.parametrize("method", BOTH)
def test_sampled_drafts_carry_the_probs_of_the_table(method: type[CountDrafter]) -> None:
    """At T = 0.5 those of a node are the squares of its row, normalised."""
    tables = some_tables(4)
    noise = Choose(Sampling(temperature=0.5)).offer(4, torch.device("cpu"))
    for root in range(4):
        update = Committed(torch.tensor([1, 2]), None, root)
        budget = Budget.fixed(chain_paths(2), "sampled")
        tree = method(tables).begin(noise).propose(update, budget)
        assert tree.draft_probs is not None
        for node in (1, 2):
            previous = int(tree.tokens[node - 1]) if method is BigramDrafter else None
            squares = [prob**2 for prob in exact_probs(tables, previous)]
            expected = [float(square / sum(squares)) for square in squares]
            np.testing.assert_allclose(tree.draft_probs[node], expected, rtol=1e-5)
