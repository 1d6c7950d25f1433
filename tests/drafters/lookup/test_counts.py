"""Tables of counts: the laws made of them, their files, and that drafts drawn from them bend nothing."""

# V vocabulary

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from data_prep.count_tokens import count_texts
from eagle import Budget, Sampling, Target
from eagle.core.drafter import Committed
from eagle.core.tree import Paths, TargetOutput, best_tree, chain_paths
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
from tests.core.test_verify_drawn import Scripted
from tests.core.test_verify_law import verify_by
from tests.enumerate_law import (
    Drawn,
    distance,
    emitted,
    every_outcome,
    laws_of,
    random_logits,
    texts_of,
)
from tests.tables import held, some_tables, some_text

V = 30
BOTH: list[type[CountDrafter]] = [BigramDrafter, UnigramDrafter]


def fractions(tables: Tables, before: int | None = None) -> list[Fraction]:
    """The law after a token, or of any token, as Witten and Bell (1991) write it, in fractions."""
    singles, pairs = held(tables)
    lower = (
        [Fraction(1, tables.vocab_size)] * tables.vocab_size
        if before is None
        else fractions(tables)
    )
    seen = (
        singles
        if before is None
        else Counter({x: count for (y, x), count in pairs.items() if y == before})
    )
    new = Fraction(len(seen), seen.total() + len(seen)) if seen else Fraction(1)
    return [
        (1 - new) * Fraction(seen[x], seen.total() or 1) + new * lower[x]
        for x in range(tables.vocab_size)
    ]


@pytest.mark.parametrize("vocab_size", [4, V])
def test_the_laws_are_those_of_witten_and_bell(vocab_size: int) -> None:
    """Every row, in whatever order they are asked for; one token is followed by none, which leaves the unigram law."""
    text = some_text(vocab_size, 150)
    text[text == 2] = 1
    tables = count_texts(
        [(torch.cat([text, torch.tensor([2])]), torch.ones(151).bool())], vocab_size
    )
    rows = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(0))
    bigram, unigram = (drafter(tables).logits(rows).exp().double() for drafter in BOTH)
    np.testing.assert_allclose(
        tables.unigram(), [float(share) for share in fractions(tables)], rtol=1e-14
    )
    for row, token in enumerate(rows.tolist()):
        for law, exact in (
            (bigram[row], fractions(tables, token)),
            (unigram[row], fractions(tables)),
        ):
            assert sum(exact) == 1 and float(law.sum()) == pytest.approx(1, abs=1e-6)
            np.testing.assert_allclose(law.numpy(), [float(share) for share in exact], rtol=3e-6)
    assert torch.equal(bigram[rows == 2], unigram[rows == 2])


@pytest.mark.parametrize("method", BOTH)
def test_what_is_saved_is_loaded(
    method: type[CountDrafter], tiny_target: Target, tmp_path: Path
) -> None:
    """Bit for bit, over older tables too, and with the same drafts; never over a model."""
    tables = replace(
        some_tables(tiny_target.vocab_size), tokenizer=tokenizer_identity(tiny_target.tokenizer)
    )
    save_tables(tmp_path / "deep/a", some_tables(V), method.kind)
    method(tables).save(tmp_path / "deep/a")
    loaded = method.load(tmp_path / "deep/a", tiny_target)
    for name, row in tables.tensors().items():
        assert torch.equal(loaded.tables.tensors()[name], row)
    assert loaded.tables.tokenizer == tables.tokenizer
    news, budget = Committed(torch.tensor([4, 5]), None, 6), Budget(8, 4, 3)
    trees = [drafter.begin().propose(news, budget) for drafter in (loaded, method(tables))]
    assert torch.equal(trees[0].tokens, trees[1].tokens)
    config = json.loads((tmp_path / "deep/a/config.json").read_text())
    assert config == {
        "kind": method.kind,
        "vocab_size": tables.vocab_size,
        "tokens": 400,
        "tokenizer": tables.tokenizer,
    }
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="holds a model, which tables of counts would overwrite"):
        save_tables(tmp_path, tables, method.kind)


def test_tables_of_other_tokens_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    """Both sizes and both tokenizers are named; a tokenizer that is not known is not held against the tables."""
    size, own = tiny_target.vocab_size, tokenizer_identity(tiny_target.tokenizer)
    BigramDrafter(some_tables(V)).save(tmp_path)
    with pytest.raises(
        ValueError, match=f"is for {V} different tokens, the target has {size}.*eagle count-tokens"
    ):
        BigramDrafter.load(tmp_path, tiny_target)
    BigramDrafter(replace(some_tables(size), tokenizer="another")).save(tmp_path)
    with pytest.raises(ValueError, match=f"the tokens of tokenizer another, the target's is {own}"):
        BigramDrafter.load(tmp_path, tiny_target)
    with pytest.raises(ValueError, match="got the kind 'bigram', expected 'unigram'"):
        UnigramDrafter.load(tmp_path, tiny_target)
    BigramDrafter(some_tables(size)).save(tmp_path)
    assert BigramDrafter.load(tmp_path, tiny_target).tables.tokenizer is None
    assert tokenizer_identity(None) is None


def raised(place: int, by: int) -> Callable[[Tensor], Tensor]:
    """A row with one of its numbers changed."""
    return lambda row: row.index_add(0, torch.tensor([place]), torch.tensor([by]))


HOSTILE: dict[str, tuple[str, Callable[[Tensor], Tensor], str]] = {
    "a start too few": (
        "starts",
        lambda row: row[:-1],
        "30 starts do not part .* expected 31 from 0",
    ),
    "starts descend": ("starts", raised(4, 10**6), "starts do not part"),
    "starts begin later": ("starts", raised(0, 1), "starts do not part"),
    "starts end early": ("starts", raised(V, -1), "starts do not part"),
    "a successor too few": ("successors", lambda row: row[1:], "starts do not part"),
    "a count too few": ("counts", lambda row: row[1:], "starts do not part"),
    "an id too high": (
        "successors",
        lambda row: row.clamp(min=V),
        "outside of the vocabulary: expected 0..29",
    ),
    "an id below 0": ("successors", raised(0, -V), "outside of the vocabulary"),
    "an id twice": ("successors", lambda row: row * 0, "expected each once"),
    "a count of 0": ("counts", lambda row: row * 0, "are no counts"),
    "a negative count": ("singles", raised(3, -(10**6)), "are no counts"),
    "nothing counted": ("singles", lambda row: row * 0, "0 tokens in .* are no counts"),
    "counts beyond all": ("counts", lambda row: row + (1 << 62), "are no counts"),
    "halves": ("counts", lambda row: row / 2, "counts is torch.float32"),
    "a matrix": ("singles", lambda row: row[None], r"singles is torch.int64 of shape \(1, 30\)"),
    "another size": ("singles", lambda row: row[:-1], "starts do not part"),
}


@pytest.mark.parametrize("fault", HOSTILE)
def test_tables_that_do_not_fit_are_refused(fault: str, tmp_path: Path) -> None:
    """Before anything is made of them, with the folder and what is wrong in it."""
    name, spoil, message = HOSTILE[fault]
    save_tables(tmp_path, some_tables(V), "bigram")
    tensors = some_tables(V).tensors()
    save_file({**tensors, name: spoil(tensors[name]).contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"holds no tables of counts .*{message}"):
        load_tables(tmp_path, "bigram")


def test_files_that_are_no_tables_are_refused(tmp_path: Path) -> None:
    """No folder, a torn file, a table too few, a config of another size or without one."""
    for spoil in (
        lambda folder: (folder / "model.safetensors").write_bytes(b"torn"),
        lambda folder: save_file({"singles": torch.ones(V)}, folder / "model.safetensors"),
        lambda folder: (folder / "config.json").write_text(
            json.dumps({"kind": "bigram", "vocab_size": 7, "tokenizer": None})
        ),
        lambda folder: (folder / "config.json").write_text("[]"),
        lambda folder: (folder / "config.json").write_text("{}"),
        lambda folder: (folder / "config.json").unlink(),
    ):
        save_tables(tmp_path, some_tables(V), "bigram")
        spoil(tmp_path)
        with pytest.raises(ValueError, match="holds no tables of counts"):
            load_tables(tmp_path, "bigram")
        (tmp_path / "config.json").unlink(missing_ok=True)


# -- drafting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "budget",
    [Budget.fixed(chain_paths(3)), Budget(14, 3, 2), Budget.fixed(chain_paths(3), "sampled")],
)
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=0.7), Sampling(temperature=1.0, top_k=3)]
)
@pytest.mark.parametrize("method", BOTH)
def test_a_target_that_is_the_table_accepts_whole_branches(
    method: type[CountDrafter], sampling: Sampling, budget: Budget
) -> None:
    """Cycle after cycle, greedy, sharing the noise and drawn: what is drafted is where the target will look."""
    drafter, choose, text = method(some_tables(V)), Choose(sampling), [3, 1, 4]
    drafter.begin().propose(Committed(torch.arange(9), None, 5), budget)  # another text
    draft = drafter.begin(choose.offer(V, torch.device("cpu")))
    news = Committed(torch.tensor(text), None, 5)
    for _ in range(4):
        tree = draft.propose(news, budget)
        path, root = verify(
            TargetOutput(tree, drafter.logits(tree.tokens), None, len(text), text), choose
        )
        assert len(path) == 1 + max(tree.depths())
        news = Committed(tree.tokens[path], None, root)
        text += news.tokens.tolist()


def drawn_trees(
    drafter: CountDrafter, root: int, sampling: Sampling, paths: Paths
) -> Iterator[Drawn]:
    """All trees that a drafter may draw behind a root, with probabilities."""
    size, width = drafter.tables.vocab_size, 1 + max(rank for path in paths for rank in path)

    def draw(chance: Any) -> Any:
        draft = drafter.begin(Scripted(sampling, size, chance, width))
        return draft.propose(
            Committed(torch.tensor([1, 2]), None, root), Budget.fixed(paths, "sampled")
        )

    for tree, weight in every_outcome(draw):
        yield tree, texts_of(tree), weight


@pytest.mark.parametrize(
    ("shape", "rule"), [("chain", "token"), ("chain", "block"), ("tree", "token")]
)
@pytest.mark.parametrize("method", BOTH)
def test_drawn_drafts_leave_the_targets_law_as_it_is(
    method: type[CountDrafter], shape: str, rule: Any
) -> None:
    """By enumeration of all that may be drawn and verified, the first four tokens have the target's own joint law.

    The planted fault hands over a law that the tokens were not drawn from: that of the other table.
    """
    paths, size = (
        {"chain": chain_paths(3), "tree": best_tree([[0.6, 0.2], [0.4, 0.3]], 4, 2)}[shape],
        3,
    )
    drafter, other = (
        kind(some_tables(size)) for kind in (BOTH if method is BigramDrafter else BOTH[::-1])
    )
    losses = []
    for seed, sampling in enumerate(
        (Sampling(temperature=1.0, rule=rule), Sampling(temperature=0.5, rule=rule))
    ):
        logits = random_logits(seed, size, 4, torch.float32, 1.0)
        target, verified = laws_of(logits, sampling), partial(verify_by, logits, sampling)
        trees = list(drawn_trees(drafter, 2, sampling, paths))
        assert sum(weight for *_, weight in trees) == pytest.approx(1, abs=1e-6)
        joint, accepted = emitted(verified, target, trees)
        assert distance(joint, target) < 1e-5 and accepted > 0.2
        noise = Choose(sampling).offer(size, torch.device("cpu"))
        wrong = [(faulty(tree, other, noise), texts, weight) for tree, texts, weight in trees]
        losses.append(distance(emitted(verified, target, wrong)[0], target))
    assert max(losses) > 1e-3


def faulty(tree: Any, other: CountDrafter, noise: Any) -> Any:
    """The tree with the laws of another drafter, warped as its own are."""
    parents = tree.tokens[tree.parents.clamp(min=0)]
    return replace(
        tree,
        draft_probs=(noise.filter_logits(other.logits(parents)) / noise.temperature).softmax(-1),
    )


@pytest.mark.parametrize("method", BOTH)
def test_drawn_drafts_carry_the_tables_law(method: type[CountDrafter]) -> None:
    """The row of a node is the power 1 / T of the law after its parent, made a law again, by hand."""
    tables, sampling = some_tables(4), Sampling(temperature=0.5)
    for tree, *_ in drawn_trees(method(tables), 2, sampling, chain_paths(2)):
        for node in (1, 2):
            before = int(tree.tokens[node - 1]) if method is BigramDrafter else None
            squares = [share**2 for share in fractions(tables, before)]
            np.testing.assert_allclose(
                tree.draft_probs[node], [float(each / sum(squares)) for each in squares], rtol=1e-5
            )
