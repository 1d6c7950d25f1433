"""Whether a reader gives a token the same bits, whatever is read together with it."""

# T prompt tokens, N nodes of a tree, D width

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from eagle.target.trees.means import FAILURES

PROMPT = 40  # tokens: enough keys for sums whose order matters
PARENTS = [-1, 0, 0, 0, 1, 1, 2, 2, 4, 4, 5, 6, 7, 8, 8, 9, 10]  # of a tree of 17 nodes
PATH = [0, 1, 4, 8, 14]


@torch.inference_mode()
def find_variance(reader: Any, length: int = PROMPT) -> str | None:
    """Return what changes the bits of a token's state after `length` tokens, or None if nothing that was tried does.

    A prompt is read whole, then steps by one token follow. The same states must come from the prompt in chunks, from
    a tree, and from a batch.
    """
    size = reader.original.get_input_embeddings().weight.shape[0]
    most = getattr(reader.config, "max_position_embeddings", None) or length + len(PARENTS)
    count = min(length, most - len(PARENTS))
    tokens = torch.randperm(max(size, count), generator=torch.Generator().manual_seed(1))[:count] % size
    nodes = torch.arange(3, 3 + len(PARENTS)) * 5 % size
    trials = {"a prompt is read in chunks": _read_chunks, "a tree is read": _read_tree, "a batch is read": _read_batch}
    prompt, steps = _read_steps(reader, tokens, nodes[PATH])
    for name, read in trials.items():
        try:
            got = read(reader, tokens, nodes)
        except torch.OutOfMemoryError:
            raise
        except FAILURES as error:
            return f"{name} fails ({type(error).__name__}: {str(error)[:200]})"
        expected = prompt[-len(got) :] if read is _read_chunks else steps[: len(got)]
        if not torch.equal(got, expected):
            return f"a token's bits change when {name}"
    return None


def _read_steps(reader: Any, tokens: Tensor, path: Tensor) -> tuple[Tensor, Tensor]:
    """The states of a whole prompt [T, D], and of steps by one token after it [5, D]."""
    cache = reader.new_cache()
    prompt = reader.read_text(tokens, 0, cache)[0]
    steps = []
    for i, token in enumerate(path):
        steps.append(reader.read_text(token[None], len(tokens) + i, cache)[0])
        cache.keep({0: [0]})
    return prompt, torch.cat(steps)


def _read_chunks(reader: Any, tokens: Tensor, nodes: Tensor) -> Tensor:
    """[T', D], the states of a prompt's last tokens, read in chunks; all of them where chunks are never read."""
    cache = reader.new_cache()
    if reader.mixers.by_levels:
        return reader.read_text(tokens, 0, cache)[0]
    first = len(tokens) // 3
    reader.read_text(tokens[:first], 0, cache)
    return _extend(reader, cache, tokens[None, first:], [first])[0]


def _read_tree(reader: Any, tokens: Tensor, nodes: Tensor) -> Tensor:
    """[5, D], the states of a path of a tree."""
    cache = reader.new_cache()
    reader.read_text(tokens, 0, cache)
    depths, seen = _lay_out()
    return reader.read_text(nodes, len(tokens), cache, depths, seen)[0, PATH]


def _read_batch(reader: Any, tokens: Tensor, nodes: Tensor) -> Tensor:
    """[5, D], the states of a path of a tree after a prompt in a batch with a shorter prompt."""
    if reader.reads_rows is False or reader.mixers.by_levels:
        return _read_tree(reader, tokens, nodes)
    texts = [tokens[: len(tokens) // 4], tokens]
    cache, lengths = reader.new_cache(), torch.tensor([len(text) for text in texts])
    cache.lengths = [0, 0]
    cache.reserve(2, len(tokens) + len(nodes))
    cache.aim([0, 1], sizes=lengths.tolist(), commits=True)
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True)
    # padding stands at the last token's position
    positions = torch.minimum(torch.arange(padded.shape[1])[None], lengths[:, None] - 1)
    reader(padded, positions, None, cache)
    cache.lengths = lengths.tolist()
    cache.aim([0, 1])
    depths, seen = _lay_out()
    both = nodes.expand(2, -1)
    states = reader(both, lengths[:, None] + torch.tensor(depths), seen.repeat(2, 1, 1), cache)
    return states[1, PATH]


def _extend(reader: Any, cache: Any, tokens: Tensor, starts: list[int]) -> Tensor:
    """[B, N, D], the states of more tokens [B, N] of prompts of which so many are read."""
    cache.lengths = starts
    cache.aim([*range(len(starts))], commits=True)
    positions = torch.tensor(starts)[:, None] + torch.arange(tokens.shape[1])
    states: Tensor = reader(tokens, positions, None, cache)
    return states


def _lay_out() -> tuple[list[int], Tensor]:
    """Depths of the tree's nodes, and which of them each attends to, [N, N]."""
    count = len(PARENTS)
    depths, seen = [0] * count, torch.eye(count, dtype=torch.bool)
    for node, parent in enumerate(PARENTS):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            seen[node] |= seen[parent]
    return depths, seen
