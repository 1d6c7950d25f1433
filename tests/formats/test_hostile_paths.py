"""Folders whose names and links lead elsewhere, and places where an import must not write."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made
from tests.foreign_heads import refused, told


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy head."""
    return made.write(tmp_path / "head", made.speculators())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_that_leave_the_folder_are_refused(name: str, folder: Path, tmp_path: Path) -> None:
    """Wherever they lead; inside of the folder they may."""
    (folder / name).rename(folder / "moved")
    (folder / name).symlink_to("moved")
    assert read_head(folder)
    (folder / "moved").rename(tmp_path / "outside")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "outside")
    assert "outside of the folder" in told(folder)
    (folder / name).unlink()
    (folder / name).symlink_to(name)
    assert "cannot be read" in told(folder)


def test_a_hubs_cache_links_into_its_own_store_alone(tmp_path: Path) -> None:
    """Snapshots are links to blobs beside them; those of another repository are none of theirs."""
    repo = tmp_path / "models--org--head"
    folder = made.write(repo / "snapshots/abc", made.eagle1())
    (repo / "blobs").mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(repo / "blobs" / f"blob-{name}")
        (folder / name).symlink_to(f"../../blobs/blob-{name}")
    assert read_head(folder)
    other = tmp_path / "models--org--other/blobs"
    other.mkdir(parents=True)
    (repo / "blobs/blob-config.json").rename(other / "config.json")
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(other / "config.json")
    assert "outside of the folder" in told(folder)


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", "x\0y", "sub"]
)
def test_an_index_names_files_of_its_folder(name: str, folder: Path, tmp_path: Path) -> None:
    """And nothing else, whatever lies there."""
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (folder / "sub").mkdir()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": name}})
    )
    assert told(folder)


def test_shards_by_an_index(folder: Path) -> None:
    """Parts of one head in two files; the same tensor in both is refused."""
    tensors = made.speculators()[1]
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    for part, held in (("a", names[:5]), ("b", names[5:])):
        save_file({name: tensors[name] for name in held}, folder / f"{part}.safetensors")
    where = {name: "a.safetensors" if name in names[:5] else "b.safetensors" for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert torch.equal(read_head(folder).state_dict()["fc.weight"], tensors["fc.weight"])
    save_file({name: tensors[name] for name in names[4:]}, folder / "b.safetensors")
    assert "another file holds too" in told(folder)
    save_file({name: tensors[name] for name in names[6:]}, folder / "b.safetensors")
    assert "index and files differ" in told(folder)


def test_what_is_not_a_file_is_not_opened(folder: Path) -> None:
    """A folder, and a pipe that nobody writes to."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "is not a file" in told(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    assert "is not a file" in told(folder)


@pytest.mark.parametrize(
    "where", ["head", "head/out", ".", "full", "file", "link", "dangling", "part"]
)
def test_nothing_is_overwritten(where: str, tmp_path: Path) -> None:
    """Neither the checkpoint, nor what lies around it, nor anything that is there already."""
    folder = made.write(tmp_path / "work/head", made.speculators())
    root = tmp_path / "work"
    (root / "full").mkdir()
    (root / "full/mine.txt").write_text("mine")
    (root / "file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (root / "link").symlink_to(tmp_path / "elsewhere")
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "part.part").symlink_to(tmp_path / "elsewhere")
    refused(folder, root / where)
    assert not list((tmp_path / "elsewhere").iterdir()) and not (tmp_path / "nowhere").exists()


def test_an_empty_folder_is_filled_and_one_that_is_missing_made(
    folder: Path, tmp_path: Path
) -> None:
    """And nothing else appears beside them."""
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "deep/new"):
        import_head(folder, out)
        assert sorted(path.name for path in out.iterdir()) == [
            "config.json",
            "model.safetensors",
            "provenance.json",
            "recipe.yaml",
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["deep", "empty", "head"]


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """With the same kind of error, by both."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file", Path("a\0b")):
        for action in (lambda path: import_head(path, tmp_path / "out"), inspect):
            with pytest.raises(ValueError, match="expected one with"):
                action(path)
