"""What `inspect` finds in heads that draft several tokens at once: a mask token of texts, and taps out of order."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle.formats.networks.block_heads import DFLASH_HEADS
from eagle.formats.reading import lint
from eagle.formats.reading.config_keys import Keys
from eagle.formats.reading.files import FolderTensors
from eagle.formats.reading.head_folder import HeadFolder
from eagle.formats.reading.target_files import TargetFiles


@pytest.fixture
def target(tmp_path: Path) -> TargetFiles:
    """Ten tokens, of which the first is special and the last three are in no tokenizer."""
    pieces = {f"t{number}": number for number in range(7)}
    added = [{"id": 0, "content": "t0", "special": True}]
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": pieces}, "added_tokens": added})
    )
    return TargetFiles(str(tmp_path), 4, 8, 10, None, {}, False, {}, FolderTensors({}, {}))


def find(settings: dict[str, object], target: TargetFiles | None) -> list[str]:
    """The findings for a head with these settings."""
    head = HeadFolder(
        Path(), {}, FolderTensors({}, {}), Keys({}), Keys({}), Keys({}), target, settings=settings
    )
    return [lint.describe_fault(found).what for found in lint.check_masked(head, DFLASH_HEADS)]


def test_a_mask_that_texts_contain_is_named(target: TargetFiles) -> None:
    """Not a special token, one beyond the tokenizer, or the last; nothing is said without a target."""
    (what,) = find({"mask_token": 5}, target)
    assert "mask_token is 5 ('t5'), an ordinary token" in what
    assert not any(find({"mask_token": token}, target) for token in (0, 7, 9))
    assert not find({"mask_token": 5}, None) and not find({}, target)
    (Path(target.path) / "tokenizer.json").write_text("no JSON")
    assert not find({"mask_token": 5}, target)


def test_taps_out_of_order_are_named() -> None:
    """As the config has them, whatever the target."""
    assert not find({"taps": (1, 3, 4)}, None)
    (what,) = find({"taps": (3, 1, 4)}, None)
    assert "layer ids [3, 1, 4] are not in order" in what
