"""The draft vocabulary holds the tokens that are supervised most, and knows what it was made from."""

# D draft vocabulary, V target vocabulary

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig

from data_prep import draft_vocab
from data_prep.draft_vocab import counts_of, coverage
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle.core.examples import Example, most_frequent
from eagle.data.identity import data_identity
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.drafters.recurrent.reduced_vocab import load_draft_vocab, save_draft_vocab
from eagle.recipe import Recipe
from eagle.training.first_head import first_head

TINY = Path(__file__).parents[2] / "recipes/tiny/eagle1.yaml"
VOCAB = 60


def some_examples() -> list[Example]:
    """Random texts in which low ids are frequent, about half of them supervised."""
    generator = torch.Generator().manual_seed(0)
    texts = [(torch.rand(90, generator=generator) ** 3 * VOCAB).long() for _ in range(5)]
    return [Example(text, torch.rand(90, generator=generator) < 0.5) for text in texts]


def naive_choice(examples: list[Example], size: int, supervised_only: bool = True) -> list[int]:
    """The most frequent ids by counting in plain Python; the planted fault counts everything."""
    counts: Counter[int] = Counter()
    for example in examples:
        for token, supervised in zip(
            example.tokens.tolist(), example.loss_mask.tolist(), strict=True
        ):
            counts[token] += supervised or not supervised_only
    return sorted(sorted(range(VOCAB), key=lambda token: (-counts[token], token))[:size])


@pytest.mark.parametrize("size", [1, 7, 20, VOCAB])
def test_the_most_frequent_supervised_tokens_are_kept(size: int) -> None:
    """As a naive count finds them, ties going to the lower id, ids that never occur filling up from below."""
    examples = some_examples()
    kept = most_frequent(counts_of(examples, VOCAB), size).tolist()
    assert kept == naive_choice(examples, size)
    assert size in (1, VOCAB) or kept != naive_choice(examples, size, supervised_only=False)


def test_ids_that_never_occur_fill_up_from_below() -> None:
    """Three tokens occur, five are wanted."""
    counts = counts_of(
        [Example(torch.tensor([9, 4, 4, 30, 2]), torch.tensor([1, 1, 1, 1, 0]).bool())], VOCAB
    )
    assert most_frequent(counts, 5).tolist() == [0, 1, 4, 9, 30]
    assert "only 3 tokens occur: the other 2" in draft_vocab.report(counts, 5)


def test_coverage_is_the_share_of_supervised_tokens() -> None:
    """By hand: 6, 3 and 1 of ten."""
    counts = torch.tensor([3, 0, 6, 1])
    assert [coverage(counts, size) for size in (1, 2, 3, 4)] == pytest.approx([0.6, 0.9, 1.0, 1.0])


def test_the_maps_are_each_others_inverse(tmp_path: Path) -> None:
    """A draft id plus its offset is the target id, ascending, and exactly these can be drafted."""
    examples, path = some_examples(), tmp_path / "deep/vocab.safetensors"
    save_draft_vocab(path, counts_of(examples, VOCAB), 20, {"tokenizer": "a"})
    d2t, t2d = load_draft_vocab(path, {"tokenizer": "a", "size": 20})
    assert (d2t.dtype, d2t.shape, t2d.dtype, t2d.shape) == (
        torch.int64,
        (20,),
        torch.bool,
        (VOCAB,),
    )
    assert [draft + offset for draft, offset in enumerate(d2t.tolist())] == naive_choice(
        examples, 20
    )
    assert t2d.nonzero()[:, 0].tolist() == naive_choice(examples, 20)


def test_a_stale_map_is_refused(tmp_path: Path) -> None:
    """Another tokenizer, other data or another size: the difference is named; no file: the command."""
    path = tmp_path / "vocab.safetensors"
    save_draft_vocab(
        path, counts_of(some_examples(), VOCAB), 20, {"tokenizer": "a", "data": {"limit": 5}}
    )
    for key, value in (("tokenizer", "b"), ("data", {"limit": 6}), ("size", 21), ("template", "c")):
        with pytest.raises(ValueError, match=f"was made with {key} = .*, this run needs"):
            load_draft_vocab(path, {key: value})
    with pytest.raises(ValueError, match="no draft vocabulary at"):
        load_draft_vocab(tmp_path / "nowhere")


@pytest.mark.parametrize("size", [0, VOCAB + 1])
def test_an_impossible_size_is_refused(size: int) -> None:
    """With what would be possible."""
    with pytest.raises(
        ValueError, match=f"vocabulary of {size} was asked for, expected 1 to {VOCAB}"
    ):
        most_frequent(torch.ones(VOCAB), size)


def test_a_tokenizer_of_another_target_is_refused() -> None:
    """A token beyond the vocabulary is named."""
    with pytest.raises(ValueError, match="token 12 is supervised, the target's vocabulary has 10"):
        counts_of([Example(torch.tensor([3, 12]), torch.ones(2).bool())], 10)


def test_training_refuses_a_vocabulary_of_another_tokenizer(tmp_path: Path) -> None:
    """And takes that of its own, whatever data it was counted on."""

    class Given:
        config = LlamaConfig(
            vocab_size=VOCAB, hidden_size=8, num_attention_heads=2, num_hidden_layers=8
        )
        head, identity = None, {"tokenizer": "a"}

        def __len__(self) -> int:
            return 0

    def start_head(tokenizer: str) -> Any:
        made_of = {"tokenizer": tokenizer, "data": "other"}
        save_draft_vocab(tmp_path / "vocab", counts_of(some_examples(), VOCAB), 20, made_of)
        settings = Eagle3.Settings(lm_head="random", draft_vocab=str(tmp_path / "vocab"))
        return first_head(Recipe.load(TINY, []), settings, Given(), Given())  # type: ignore[arg-type]

    assert len(start_head("a").drafts) == 20
    with pytest.raises(ValueError, match="was made with tokenizer = 'b', this run needs 'a'"):
        start_head("b")


def test_the_command_counts_the_recipes_own_data(
    tiny_target_dir: Path, tmp_path: Path, capsys: object
) -> None:
    """On the tiny target: the counts of its examples, keyed to them, for the config's vocabulary."""
    overrides = [
        f"target.path={tiny_target_dir}/target",
        f"data.train={tiny_target_dir}/data/train.jsonl",
    ]
    overrides.append("data.limit=20")
    out = tmp_path / "vocab.safetensors"
    draft_vocab.main([str(TINY), *overrides, "--size", "256", "--out", str(out)])
    recipe = Recipe.load(TINY, overrides)
    _, t2d = load_draft_vocab(out, data_identity(recipe))
    counts: Counter[int] = Counter()
    for example in tokenize_data(recipe, load_tokenizer(recipe))[0]:
        counts.update(example.tokens[example.loss_mask].tolist())
    order = sorted(range(len(t2d)), key=lambda token: (-counts[token], token))
    assert t2d.nonzero()[:, 0].tolist() == sorted(order[:256])
    assert (
        len(t2d) == json.loads((tiny_target_dir / "target/config.json").read_text())["vocab_size"]
    )
    with pytest.raises(ValueError, match="was made with data"):
        load_draft_vocab(out, data_identity(Recipe.load(TINY, [*overrides, "data.limit=21"])))
    with safe_open(out, "pt") as file:
        assert json.loads(file.metadata()["identity"])["size"] == 256
