"""LM heads during training: hidden states to logits, and gradients back."""

# D width, V vocabulary, r rank

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle.core.drafter import TargetHead


class LanguageHead(Protocol):
    """Hidden states to logits, and gradients back."""

    @property
    def weight(self) -> Tensor: ...

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor: ...

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None: ...

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor: ...

    def cast(self, dtype: torch.dtype) -> LanguageHead: ...


@dataclass(frozen=True, slots=True)
class OwnHead:
    """A head's own matrix [V, D], and a bias [V] where it has one."""

    weight: Tensor
    bias: Tensor | None = None

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[.., V], written to `out` where that is given."""
        logits = torch.matmul(hidden.to(self.weight.dtype), self.weight.T, out=out)
        return logits if self.bias is None else logits.add_(self.bias)

    def slope(self, logits: Tensor, hidden: Tensor) -> None:
        """None: there is no softcap."""

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """[.., D], the gradient at the hidden states from that at their logits."""
        return gradient.to(self.weight.dtype) @ self.weight

    def cast(self, dtype: torch.dtype) -> OwnHead:
        """This head in another precision, with gradients that reach its own."""
        return OwnHead(self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


@dataclass(frozen=True, slots=True)
class BiasedHead:
    """The target's LM head, whose logits get a bias from codes [.., r] that lie behind the hidden states [.., D]."""

    frozen: TargetHead
    weight: Tensor  # [V, r], which makes biases of codes, and learns

    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """[.., V] from hidden states and codes [.., D + r], written to `out` where that is given."""
        state, code = self._split(hidden.to(self.weight.dtype))
        logits = self.frozen.logits(state, out=out)
        return logits.add_(code @ self.weight.T) if out is None else torch.addmm(logits, code, self.weight.T, out=out)

    def slope(self, logits: Tensor, hidden: Tensor) -> Tensor | None:
        """[.., V], how far the target's logits move with what lies below their softcap; None without one.

        For a target that transforms states it is these [.., D].
        """
        if self.frozen.is_linear:
            return None
        state, code = self._split(hidden)
        return self.frozen.slope(logits - code @ self.weight.T, state)

    def pull_back(self, gradient: Tensor, slope: Tensor | None) -> Tensor:
        """[.., D + r], the gradient at hidden states and codes from that at the logits."""
        whole = gradient if slope is None else gradient.clone()  # it is bent for the target's logits alone
        return torch.cat([self.frozen.pull_back(whole, slope), gradient @ self.weight], dim=-1)

    def cast(self, dtype: torch.dtype) -> BiasedHead:
        """This head in another precision, with gradients that reach its own matrix."""
        return BiasedHead(self.frozen.cast(dtype), self.weight.to(dtype))

    def _split(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return hidden.tensor_split([hidden.shape[-1] - self.weight.shape[1]], dim=-1)
