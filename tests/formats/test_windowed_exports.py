"""Heads with a window leave for engines that hide the same rows, and for no other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle.drafters.parts.window import Window
from eagle.drafters.recurrent.hass import Hass
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import read_head
from eagle.recipe import Recipe
from tests.drafters.recurrent.test_hass import started
from tests.formats.test_foreign_round_trip import proposals
from tests.unrolled_heads import NARROW, SHAPE, frozen_head, new_head


@pytest.mark.parametrize("engine", EXPORTERS)
@pytest.mark.parametrize(("name", "sinks"), [("eagle3", 0), ("eagle3", 2), ("hass", 0)])
def test_only_an_engine_that_slides_gets_one(
    engine: str, name: str, sinks: int, tmp_path: Path
) -> None:
    """vLLM with EAGLE-3 and no sinks; all others say what they would read."""
    shape = NARROW if engine == "eagle" else SHAPE
    changes = {"fc_bias": False} if name == "hass" else {}
    head = new_head(tmp_path, name, shape=shape, window=Window(sinks, 5), **changes).bind(
        frozen_head(torch.float32)
    )
    if (engine, name, sinks) == ("vllm", "eagle3", 0):
        config = EXPORTERS[engine](head, shape).config
        assert (config["sliding_window"], config["layer_types"]) == (5, ["sliding_attention"])
    else:
        with pytest.raises(
            ValueError,
            match=f"{engine}: (drafter.window is .*Train without|no layout|.*is a head, which)",
        ):
            EXPORTERS[engine](head, shape)


def test_it_comes_back_with_its_window(tmp_path: Path) -> None:
    """From its own folder, and from vLLM's layout, with every proposal; without the layer types it is refused."""
    head = new_head(tmp_path, "eagle3", window=Window(0, 5)).bind(frozen_head(torch.float32))
    save_head(tmp_path / "own", head, "", {})
    export(head, SHAPE, "vllm", tmp_path / "out")
    for back in (load_head(tmp_path / "own"), read_head(tmp_path / "out")):
        assert back.settings.window == Window(0, 5)
        assert proposals(back) == proposals(head)
    assert proposals(new_head(tmp_path, "eagle3")) != proposals(head)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    del config["layer_types"]
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="sliding_window is 5"):
        read_head(tmp_path / "out")


@pytest.mark.parametrize(
    ("had", "asked"), [(None, Window(4, 64)), (Window(4, 64), Window(0, 8)), (Window(1, 2), None)]
)
def test_a_head_goes_on_with_another_window(
    had: Window | None, asked: Window | None, tmp_path: Path
) -> None:
    """`train.init` takes every weight of a head that saw more of a text, or less."""
    given = Hass.for_target(Hass.Settings(window=had), SHAPE)
    save_head(tmp_path / "head", given, "", {})
    head = started(
        Recipe.load("recipes/tiny/hass.yaml"), Hass.Settings(window=asked), tmp_path / "head"
    )
    assert head.window == asked
    assert all(head.state_dict()[name].equal(tensor) for name, tensor in given.state_dict().items())
