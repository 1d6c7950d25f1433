"""What is written can be read by whom the umask lets read it, as a server under another user."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from eagle import Target
from eagle.core.budget import Budget
from eagle.core.examples import Example
from eagle.data.features import extract
from eagle.data.store import FeatureStore
from eagle.disk import write_text
from eagle.drafters.lookup.counts import Tables, save_tables
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.reduced_vocab import save_draft_vocab
from eagle.formats.checkpoint import save_head, write_budget
from eagle.formats.export import export
from eagle.formats.reading.foreign import import_head
from eagle.target.borrowed import save_borrowed
from tests.engines.compare_engines import merge_rows


@pytest.fixture(params=[0o022, 0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """The umask of a user who shares, of one who does not, and of a group."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """The mode of every file in a folder, however deep."""
    return {
        str(path.relative_to(folder)): oct(path.stat().st_mode & 0o777)
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_every_writer_follows_the_umask(umask: int, tiny_target: Target, tmp_path: Path) -> None:
    """Heads, exports, imports, stores, tables, vocabularies, texts."""
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), tiny_target.config).bind(
        tiny_target.head
    )
    save_head(tmp_path / "head", head, "a: recipe", {})
    write_budget(tmp_path / "head", Budget(2, 2, 1))
    for engine in ("vllm", "sglang", "eagle"):
        export(head, tiny_target.config, engine, tmp_path / engine, tmp_path / "head")
    import_head(
        tmp_path / "vllm", tmp_path / "imported", str(tiny_target.model.config._name_or_path)
    )
    example = Example(torch.arange(20, 40), torch.ones(20, dtype=torch.bool))
    identity = {"taps": [-1], "dtype": "float32"}
    about = {"width": tiny_target.config.hidden_size, "borrowed": {}}
    list(
        extract(
            tiny_target,
            FeatureStore.create(tmp_path / "store", [example], identity, [[[0]]], **about),
            [0],
        )
    )
    save_borrowed(tmp_path / "store", tiny_target.head, tiny_target.config)
    save_draft_vocab(tmp_path / "vocab/draft.safetensors", torch.arange(64), 8, {})
    none = torch.zeros(0, dtype=torch.int64)
    save_tables(
        tmp_path / "counts",
        Tables(torch.arange(64), torch.zeros(65, dtype=torch.int64), none, none),
        "bigram",
    )
    write_text(tmp_path / "report.html", "text")
    row = dict.fromkeys(("head", "target", "engine", "dtype", "draft", "prompts", "new_tokens"), 0)
    merge_rows([row], tmp_path / "engines.json")
    assert json.loads((tmp_path / "engines.json").read_text()) == [row]
    found = modes(tmp_path)
    assert len(found) > 25 and set(found.values()) == {oct(0o666 & ~umask)}, found


def test_the_tiny_target_follows_the_umask(tiny_target_dir: Path) -> None:
    """Transformers writes weights that their owner alone can read."""
    (tiny_target_dir / "probe").touch()
    found = modes(tiny_target_dir)
    assert set(found.values()) == {found["probe"]}, found
    (tiny_target_dir / "probe").unlink()


def test_a_written_file_leaves_links_and_devices_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A link's file is replaced, not the link; what is no file is written to; a folder is refused."""
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)
    with pytest.raises(ValueError, match="is a folder: name a file"):
        write_text(tmp_path, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "real"]
