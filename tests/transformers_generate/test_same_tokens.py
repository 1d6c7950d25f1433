"""`model.generate` with a drafter gives the tokens that it gives without, for every family and way of decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    MinPLogitsWarper,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

import eagle.transformers
from eagle.transformers.node_processors import NodeProcessors
from tests.every_type import build as build_type
from tests.families import random_tokens
from tests.stock_generate import (
    FAMILIES,
    SEED,
    asked,
    generate_knowing,
    left_padded,
    model_of,
    stock_generate,
)

BATCH = left_padded((4, 9, 7))
SAMPLED = {
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.01,
}
WARPERS = [
    TemperatureLogitsWarper(0.7),
    TopKLogitsWarper(40),
    TopPLogitsWarper(0.95),
    MinPLogitsWarper(0.01),
]


@pytest.mark.quick("llama", "gpt2", "opt")
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_the_stock_ones(family: str) -> None:
    """Rows of a batch with padding end at different positions, or not at all."""
    model = model_of(family)
    free = stock_generate(model, BATCH)
    ends = sorted({int(row[-9 + index]) for index, row in enumerate(free)})
    for options in ({}, {"eos_token_id": ends}):
        stock = stock_generate(model, BATCH, **options)
        ours, with_drafter = generate_knowing(model, stock, BATCH, **options)
        assert torch.equal(ours, stock)
        # several tokens a forward
        assert options or with_drafter.acceptance_length > 3


def repetition_penalty(penalty: float, paddings: torch.Tensor) -> RepetitionPenaltyLogitsProcessor:
    """Return the penalty as `generate` makes it of its options; transformers 5.20 penalises padding too."""
    try:
        return RepetitionPenaltyLogitsProcessor(penalty, paddings)
    except ValueError:
        return RepetitionPenaltyLogitsProcessor(penalty)


@pytest.mark.quick("llama")
@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_sampled_tokens_are_the_stock_ones_with_the_same_noise(family: str) -> None:
    """Some warpers are read as a sampling, others are called at every node."""
    model = model_of(family)
    stock = stock_generate(model, BATCH, WARPERS)
    ours, with_drafter = generate_knowing(model, stock, BATCH, **SAMPLED)
    assert torch.equal(ours, stock)
    assert with_drafter.acceptance_length > 3
    reseeded, _ = generate_knowing(model, stock, BATCH, **SAMPLED, seed=SEED + 1)
    assert not torch.equal(ours, reseeded)

    # in the order in which `generate` applies them
    processors = [
        repetition_penalty(1.2, torch.tensor([5, 0, 2])),
        NoRepeatNGramLogitsProcessor(2),
        *WARPERS,
        TypicalLogitsWarper(0.9),
    ]
    options = {
        **SAMPLED,
        "typical_p": 0.9,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
    }
    stock = stock_generate(model, BATCH, processors)
    ours, with_drafter = generate_knowing(model, stock, BATCH, **options)
    assert torch.equal(ours, stock)
    assert with_drafter.acceptance_length > 3


BEAMS: dict[str, dict[str, Any]] = {
    "several answers": {
        "num_beams": 4,
        "num_return_sequences": 2,
        "length_penalty": 0.3,
    },
    "early stopping": {
        "num_beams": 3,
        "early_stopping": True,
        "no_repeat_ngram_size": 2,
        "min_length": 14,
    },
    "dictionary": {
        "num_beams": 2,
        "eos_token_id": None,
        "repetition_penalty": 1.3,
        "pad_token_id": 95,
        "return_dict_in_generate": True,
    },
}


@pytest.mark.quick("llama-*")
@pytest.mark.parametrize("case", BEAMS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_beams_are_the_stock_ones(family: str, case: str) -> None:
    """Beams have stop tokens, processors that see the padding, a length penalty, and several answers."""
    model = model_of(family)
    # a token that ends some beams and not others
    end = int(stock_generate(model, BATCH, num_beams=3)[0, -5])
    options = {"eos_token_id": [end, 3], **BEAMS[case]}
    stock = stock_generate(model, BATCH, **options)
    ours = model.generate(
        **BATCH,
        **{**asked(), **options},
        custom_generate=eagle.transformers.generate_with("ngram"),
    )
    assert torch.equal(getattr(ours, "sequences", ours), getattr(stock, "sequences", stock))


def test_wrong_texts_of_processors_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is called with the root's text at every node gives other tokens."""
    model = model_of("llama")
    options = {"no_repeat_ngram_size": 1}
    stock = stock_generate(model, BATCH, **options)
    assert torch.equal(generate_knowing(model, stock, BATCH, **options)[0], stock)
    call = NodeProcessors.__call__

    def call_at_root(self: Any, output: Any, nodes: list[int]) -> Any:
        return call(self, output, [0] * len(nodes))

    monkeypatch.setattr(NodeProcessors, "__call__", call_at_root)
    assert not torch.equal(generate_knowing(model, stock, BATCH, **options)[0], stock)


def unpadded(length: int, seed: int) -> dict[str, Any]:
    """Return a random prompt without padding, which may hold the padding token."""
    ids = torch.tensor([random_tokens(length, seed)])
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
    }


@pytest.mark.quick("data2vec-text")
@pytest.mark.parametrize("model_type", ["roberta", "data2vec-text"])
def test_positions_begin_where_generate_begins(model_type: str) -> None:
    """`generate` counts from 0, RoBERTa's forward by itself from the padding token's id."""
    model = build_type(model_type)
    # token 1, which pads RoBERTa's texts, may stand in them
    for inputs in (unpadded(9, 0), unpadded(9, 1), left_padded((9, 4, 6))):
        stock = stock_generate(model, inputs)
        ours, with_drafter = generate_knowing(model, stock, inputs)
        assert torch.equal(ours, stock)
        assert with_drafter.acceptance_length > 2


@pytest.mark.quick("5")
@pytest.mark.parametrize("length", [5, 30])
def test_a_cache_that_forgets_is_followed(length: int) -> None:
    """Moshi's forward over a text applies no window, and its cache does."""
    model = build_type("moshi")
    assert model.config.sliding_window < 30
    inputs = unpadded(length, 0)
    stock = stock_generate(model, inputs, max_new_tokens=24)
    ours, with_drafter = generate_knowing(model, stock, inputs, max_new_tokens=24)
    assert torch.equal(ours, stock)
    assert with_drafter.acceptance_length > 2


@pytest.mark.parametrize("model_type", ["phi3", "phi4_multimodal"])
def test_a_cache_that_is_dropped_is_followed_or_refused(model_type: str) -> None:
    """Behind its original positions Phi-3 reads everything again, Phi-4 multimodal goes on from one token alone."""
    model = build_type(model_type)
    border = model.config.original_max_position_embeddings
    short = unpadded(border - 2, 1)
    # an answer that ends at the border, one that begins behind it, and one that passes it
    calls = [(short, 3), (unpadded(border + 4, 1), 16)]
    if model_type == "phi3":
        calls.append((short, 16))
    for inputs, count in calls:
        stock = stock_generate(model, inputs, max_new_tokens=count)
        assert torch.equal(generate_knowing(model, stock, inputs, max_new_tokens=count)[0], stock)
    if model_type == "phi4_multimodal":
        stock = stock_generate(model, short, max_new_tokens=4)
        with pytest.raises(ValueError, match=f"drops its cache behind {border} tokens"):
            generate_knowing(model, stock, short, max_new_tokens=4)
