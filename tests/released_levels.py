"""Plain renderings of released heads that guess several tokens at once; tensors are named as in ours.

Conversations padded to the longest, the logits of all levels at every slot side by side, the loss of each level on
labels shifted by its own distance, those that are not supervised left out at the end.
"""

# B texts, T tokens of the longest, K levels, H width, V vocabulary

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.published_eagle1 import Layer, Padded

Head = dict[str, Any]


def token_loss(logits: Tensor, tokens: Tensor, mask: Tensor, ahead: int) -> Tensor:
    """Mean cross-entropy of [B, T, V], slot i against token i + `ahead`."""
    labels = tokens.masked_fill(~mask, -100)[:, ahead:]
    return F.cross_entropy(
        logits[:, :-ahead].flatten(0, 1).float(), labels.flatten(), ignore_index=-100
    )


def probs_loss(logits: Tensor, target_probs: Tensor, mask: Tensor, ahead: int) -> Tensor:
    """Mean cross-entropy of [B, T, V], slot i against the target's probs [B, T, V] of token i + `ahead`."""
    entropy = -(
        target_probs[:, ahead - 1 : -1] * logits[:, :-ahead].log_softmax(-1, dtype=torch.float32)
    ).sum(-1)
    counted = mask[:, ahead:]
    return (entropy * counted).sum() / counted.sum()


def shift_left(x: Tensor, by: int) -> Tensor:
    """[B, T, ..], slot i holds what stood at i + `by`."""
    return torch.cat([x[:, by:], torch.zeros_like(x[:, :by])], 1)


class Plain(nn.Module):
    """A head whose levels' logits are all made before any loss is."""

    def __init__(self, settings: Head) -> None:
        super().__init__()
        self.settings, self.levels = settings, range(settings.get("levels", 0))

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """[K, B, T, V], from tokens [B, T] and the target's states [B, T, H]."""
        raise NotImplementedError

    def loss(self, batch: Padded, embedding: Tensor, weight: Tensor) -> Tensor:
        """The levels' mean losses, summed: slot i of level d names token i + 2 + d."""
        tokens, states, mask, lengths = batch
        every = self.logits(tokens, states, lengths, embedding)
        if self.settings["loss"] == "tokens":
            return sum(
                (token_loss(one, tokens, mask, 2 + d) for d, one in enumerate(every)),
                torch.zeros(()),
            )
        with torch.no_grad():
            target_probs = F.linear(states, weight).softmax(-1, dtype=torch.float32)
        return sum(
            (probs_loss(one, target_probs, mask, 2 + d) for d, one in enumerate(every)),
            torch.zeros(()),
        )


class Medusa(Plain):
    """Residual blocks and an LM head for each level."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width, layers = shape.hidden_size, range(settings["layers"])
        self.blocks: Any = nn.ModuleList(
            [nn.ModuleList([nn.Linear(width, width) for _ in layers]) for _ in self.levels]
        )
        self.heads = nn.ModuleList(
            [nn.Linear(width, shape.vocab_size, bias=False) for _ in self.levels]
        )

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """Of every level from the state alone."""
        every = []
        for blocks, head in zip(self.blocks, self.heads, strict=True):
            x = states
            for block in blocks:
                x = x + F.silu(block(x))
            every.append(head(x))
        return torch.stack(every)


class Gated(nn.Linear):
    """x + silu(Wx + b), or Rx + r + silu(Wx + b)."""

    def __init__(self, read: int, width: int) -> None:
        super().__init__(read, width)
        self.residual = nn.Identity() if read == width else nn.Linear(read, width)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        return self.residual(x) + F.silu(super().forward(x))


class Hydra(Plain):
    """Hydra++: a Llama block over the states, then levels that also read the embeddings of the tokens between."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width, layers = shape.hidden_size, range(1, settings["layers"])
        self.layers = nn.ModuleList([Layer(shape, normed=True)])
        self.norm = nn.RMSNorm(width, shape.rms_norm_eps)
        self.blocks: Any = nn.ModuleList(
            [
                nn.ModuleList(
                    [Gated((d + 2) * width, width), *(Gated(width, width) for _ in layers)]
                )
                for d in self.levels
            ]
        )
        self.heads = nn.ModuleList([nn.Linear(width, shape.vocab_size) for _ in self.levels])

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """Dropout in front of every block and LM head."""
        read = [self.norm(self.layers[0](states, seen_blocks(tokens, lengths, 1)))]
        every = []
        for d, (blocks, head) in enumerate(zip(self.blocks, self.heads, strict=True)):
            read.append(F.embedding(shift_left(tokens, d + 1), embedding))
            x = torch.cat(read, -1)
            for block in blocks:
                x = block(F.dropout(x, self.settings["dropout"]))
            every.append(head(F.dropout(x, self.settings["dropout"])))
        return torch.stack(every)


class MlpNorm(nn.Module):
    """w x / rms(x) + b."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) + self.bias


class MlpSpeculator(Plain):
    """Stages that each read the state before and one token."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width, vocab = shape.hidden_size, shape.vocab_size
        self.emb = nn.ModuleList([nn.Embedding(vocab, width) for _ in self.levels])
        self.proj = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in self.levels])
        self.ln = nn.ModuleList([MlpNorm(width) for _ in self.levels])
        self.head = nn.ModuleList([nn.Linear(width, vocab, bias=False) for _ in self.levels])
        kept = 0.5 ** (0.5 / len(self.levels))
        self.ratio = math.sqrt((1 - kept**2) * width / 2) / kept

    def logits(self, tokens: Tensor, states: Tensor, lengths: Tensor, embedding: Tensor) -> Tensor:
        """Of every stage, which the next continues."""
        x, every = states, []
        for d, (emb, proj, ln, head) in enumerate(
            zip(self.emb, self.proj, self.ln, self.head, strict=True)
        ):
            x = F.gelu(ln(proj(x) + self.ratio * emb(shift_left(tokens, d + 1))))
            every.append(head(x))
        return torch.stack(every)


class Blockwise(Plain):
    """One hidden layer for all levels, the target's LM head, and the loss of a drawn level."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        inner = len(self.levels) * shape.intermediate_size
        self.up = nn.Linear(shape.hidden_size, inner)
        self.down = nn.Linear(inner, len(self.levels) * shape.hidden_size)

    def loss(self, batch: Padded, embedding: Tensor, weight: Tensor) -> Tensor:
        """The states of all levels, the logits of one."""
        tokens, states, mask, _ = batch
        changes = self.down(F.relu(self.up(states))).unflatten(-1, (len(self.levels), -1))
        d = int(torch.randint(len(self.levels), ()))
        return token_loss(
            F.linear((states[..., None, :] + changes)[..., d, :], weight), tokens, mask, 2 + d
        )


def seen_blocks(tokens: Tensor, lengths: Tensor, size: int) -> Tensor:
    """[B, 1, T, T], slots in blocks that see themselves, what lies before them, and no padding."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (places[:, None] // size >= places // size) & (places < lengths[:, None])[:, None, None]


class Gate(nn.Linear):
    """An LSTM's cell from an empty state."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__(inputs, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        """[.., H]."""
        enter, cell, leave = super().forward(x).chunk(3, dim=-1)
        return leave.sigmoid() * (enter.sigmoid() * cell.tanh()).tanh()


class Falcon(Plain):
    """Slots in blocks of k that together guess the next k tokens; a first pass finds those that read their answers."""

    def __init__(self, shape: Any, settings: Head) -> None:
        super().__init__(settings)
        width = shape.hidden_size
        self.gates = nn.ModuleList([Gate(2 * width, width), Gate(width, width)])
        self.layers = nn.ModuleList([Layer(shape)])

    def states(self, following: Tensor, known: Tensor, seen: Tensor, embedding: Tensor) -> Tensor:
        """[B, T, H] guessed states, from the tokens behind each slot and the target's states."""
        x = self.gates[0](torch.cat([F.embedding(following, embedding), known], -1))
        return self.layers[0](self.gates[1](F.dropout(x, self.settings["dropout"])), seen)

    def loss(self, batch: Padded, embedding: Tensor, weight: Tensor) -> Tensor:
        """Smooth-L1 of the states and cross-entropy of the probs: slot i guesses state i + k."""
        tokens, true, mask, lengths = batch
        k, following, seen = (
            self.settings["k"],
            shift_left(tokens, 1),
            seen_blocks(tokens, lengths, self.settings["k"]),
        )
        counted, answer = shift_left(mask, k + 1), shift_left(true, k)
        known = true + torch.empty_like(true).uniform_(-0.1, 0.1) * (512 / lengths)[:, None, None]
        with torch.no_grad():
            target_probs = F.linear(answer, weight).softmax(-1, dtype=torch.float32)
            guess = F.linear(self.states(following, known, seen, embedding), weight)
            wrong = counted & (guess.argmax(-1) != target_probs.argmax(-1))
            reads_answer = counted & (
                torch.rand_like(true[..., 0])
                < 0.45 * wrong.sum(-1, keepdim=True) / counted.sum(-1, keepdim=True)
            )
        following, known = (
            torch.where(reads_answer, shift_left(tokens, k + 1), following),
            torch.where(reads_answer[..., None], answer, known),
        )
        states = self.states(following, known, seen, embedding)
        regression = F.smooth_l1_loss(states.float(), answer, reduction="none").mean(-1)
        entropy = -(
            target_probs * F.linear(states, weight).log_softmax(-1, dtype=torch.float32)
        ).sum(-1)
        return ((regression + 0.1 * entropy) * counted).sum() / counted.sum()


PLAIN: dict[str, type[Any]] = {
    "medusa": Medusa,
    "hydra": Hydra,
    "mlp_speculator": MlpSpeculator,
    "blockwise": Blockwise,
    "falcon": Falcon,
}
