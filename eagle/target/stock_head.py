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
    """The target's embedding, and the part of its forward above its base in place of a matrix product.

    The base is the model below the LM head. Gradients go through that part, too.
    """

    # a second module tree over the target's weights, with a `PassThrough` in place of its base
    model: Any = None
    matrix: Tensor | None = None  # [V, D'], of the last linear layer, over V tokens
    rows: Tensor | slice | None = None  # the vocabulary entries of a narrowed head; None for all

    @property
    def weight(self) -> Tensor:
        """The last matrix [V, D'], over V tokens: it has the head's precision, but states are transformed before it.

        It serves for sizes and dtype.
        """
        assert self.matrix is not None
        return self.matrix

    @property
    def is_linear(self) -> bool:
        """False: the logits are more than one matrix product of the hidden states."""
        return False

    def start_matrix(self) -> Tensor:
        """Return the last matrix [V, D] for V tokens, from which a draft head may start its own LM head.

        Raises:
            ValueError: if the target's head changes the width of states, so that the matrix does not fit them.
        """
        if self.weight.shape[1] != self.width:
            raise ValueError(
                f"the target's LM head transforms states of width {self.width} to {self.weight.shape[1]} before its "
                "matrix, and a draft head has no such matrix to start from: train another method, or with "
                "drafter.lm_head: random where the method has one"
            )
        return self.weight

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """Return [.., V], the target's logits over V tokens for its base's output [.., D], in the weights' dtype.

        `out` is a tensor to write them to; None: a new one.
        """
        states = hidden.to(self.weight.dtype)
        # [1, rows, D]: the model's forward wants a batch. `PassThrough` takes states in place of token ids
        logits: Tensor = self.model(input_ids=states.reshape(1, -1, hidden.shape[-1])).logits
        if self.rows is not None:
            logits = logits[..., self.rows]
        logits = logits.view(*hidden.shape[:-1], -1)
        return logits if out is None else out.copy_(logits)

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor:
        """Return what `pull_back` needs: the states [.., D], from which it runs the forward again.

        In a `TargetHead` this is the derivative of a softcap; the loss passes it on unread.
        """
        return hidden

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """Return [.., D], the gradient by the hidden states, given the gradient by the logits [.., V].

        `slope` is what `slope` returned: the hidden states. The loss computes its gradients by hand, and needs this
        step of the chain rule.
        """
        assert slope is not None
        # the forward runs again, now with a graph
        with torch.enable_grad():
            hidden = slope.detach().requires_grad_()
            logits = self.logits(hidden)
        # a tuple of one gradient
        return torch.autograd.grad(logits, hidden, gradient.to(logits.dtype))[0].to(
            self.weight.dtype
        )

    def narrow(self, tokens: Tensor | slice) -> StockHead:
        """Return a head for a draft vocabulary, some of the tokens: it computes all logits, and picks theirs."""
        return replace(self, rows=tokens, matrix=self.weight[tokens])

    def cast(self, dtype: torch.dtype) -> StockHead:
        """Return this head in another precision: itself if it is in that precision, else a copy of its weights."""
        if self.weight.dtype == dtype:
            return self
        embedding = in_dtype(copy.deepcopy(self.embedding), dtype)
        model = in_dtype(copy.deepcopy(self.model), dtype)
        return replace(self, embedding=embedding, model=model, matrix=self.weight.to(dtype))


class PassThrough(nn.Module):
    """Takes the place of a model's base: it gets states as if they were token ids, and returns them as its output."""

    def __init__(self, output: type[Any], base: nn.Module) -> None:
        """Take the class of the base's output, and the base (the model below its LM head) that is replaced."""
        super().__init__()
        for name, value in vars(base).items():
            # the model's forward may read numbers from its base, as Falcon-H1's reads a factor
            if isinstance(value, int | float | str) and not hasattr(self, name):
                setattr(self, name, value)
        self.output = output

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the states [B, T, D] that the model passes as `input_ids`, as an output of the base's class."""
        return self.output(last_hidden_state=input_ids)


def stock_head(model: Any, config: Any, head: TargetHead, output: Any) -> StockHead:
    """Return a head that computes logits by the model's own forward above its base (the model below its LM head).

    Args:
        model: the target's model.
        config: its text config.
        head: the target's plain head, which gives embedding and output layer.
        output: an output of the model's base, for its class.
    """
    base = base_of(model)
    # the base's name in the model
    path = next(name for name, module in model.named_modules() if module is base)
    # without decoder layers, as the part above the base runs none; the second item is the tree's config
    upper, _ = share_weights(model, config, layers=nn.ModuleList())
    # only the second module tree gets a `PassThrough`, and the model itself keeps its base
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
