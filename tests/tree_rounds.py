"""Rounds of reading and keeping branching trees by a reader, beside the untouched model's plain forwards."""

# N tree nodes, T tokens, D width

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle.target.reader import TreeReader
from eagle.target.structure import base_of

PARENTS = [
    [-1, 0, 0, 1, 2, 2, 4],
    [-1, 0, 1, 1, 0],
    [-1, 0, 0, 0, 3, 3, 3, 6],
]  # of a tree for each text
KEPT = [
    [[0, 2], [0, 2, 4], [0, 2, 4, 6]],
    [[0], [0, 1, 3], [0, 4]],
    [[0, 3, 6, 7], [0], [0, 3, 4]],
]  # in each round


def trace_path(parents: Sequence[int], node: int) -> list[int]:
    """The nodes from the root to this one."""
    return ([] if parents[node] < 0 else trace_path(parents, parents[node])) + [node]


def read_plainly(model: Any, tokens: Sequence[int]) -> Tensor:
    """[T, D], the base model's last hidden states of one text."""
    return base_of(model)(input_ids=torch.tensor([tokens]), use_cache=False).last_hidden_state[0]


def read_trees(reader: TreeReader, cache: Any, nodes: Sequence[Sequence[int]]) -> Tensor:
    """[B, N, D], hidden states of one tree after each text of the cache, padded with copies of the last node."""
    widest = max(map(len, nodes))
    tokens = torch.tensor([[*row, *row[-1:] * (widest - len(row))] for row in nodes])
    seen = torch.eye(widest, dtype=torch.bool).repeat(len(nodes), 1, 1)
    depths = torch.zeros(len(nodes), widest, dtype=torch.long)
    for row, parents in enumerate(PARENTS[: len(nodes)]):
        for node in range(len(parents)):
            path = trace_path(parents, node)
            seen[row, node, path] = True
            depths[row, node] = len(path) - 1
    return reader(tokens, torch.tensor(cache.lengths[: len(nodes)])[:, None] + depths, seen, cache)


@torch.no_grad()
def worst_difference(
    model: Any, reader: TreeReader, lengths: Sequence[int] = (21,), pieces: int = 1
) -> float:
    """The largest relative difference of a path's states from a plain forward, over three rounds of read and keep.

    Prompts of these lengths are read side by side, in so many pieces if there is only one.
    """
    generator = torch.Generator().manual_seed(1)
    draw = torch.randint(3, 90, (400,), generator=generator).tolist()
    texts = [draw[40 * row : 40 * row + length] for row, length in enumerate(lengths)]
    cache = reader.new_cache()
    rows = list(range(len(texts)))
    cache.lengths = [0] * len(texts)
    cache.reserve(len(texts), max(lengths) + 32)
    for start in range(0, max(lengths), -(-max(lengths) // pieces)):
        piece = [text[start : start + -(-max(lengths) // pieces)] for text in texts]
        padded = torch.nn.utils.rnn.pad_sequence(
            [torch.tensor(part) for part in piece], batch_first=True
        )
        last = torch.tensor(lengths)[:, None] - 1
        cache.set_write_offset(rows, sizes=list(map(len, piece)), commits=True)
        reader(
            padded, torch.minimum(start + torch.arange(padded.shape[1])[None], last), None, cache
        )
        cache.lengths = [min(start + padded.shape[1], length) for length in lengths]
    differences = []
    for turn in range(3):
        nodes = [draw[200 + 30 * turn + 10 * row :][: len(PARENTS[row])] for row in rows]
        cache.set_write_offset(rows)
        hidden = read_trees(reader, cache, nodes)
        for row in rows:
            for leaf in set(range(len(PARENTS[row]))) - set(PARENTS[row]):
                path = trace_path(PARENTS[row], leaf)
                expected = read_plainly(model, texts[row] + [nodes[row][node] for node in path])[
                    -len(path) :
                ]
                differences.append(float((hidden[row, path] - expected).norm() / expected.norm()))
            texts[row] = texts[row] + [nodes[row][node] for node in KEPT[row][turn]]
        cache.keep({row: KEPT[row][turn] for row in rows})
    return max(
        difference if difference == difference else float("inf") for difference in differences
    )


def make_reader(model: Any) -> TreeReader:
    """A reader of a copy of the model, so that the model itself stays untouched."""
    return TreeReader(copied := copy.deepcopy(model), copied.config.get_text_config())
