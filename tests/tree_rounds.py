"""Rounds of reading and keeping branching trees by a reader, compared with the untouched model's plain forwards."""

# B sequences, N tree nodes, T tokens, H hidden

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from eagle.target.reader import TreeReader
from eagle.target.structure import base_of

# the parents of the nodes of each sequence's tree
PARENTS = [
    [-1, 0, 0, 1, 2, 2, 4],
    [-1, 0, 1, 1, 0],
    [-1, 0, 0, 0, 3, 3, 3, 6],
]
# the nodes of each sequence's tree that are kept, round by round
KEPT = [
    [[0, 2], [0, 2, 4], [0, 2, 4, 6]],
    [[0], [0, 1, 3], [0, 4]],
    [[0, 3, 6, 7], [0], [0, 3, 4]],
]


def trace_path(parents: Sequence[int], node: int) -> list[int]:
    """Return the nodes from the root to this one."""
    before = [] if parents[node] < 0 else trace_path(parents, parents[node])
    return [*before, node]


def read_plainly(model: Any, tokens: Sequence[int]) -> Tensor:
    """Return [T, H], the base model's last hidden states of one sequence."""
    return base_of(model)(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


def read_prompts(
    reader: TreeReader,
    cache: Any,
    prompts: Sequence[Sequence[int]],
    chunks: int,
) -> None:
    """Read the prompts into a cache in one batch, in so many chunks."""
    rows = list(range(len(prompts)))
    lengths = [len(prompt) for prompt in prompts]
    cache.lengths = [0] * len(prompts)
    cache.reserve(len(prompts), max(lengths) + 32)
    size = -(-max(lengths) // chunks)
    last = torch.tensor(lengths)[:, None] - 1
    for start in range(0, max(lengths), size):
        chunk = [torch.tensor(prompt[start : start + size]) for prompt in prompts]
        tokens = pad_sequence(chunk, batch_first=True)
        # padding stands at the last position of its sequence, and is not committed
        positions = torch.minimum(start + torch.arange(tokens.shape[1])[None], last)
        cache.set_write_offset(rows, sizes=[len(tokens) for tokens in chunk], commits=True)
        reader(tokens, positions, None, cache)
        cache.lengths = [min(start + tokens.shape[1], length) for length in lengths]


def read_trees(reader: TreeReader, cache: Any, nodes: Sequence[Sequence[int]]) -> Tensor:
    """Return [B, N, H], hidden states of a tree after each sequence, padded with copies of the last node.

    Args:
        reader: reads by the model's copy.
        cache: of the sequences so far.
        nodes: the tokens of each tree, whose parents PARENTS has.
    """
    widest = max(map(len, nodes))
    tokens = torch.tensor([[*row, *row[-1:] * (widest - len(row))] for row in nodes])
    # a node sees itself and its ancestors
    visible = torch.eye(widest, dtype=torch.bool).repeat(len(nodes), 1, 1)
    depths = torch.zeros(len(nodes), widest, dtype=torch.long)
    for row, parents in enumerate(PARENTS[: len(nodes)]):
        for node in range(len(parents)):
            path = trace_path(parents, node)
            visible[row, node, path] = True
            depths[row, node] = len(path) - 1
    positions = torch.tensor(cache.lengths[: len(nodes)])[:, None] + depths
    return reader(tokens, positions, visible, cache)


@torch.no_grad()
def worst_difference(
    model: Any,
    reader: TreeReader,
    lengths: Sequence[int] = (21,),
    pieces: int = 1,
) -> float:
    """Return the largest relative difference of a path's states from a plain forward, over three rounds.

    Args:
        model: the untouched model.
        reader: reads trees by a copy of it.
        lengths: those of the prompts, which are read as one batch.
        pieces: in how many chunks a prompt is read.
    """
    generator = torch.Generator().manual_seed(1)
    # tokens of prompts, and from 200 on those of trees
    tokens = torch.randint(3, 90, (400,), generator=generator).tolist()
    texts = [tokens[40 * row : 40 * row + length] for row, length in enumerate(lengths)]
    cache = reader.new_cache()
    read_prompts(reader, cache, texts, pieces)
    rows = list(range(len(texts)))
    differences = []
    for turn in range(3):
        # new tokens in each round, in the same shapes
        nodes = [tokens[200 + 30 * turn + 10 * row :][: len(PARENTS[row])] for row in rows]
        cache.set_write_offset(rows)
        hidden = read_trees(reader, cache, nodes)
        for row in rows:
            # a path to a leaf holds all nodes between, so that leaves are enough
            for leaf in set(range(len(PARENTS[row]))) - set(PARENTS[row]):
                path = trace_path(PARENTS[row], leaf)
                plain = read_plainly(model, texts[row] + [nodes[row][node] for node in path])
                expected = plain[-len(path) :]
                differences.append((hidden[row, path] - expected).norm() / expected.norm())
            # the kept path becomes a part of the sequence, in the cache and here
            texts[row] = texts[row] + [nodes[row][node] for node in KEPT[row][turn]]
        cache.keep({row: KEPT[row][turn] for row in rows})
    # a difference that is not a number is the worst
    return float(torch.stack(differences).nan_to_num(nan=torch.inf).max())


def make_reader(model: Any) -> TreeReader:
    """Return a reader of a copy of the model, so that the model itself stays untouched."""
    copied = copy.deepcopy(model)
    return TreeReader(copied, copied.config.get_text_config())
