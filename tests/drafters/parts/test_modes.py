"""Files that are written can be read by whom the umask lets read them, such as a server of another user."""

from __future__ import annotations

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
from eagle.drafters.lookup.counts import save_tables
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.drafters.recurrent.reduced_vocab import save_draft_vocab
from eagle.formats.checkpoint import save_head, write_budget
from eagle.formats.export import export
from eagle.formats.reading.foreign import import_head
from eagle.target.borrowed import save_borrowed
from tests.engines.compare_engines import merge_rows
from tests.tables import some_tables


@pytest.fixture(params=[0o077, 0o002], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set the umask of a user who does not share files, or of a group."""
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    """Return the mode of every file in a folder, however deep."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[str(path.relative_to(folder))] = oct(path.stat().st_mode & 0o777)
    return found


def write_store(target: Target, folder: Path) -> None:
    """Write a store of features of one text, with what the target lends to heads."""
    example = Example(torch.arange(20, 40), torch.ones(20, dtype=torch.bool))
    store = FeatureStore.create(
        folder,
        [example],
        {"taps": [-1], "dtype": "float32"},
        [[[0]]],
        width=target.config.hidden_size,
        borrowed={},
    )
    for _ in extract(target, store, [0]):
        pass
    save_borrowed(folder, target.head, target.config)


def test_every_writer_follows_the_umask(
    umask: int,
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Heads, exports, imports, stores, tables, vocabularies and reports have the mode of any new file."""
    config = tiny_target.config
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), config).bind(tiny_target.head)
    save_head(tmp_path / "head", head, "a: recipe", {})
    write_budget(tmp_path / "head", Budget(2, 2, 1))
    for engine in ("vllm", "sglang", "eagle"):
        export(head, config, engine, out=tmp_path / engine, head=tmp_path / "head")  # fmt: skip
    # an import reads the target's vocabulary
    target_path = str(tiny_target.model.config._name_or_path)
    import_head(
        tmp_path / "vllm",
        tmp_path / "imported",
        target_path,
    )
    write_store(tiny_target, tmp_path / "store")
    save_draft_vocab(
        tmp_path / "vocab/draft.safetensors",
        torch.arange(64),
        8,
        {},
    )
    save_tables(tmp_path / "counts", some_tables(64), "bigram")
    write_text(tmp_path / "report.html", "text")
    columns = ("head", "target", "engine", "dtype", "draft", "prompts", "new_tokens")
    merge_rows([dict.fromkeys(columns, 0)], tmp_path / "engines.json")
    # tensors, JSON and text are written by different functions
    found = modes(tmp_path)
    assert len(found) > 25
    assert set(found.values()) == {oct(0o666 & ~umask)}, found


def test_the_tiny_target_follows_the_umask(tiny_target_dir: Path) -> None:
    """By itself transformers writes weights that their owner alone can read."""
    # a file that is made in the plainest way
    probe = tiny_target_dir / "probe"
    probe.touch()
    found = modes(tiny_target_dir)
    probe.unlink()
    assert set(found.values()) == {found["probe"]}, found


def test_a_written_file_leaves_links_and_devices_alone(tmp_path: Path) -> None:
    """A link's file is replaced and the link stays, a pipe is written to, and a folder is refused."""
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    write_text(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"

    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_text(tmp_path / "pipe", "through")
    assert os.read(reader, 99) == b"through"
    os.close(reader)

    with pytest.raises(ValueError, match="is a folder"):
        write_text(tmp_path, "text")
    # no temporary file is left
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe", "real"]
