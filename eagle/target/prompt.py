"""The target's output for a prompt."""

# T tokens, L taps, D target width

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eagle.core.drafter import Committed
from eagle.core.tree import TargetOutput
from eagle.core.verify import Choose, check_choice


@dataclass(frozen=True, slots=True)
class PromptOutput:
    """A prompt after its forward: tapped states, and the target's output after the last token."""

    tokens: list[int]
    features: Tensor | None  # [T, L, D]
    output: TargetOutput

    def commit(self, choose: Choose) -> Committed:
        """The prompt as a `Committed`, with the token chosen after it."""
        (root,) = choose(self.output, [0])
        check_choice(root, self.output, 1)
        return Committed(torch.tensor(self.tokens), self.features, root)
