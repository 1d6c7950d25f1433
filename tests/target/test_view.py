"""A view runs the target's layers as the untouched model does, with any cache and mask, and touches no sequence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from tests.families import build, random_tokens

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 4,
}
LAYERS = 4
COUNT = 9


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Return a tiny llama in fp64."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        num_hidden_layers=LAYERS,
        num_key_value_heads=2,
        **SIZES,
    )
    return LlamaForCausalLM(config).double().eval()


@pytest.fixture(scope="module")
def target(model: LlamaForCausalLM) -> Target:
    """Return a target over a copy of it."""
    return Target(copy.deepcopy(model))


@torch.no_grad()
def read_plainly(model: Any, tokens: Any, **options: Any) -> Any:
    """Return the untouched model's output for one sequence, with its hidden states."""
    return model(
        input_ids=torch.as_tensor(tokens)[None],
        output_hidden_states=True,
        **options,
    )


def assert_equal(got: Tensor, expected: Tensor) -> None:
    """Compare in fp64: nothing but rounding is allowed."""
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("start", "end"), [(0, LAYERS), (1, 3), (2, 2)])
def test_layers_are_those_of_the_untouched_model(
    start: int,
    end: int,
    model: LlamaForCausalLM,
    target: Target,
) -> None:
    """Any run of them, in one piece or token by token over a cache."""
    tokens = torch.tensor(random_tokens(COUNT, seed=1)) % 32
    output = read_plainly(model, tokens)
    hidden = [states[0] for states in output.hidden_states]
    view = target.view()
    assert len(view) == LAYERS
    assert torch.equal(view.embed(tokens), hidden[0])

    once = view.run_layers(
        hidden[start],
        list(range(COUNT)),
        start,
        end,
        cache=view.new_cache(),
    )
    # transformers reports the last layer's output after the final norm
    if end < LAYERS:
        assert_equal(once, hidden[end])
    else:
        assert_equal(view.logits(once), output.logits[0])

    cache = view.new_cache()

    for position in range(COUNT):
        token = hidden[start][[position]]
        # one token at a time over what the cache holds
        state = view.run_layers(token, [position], start, end, cache=cache)
        assert_equal(state, once[[position]])
        cache.length += 1


def test_a_mask_hides_columns_of_the_cache(model: LlamaForCausalLM, target: Target) -> None:
    """Hidden columns might as well not be cached: the states are those of a sequence without them."""
    view = target.view()
    cache = view.new_cache()
    tokens = torch.tensor([3, 4, 5, 6])
    view.run_layers(view.embed(tokens[:3]), [0, 1, 2], 0, 1, cache=cache)
    cache.length = 3
    mask = torch.tensor([[True, False, True, True]])
    state = view.run_layers(
        view.embed(tokens[3:]),
        [3],
        0,
        1,
        cache=cache,
        mask=mask,
    )
    visible = [0, 2, 3]
    # the oracle has no hidden token, and the positions of those that are left
    output = read_plainly(model, tokens[visible], position_ids=torch.tensor([visible]))
    assert_equal(state, output.hidden_states[1][0, -1:])


@pytest.mark.parametrize("name", ["gemma2", "qwen3"])
def test_other_families_are_viewed(name: str) -> None:
    """Their views give the logits of the untouched model."""
    model = build(name)
    tokens = torch.tensor(random_tokens(5, seed=2))
    view = Target(copy.deepcopy(model)).view()
    cache = view.new_cache()
    hidden = view.run_layers(
        view.embed(tokens),
        list(range(5)),
        0,
        len(view),
        cache=cache,
    )
    expected = read_plainly(model, tokens).logits[0]
    torch.testing.assert_close(view.logits(hidden), expected, rtol=1e-4, atol=1e-5)


def test_what_is_not_there_is_refused(target: Target, model: LlamaForCausalLM) -> None:
    """Layers, tensors, and a view of a model whose embedding adds positions; a tensor that is there is the model's."""
    view = target.view()
    hidden = torch.zeros(1, 16, dtype=torch.double)

    with pytest.raises(ValueError, match=r"layers 3\.\.5 are none of this target"):
        view.run_layers(hidden, [0], 3, 5, cache=view.new_cache())
    with pytest.raises(ValueError, match="llama has no tensor lm_tail"):
        target.tensor("lm_tail")
    with pytest.raises(ValueError, match="cannot be viewed"):
        Target(build("gpt2")).view()

    name = "model.layers.1.mlp.up_proj.weight"

    assert torch.equal(target.tensor(name), model.state_dict()[name])


SEQUENCES = {4: [1, 2, 3, 4, 5], 9: [6, 7, 8]}  # by the number of a row
# of each a root, two children, and one below the second of these
TREES = torch.tensor([[10, 11, 12, 13], [14, 15, 16, 17]])
DEPTHS = [0, 1, 1, 2]
PATHS = [[0], [0, 1], [0, 2], [0, 2, 3]]


def read_levels(texts: Any, layers: int) -> Tensor:
    """Return [2, 4, D], the states of both trees' nodes, read level by level as a drafter grows its tree."""
    ancestors = torch.tensor([[node in path for node in range(4)] for path in PATHS])
    levels = []

    for start, end in ((0, 1), (1, 3), (3, 4)):
        mask = ancestors[None, start:end, :end].expand(2, -1, -1)
        rows = list(SEQUENCES)
        levels.append(texts.ahead(rows, TREES[:, start:end], DEPTHS[:end], mask, layers=layers))

    return torch.cat(levels, 1)


@pytest.mark.parametrize("layers", [0, 2, LAYERS])
def test_drafts_after_the_targets_sequences_are_the_untouched_models(
    layers: int,
    model: LlamaForCausalLM,
    target: Target,
) -> None:
    """States of two sequences' drafts, as if each path stood in the sequence; the target's cache is shared."""
    state = target.open((2,))
    for row, prompt in SEQUENCES.items():
        state.admit(row, prompt, 8)
    while state.prompts:
        state.read_prompts()

    before = [rows.tensor.clone() for rows in state.cache.buffers]
    texts = state.lend()
    states = read_levels(texts, layers)

    for i, (row, prompt) in enumerate(SEQUENCES.items()):
        assert texts.length(row) == len(prompt)
        for node, path in enumerate(PATHS):
            output = read_plainly(model, [*prompt, *TREES[i, path].tolist()])
            # transformers reports the last layer's output after the final norm
            if layers < LAYERS:
                assert_equal(states[i, node], output.hidden_states[layers][0, -1])
            else:
                assert_equal(texts.view.logits(states[i])[node], output.logits[0, -1])
        # a drafter reads the target's own keys and values
        cached = read_plainly(model, prompt).past_key_values.layers[1]
        keys, values = texts.keys_values(row, 1)
        assert_equal(keys, cached.keys[0])
        assert_equal(values, cached.values[0])

    # what is committed stays what it was
    lengths = [len(SEQUENCES[row]) for row in state.rows]
    for rows, buffer in zip(state.cache.buffers, before, strict=True):
        for slot, length in enumerate(lengths):
            assert torch.equal(rows.tensor[slot, :, :length], buffer[slot, :, :length])
