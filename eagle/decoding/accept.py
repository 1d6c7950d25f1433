"""The end of a cycle: which drafts the target accepts and keeps, decided on the host or where the trees lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from eagle.core.drafter import Committed
from eagle.core.grown import lies_on_device
from eagle.core.row_errors import FATAL, RowErrors
from eagle.core.tree import TargetOutput, check_draft
from eagle.core.verify import check_choice, verify_rows
from eagle.core.walks import read_walks, walk_outputs
from eagle.decoding.decoding_row import Row


@dataclass(frozen=True, slots=True)
class Accepted:
    """What a cycle commits of one text."""

    path: list[int]  # the accepted nodes of its tree, the root first
    update: Committed


def accept(state: Any, rows: Sequence[Row], outputs: dict[int, TargetOutput]) -> dict[int, Accepted]:
    """What the target (`eagle.target.state.TargetState`) accepts of each row's tree, and keeps; rows fail alone."""
    on_device = any(lies_on_device(outputs[row.number].tree) for row in rows)
    try:
        return (_accept_on_device if on_device else _accept)(state, rows, outputs)
    except FATAL:
        raise
    except Exception as error:
        if len(rows) > 1:
            raise
        rows[0].fail(error)
        return {}


def _accept(state: Any, rows: Sequence[Row], outputs: dict[int, TargetOutput]) -> dict[int, Accepted]:
    """`accept` of trees on the host."""
    try:
        verified = dict(enumerate(verify_rows([(outputs[row.number], row.choose) for row in rows])))
    except RowErrors as failed:
        verified = failed.trees
        for place, error in failed.errors.items():
            rows[place].fail(error)
    paths = {rows[place].number: result for place, result in verified.items()}
    state.keep({number: path for number, (path, _) in paths.items()})
    accepted = dict[int, Accepted]()
    for number, (path, root) in paths.items():
        output = outputs[number]
        accepted[number] = Accepted(path, Committed(output.tree.tokens[path], output.features_at(path), root))
    return accepted


@torch.inference_mode()
def _accept_on_device(state: Any, rows: Sequence[Row], outputs: dict[int, TargetOutput]) -> dict[int, Accepted]:
    """`accept` where trees lie on the device: all that follows from them is under way there before the host waits."""
    pairs = [(outputs[row.number], row.choose) for row in rows]
    walks = walk_outputs(pairs)
    state.cache.move([state.rows.index(row.number) for row in rows], walks.paths)
    features = [output.features_at(path) for (output, _), path in zip(pairs, walks.paths, strict=True)]
    accepted = dict[int, Accepted]()
    for row, states, (path, root) in zip(rows, features, read_walks(pairs, walks), strict=True):
        with row.fail_alone():
            output = outputs[row.number]
            check_choice(root, output, len(path))
            tree = output.tree
            check_draft(tree, int(tree.tokens[0]), tree.levels, state.target.vocab_size)
            tokens = tree.tokens[path]
            state.commit(row.number, tokens.tolist())
            update = Committed(tokens, None if states is None else states[: len(path)], root)
            accepted[row.number] = Accepted(path, update)
    return accepted
