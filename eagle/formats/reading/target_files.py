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
    """What the files of the target tell, with which a head for it is compared; no model is loaded."""

    path: str
    layers: int
    width: int
    vocab_size: int
    positions: int | None
    rope: dict[str, Any]  # rotary parameters; empty if they differ between layers
    tied: bool  # whether its LM head is its embedding
    config: dict[str, Any]  # of its language model
    tensors: FolderTensors

    @classmethod
    def read(cls, path: str) -> TargetFiles:
        """Read a target's config and the headers of its weight files, in a folder or on the hub; no weights are loaded.

        ValueError if the config does not tell the target's sizes.
        """
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.bin", "*.json")))
        config = read_json(folder, "config.json")
        tensors = read_tensors(folder, max_bytes=None)
        # a vision model nests the config of its language model
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
        rope = read_rope(keys, notes=[])  # notes on defaults are for heads alone
        # a target whose kinds of layers have different rotary parameters nests one mapping for each, a wrong value here
        if keys.wrong:
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
        """The factor by which the target multiplies its embedding; heads of other projects read the rows without it."""
        usual = 1.0
        # Gemma's configs do not state its factor
        if "gemma" in str(self.config.get("model_type")):
            usual = math.sqrt(self.width)
        return float(self.config.get("embedding_multiplier") or usual)

    def ordinary_tokens(self) -> dict[int, str]:
        """Return the ordinary tokens, id -> spelling, without special ones; empty without a tokenizer.json.

        The check of a head's mask token needs them: an ordinary token is an unlikely mask.
        """
        try:
            folder = folder_at(folder_of(self.path, None, ("*.json",)))
            tokenizer = read_json(folder, "tokenizer.json")
            special = {token["id"] for token in tokenizer.get("added_tokens", [])}
            pieces = tokenizer["model"]["vocab"]
            return {token: piece for piece, token in pieces.items() if token not in special}
        # the tokens only serve a hint, which is not worth a failure
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def matrix(self, names: tuple[str, ...]) -> Tensor | None:
        """Return the target's embedding or LM head, [vocabulary, width]; None if not exactly one tensor's name ends so.

        Args:
            names: EMBEDDINGS or LM_HEADS, the endings of names in any family of models.
        """
        matching = [name for name in self.tensors.stored if name.endswith(names)]
        # files of a target whose LM head is its embedding hold it once
        if not matching and names is LM_HEADS and self.tied:
            return self.matrix(EMBEDDINGS)
        if len(matching) != 1:
            return None
        return self.tensors.load(matching[0])


def embedding_dtype(path: str) -> torch.dtype:
    """Return the dtype of the embedding in a target's files; float32, which rounds nothing, if it is not clear.

    Args:
        path: The target, a folder or a hub id.
    """
    try:
        folder = folder_at(folder_of(path, None, ("*.safetensors", "*.json")))
        # this reads the headers of the files and no tensor
        stored = read_tensors(folder, max_bytes=None).stored
    except (OSError, ValueError):  # whoever loads the target says what is wrong with it
        return torch.float32
    dtypes = {entry.dtype for name, entry in stored.items() if name.endswith(EMBEDDINGS)}
    # one embedding, in half precision
    if len(dtypes) == 1 and dtypes <= {torch.bfloat16, torch.float16}:
        return dtypes.pop()
    return torch.float32


def count_differing_rows(ours: Tensor, theirs: Tensor) -> int:
    """Return how many rows of two matrices of one shape differ after both are rounded to the coarser of their dtypes.

    A row is a token's. Rounding is no difference, since tools save in different precisions.

    Args:
        ours: A head's embedding or LM head, [vocabulary, width].
        theirs: The target's.
    """
    coarser = max(ours.dtype, theirs.dtype, key=lambda dtype: torch.finfo(dtype).eps)
    return int((ours.to(coarser) != theirs.to(coarser)).any(1).sum())


def is_multiple(ours: Tensor, theirs: Tensor, factor: float) -> bool:
    """Return whether a head's embedding is the target's times a factor, up to rounding; False for a factor of 1.

    Args:
        ours: The head's embedding, [vocabulary, width].
        theirs: The target's.
        factor: The factor on its embedding that the target computes with.
    """
    # the factor and the products may have been rounded to bfloat16
    # a rounding to bfloat16 changes a number by up to 2**-8 of it, so two by 2**-7
    return factor != 1.0 and torch.allclose(
        ours.float(), theirs.float() * factor, rtol=2**-7, atol=0.0
    )
