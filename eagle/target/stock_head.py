"""An LM head that transforms states before its matrix: its logits by the model's own forward over given states."""

# D width of the states, V vocabulary

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from eagle.core.drafter import TargetHead
from eagle.device import in_dtype
from eagle.target.structure import base_of
from eagle.target.twin import share_weights


@dataclass(frozen=True, slots=True)
class StockHead(TargetHead):
    """The target's embedding and the part of its forward above its base; gradients go through that forward too."""

    # the target's modules over its own weights, with a `PassThrough` for its base
    model: Any = None
    matrix: Tensor | None = None  # [V, D'], of the last linear layer
    rows: Tensor | slice | None = None  # of the vocabulary; None for all

    @property
    def weight(self) -> Tensor:
        """The last matrix [V, D']: its precision and vocabulary are the head's, its product with states is not."""
        assert self.matrix is not None
        return self.matrix

    @property
    def is_linear(self) -> bool:
        """False: the logits are more than one product."""
        return False

    def start_matrix(self) -> Tensor:
        """Return the last matrix [V, D], from which a head's own may start; it takes transformed states."""
        if self.weight.shape[1] != self.width:
            raise ValueError(
                f"the target's LM head transforms states of width {self.width} to {self.weight.shape[1]} before its "
                "matrix, and a draft head has no such matrix to start from: train another method, or with "
                "drafter.lm_head: random where the method has one"
            )
        return self.weight

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the target's logits from its base's output, in the weights' dtype; `out` is memory for them."""
        states = hidden.to(self.weight.dtype)
        # one sequence, as the model's forward wants; it takes states in place of token ids
        logits: Tensor = self.model(input_ids=states.reshape(1, -1, hidden.shape[-1])).logits
        if self.rows is not None:
            logits = logits[..., self.rows]
        logits = logits.view(*hidden.shape[:-1], -1)
        return logits if out is None else out.copy_(logits)

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return the states themselves, from which `pull_back` runs the forward again."""
        return hidden

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return [.., D], the gradient at the hidden states (`slope`) from that at the logits."""
        assert slope is not None
        # through the model's forward, run again
        with torch.enable_grad():
            hidden = slope.detach().requires_grad_()
            logits = self.logits(hidden)
        return torch.autograd.grad(logits, hidden, gradient.to(logits.dtype))[0].to(
            self.weight.dtype
        )

    def narrow(self, tokens: Tensor | slice) -> StockHead:
        """Return a head for a subset of the vocabulary, which picks its logits."""
        return replace(self, rows=tokens, matrix=self.weight[tokens])

    def cast(self, dtype: torch.dtype) -> StockHead:
        """Return this head in another precision: itself if it has it, else a copy."""
        if self.weight.dtype == dtype:
            return self
        embedding = in_dtype(copy.deepcopy(self.embedding), dtype)
        model = in_dtype(copy.deepcopy(self.model), dtype)
        return replace(self, embedding=embedding, model=model, matrix=self.weight.to(dtype))


class PassThrough(nn.Module):
    """Takes the place of a model's base, and hands on the states that it gets in place of token ids."""

    def __init__(self, output: type[Any], base: nn.Module) -> None:
        super().__init__()
        for name, value in vars(base).items():
            # a factor that the model's forward asks its base for, as Falcon-H1's
            if isinstance(value, int | float | str) and not hasattr(self, name):
                setattr(self, name, value)
        self.output = output

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the base's kind of output, with these states [B, T, D]."""
        return self.output(last_hidden_state=input_ids)


def stock_head(model: Any, config: Any, head: TargetHead, output: Any) -> StockHead:
    """Return a head by the model's own forward; `output` is what its base gave for some sequence."""
    base = base_of(model)
    path = next(name for name, module in model.named_modules() if module is base)
    upper, _ = share_weights(model, config, nn.ModuleList())
    # in the second tree alone, the states replace the base
    parent, _, name = path.rpartition(".")
    upper.get_submodule(parent)._modules[name] = PassThrough(type(output), base)
    return StockHead(
        head.embedding,
        head.output,
        head.embed_scale,
        width=head.width,
        model=upper,
        matrix=head.output.get_parameter("weight"),
    )
