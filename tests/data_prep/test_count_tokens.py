"""The script that counts tokens: in one pass what a naive count finds, of conversations and of plain text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from data_prep import count_tokens
from data_prep.count_tokens import Text, count_texts
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle import Target
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.counts import load_tables
from eagle.drafters.lookup.unigram import UnigramDrafter
from eagle.recipe import Recipe
from tests.tables import held, naive, some_text

TINY = str(Path(__file__).parents[2] / "recipes/tiny/eagle1.yaml")
V = 30


def some_texts() -> list[Text]:
    """Texts of several lengths, about half of their tokens counted, some with none and one empty."""
    generator = torch.Generator().manual_seed(1)
    texts = [some_text(V, length, seed) for seed, length in enumerate((90, 1, 2, 0, 55, 90))]
    return [(text, torch.rand(len(text), generator=generator) < 0.5) for text in texts]


@pytest.mark.parametrize("chunk", [1, 60, 10**6])
def test_tables_hold_what_a_naive_count_finds(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many pieces are merged; what is not said is not counted, nor a pair across texts."""
    monkeypatch.setattr(count_tokens, "CHUNK", chunk)
    counts = held(count_texts(some_texts(), V))
    assert counts == naive(some_texts())
    assert all(counts != naive(some_texts(), fault) for fault in ("not said", "across texts"))
    assert held(count_texts(some_texts(), V, pairs=False)) == (counts[0], Counter())


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    """Said or not."""
    with pytest.raises(ValueError, match="holds the token 12, the target's vocabulary has 10"):
        count_texts([(torch.tensor([3, 12]), torch.zeros(2).bool())], 10)


def test_the_command_counts_the_recipes_answers(
    recipe: Recipe, tiny_target: Target, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations as for training, for the config's vocabulary, ready to load; unigrams alone where asked for."""
    where = [f"target.path={recipe.target.path}", f"data.train={recipe.data.train}"]
    count_tokens.main([TINY, *where, "--out", str(tmp_path / "two")])
    texts = [
        (example.tokens, example.loss_mask)
        for example in tokenize_data(recipe, load_tokenizer(recipe))[0]
    ]
    expected = naive(texts)
    assert held(BigramDrafter.load(tmp_path / "two", tiny_target).tables) == expected
    printed = capsys.readouterr().out
    assert (
        f"{expected[0].total()} tokens counted, {len(expected[0])} distinct of {tiny_target.vocab_size}"
        in printed
    )
    assert (
        f"{expected[1].total()} pairs, {len(expected[1])} distinct" in printed and "kept" in printed
    )
    count_tokens.main([TINY, *where, "--kind", "unigram", "--out", str(tmp_path / "one")])
    assert held(UnigramDrafter.load(tmp_path / "one", tiny_target).tables) == (
        expected[0],
        Counter(),
    )


def test_the_command_counts_plain_text(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In pieces as whole, with the pairs between pieces and none between files; what is no text is refused."""
    monkeypatch.setattr(count_tokens, "PIECE", 40)
    texts = [
        "".join(f"line {line} says {line * 7} and ü😀\n" for line in range(30)),
        "another file\nends here",
    ]
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    assert [len(list(count_tokens.pieces(file))) > 2 for file in files] == [True, False]
    assert ["".join(count_tokens.pieces(file)) for file in files] == texts
    where = f"target.path={recipe.target.path}"
    count_tokens.main([TINY, where, "--out", str(tmp_path / "out"), "--text", *map(str, files)])
    tokens = [
        torch.tensor(load_tokenizer(recipe)(text, add_special_tokens=False).input_ids)
        for text in texts
    ]
    expected = naive([(row, torch.ones_like(row, dtype=torch.bool)) for row in tokens])
    assert held(load_tables(tmp_path / "out", "bigram")) == expected
    assert "kept" not in capsys.readouterr().out
    files[0].write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.txt is no text in UTF-8"):
        list(count_tokens.pieces(files[0]))
    with pytest.raises(ValueError, match=r"no text at nowhere\.txt"):
        count_tokens.main([TINY, where, "--out", "unused", "--text", "nowhere.txt"])


def test_a_recipe_without_answers_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    """With what became of its records."""
    (tmp_path / "empty.jsonl").write_text(
        '{"conversations": [{"from": "human", "value": "Who?"}]}\n'
    )
    where = [f"target.path={recipe.target.path}", f"data.train={tmp_path / 'empty.jsonl'}"]
    with pytest.raises(
        ValueError,
        match=r"(?s)gives nothing to learn from: its records are questions.*no answer +1",
    ):
        count_tokens.main([TINY, *where, "--out", str(tmp_path / "out")])
