"""The comparison of layouts with sources sees a class, a tensor and a key that an engine no longer has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from eagle.formats.layout import Layout
from tests.engines.layout_sources import (
    compare_layout,
    find_reader,
    read_sources,
    source_table,
    write_layouts,
)

# head_flag is off, so that no engine need know it; hidden_size is known to all
LAYOUT = Layout(
    {"architectures": ["HeadForCausalLM"], "head_depth": 3, "head_flag": False, "hidden_size": 8},
    {"fc.weight": torch.zeros(1), "layers.0.mlp.up_proj.weight": torch.zeros(1)},
    "",
)
# an engine's package: a head, what it imports, and its config
SOURCES = {
    "engine/models/head.py": "from engine.models.block import Mlp\n\nclass HeadForCausalLM:\n    fc, mlp = 1, Mlp\n",
    "engine/models/block.py": "class Mlp:\n    up_proj = 2\n",
    "engine/config.py": "depth = config.head_depth\n",
}
# config keys that some engine reads
READ = {"head_depth"}


def test_what_an_engine_reads_is_found(tmp_path: Path) -> None:
    """In the file of the class and in those that it imports; a key that is off need not be known."""
    for name, text in SOURCES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_sources(tmp_path) == SOURCES
    assert compare_layout(LAYOUT, SOURCES, READ) == ("HeadForCausalLM", 4, [])


@pytest.mark.parametrize(
    ("file", "old", "new", "missing"),
    [
        ("engine/models/head.py", "fc,", "fusion,", ["fc"]),
        ("engine/models/block.py", "up_proj", "gate_up_proj", ["up_proj"]),
        (
            "engine/models/head.py",
            "class HeadForCausalLM",
            "class OtherForCausalLM",
            ["fc", "mlp", "up_proj"],
        ),
        (
            "engine/models/head.py",
            "from engine.models.block import Mlp",
            "Mlp = object",
            ["up_proj"],
        ),
    ],
)
def test_a_changed_engine_is_seen(file: str, old: str, new: str, missing: list[str]) -> None:
    """A renamed tensor, a block that is no longer there, a class of another name."""
    changed = {**SOURCES, file: SOURCES[file].replace(old, new)}
    reader, _, found = compare_layout(LAYOUT, changed, READ)
    assert found == missing and bool(reader) == ("Other" not in new)


def test_a_key_that_nothing_reads_is_named() -> None:
    """Where no engine knows it any more, and it is not off."""
    assert compare_layout(LAYOUT, SOURCES, set())[2] == ["head_depth"]


def test_a_class_is_found_by_the_engines_own_table() -> None:
    """By an entry of its registry, and by vLLM's prefix, before the class of that very name."""
    table = {
        "registry.py": 'TABLE = {"HeadForCausalLM": ("head", "LlamaHead")}',
        "head.py": "class LlamaHead:\n",
    }
    assert find_reader(["HeadForCausalLM"], table) == ("LlamaHead", "head.py")
    both = {"llama.py": "class Llama:\n", "eagle.py": "class EagleLlama:\n"}
    assert find_reader(["Unknown", "Llama"], both) == ("EagleLlama", "eagle.py")


def test_every_layout_is_asked_about() -> None:
    """Each method that vLLM serves but MTP, whose layers lie in a target's folder; the table tells where one ends."""
    layouts = {method: until for method, _, until in write_layouts("vllm")}
    assert {"eagle1", "eagle3", "dflash", "dspark", "peagle"} <= {
        name for name, until in layouts.items() if not until
    }
    assert layouts["medusa"] == "0.32.0"

    row = {
        "engine": "vllm",
        "version": "0.33.0",
        "method": "medusa",
        "reader": "",
        "words": 6,
        "missing": ["blocks"],
    }
    assert "nothing since 0.32.0" in source_table([{**row, "until": "0.32.0"}])
