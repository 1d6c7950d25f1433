"""A head's folder that is torn, another tool's, or of another release: a sentence with the file, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import load_drafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.card import model_card
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import export
from eagle.target.target import Target

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target."""
    torch.manual_seed(0)
    return Target(LlamaForCausalLM(LlamaConfig(**SIZES)))


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    """A head as training leaves it."""
    settings = settings_of({"kind": "eagle3", "taps": (2, 4, 5)}, "test")
    head = DRAFTERS["eagle3"].for_target(settings, target.config, target.head, ())
    save_head(tmp_path / "head", head, "target: {path: some/target}\n", {"torch": "1"})
    return tmp_path / "head"


def change_config(folder: Path, **changed: Any) -> None:
    """Other keys in config.json; None takes one out."""
    config = {**json.loads((folder / "config.json").read_text()), **changed}
    (folder / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )


def change_weights(folder: Path, **changed: Any) -> None:
    """Other tensors; a double underscore stands for a dot."""
    weights = load_file(folder / "model.safetensors")
    weights |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
    save_file(
        {name: tensor for name, tensor in weights.items() if tensor is not None},
        folder / "model.safetensors",
    )


def cut(folder: Path, name: str, keep: int) -> None:
    """Leave the first bytes of a file."""
    (folder / name).write_bytes((folder / name).read_bytes()[:keep])


TORN = {
    "weights cut short": (
        lambda folder: cut(folder, "model.safetensors", 5000),
        "model.safetensors",
    ),
    "weights cut in the header": (
        lambda folder: cut(folder, "model.safetensors", 40),
        "model.safetensors",
    ),
    "weights empty": (lambda folder: cut(folder, "model.safetensors", 0), "model.safetensors"),
    "weights gone": (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors"),
    "weights of a hub's pointer": (
        lambda folder: (folder / "model.safetensors").write_text(
            "version https://git-lfs.github.com/spec/v1\n" * 9
        ),
        "model.safetensors",
    ),
    "config cut short": (lambda folder: cut(folder, "config.json", 30), "config.json"),
    "config empty": (lambda folder: cut(folder, "config.json", 0), "config.json"),
    "config no text": (
        lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"),
        "config.json",
    ),
    "config a list": (lambda folder: (folder / "config.json").write_text("[1]"), "eagle import"),
    "no shape": (
        lambda folder: change_config(folder, shape=None),
        "expected the keys settings and shape",
    ),
    "settings a word": (
        lambda folder: change_config(folder, settings="eagle3"),
        "expected the keys settings and shape",
    ),
    "no model_type": (
        lambda folder: change_config(folder, shape={"hidden_size": 32}),
        "config.json",
    ),
    "sizes of a wrong kind": (
        lambda folder: change_config(folder, shape={"model_type": "llama", "hidden_size": "x"}),
        "config.json",
    ),
    "other sizes": (
        lambda folder: change_weights(folder, fc__weight=torch.zeros(32, 64)),
        r"fc\.weight is \[32, 64\], expected \[32, 96\]",
    ),
    "a tensor missing": (lambda folder: change_weights(folder, fc__weight=None), "fc.weight"),
    "a newer method": (
        lambda folder: change_config(folder, settings={"kind": "eagle9"}),
        "kind is 'eagle9'.*newer release",
    ),
    "a newer setting": (
        lambda folder: change_config(
            folder, settings={"kind": "eagle3", "taps": [2, 4, 5], "warp": 1}
        ),
        "warp.*newer release",
    ),
    "a budget of another release": (
        lambda folder: change_config(folder, budget={"nodes": 3, "warp": 1}),
        "budget",
    ),
    "a budget that is none": (lambda folder: change_config(folder, budget=[3]), "budget"),
}


@pytest.mark.parametrize("name", TORN)
def test_a_spoilt_folder_is_refused_with_what_is_wrong_in_it(
    name: str, folder: Path, target: Target
) -> None:
    """By `load_head`, and by `load_drafter`, which users call."""
    spoil, says = TORN[name]
    spoil(folder)
    for load in (load_head, lambda path: load_drafter(path, target)):
        with pytest.raises(ValueError, match=f"(?s){says}") as refused:
            load(folder)
        assert str(folder) in str(refused.value)


@pytest.mark.parametrize("engine", ["vllm", "speculators", "eagle"])
def test_an_exported_folder_is_no_head_to_train_from(
    engine: str, folder: Path, target: Target, tmp_path: Path
) -> None:
    """The message names the command that makes one of it."""
    export(load_head(folder).bind(target.head), target.config, engine, tmp_path / "out", folder)
    with pytest.raises(ValueError, match=rf"eagle import {tmp_path / 'out'}"):
        load_head(tmp_path / "out")


def test_recipe_and_provenance_are_not_needed(folder: Path, target: Target, tmp_path: Path) -> None:
    """A head without them loads, drafts and is exported; a card, which is made of them, says what it lacks."""
    (folder / "recipe.yaml").unlink()
    (folder / "provenance.json").unlink()
    assert load_drafter(folder, target).taps == (2, 4, 5)
    export(load_head(folder).bind(target.head), target.config, "vllm", tmp_path / "out", folder)
    assert "Unknown" in (tmp_path / "out/README.md").read_text()
    with pytest.raises(
        ValueError, match=r"recipe\.yaml and provenance\.json are missing.*eagle import"
    ):
        model_card(folder, "me/head")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.yaml", "a: [1"),
        ("recipe.yaml", "- 1"),
        ("provenance.json", "{"),
        ("provenance.json", "3"),
    ],
)
def test_torn_notes_are_named_and_nothing_is_written(
    name: str, text: str, folder: Path, target: Target
) -> None:
    """Before the export is half there."""
    (folder / name).write_text(text)
    with pytest.raises(ValueError, match=name):
        export(
            load_head(folder).bind(target.head),
            target.config,
            "vllm",
            folder.parent / "out",
            folder,
        )
    assert not (folder.parent / "out").exists()
