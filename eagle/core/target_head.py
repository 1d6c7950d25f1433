"""The target's embedding and LM head, which drafters borrow."""

# D target width, V vocabulary

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle.device import in_dtype


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The target's frozen embedding and LM head, which drafters borrow."""

    embedding: nn.Module
    output: nn.Module
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    softcap: float | None = None
    width: int | None = None  # of the layers' states, where it is known; some embeddings have another

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetHead:
        """Return itself, so that a copied head shares the target."""
        return self

    @property
    def scale(self) -> float:
        """The factor on the rows of the embedding matrix, including the module's own (Gemma)."""
        factor = torch.as_tensor(getattr(self.embedding, "embed_scale", 1.0))
        return self.embed_scale * factor.to(self.embedding.get_parameter("weight").dtype).item()

    def embed(self, tokens: Tensor) -> Tensor:
        """Token embeddings as the target's first layer sees them, without learned positions."""
        embedded = self.embedding(tokens)
        if self.width not in (None, embedded.shape[-1]):
            raise ValueError(
                f"the target embeds tokens in width {embedded.shape[-1]} and its layers have width {self.width}: got a "
                "method that reads both as one, expected one without embeddings, as draft_model, ngram or suffix"
            )
        return embedded if self.embed_scale == 1.0 else embedded * self.embed_scale

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """The target's logits from the LM head's input, in the weights' dtype; `out` is memory to write them to."""
        hidden = hidden.to(self.weight.dtype)
        if out is None:
            logits = self.output(hidden)
        else:
            logits = torch.matmul(hidden, self.weight.T, out=out)
            if (bias := getattr(self.output, "bias", None)) is not None:
                logits += bias
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """[.., V], the derivative of the logits by the values before the softcap; None without a softcap."""
        return None if self.softcap is None else 1 - (logits / self.softcap) ** 2

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """[.., D], the gradient at the hidden states from that at the logits, which is overwritten (softcap undone)."""
        gradient = gradient if slope is None else gradient.mul_(slope)
        hidden = gradient.to(self.weight.dtype) @ self.weight
        return hidden if self.logit_scale == 1.0 else hidden * self.logit_scale

    def narrow(self, tokens: Tensor | slice) -> TargetHead:
        """A head for a subset of the vocabulary; a slice of the matrix is not copied."""
        bias, rows = getattr(self.output, "bias", None), self.weight[tokens]
        output = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, device="meta")
        output.weight = nn.Parameter(rows, requires_grad=False)
        if bias is not None:
            output.bias = nn.Parameter(bias[tokens], requires_grad=False)
        return replace(self, output=output)

    def cast(self, dtype: torch.dtype) -> TargetHead:
        """This head in another precision: itself if it has it, else a copy."""
        if self.weight.dtype == dtype:
            return self
        embedding, output = (in_dtype(copy.deepcopy(module), dtype) for module in (self.embedding, self.output))
        return replace(self, embedding=embedding, output=output)

    @property
    def is_linear(self) -> bool:
        """Whether the logits are one product with the matrix, scaled."""
        return self.softcap is None

    def start_matrix(self) -> Tensor:
        """[V, D], from which a head's own LM head may start: the matrix with the scale of its logits."""
        return self.weight * self.logit_scale

    @property
    def weight(self) -> Tensor:
        """[V, D], the LM head's matrix."""
        return self.output.get_parameter("weight")
