"""Heads that left this project and come back are the same, with their window too."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Budget
from eagle.core.drafter import Committed
from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.hass import Hass
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import read_head
from eagle.recipe import Recipe
from tests.drafters.recurrent.test_hass import started
from tests.formats.make_heads import assert_equal
from tests.unrolled_heads import NARROW, SHAPE, VARIANTS, frozen_head, new_head


def propose_along_text(head: Any, order: tuple[int, ...] | None = None) -> list[list[int]]:
    """Return what a head drafts along a random text, whose features may come in another order."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(SHAPE.vocab_size, (30,), generator=generator)
    features = torch.randn(
        30,
        len(head.taps),
        SHAPE.hidden_size,
        generator=generator,
    )
    if order is not None:
        features = features[:, list(order)]
    state = head.bind(frozen_head(torch.float32)).begin()
    proposals = []
    # prefill, one token, and several tokens a cycle
    for start, stop in pairwise((0, 11, 12, 15, 29)):
        news = Committed(tokens[start:stop], features[start:stop], int(tokens[stop]))
        tree = state.propose(news, Budget(nodes=12, depth=4, top_k=3))
        proposals.append([*tree.tokens.tolist(), *tree.parents.tolist()])
    return proposals


def bound_head(engine: str, name: str, folder: Path, **changes: Any) -> tuple[Any, Any]:
    """Return a head that is as narrow as an engine takes it, and its target's config."""
    # SafeAILab's code takes heads that together are as wide as the state
    shape = NARROW if engine == "eagle" else SHAPE
    head = new_head(folder, name, shape=shape, **changes)
    return head.bind(frozen_head(torch.float32)), shape


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize("name", VARIANTS)
def test_an_exported_head_comes_back(
    engine: str,
    name: str,
    tmp_path: Path,
) -> None:
    """Every tensor bit by bit, and every proposal; an engine that does not serve a head has no layout of it."""
    head, shape = bound_head(engine, name, tmp_path)
    try:
        export(head, shape, engine, tmp_path / "out")
    except ValueError as refusal:
        pytest.skip(str(refusal))
    back: Any = read_head(tmp_path / "out")
    assert_equal(back.state_dict(), head.state_dict())
    assert back.taps == tuple(sorted(head.taps))
    assert propose_along_text(back) == propose_along_text(head)


@pytest.mark.parametrize(
    ("engine", "name"),
    [
        ("vllm", "eagle3 draft vocabulary"),
        ("sglang", "eagle3 draft vocabulary"),
        ("trtllm", "eagle3 draft vocabulary"),
        ("speculators", "eagle3 draft vocabulary"),
        ("llamacpp", "eagle3 draft vocabulary"),
        # a norm of each tap, and one of all of them
        ("vllm", "eagle3.1"),
        ("vllm", "eagle3 joint norm"),
    ],
)
def test_taps_in_another_order_come_back_in_order(engine: str, name: str, tmp_path: Path) -> None:
    """Norms and the columns of `fc` go with them, so that the proposals are the same."""
    head, shape = bound_head(engine, name, tmp_path, taps=(5, 2, 4))
    export(head, shape, engine, tmp_path / "out")
    back: Any = read_head(tmp_path / "out")

    assert back.taps == (2, 4, 5)
    assert not torch.equal(back.fc.weight, head.fc.weight)
    assert propose_along_text(back, order=(1, 2, 0)) == propose_along_text(head)


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize(
    ("name", "sinks"),
    [
        ("eagle3", 0),
        ("eagle3", 2),
        ("hass", 0),
    ],
)
def test_only_an_engine_that_slides_gets_a_window(
    engine: str,
    name: str,
    sinks: int,
    tmp_path: Path,
) -> None:
    """vLLM with EAGLE-3 and no sinks; all others would attend to more positions than the head was trained on."""
    changes = {"fc_bias": False} if name == "hass" else {}
    head, shape = bound_head(
        engine,
        name,
        tmp_path,
        window=Window(sinks, 5),
        **changes,
    )
    if (engine, name, sinks) == ("vllm", "eagle3", 0):
        config = EXPORTERS[engine](head, shape).config
        assert config["sliding_window"] == 5
        assert config["layer_types"] == ["sliding_attention"]
    else:
        # a refusal by the window, by the method, or because it is no model
        words = "drafter.window is .*Train without|no layout|is a head, which"
        with pytest.raises(ValueError, match=f"{engine}: .*({words})"):
            EXPORTERS[engine](head, shape)


def test_a_head_comes_back_with_its_window(tmp_path: Path) -> None:
    """From its own folder and from vLLM's layout; without the layer types vLLM's is refused."""
    head, shape = bound_head("vllm", "eagle3", tmp_path, window=Window(0, 5))
    save_head(tmp_path / "own", head, "", {})
    out = tmp_path / "out"
    export(head, shape, "vllm", out)

    for back in (load_head(tmp_path / "own"), read_head(out)):
        assert back.settings.window == Window(0, 5)
        assert propose_along_text(back) == propose_along_text(head)
    # the window matters for these proposals
    assert propose_along_text(new_head(tmp_path, "eagle3")) != propose_along_text(head)

    config = json.loads((out / "config.json").read_text())
    # without them vLLM reads every layer as one of full attention
    del config["layer_types"]
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="sliding_window is 5"):
        read_head(out)


@pytest.mark.parametrize(
    ("window", "changed"),
    [
        (None, Window(4, 64)),
        (Window(4, 64), Window(0, 8)),
    ],
)
def test_training_goes_on_with_another_window(
    window: Window | None,
    changed: Window,
    tmp_path: Path,
) -> None:
    """`train.init` takes every weight of a head that attended to more of a text, or less."""
    head = Hass.for_target(Hass.Settings(window=window), SHAPE)
    save_head(tmp_path / "head", head, "", {})
    settings = Hass.Settings(window=changed)
    warm = started(Recipe.load("recipes/tiny/hass.yaml"), settings, tmp_path / "head")

    assert warm.window == changed
    assert_equal(warm.state_dict(), head.state_dict())
