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
from eagle.core.verify import Choose
from eagle.transformers.node_processors import NodeProcessors
from eagle.transformers.stepwise import Stepwise
from tests.every_type import build as build_type
from tests.families import random_tokens
from tests.stock_generate import (
    FAMILIES,
    SEED,
    generate_knowing,
    left_padded,
    model_of,
    stock_generate,
)

ONE = {"input_ids": torch.tensor([random_tokens(9, 1)])}
BATCH = left_padded((4, 9, 7))
MOSTLY_SLOW = [
    "llama",
    *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name != "llama"),
]
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.01}
WARPERS = [
    TemperatureLogitsWarper(0.7),
    TopKLogitsWarper(40),
    TopPLogitsWarper(0.95),
    MinPLogitsWarper(0.01),
]


@pytest.mark.quick("one-llama", "one-gpt2", "one-opt")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_greedy_tokens_are_the_stock_ones(family: str, inputs: dict[str, Any]) -> None:
    """Several a forward, with texts that end at different places."""
    model = model_of(family)
    free = stock_generate(model, inputs)
    ends = sorted({int(row[-9 + number]) for number, row in enumerate(free)})
    for options in ({}, {"eos_token_id": ends}):
        stock = stock_generate(model, inputs, **options)
        ours, with_drafter = generate_knowing(model, stock, inputs, **options)
        assert torch.equal(ours, stock)
        assert options or with_drafter.acceptance_length > 3


def penalise_behind_padding(
    penalty: float, paddings: torch.Tensor | None
) -> RepetitionPenaltyLogitsProcessor:
    """The penalty as `generate` makes it of its options; transformers 5.20 penalises padding, too."""
    try:
        return RepetitionPenaltyLogitsProcessor(penalty, paddings)
    except ValueError:
        return RepetitionPenaltyLogitsProcessor(penalty)


@pytest.mark.parametrize("family", MOSTLY_SLOW)
@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_sampled_tokens_are_the_stock_ones_with_the_same_noise(
    family: str, inputs: dict[str, Any]
) -> None:
    """By the warpers that are read as a sampling, and by others, that are called at every node."""
    model = model_of(family)
    stock = stock_generate(model, inputs, WARPERS)
    ours, with_drafter = generate_knowing(model, stock, inputs, **SAMPLED)
    assert torch.equal(ours, stock) and with_drafter.acceptance_length > 3
    assert not torch.equal(
        ours, generate_knowing(model, stock, inputs, **SAMPLED, seed=SEED + 1)[0]
    )
    more = [penalise_behind_padding(1.2, torch.tensor([5, 0, 2]) if inputs is BATCH else None)]
    more += [NoRepeatNGramLogitsProcessor(2), *WARPERS, TypicalLogitsWarper(0.9)]
    stock = stock_generate(model, inputs, more)
    options = {**SAMPLED, "typical_p": 0.9, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2}
    ours, with_drafter = generate_knowing(model, stock, inputs, **options)
    assert torch.equal(ours, stock) and with_drafter.acceptance_length > 3


@pytest.mark.quick("one-llama")
@pytest.mark.parametrize("family", MOSTLY_SLOW)
@pytest.mark.parametrize("inputs", [ONE, BATCH], ids=["one", "batch"])
def test_beams_are_the_stock_ones(family: str, inputs: dict[str, Any]) -> None:
    """With stop tokens, processors that see the padding, a length penalty, and several answers."""
    model = model_of(family)
    end = int(stock_generate(model, inputs, num_beams=3)[0, -5])
    with_drafter = eagle.transformers.generate_with("ngram")
    for options in (
        {"num_beams": 3},
        {"num_beams": 4, "num_return_sequences": 2, "eos_token_id": end, "length_penalty": 0.3},
        {
            "num_beams": 3,
            "eos_token_id": [end, 3],
            "early_stopping": True,
            "no_repeat_ngram_size": 2,
            "min_length": 14,
        },
        {
            "num_beams": 2,
            "repetition_penalty": 1.3,
            "pad_token_id": 95,
            "return_dict_in_generate": True,
        },
    ):
        stock = stock_generate(model, inputs, **options)
        asked = {
            "max_new_tokens": 16,
            "do_sample": False,
            "pad_token_id": 0,
            "eos_token_id": None,
            **options,
        }
        ours = model.generate(**inputs, **asked, custom_generate=with_drafter)
        assert torch.equal(getattr(ours, "sequences", ours), getattr(stock, "sequences", stock)), (
            options
        )


def forget_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors see texts without their padding."""
    made = NodeProcessors.__init__
    monkeypatch.setattr(
        NodeProcessors, "__init__", lambda self, given, _, device: made(self, given, [], device)
    )


def forget_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not read as a sampling is not called."""
    made = Choose.__init__

    def plain(self: Any, *args: Any, process: Any = None, **kwargs: Any) -> None:
        made(self, *args, **kwargs)

    monkeypatch.setattr(Choose, "__init__", plain)


def shift_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processors are called with the root's text at every node."""
    called = NodeProcessors.__call__
    monkeypatch.setattr(
        NodeProcessors,
        "__call__",
        lambda self, output, nodes: called(self, output, [0] * len(nodes)),
    )


def forget_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that have ended are not padded."""
    made = Stepwise.__init__

    def endless(self: Any, *args: Any) -> None:
        made(self, *args)
        self.has_ends = False

    monkeypatch.setattr(Stepwise, "__init__", endless)


@pytest.mark.parametrize(
    ("plant", "options"),
    [
        (
            forget_padding,
            {"min_length": 12},
        ),  # which counts padding: the first text may end after three tokens
        (forget_processors, {"no_repeat_ngram_size": 1}),
        (shift_nodes, {"no_repeat_ngram_size": 1}),
        (forget_ends, {}),
    ],
)
def test_a_fault_is_seen(
    plant: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison itself can fail."""
    model = model_of("llama")
    options = {**options, "eos_token_id": int(stock_generate(model, BATCH)[0, 13])}
    stock = stock_generate(model, BATCH, **options)
    assert torch.equal(generate_knowing(model, stock, BATCH, **options)[0], stock)
    plant(monkeypatch)
    try:
        ours = generate_knowing(model, stock, BATCH, **options)[0]
    except AssertionError:  # a row is asked for tokens that it never has
        return
    assert ours.shape != stock.shape or not torch.equal(ours, stock)


def unpadded(length: int, seed: int) -> dict[str, Any]:
    """A random prompt without padding, which may hold the padding token."""
    ids = torch.tensor([random_tokens(length, seed)])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.quick("data2vec-text")
@pytest.mark.parametrize("model_type", ["roberta", "xlm-roberta", "xmod", "data2vec-text", "bert"])
def test_positions_begin_where_generate_begins(model_type: str) -> None:
    """At 0, where the forward of RoBERTa by itself begins behind the padding token's id."""
    model = build_type(model_type)
    for seed in range(3):
        inputs = unpadded(9, seed)
        stock = stock_generate(model, inputs)
        ours, with_drafter = generate_knowing(model, stock, inputs)
        assert torch.equal(ours, stock)
        assert with_drafter.acceptance_length > 2
    inputs = left_padded((9, 4, 6))
    stock = stock_generate(model, inputs)
    assert torch.equal(generate_knowing(model, stock, inputs)[0], stock)


@pytest.mark.quick("5")
@pytest.mark.parametrize("length", [5, 9, 30])
def test_a_cache_that_forgets_is_followed(length: int) -> None:
    """Moshi's forward over a text applies no window, and its cache does."""
    model = build_type("moshi")
    assert model.config.sliding_window < 30
    for seed in range(2):
        inputs = unpadded(length, seed)
        stock = stock_generate(model, inputs, max_new_tokens=24)
        ours, with_drafter = generate_knowing(model, stock, inputs, max_new_tokens=24)
        assert torch.equal(ours, stock)
        assert with_drafter.acceptance_length > 2


@pytest.mark.parametrize("model_type", ["phi3", "phi4_multimodal"])
def test_a_cache_that_is_dropped_is_followed_or_refused(model_type: str) -> None:
    """Phi-4 multimodal goes on from one token alone behind its original positions; Phi-3 reads all again."""
    model = build_type(model_type)
    border = model.config.original_max_position_embeddings
    short, long = unpadded(border - 2, 1), unpadded(border + 4, 1)
    for inputs, count in ((short, 3), (long, 16), *([(short, 16)] if model_type == "phi3" else [])):
        stock = stock_generate(model, inputs, max_new_tokens=count)
        assert torch.equal(generate_knowing(model, stock, inputs, max_new_tokens=count)[0], stock)
    if model_type == "phi4_multimodal":
        stock = stock_generate(model, short, max_new_tokens=4)
        with pytest.raises(ValueError, match=f"drops its cache behind {border} tokens"):
            generate_knowing(model, stock, short, max_new_tokens=4)
