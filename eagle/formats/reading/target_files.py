"""The files of a target, with which a head for it is compared."""

# H width, V vocabulary

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle.data.identity import folder_of
from eagle.formats.reading.config_keys import Keys, read_rope
from eagle.formats.reading.files import FolderTensors, folder_at, read_json, read_tensors

# how the names of these tensors end in any family
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
LM_HEADS = ("lm_head.weight", "embed_out.weight")


@dataclass(frozen=True)
class TargetFiles:
    """The target that a head is meant for."""

    path: str
    layers: int
    width: int
    vocab_size: int
    positions: int | None
    rope: dict[str, Any]  # empty where it is not one for all layers
    tied: bool
    config: dict[str, Any]  # of the text model
    tensors: FolderTensors

    @classmethod
    def read(cls, path: str) -> TargetFiles:
        """Read the target's files in a folder, or on the hub."""
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.bin", "*.json")))
        config = read_json(folder, "config.json")
        tensors = read_tensors(folder, max_bytes=None)
        # a model that sees has one config for each of its models
        text_config = config.get("text_config")
        keys = Keys(text_config if isinstance(text_config, dict) else config)
        layers = keys.read("num_hidden_layers")
        width = keys.read("hidden_size")
        vocab_size = keys.read("vocab_size")
        if layers is None or width is None or vocab_size is None:
            raise ValueError(
                f"the config.json of {path} does not tell layers, width and vocabulary: is it the target's?"
            )
        tied = keys.read("tie_word_embeddings")
        rope = read_rope(keys, [])
        if keys.wrong:  # some targets turn each kind of layer in its own way
            rope = {}
        return cls(
            path=path,
            layers=layers,
            width=width,
            vocab_size=vocab_size,
            positions=keys.read("max_position_embeddings"),
            rope=rope,
            tied=bool(tied),
            config=keys.values,
            tensors=tensors,
        )

    @property
    def embed_scale(self) -> float:
        """The factor on its embedding's rows, of which heads elsewhere know nothing."""
        usual = 1.0
        if "gemma" in str(self.config.get("model_type")):  # whose configs do not say it
            usual = math.sqrt(self.width)
        return float(self.config.get("embedding_multiplier") or usual)

    def ordinary_tokens(self) -> dict[int, str]:
        """Return the tokens that texts are made of, without special ones; empty where no tokenizer.json tells."""
        try:
            folder = folder_at(folder_of(self.path, None, ("*.json",)))
            tokenizer = read_json(folder, "tokenizer.json")
            special = {token["id"] for token in tokenizer.get("added_tokens", [])}
            pieces = tokenizer["model"]["vocab"]
            return {token: piece for piece, token in pieces.items() if token not in special}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # only asked for a hint
            return {}

    def matrix(self, names: tuple[str, ...]) -> Tensor | None:
        """Return its embedding or its LM head, [V, H]; None where no tensor, or several, are called so."""
        matching = [name for name in self.tensors.stored if name.endswith(names)]
        if not matching and names is LM_HEADS and self.tied:
            return self.matrix(EMBEDDINGS)
        if len(matching) != 1:
            return None
        return self.tensors.load(matching[0])


def embedding_dtype(path: str) -> torch.dtype:
    """Return the precision in which a target's files hold its embedding, or float32, which rounds none."""
    try:
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.json")))
        # headers alone: no tensor is read
        stored = read_tensors(folder, max_bytes=None).stored
    except (OSError, ValueError):  # whoever loads the target says what is wrong with it
        return torch.float32
    dtypes = {entry.dtype for name, entry in stored.items() if name.endswith(EMBEDDINGS)}
    if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}:
        return dtypes.pop()
    return torch.float32


def count_differing_rows(ours: Tensor, theirs: Tensor) -> int:
    """Return the number of rows that differ after rounding to the coarser dtype."""
    coarser = max(ours.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return int((ours.to(coarser) != theirs.to(coarser)).any(1).sum())


def is_multiple(ours: Tensor, theirs: Tensor, factor: float) -> bool:
    """Return whether our rows are a target's times a factor; it and the products may be rounded to bfloat16."""
    return factor != 1.0 and torch.allclose(
        ours.float(), theirs.float() * factor, rtol=2**-7, atol=0.0
    )
