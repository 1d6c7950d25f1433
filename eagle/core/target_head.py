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
    output: nn.Module  # the LM head
    embed_scale: float = 1.0  # factor on embeddings, beside one that the module applies itself
    logit_scale: float = 1.0  # factor on logits
    softcap: float | None = None  # c in logits = c tanh(logits / c), as in Gemma 2
    # the hidden size of the layers if it is known; a few models have embeddings of another size
    width: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TargetHead:
        """Return itself, so that a copied head shares the target."""
        return self

    @property
    def scale(self) -> float:
        """The factor between a row of the embedding matrix and the embedding, with the module's own factor (Gemma)."""
        # rounded to the weights' precision, as the module does
        factor = torch.as_tensor(getattr(self.embedding, "embed_scale", 1.0))
        return self.embed_scale * factor.to(self.embedding.get_parameter("weight").dtype).item()

    def embed(self, tokens: Tensor) -> Tensor:
        """Return token embeddings as the target's first layer sees them, without learned positions."""
        embedded = self.embedding(tokens)
        if self.width not in (None, embedded.shape[-1]):
            raise ValueError(
                f"the target embeds tokens in width {embedded.shape[-1]} and its layers have width {self.width}: got a "
                "method that reads both as one, expected one without embeddings, as draft_model, ngram or suffix"
            )
        if self.embed_scale == 1.0:
            return embedded
        return embedded * self.embed_scale

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the logits [.., V] of the LM head's input [.., D], in the weights' dtype.

        Args:
            hidden: The input.
            out: A tensor [.., V] to write the product to, which saves memory. With a scale or a softcap the result is
                another tensor.
        """
        hidden = hidden.to(self.weight.dtype)
        if out is None:
            logits = self.output(hidden)
        else:
            logits = torch.matmul(hidden, self.weight.T, out=out)
            bias = getattr(self.output, "bias", None)
            if bias is not None:
                logits += bias
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """Return the derivative [.., V] of the logits by the values before the softcap; None without a softcap.

        `pull_back` needs it. The loss computes gradients by hand, chunk by chunk, so it asks before it overwrites the
        logits.

        Args:
            logits: [.., V], after the softcap.
            hidden: [.., D], their input, which heads need whose logits are no matrix product (`eagle.target`).
        """
        if self.softcap is None:
            return None
        # d/dx c tanh(x / c) = 1 - tanh(x / c)^2
        return 1 - (logits / self.softcap) ** 2

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return the gradient [.., D] at the hidden states, by the chain rule.

        d logits / d hidden = slope of the softcap * logit scale * matrix

        Args:
            gradient: [.., V], at the logits; it is overwritten.
            slope: What `slope` returned.
        """
        if slope is not None:
            gradient = gradient.mul_(slope)
        hidden = gradient.to(self.weight.dtype) @ self.weight
        if self.logit_scale == 1.0:
            return hidden
        return hidden * self.logit_scale

    def narrow(self, tokens: Tensor | slice) -> TargetHead:
        """Return a head whose logits are those of a subset of the vocabulary, in the order of `tokens`.

        Rows of the matrix are copied, unless `tokens` is a slice.
        """
        bias = getattr(self.output, "bias", None)
        rows = self.weight[tokens]
        # on the meta device, so that no matrix is initialised only to be replaced
        output = nn.Linear(rows.shape[1], rows.shape[0], bias=bias is not None, device="meta")
        output.weight = nn.Parameter(rows, requires_grad=False)
        if bias is not None:
            output.bias = nn.Parameter(bias[tokens], requires_grad=False)
        return replace(self, output=output)

    def cast(self, dtype: torch.dtype) -> TargetHead:
        """Return this head in a precision: itself if it has that precision already, else a copy."""
        if self.weight.dtype == dtype:
            return self
        embedding = in_dtype(copy.deepcopy(self.embedding), dtype)
        output = in_dtype(copy.deepcopy(self.output), dtype)
        return replace(self, embedding=embedding, output=output)

    @property
    def is_linear(self) -> bool:
        """Whether the logits are a linear function of the hidden states, without a softcap."""
        return self.softcap is None

    def start_matrix(self) -> Tensor:
        """Return the matrix [V, D] times the logit scale, as the initial weights of a drafter's own LM head."""
        return self.weight * self.logit_scale

    @property
    def weight(self) -> Tensor:
        """[V, D], the LM head's matrix."""
        return self.output.get_parameter("weight")
