"""A head goes to disk and to a hub, and comes back as it was; what is no head is refused."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import snapshot_download

from eagle import Target, load_drafter
from eagle.core.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats import checkpoint as module
from eagle.formats.card import model_card
from eagle.formats.checkpoint import from_pretrained, save_head, save_pretrained
from eagle.recipe import Recipe


@pytest.fixture
def head(tiny_target: Target) -> TrainableDrafter:
    """A new head for the tiny target."""
    torch.manual_seed(1)
    return DRAFTERS["eagle1"].for_target(
        settings_of({"kind": "eagle1", "fc_bias": False}, "test"), tiny_target.config
    )


@pytest.fixture
def folder(head: TrainableDrafter, recipe: Recipe, tmp_path: Path) -> Path:
    """That head as a run leaves it, with metrics and results beside it."""
    made = {"torch": torch.__version__, "validation": {"tree_tau": 2.5}}
    save_head(tmp_path / "head", head, recipe.dump(), made)
    steps = [
        {"step": step, "total": 9.0 - step / 100, "regression": 1.0, "lr": 1e-3}
        for step in range(0, 201, 10)
    ]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in [*steps, {"step": 200}])
    )
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in results()))
    return tmp_path / "head"


def results() -> list[dict[str, Any]]:
    """Two runs of a measurement, of which the second counts."""
    common = {"temperature": 0.0, "identical": True, "loops": False, "tokens": 9, "seconds": 1.0}
    row = {**common, "drafter": "eagle1", "committed": 30, "cycles": 10}
    none = {**common, "drafter": "none", "committed": 5, "cycles": 5}
    return [
        {"run": {"date": "old"}},
        {**row, "cycles": 1},
        {"run": {"date": "new"}},
        none,
        row,
        {**row, "cycles": 6},
    ]


def same(one: TrainableDrafter, other: TrainableDrafter) -> bool:
    """Bit for bit."""
    theirs = other.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in one.state_dict().items())


def test_a_head_comes_back_from_its_folder(head: TrainableDrafter, tmp_path: Path) -> None:
    """Settings, shape and every bit; a planted change is seen."""
    save_pretrained(head, tmp_path / "a/b")
    loaded = from_pretrained(tmp_path / "a/b")
    assert loaded.settings == head.settings and same(loaded, head)
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]
    with torch.no_grad():
        head.fc.weight[0, 0] += 1e-3
    assert not same(loaded, head)


def test_a_folder_that_is_no_head_says_what_is_wrong(folder: Path) -> None:
    """Nothing there, another project's config, pickled weights."""
    with pytest.raises(ValueError, match="expected the keys settings and shape"):
        (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        from_pretrained(folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"model\.safetensors missing"):
        from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"config\.json, model\.safetensors missing"):
        from_pretrained(folder)


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as one repository with one revision needs."""

    files: dict[str, bytes]
    asked: list[str]

    def do_GET(self) -> None:
        """The list of files, or a file."""
        self.answer(True)

    def do_HEAD(self) -> None:
        """A file's headers."""
        self.answer(False)

    def answer(self, body: bool) -> None:
        """What a hub says of the path."""
        self.asked.append(self.path)
        name = self.path.split("?")[0].rsplit("/", 1)[-1]
        if self.path.startswith("/api/models/someone/head/tree/"):
            entries = [
                {"type": "file", "path": file, "size": len(data), "oid": file}
                for file, data in self.files.items()
            ]
            data = json.dumps(entries).encode()
        elif self.path.startswith("/api/models/someone/head"):
            siblings = [{"rfilename": file} for file in self.files]
            data = json.dumps(
                {"id": "someone/head", "sha": "a" * 40, "siblings": siblings}
            ).encode()
        elif "/someone/head/" in self.path and name in self.files:
            data = self.files[name]
        else:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{name}"')
        self.send_header("X-Repo-Commit", "a" * 40)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Hub]]:
    """A hub on this machine that holds the head, and weights of another format."""
    Hub.files = {path.name: path.read_bytes() for path in folder.iterdir()} | {
        "pytorch_model.bin": b"pickled"
    }
    Hub.asked = []
    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"

    def local(name: str, **kwargs: Any) -> str:
        return snapshot_download(
            name, endpoint=address, cache_dir=tmp_path / "cache", token=False, **kwargs
        )

    monkeypatch.setattr(module, "snapshot_download", local)
    yield Hub
    server.shutdown()
    server.server_close()


def test_a_head_comes_from_a_hub(
    head: TrainableDrafter, hub: type[Hub], tiny_target: Target
) -> None:
    """By its id, without the weights of other formats; an id that is not there is refused."""
    assert same(from_pretrained("someone/head"), head)
    assert same(from_pretrained("someone/head", revision="main"), head)
    assert load_drafter("someone/head", tiny_target).settings == head.settings  # type: ignore[attr-defined]
    assert not [path for path in hub.asked if "pytorch_model" in path]
    with pytest.raises(
        ValueError, match="no head at someone/other: expected a folder, or a hub id"
    ):
        from_pretrained("someone/other")


def test_a_card_tells_what_the_files_tell(folder: Path, recipe: Recipe) -> None:
    """Front matter that parses, the target, the settings, the ends of the curve, the acceptance of the newest run."""
    card = model_card(folder, "someone/head")
    front = yaml.safe_load(card.split("---")[1])
    assert front["library_name"] == "eagle" and "eagle1" in front["tags"]
    assert "base_model" not in front  # the tiny target is a folder
    assert (
        recipe.target.path in card
        and f"| `lr` | {recipe.train.lr} |" in card
        and recipe.data.train in card
    )
    assert "| 0 | 9 | 1 |" in card and "| 200 | 7 | 1 |" in card and "| `tree_tau` | 2.5 |" in card
    assert f"| 0 | `eagle1` | {(30 + 30) / (10 + 6):.4g} |" in card and "date new" in card
    for path in ("metrics.jsonl", "results.jsonl"):
        (folder.parent / path).unlink()
    bare = model_card(folder, "someone/head")
    assert "## Curve" not in bare and "## Acceptance" not in bare
