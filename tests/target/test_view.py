"""A view runs the target's layers as the untouched model does, with any cache and mask, and touches no text."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.core.verify import Choose, Sampling
from tests.families import build, random_tokens

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LAYERS, COUNT = 4, 9


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """A tiny llama in fp64."""
    torch.manual_seed(0)
    return (
        LlamaForCausalLM(LlamaConfig(vocab_size=32, num_hidden_layers=LAYERS, **SIZES))
        .double()
        .eval()
    )


@pytest.fixture(scope="module")
def target(model: LlamaForCausalLM) -> Target:
    """A target over a copy of it."""
    return Target(copy.deepcopy(model))


@pytest.fixture(scope="module")
def states(model: LlamaForCausalLM) -> tuple[Tensor, list[Tensor], Tensor]:
    """Tokens, and the untouched model's states before each layer and logits."""
    tokens = torch.tensor(random_tokens(COUNT, seed=1)) % 32
    with torch.no_grad():
        output = model(input_ids=tokens[None], output_hidden_states=True, use_cache=False)
    return tokens, [hidden[0] for hidden in output.hidden_states], output.logits[0]


@pytest.mark.parametrize(("start", "end"), [(0, LAYERS), (0, 2), (1, 3), (2, 2)])
def test_layers_are_those_of_the_untouched_model(
    start: int, end: int, target: Target, states: tuple[Tensor, list[Tensor], Tensor]
) -> None:
    """Any run of them, in one piece or row by row behind a cache."""
    view, (tokens, hidden, logits) = target.view(), states
    assert len(view) == LAYERS and torch.equal(view.embed(tokens), hidden[0])
    once = view.run_layers(hidden[start], list(range(COUNT)), start, end, view.new_cache())
    cache, rows = view.new_cache(), []
    for place in range(COUNT):
        rows.append(view.run_layers(hidden[start][place : place + 1], [place], start, end, cache))
        cache.length += 1
    if end < LAYERS:  # transformers reports the last layer's output behind the final norm
        torch.testing.assert_close(once, hidden[end], rtol=0, atol=1e-13)
    else:
        torch.testing.assert_close(view.logits(once), logits, rtol=0, atol=1e-13)
    torch.testing.assert_close(torch.cat(rows), once, rtol=0, atol=1e-13)


def test_a_mask_hides_rows_of_the_cache(model: LlamaForCausalLM, target: Target) -> None:
    """Rows that are hidden might as well not be cached: the states are those of a text without them."""
    view, cache, tokens = target.view(), target.view().new_cache(), torch.tensor([3, 4, 5, 6])
    view.run_layers(view.embed(tokens[:3]), [0, 1, 2], 0, 1, cache)
    cache.length = 3
    mask = torch.tensor([[True, False, True, True]])
    row = view.run_layers(view.embed(tokens[3:]), [3], 0, 1, cache, mask)
    kept, places = tokens[[0, 2, 3]], torch.tensor([[0, 2, 3]])
    with torch.no_grad():
        expected = model(
            input_ids=kept[None], position_ids=places, output_hidden_states=True
        ).hidden_states[1][0, -1:]
    torch.testing.assert_close(row, expected, rtol=0, atol=1e-13)


def test_a_text_goes_on_while_the_view_is_used(target: Target) -> None:
    """Neither the target's cache nor its layers notice."""
    expected = target.features(torch.tensor([[1, 2, 3]]), (2, -1))
    state = target.open()
    state.begin([1, 2, 3], Choose(Sampling()))
    text, rows = list(state.text(0)), [held.buffer.clone() for held in state.cache.buffers]
    view = target.view()
    view.run_layers(view.embed(torch.tensor([7, 8])), [0, 1], 0, LAYERS, view.new_cache())
    assert state.text(0) == text == [1, 2, 3]
    assert all(
        torch.equal(held.buffer, row) for held, row in zip(state.cache.buffers, rows, strict=True)
    )
    assert torch.equal(target.features(torch.tensor([[1, 2, 3]]), (2, -1)), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "qwen3"])
def test_other_families_are_viewed_or_refused(name: str) -> None:
    """Whoever is not refused gives the logits of the untouched model."""
    model = build(name)
    tokens = torch.tensor(random_tokens(5, seed=2))
    with torch.no_grad():
        expected = model(input_ids=tokens[None], use_cache=False).logits[0]
    try:
        view = Target(copy.deepcopy(model)).view()
    except ValueError as error:
        assert "cannot be viewed" in str(error) and name == "gpt2"
        return
    hidden = view.run_layers(view.embed(tokens), list(range(5)), 0, len(view), view.new_cache())
    torch.testing.assert_close(view.logits(hidden), expected, rtol=1e-4, atol=1e-5)


def test_layers_and_tensors_that_are_not_there_are_refused(
    target: Target, model: LlamaForCausalLM
) -> None:
    """With what there is; a tensor that is there is the model's."""
    with pytest.raises(ValueError, match=r"layers 3\.\.5 are none of this target"):
        target.view().run_layers(
            torch.zeros(1, 16, dtype=torch.double), [0], 3, 5, target.view().new_cache()
        )
    with pytest.raises(ValueError, match="llama has no tensor lm_tail"):
        target.tensor("lm_tail")
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(target.tensor(name), model.state_dict()[name])


TEXTS = {4: [1, 2, 3, 4, 5], 9: [6, 7, 8]}  # rows of two lengths
BELOW = [
    [10, 11, 12, 13],
    [14, 15, 16, 17],
]  # of each a root, two children, and one below the second of these
DEPTHS, PATHS = [0, 1, 1, 2], [[0], [0, 1], [0, 2], [0, 2, 3]]


@pytest.mark.parametrize("layers", [0, 2, LAYERS])
def test_drafts_behind_the_targets_texts_are_the_untouched_models(
    layers: int, model: LlamaForCausalLM, target: Target
) -> None:
    """States of two levels of two texts' drafts, each as if its path stood in the text; keys and values are shared."""
    state = target.open((2,))
    for row, text in TEXTS.items():
        state.admit(row, text, 8)
    while state.prompts:
        state.read_prompts()
    before = [held.buffer.clone() for held in state.cache.buffers]
    texts, tokens = state.lend(), torch.tensor(BELOW)
    seen = torch.tensor([[node in path for node in range(4)] for path in PATHS])
    rows = list(TEXTS)
    levels = [
        texts.ahead(rows, tokens[:, :1], DEPTHS[:1], seen[None, :1, :1], layers),
        texts.ahead(
            rows, tokens[:, 1:3], DEPTHS[:3], seen[None, 1:3, :3].expand(2, -1, -1), layers
        ),
        texts.ahead(rows, tokens[:, 3:], DEPTHS, seen[None, 3:].expand(2, -1, -1), layers),
    ]
    states = torch.cat(levels, 1)
    for number, (row, text) in enumerate(TEXTS.items()):
        assert texts.length(row) == len(text)
        for node, path in enumerate(PATHS):
            whole = torch.tensor([[*text, *(BELOW[number][step] for step in path)]])
            with torch.no_grad():
                output = model(input_ids=whole, output_hidden_states=True, use_cache=True)
            if layers < LAYERS:
                expected = output.hidden_states[layers][0, -1]
                torch.testing.assert_close(states[number, node], expected, rtol=0, atol=1e-13)
            else:
                logits = texts.view.logits(states[number])[node]
                torch.testing.assert_close(logits, output.logits[0, -1], rtol=0, atol=1e-13)
        keys, values = texts.keys_values(row, 1)
        cached = output.past_key_values.layers[1]
        torch.testing.assert_close(keys, cached.keys[0, :, : len(text)], rtol=0, atol=1e-13)
        torch.testing.assert_close(values, cached.values[0, :, : len(text)], rtol=0, atol=1e-13)
    lengths = [len(TEXTS[row]) for row in state.rows]
    for held, kept in zip(
        state.cache.buffers, before, strict=True
    ):  # what is committed stays what it was
        for slot, length in enumerate(lengths):
            assert torch.equal(held.buffer[slot, :, :length], kept[slot, :, :length])
