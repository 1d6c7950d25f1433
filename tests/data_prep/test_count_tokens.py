"""The script that counts tokens finds in one pass what a naive count finds, in conversations and in plain text."""

# V vocabulary

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from data_prep import count_tokens
from data_prep.count_tokens import Text, count_texts, main
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle import Target
from eagle.drafters.lookup.bigram import BigramDrafter
from eagle.drafters.lookup.counts import load_tables
from eagle.drafters.lookup.unigram import UnigramDrafter
from eagle.recipe import Recipe
from tests.data_prep.stub_servers import write_records
from tests.tables import held, naive, some_text

TINY = str(Path(__file__).parents[2] / "recipes/tiny/eagle1.yaml")
V = 30


@pytest.fixture
def texts() -> list[Text]:
    """Texts of several lengths, about half of their tokens counted; some have none, and one is empty."""
    generator = torch.Generator().manual_seed(1)
    made = []
    # a pair needs two tokens, so lengths of 0, 1 and 2 are the edges
    for seed, length in enumerate((90, 1, 2, 0, 55, 90)):
        tokens = some_text(V, length, seed)
        made.append((tokens, torch.rand(length, generator=generator) < 0.5))
    return made


@pytest.mark.parametrize("chunk", [1, 60, 10**6])
def test_tables_hold_what_a_naive_count_finds(
    chunk: int,
    texts: list[Text],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any number of chunks is merged; unsupervised tokens do not count, nor pairs across texts."""
    monkeypatch.setattr(count_tokens, "CHUNK", chunk)
    counts = held(count_texts(texts, V))
    assert counts == naive(texts)
    for fault in ("not said", "across texts"):
        assert counts != naive(texts, fault)
    assert held(
        count_texts(
            texts,
            V,
            pairs=False,
        )
    ) == (counts[0], Counter())


def test_a_token_beyond_the_vocabulary_is_refused() -> None:
    """It is refused though it is not supervised."""
    text = (torch.tensor([3, 12]), torch.zeros(2).bool())
    with pytest.raises(ValueError, match="holds the token 12, the target's vocabulary has 10"):
        count_texts([text], 10)


def test_the_command_counts_the_recipes_answers(
    recipe: Recipe,
    tiny_target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tables are ready to load for the config's vocabulary; unigrams may be counted alone."""
    command = [TINY, f"target.path={recipe.target.path}", f"data.train={recipe.data.train}"]
    main([*command, "--out", str(tmp_path / "two")])
    examples, _ = tokenize_data(recipe, load_tokenizer(recipe))
    singles, pairs = naive([(example.tokens, example.loss_mask) for example in examples])
    assert held(BigramDrafter.load(tmp_path / "two", tiny_target).tables) == (singles, pairs)
    printed = capsys.readouterr().out
    vocab_size = tiny_target.vocab_size
    counted = f"{singles.total()} tokens counted, {len(singles)} distinct of {vocab_size}"
    for text in (counted, f"{pairs.total()} pairs, {len(pairs)} distinct", "kept"):
        assert text in printed
    main(
        [
            *command,
            "--kind",
            "unigram",
            "--out",
            str(tmp_path / "one"),
        ]
    )
    # the two files are read by the drafters that use them
    tables = UnigramDrafter.load(tmp_path / "one", tiny_target).tables
    assert held(tables) == (singles, Counter())


def test_the_command_counts_plain_text(
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Files are read in pieces; pairs between pieces count, and none between files."""
    monkeypatch.setattr(count_tokens, "PIECE", 40)
    lines = [f"line {line} says {line * 7} and ü😀\n" for line in range(30)]
    contents = {tmp_path / "a.txt": "".join(lines), tmp_path / "b.txt": "another file\nends here"}
    tokenizer = load_tokenizer(recipe)
    texts = []
    for file, content in contents.items():
        file.write_text(content, encoding="utf-8")
        assert "".join(count_tokens.pieces(file)) == content
        # the truth tokenises each file at once
        tokens = torch.tensor(tokenizer(content, add_special_tokens=False).input_ids)
        texts.append((tokens, torch.ones_like(tokens, dtype=torch.bool)))
    assert len(list(count_tokens.pieces(tmp_path / "a.txt"))) > 2
    command = [
        TINY,
        f"target.path={recipe.target.path}",
        "--out",
        str(tmp_path / "out"),
        "--text",
    ]
    main([*command, *map(str, contents)])
    assert held(load_tables(tmp_path / "out", "bigram")) == naive(texts)
    assert "kept" not in capsys.readouterr().out
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match=r"a\.txt is no text in UTF-8"):
        list(count_tokens.pieces(tmp_path / "a.txt"))
    with pytest.raises(ValueError, match=r"no text at nowhere\.txt"):
        main([*command, "nowhere.txt"])


def test_a_recipe_without_answers_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    """The error says what became of its records."""
    source = write_records(tmp_path / "empty.jsonl", [{"prompt": "Who?"}])
    command = [TINY, f"target.path={recipe.target.path}", f"data.train={source}"]
    message = r"(?s)gives nothing to learn from: its records are questions.*no answer +1"
    with pytest.raises(ValueError, match=message):
        main([*command, "--out", str(tmp_path / "out")])
