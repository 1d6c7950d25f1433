"""A place to work in with hostile folders, and healthy heads to spoil."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle import Target
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from tests.formats.hostile_place import OPENED, Place
from tests.formats.make_heads import make_head


@pytest.fixture(scope="session")
def _record_opened() -> None:
    """Record every file that is opened from here on."""
    sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


@pytest.fixture(scope="session")
def healthy(
    _record_opened: None,
    tiny_target: Target,
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """A folder with heads of a few kinds for the tiny target, as training leaves them."""
    folder = tmp_path_factory.mktemp("healthy")
    for kind in ("eagle1", "dflash", "peagle", "falcon", "mlp_speculator"):
        torch.manual_seed(0)
        save_head(
            folder / kind,
            make_head({"kind": kind}, tiny_target),
            "",
            {"torch": "1"},
        )
    return folder


@pytest.fixture
def place(
    _record_opened: None,
    tiny_target: Target,
    tiny_target_dir: Path,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    """A place to work in; the target, which is no part of the folder, is loaded once for all tests."""
    place = Place(tmp_path, recipe, tiny_target_dir / "target")
    # loading takes seconds, and its memory would count against the folder
    load_target = Target.load

    def load(path: Any, **options: Any) -> Target:
        return tiny_target if str(path) == place.target else load_target(path, **options)

    monkeypatch.setattr(Target, "load", load)
    # what `eagle chat` reads
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    # else importing code would leave files that look as if it had run
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    # as for whoever works in that folder
    monkeypatch.syspath_prepend(str(place.head))
    methods = set(DRAFTERS)
    tokenizer = tiny_target.tokenizer
    yield place
    tiny_target.tokenizer = tokenizer
    # code that ran on purpose registered a method
    for name in DRAFTERS.keys() - methods:
        del DRAFTERS[name]
    for name in list(sys.modules):
        if name.startswith("outside_") or name == "evil":
            del sys.modules[name]
