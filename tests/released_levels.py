"""Plain renderings of released heads that guess several tokens at once; tensors are named as in ours.

Conversations are padded to the longest. The logits of all levels at every position are made before any loss. Each level
is compared with labels that are shifted by its own distance, and what is not supervised is left out at the end.
"""

# B sequences, T tokens of the longest, K levels, H hidden, V vocabulary

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.published_eagle1 import Layer, Padded

Head = dict[str, Any]


def token_loss(logits: Tensor, tokens: Tensor, mask: Tensor, ahead: int) -> Tensor:
    """Return the mean cross-entropy of [B, T, V], position i against token i + `ahead`.

    Args:
        logits: [B, T, V] of one level.
        tokens: [B, T].
        mask: [B, T], which tokens are supervised.
        ahead: the distance to the token that a position guesses.
    """
    # -100 is what cross_entropy leaves out
    labels = tokens.masked_fill(~mask, -100)[:, ahead:]
    guesses = logits[:, :-ahead].flatten(0, 1).float()
    return F.cross_entropy(guesses, labels.flatten(), ignore_index=-100)


def probs_loss(logits: Tensor, target_probs: Tensor, mask: Tensor, ahead: int) -> Tensor:
    """Return the mean cross-entropy of [B, T, V], position i against the target's probs of token i + `ahead`."""
    log_probs = logits[:, :-ahead].log_softmax(-1, dtype=torch.float32)
    entropy = -(target_probs[:, ahead - 1 : -1] * log_probs).sum(-1)
    # the mask is that of the token which a position guesses
    counted = mask[:, ahead:]
    return (entropy * counted).sum() / counted.sum()


def shift_left(x: Tensor, by: int) -> Tensor:
    """Return [B, T, ..], position i holds what stood at i + `by`."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


class Plain(nn.Module):
    """A head whose levels' logits are all made before any loss is."""

    def __init__(self, settings: Head) -> None:
        super().__init__()
        self.settings = settings
        self.levels = range(settings.get("levels", 0))

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """Return [K, B, T, V], from tokens [B, T] and the target's states [B, T, H]."""
        raise NotImplementedError

    def loss(self, batch: Padded, embedding: Tensor, weight: Tensor) -> Tensor:
        """Return the sum of the levels' mean losses: position i of level d names token i + 2 + d."""
        tokens, states, mask, lengths = batch
        level_logits = self.logits(tokens, states, lengths, embedding)
        # the labels are tokens, or the target's probs of them
        labels = tokens
        level_loss = token_loss
        if self.settings["loss"] != "tokens":
            labels = F.linear(states, weight).detach().softmax(-1, dtype=torch.float32)
            level_loss = probs_loss
        losses = [level_loss(row, labels, mask, 2 + d) for d, row in enumerate(level_logits)]
        return torch.stack(losses).sum()


class Medusa(Plain):
    """Residual blocks and an LM head for each level."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width = shape.hidden_size
        self.blocks = nn.ModuleList()
        self.heads = nn.ModuleList()
        for _ in self.levels:
            layers = [nn.Linear(width, width) for _ in range(settings["layers"])]
            self.blocks.append(nn.ModuleList(layers))
            self.heads.append(nn.Linear(width, shape.vocab_size, bias=False))

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """Return the logits of every level from the state alone."""
        level_logits = []
        for blocks, head in zip(self.blocks, self.heads, strict=True):
            # every level begins again from the target's state
            x = states
            for block in blocks:
                x = x + F.silu(block(x))
            level_logits.append(head(x))
        return torch.stack(level_logits)


class Gated(nn.Linear):
    """x + silu(Wx + b), or Rx + r + silu(Wx + b) where more is read than returned."""

    def __init__(self, read: int, width: int) -> None:
        super().__init__(read, width)
        self.residual = nn.Identity() if read == width else nn.Linear(read, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., H]."""
        return self.residual(x) + F.silu(super().forward(x))


class Hydra(Plain):
    """Hydra++: a Llama block over the states, then levels that also read the embeddings of the tokens between."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width = shape.hidden_size
        self.layers = nn.ModuleList([Layer(shape, normed=True)])
        self.norm = nn.RMSNorm(width, shape.rms_norm_eps)
        self.blocks = nn.ModuleList()
        self.heads = nn.ModuleList()
        for d in self.levels:
            # level d reads the state and d + 1 embeddings
            layers = [Gated((d + 2) * width, width)]
            layers += [Gated(width, width) for _ in range(1, settings["layers"])]
            self.blocks.append(nn.ModuleList(layers))
            self.heads.append(nn.Linear(width, shape.vocab_size))

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """Return the logits, with dropout in front of every block and LM head."""
        position = torch.arange(tokens.shape[1])
        # [B, 1, T, T]: causal, and blind for padding
        causal = position[:, None] >= position
        mask = causal & (position < lengths[:, None])[:, None, None]
        read = [self.norm(self.layers[0](states, mask))]
        level_logits = []
        for d in self.levels:
            read.append(F.embedding(shift_left(tokens, d + 1), embedding))
            x = torch.cat(read, -1)
            for block in self.blocks[d]:
                x = block(F.dropout(x, self.settings["dropout"]))
            level_logits.append(self.heads[d](F.dropout(x, self.settings["dropout"])))
        return torch.stack(level_logits)


class MlpNorm(nn.Module):
    """w x / rms(x) + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """Return [.., H]."""
        return F.rms_norm(x, x.shape[-1:], self.weight, eps=1e-6) + self.bias


class MlpSpeculator(Plain):
    """Stages that each read the state before and one token."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width = shape.hidden_size
        vocab = shape.vocab_size
        self.emb = nn.ModuleList(nn.Embedding(vocab, width) for _ in self.levels)
        self.proj = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in self.levels)
        self.ln = nn.ModuleList(MlpNorm(width) for _ in self.levels)
        self.head = nn.ModuleList(nn.Linear(width, vocab, bias=False) for _ in self.levels)
        # after all levels the state and the tokens have equal shares of the variance
        kept = 0.5 ** (0.5 / len(self.levels))
        self.ratio = math.sqrt((1 - kept**2) * width / 2) / kept

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """Return the logits of every stage, which the next continues."""
        # a stage hands its state to the next
        x = states
        level_logits = []
        for d in self.levels:
            token = self.emb[d](shift_left(tokens, d + 1))
            x = F.gelu(self.ln[d](self.proj[d](x) + self.ratio * token))
            level_logits.append(self.head[d](x))
        return torch.stack(level_logits)


class Blockwise(Plain):
    """One hidden layer for all levels, the target's LM head, and the loss of a randomly chosen level."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        # as wide as the levels together, so that each has a share
        inner = len(self.levels) * shape.intermediate_size
        self.up = nn.Linear(shape.hidden_size, inner)
        self.down = nn.Linear(inner, len(self.levels) * shape.hidden_size)

    def loss(self, batch: Padded, embedding: Tensor, weight: Tensor) -> Tensor:
        """Return the loss of one level, of which alone the logits are made."""
        tokens, states, mask, _ = batch
        # all levels share one hidden layer, and each has a slice of its output
        changes = self.down(F.relu(self.up(states))).unflatten(-1, (len(self.levels), -1))
        d = int(torch.randint(len(self.levels), ()))
        logits = F.linear(states + changes[..., d, :], weight)
        return token_loss(logits, tokens, mask, 2 + d)


class Falcon(Plain):
    """The tensors alone: its loss depends on where blocks begin, which ours draws by a seed of the text."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width = shape.hidden_size
        # two cells of an LSTM from an empty state, which need three gates
        gates = [nn.Linear(2 * width, 3 * width), nn.Linear(width, 3 * width)]
        self.gates = nn.ModuleList(gates)
        self.layers = nn.ModuleList([Layer(shape)])


PLAIN: dict[str, type[Any]] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "mlp_speculator": MlpSpeculator,
    "blockwise": Blockwise,
    "falcon": Falcon,
}
