"""The draft vocabulary holds the tokens that are supervised most, and knows what it was made from."""

# D draft vocabulary, V target vocabulary

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from data_prep import draft_vocab
from data_prep.draft_vocab import counts_of, coverage
from data_prep.tokens import load_tokenizer, tokenize_data
from eagle import Target
from eagle.core.examples import Example, most_frequent
from eagle.data.identity import data_identity
from eagle.drafters.parts.reduced_vocab import load_draft_vocab, save_draft_vocab
from eagle.drafters.recurrent.eagle3 import Eagle3
from eagle.recipe import Recipe
from eagle.training.start import first_head

TINY = Path(__file__).parents[2] / "recipes/tiny/eagle1.yaml"
VOCAB = 60


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Random sequences in which low ids are frequent, about half of them supervised."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(5):
        tokens = (torch.rand(90, generator=generator) ** 3 * VOCAB).long()
        made.append(Example(tokens, torch.rand(90, generator=generator) < 0.5))
    return made


def choose_naively(
    examples: list[Example],
    size: int,
    vocab_size: int = VOCAB,
) -> list[int]:
    """Return the ids that are supervised most often, in plain Python; ties go to the lower id."""
    # an id that never occurs counts 0, so that ids fill up from below
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.tokens[example.loss_mask].tolist())
    by_frequency = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    return sorted(by_frequency[:size])


@pytest.mark.parametrize("size", [1, 7, 20, VOCAB])
def test_the_most_frequent_supervised_tokens_are_kept(size: int, examples: list[Example]) -> None:
    """A naive count finds the same; one of all tokens, the planted fault, finds others."""
    kept = most_frequent(counts_of(examples, VOCAB), size).tolist()
    assert kept == choose_naively(examples, size)
    # questions have other frequent tokens than answers
    everything = [Example(each.tokens, torch.ones_like(each.loss_mask)) for each in examples]
    assert size in (1, VOCAB) or kept != choose_naively(everything, size)


def test_ids_that_never_occur_fill_up_from_below() -> None:
    """Three tokens occur where five are wanted."""
    mask = torch.tensor([True, True, True, True, False])
    counts = counts_of([Example(torch.tensor([9, 4, 4, 30, 2]), mask)], VOCAB)
    assert most_frequent(counts, 5).tolist() == [0, 1, 4, 9, 30]
    assert "only 3 tokens occur: the other 2" in draft_vocab.report(counts, 5)


def test_coverage_is_the_share_of_supervised_tokens() -> None:
    """By hand: the tokens occur 6, 3 and 1 times of ten."""
    counts = torch.tensor([3, 0, 6, 1])
    shares = [coverage(counts, size) for size in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.6, 0.9, 1.0, 1.0])


def test_the_maps_are_each_others_inverse(examples: list[Example], tmp_path: Path) -> None:
    """A draft id plus its offset is the target id, ascending, and exactly these can be drafted."""
    path = tmp_path / "deep/vocab.safetensors"
    save_draft_vocab(
        path,
        counts_of(examples, VOCAB),
        20,
        {"tokenizer": "a"},
    )
    # the two maps are those of published EAGLE-3 heads
    d2t, t2d = load_draft_vocab(path, {"tokenizer": "a", "size": 20})
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert len(t2d) == VOCAB
    expected = choose_naively(examples, 20)
    assert (torch.arange(20) + d2t).tolist() == expected
    assert t2d.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer", "b"),
        ("data", {"limit": 6}),
        ("size", 21),
        ("template", "c"),
    ],
)
def test_a_stale_map_is_refused(
    key: str,
    value: Any,
    examples: list[Example],
    tmp_path: Path,
) -> None:
    """The error names what differs: the tokenizer, the data or the size."""
    path = tmp_path / "vocab.safetensors"
    made_of = {"tokenizer": "a", "data": {"limit": 5}}
    save_draft_vocab(path, counts_of(examples, VOCAB), 20, made_of)
    with pytest.raises(ValueError, match=f"was made with {key} = .*, this run needs"):
        load_draft_vocab(path, {key: value})


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    """No file, an impossible size, and tokens of another target."""
    with pytest.raises(ValueError, match="no draft vocabulary at"):
        load_draft_vocab(tmp_path / "nowhere")
    for size in (0, VOCAB + 1):
        with pytest.raises(ValueError, match=f"vocabulary of {size} .* expected 1 to {VOCAB}"):
            most_frequent(torch.ones(VOCAB), size)
    example = Example(torch.tensor([3, 12]), torch.ones(2).bool())
    with pytest.raises(ValueError, match=r"token 12 is supervised, .* vocabulary has 10"):
        counts_of([example], 10)


def test_training_refuses_a_vocabulary_of_another_tokenizer(
    examples: list[Example], tmp_path: Path
) -> None:
    """It takes that of its own, whatever data it was counted on."""

    # a head is made without reading a single example
    class NoFeatures(SimpleNamespace):
        def __len__(self) -> int:
            return 0

    sizes = {
        "hidden_size": 8,
        "num_attention_heads": 2,
        "num_hidden_layers": 8,
    }
    config = LlamaConfig(vocab_size=VOCAB, **sizes)
    features: Any = NoFeatures(
        config=config,
        head=None,
        identity={"tokenizer": "a"},
    )
    path = tmp_path / "vocab"
    settings = Eagle3.Settings(lm_head="random", draft_vocab=str(path))

    def start_head(tokenizer: str) -> Any:
        made_of = {"tokenizer": tokenizer, "data": "other"}
        save_draft_vocab(path, counts_of(examples, VOCAB), 20, made_of)
        return first_head(
            Recipe.load(TINY, []),
            settings,
            features,
            features,
        )

    assert len(start_head("a").drafts) == 20
    with pytest.raises(ValueError, match="was made with tokenizer = 'b', this run needs 'a'"):
        start_head("b")


def test_the_command_counts_the_recipes_own_data(tiny_target: Target, recipe: Recipe) -> None:
    """The file holds the counts of the recipe's examples, keyed to them, for the config's vocabulary."""
    folder = Path(recipe.data.train).parent
    (folder / "recipe.yaml").write_text(recipe.dump())
    out = folder / "vocab.safetensors"
    options = ["--size", "16", "--out", str(out)]
    draft_vocab.main([str(folder / "recipe.yaml"), *options])
    _, t2d = load_draft_vocab(out, {**data_identity(recipe), "size": 16})
    assert len(t2d) == tiny_target.config.vocab_size
    examples, _ = tokenize_data(recipe, load_tokenizer(recipe))
    expected = choose_naively(examples, 16, len(t2d))
    assert t2d.nonzero()[:, 0].tolist() == expected
    # counts of other data are another vocabulary
    other = Recipe.load(folder / "recipe.yaml", ["data.limit=2"])
    with pytest.raises(ValueError, match="was made with data"):
        load_draft_vocab(out, data_identity(other))
