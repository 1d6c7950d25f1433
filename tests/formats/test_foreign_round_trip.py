"""Heads that left this project and come back are the same, and go on training."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle import Budget, Target
from eagle.core.drafter import Committed
from eagle.formats.checkpoint import load_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import import_head, read_head
from tests import trained
from tests.unrolled_heads import NARROW, SHAPE, VARIANTS, frozen_head, new_head


def proposals(head: Any, order: tuple[int, ...] | None = None) -> list[list[int]]:
    """What a head drafts along a random text, whose features may come in another order."""
    generator, found = torch.Generator().manual_seed(5), []
    tokens = torch.randint(SHAPE.vocab_size, (30,), generator=generator)
    features = torch.randn(30, len(head.taps), SHAPE.hidden_size, generator=generator)
    features = features[:, list(order)] if order else features
    text = head.bind(frozen_head(torch.float32)).begin()
    for start, stop in pairwise((0, 11, 12, 15, 29)):
        news = Committed(tokens[start:stop], features[start:stop], int(tokens[stop]))
        tree = text.propose(news, Budget(nodes=12, depth=4, top_k=3))
        found.append([*tree.tokens.tolist(), *tree.parents.tolist()])
    return found


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize("name", [*VARIANTS, "eagle3 taps in another order"])
def test_exported_and_imported_it_is_the_same_head(engine: str, name: str, tmp_path: Path) -> None:
    """Every tensor bit by bit, and every proposal; an engine that does not serve a head has no layout of it."""
    mixed, shape = (
        name not in VARIANTS,
        NARROW if engine == "eagle" else SHAPE,
    )  # which takes no other width
    changes = {"taps": (5, 2, 4)} if mixed else {}
    head = new_head(tmp_path, "eagle3 draft vocabulary" if mixed else name, shape=shape, **changes)
    head.bind(frozen_head(torch.float32))
    try:
        export(head, shape, engine, tmp_path / "out")
    except ValueError as refused:
        pytest.skip(str(refused))
    back: Any = read_head(tmp_path / "out")
    one, other = head.state_dict(), back.state_dict()
    assert one.keys() == other.keys()
    assert {part for part in one if not torch.equal(one[part], other[part])} == (
        {"fc.weight"} if mixed else set()
    )
    assert back.taps == tuple(sorted(head.taps))
    order = tuple(head.taps.index(tap) for tap in back.taps) if mixed else None
    assert proposals(back, order) == proposals(head)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "engine"),
    [
        ("drafter={kind: eagle1, fc_bias: false}", "eagle"),
        ("drafter={kind: eagle3, steps: 3, draft_vocab: 512}", "speculators"),
    ],
)
def test_a_warm_start_from_an_imported_head_trains(
    drafter: str, engine: str, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """It begins with the weights that were given, far better than fresh ones, and its loss goes on falling."""
    recipe, target = (
        trained.prepared(tiny_target_dir, tmp_path, drafter),
        str(tiny_target_dir / "target"),
    )
    first, served = (
        trained.run(recipe, tmp_path / "first", "train.epochs=8"),
        Target.load(target, dtype="float32"),
    )
    head: Any = load_head(first / "last")
    export(head.bind(served.head), served.config, engine, tmp_path / "foreign")
    import_head(tmp_path / "foreign", tmp_path / "imported", target)
    assert (
        trained.apart(trained.weights(first), load_file(tmp_path / "imported/model.safetensors"))
        == 0
    )
    warm = trained.run(
        recipe, tmp_path / "warm", f"train.init={tmp_path / 'imported'}", "train.epochs=4"
    )
    cold = trained.run(recipe, tmp_path / "cold", "train.epochs=4")
    losses = {
        out: [row["total"] for row in trained.rows(out) if "total" in row] for out in (warm, cold)
    }
    assert losses[warm][0] < losses[cold][0] - 0.1
    assert losses[warm][-1] < losses[warm][0]
