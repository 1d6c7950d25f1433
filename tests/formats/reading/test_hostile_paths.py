"""Folders whose names and links lead elsewhere, and paths where an import must not write."""

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


def replace_by_link(path: Path, target: Path | str) -> None:
    """Put a link in place of what a path leads to."""
    path.unlink(missing_ok=True)
    path.symlink_to(target)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_links_that_leave_the_folder_are_refused(
    name: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    """Wherever they lead; inside of the folder they may."""
    moved = (folder / name).rename(folder / "moved")
    replace_by_link(folder / name, "moved")
    assert read_head(folder)

    moved.rename(tmp_path / "outside")
    replace_by_link(folder / name, tmp_path / "outside")
    assert "outside of the folder" in told(folder)

    # a link to itself
    replace_by_link(folder / name, name)
    assert "cannot be read" in told(folder)


def test_a_hubs_cache_links_into_its_own_store_alone(tmp_path: Path) -> None:
    """Snapshots are links to blobs beside them; those of another repository are none of theirs."""
    repository = tmp_path / "models--org--head"
    folder = made.write(repository / "snapshots/abc", made.eagle1())
    # as huggingface_hub lays out its cache
    blobs = repository / "blobs"
    blobs.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).rename(blobs / name)
        replace_by_link(folder / name, f"../../blobs/{name}")

    assert read_head(folder)

    other = tmp_path / "models--org--other/blobs"
    other.mkdir(parents=True)
    (blobs / "config.json").rename(other / "config.json")
    replace_by_link(folder / "config.json", other / "config.json")

    assert "outside of the folder" in told(folder)


def write_index(folder: Path, files: dict[str, str]) -> None:
    """Write an index that says in which file each tensor is."""
    text = json.dumps({"weight_map": files})
    (folder / "model.safetensors.index.json").write_text(text)


@pytest.mark.parametrize(
    "name", ["../../secret.safetensors", "/etc/passwd", "..", "a/b.safetensors", "", "x\0y", "sub"]
)
def test_an_index_names_files_of_its_folder(
    name: str,
    folder: Path,
    tmp_path: Path,
) -> None:
    """And nothing else, whatever is there."""
    (folder / "model.safetensors").rename(tmp_path / "secret.safetensors")
    (folder / "sub").mkdir()
    write_index(folder, {"fc.weight": name})
    assert told(folder)


def test_shards_by_an_index(folder: Path) -> None:
    """Tensors of one head in two files; the same tensor in both is refused."""
    tensors = made.speculators()[1]
    names = sorted(tensors)

    def write_shard(file: str, shard: list[str]) -> None:
        save_file({name: tensors[name] for name in shard}, folder / file)

    (folder / "model.safetensors").unlink()
    write_shard("a.safetensors", names[:5])
    write_shard("b.safetensors", names[5:])
    files = dict.fromkeys(names[:5], "a.safetensors") | dict.fromkeys(names[5:], "b.safetensors")
    write_index(folder, files)

    assert torch.equal(read_head(folder).state_dict()["fc.weight"], tensors["fc.weight"])

    # one tensor in both files
    write_shard("b.safetensors", names[4:])
    assert "another file holds too" in told(folder)

    # one that the index names in neither
    write_shard("b.safetensors", names[6:])
    assert "index and files differ" in told(folder)


def test_what_is_not_a_file_is_not_opened(folder: Path) -> None:
    """A folder, and a pipe that nobody writes to."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    assert "is not a file" in told(folder)

    (folder / "config.json").unlink()
    # opening it for reading would wait for ever
    os.mkfifo(folder / "config.json")
    assert "is not a file" in told(folder)


@pytest.mark.parametrize(
    "out", ["head", "head/out", ".", "full", "file", "link", "dangling", "part"]
)
def test_nothing_is_overwritten(out: str, tmp_path: Path) -> None:
    """Neither the checkpoint, nor what is around it, nor anything that is there already."""
    root = tmp_path / "work"
    folder = made.write(root / "head", made.speculators())
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (root / "full").mkdir()
    (root / "full/mine.txt").write_text("mine")
    (root / "file").write_text("mine")
    (root / "link").symlink_to(elsewhere)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    # the name under which an import writes `part` first
    (root / "part.part").symlink_to(elsewhere)
    refused(folder, root / out)

    assert not list(elsewhere.iterdir())
    assert not (tmp_path / "nowhere").exists()


def test_an_empty_folder_is_filled_and_one_that_is_missing_made(
    folder: Path, tmp_path: Path
) -> None:
    """And nothing else appears beside them."""
    (tmp_path / "empty").mkdir()
    files = {"config.json", "model.safetensors", "provenance.json", "recipe.yaml"}
    for out in (tmp_path / "empty", tmp_path / "deep/new"):
        import_head(folder, out)
        assert {path.name for path in out.iterdir()} == files
    assert {path.name for path in tmp_path.iterdir()} == {"deep", "empty", "head"}


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    """With the same kind of error, by both."""
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "missing", tmp_path / "file", Path("a\0b")):
        with pytest.raises(ValueError, match="expected one with"):
            import_head(path, tmp_path / "out")
        with pytest.raises(ValueError, match="expected one with"):
            inspect(path)
