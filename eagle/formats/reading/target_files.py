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
from eagle.formats.reading.files import FolderTensors, read_json, read_tensors
from eagle.formats.reading.folder_paths import folder_at

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
        """The target's files in a folder, or on the hub."""
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.bin", "*.json")))
        config, tensors = read_json(folder, "config.json"), read_tensors(folder, most=None)
        text = config.get("text_config")
        keys = Keys(text if isinstance(text, dict) else config)
        layers, width, vocab_size = (keys.read(name) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
        if layers is None or width is None or vocab_size is None:
            raise ValueError(
                f"the config.json of {path} does not tell layers, width and vocabulary: is it the target's?"
            )
        tied, rope = keys.read("tie_word_embeddings"), read_rope(keys, [])
        rope = {} if keys.wrong else rope  # some targets turn each kind of layer in its own way
        positions = keys.read("max_position_embeddings")
        return cls(path, layers, width, vocab_size, positions, rope, bool(tied), keys.values, tensors)

    @property
    def embed_scale(self) -> float:
        """The factor on its embedding's rows, of which heads elsewhere know nothing."""
        usual = math.sqrt(self.width) if "gemma" in str(self.config.get("model_type")) else 1.0
        return float(self.config.get("embedding_multiplier") or usual)

    def ordinary_tokens(self) -> dict[int, str]:
        """The tokens that texts are made of, without special ones; empty where no tokenizer.json tells."""
        try:
            folder = folder_at(folder_of(self.path, None, ("*.json",)))
            tokenizer = read_json(folder, "tokenizer.json")
            pieces = tokenizer["model"]["vocab"]
            special = {token["id"] for token in tokenizer.get("added_tokens", [])}
            return {number: piece for piece, number in pieces.items() if number not in special}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):  # only asked for a hint
            return {}

    def matrix(self, names: tuple[str, ...]) -> Tensor | None:
        """Its embedding or its LM head, [V, H]."""
        matching = [name for name in self.tensors.stored if name.endswith(names)]
        if not matching and names is LM_HEADS and self.tied:
            return self.matrix(EMBEDDINGS)
        return self.tensors.load(matching[0]) if len(matching) == 1 else None


def embedding_dtype(path: str) -> torch.dtype:
    """The precision in which a target's files hold its embedding; float32, which rounds none, if they do not tell."""
    try:
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.json")))
        stored = read_tensors(folder, most=None).stored
    except (OSError, ValueError):  # whoever loads the target says what is wrong with it
        return torch.float32
    dtypes = {entry.dtype for name, entry in stored.items() if name.endswith(EMBEDDINGS)}
    return dtypes.pop() if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16} else torch.float32


def count_differing_rows(ours: Tensor, theirs: Tensor) -> int:
    """The number of rows that differ after rounding to the coarser dtype."""
    coarse = max(ours.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return int((ours.to(coarse) != theirs.to(coarse)).any(1).sum())


def is_multiple(ours: Tensor, theirs: Tensor, factor: float) -> bool:
    """Whether our rows are a target's multiplied with a factor; it and the products may be rounded to bfloat16."""
    return factor != 1.0 and torch.allclose(ours.float(), theirs.float() * factor, rtol=2**-7, atol=0.0)
