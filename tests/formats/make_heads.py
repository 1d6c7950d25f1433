"""Random targets and heads, heads of other tools with one change, and what tests assert of both."""

# H hidden, V vocabulary

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.core.drafter import TargetHead
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.reading.foreign import inspect, read_head
from tests import foreign_heads as made

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    # deep enough for the taps that engines read by default
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
# of tensors and of mappings of tensors: the same names, dtypes and bits
assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)


def make_target(**sizes: Any) -> Target:
    """Return a random Llama; the same for the same sizes."""
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(LlamaConfig(**{**SIZES, **sizes})))


def write_target(folder: Path, dtype: torch.dtype = torch.float32, **sizes: Any) -> Target:
    """Save a random Llama in a precision, and return it."""
    target = make_target(**sizes)
    target.model.to(dtype).save_pretrained(folder)
    return target


def borrow_from(config: Any) -> Any:
    """Return what heads of `foreign_heads` read of their target: its config, embedding and LM head."""
    embedding = nn.Embedding(made.V, made.H)
    embedding.weight.data = made.embedding()
    output = nn.Linear(made.H, made.V, bias=False)
    output.weight.data = made.drawn(made.V, made.H, seed=8)
    return SimpleNamespace(config=config, head=TargetHead(embedding, output))


def make_head(
    settings: dict[str, Any],
    target: Any,
    supervised: Any = range(40),
) -> Any:
    """Return an untrained head for a target, whose draft vocabulary is drawn from the supervised tokens."""
    parsed = settings_of(settings, "test")
    method = DRAFTERS[parsed.kind]
    weights = {}
    # a stand-in that lends embedding and LM head alone has no further weights to start from
    if method.reads.weights and hasattr(target, "tensor"):
        weights["weights"] = target.tensor
    tokens = [torch.tensor(supervised)]
    return method.for_target(parsed, target.config, target.head, tokens, **weights)


def random_head(
    settings: dict[str, Any],
    target: Any,
    supervised: Any = range(40),
) -> Any:
    """Return such a head whose weights are all random, norms and biases too, bound to the target."""
    head = make_head(settings, target, supervised)
    generator = torch.Generator().manual_seed(1)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    return head.bind(target.head)


def change_head(head: made.Head, changes: dict[str, Any]) -> made.Head:
    """Return a copy of a head in which some tensors and keys of the config have other values.

    A name is that of a tensor if the head has such a tensor or the value is one, else a key of the config; `a/b` is
    key b of section a. None removes what is there, and a function returns the new tensor from the old one.
    """
    config = json.loads(json.dumps(head[0]))
    tensors = {name: tensor.clone() for name, tensor in head[1].items()}
    for name, value in changes.items():
        if callable(value):
            value = value(tensors[name])
        *sections, key = name.split("/")
        values: dict[str, Any] = config
        if name in tensors or isinstance(value, Tensor):
            values = tensors
        for section in sections:
            values = values[section]
        if value is None:
            del values[key]
        else:
            values[key] = value
    return config, tensors


def assert_refused(
    folder: Path,
    words: str,
    target: str | None = None,
) -> None:
    """Assert that an import refuses a folder with these words, and that `inspect` has them too."""
    with pytest.raises(ValueError, match=re.escape(words)):
        read_head(folder, target)
    assert words in str(inspect(folder, target))
