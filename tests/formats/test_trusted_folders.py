"""What is read of a head's folder only where the user trusts it, and weights and links that never are."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eagle import Target
from eagle.command import write_card
from eagle.command.share import pack
from eagle.command.ship import run_inspect
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import from_pretrained, load_head
from eagle.formats.reading.foreign import read_head
from eagle.recipe import Recipe, Trust
from eval import lossless, measure, tune
from tests.formats.hostile_place import (
    NOTES,
    OPENED,
    SECRET,
    Place,
    bring_a_method,
    draft,
    link_notes,
    name_a_file,
)


def test_trusted_code_runs(place: Place, healthy: Path) -> None:
    """The gate opens for a method.py that is trusted, and for nothing else that the config names."""
    place.fill(healthy / "eagle1")
    bring_a_method(place)
    with pytest.raises(ValueError, match=r"Evil is called 'eagle1'|names the method 'evil'"):
        load_head(place.head, trust_code=True)
    assert place.marker.exists()

    place.marker.unlink()
    name_a_file(place)
    # trust is for the file whose checksum the head records, and not for paths
    words = r"settings\.kind is '.*evil\.py:Evil', which names code to run"
    with pytest.raises(ValueError, match=words):
        load_head(place.head, trust_code=True)
    assert not place.marker.exists()


def test_a_package_in_the_folder_offers_no_method(place: Place, healthy: Path) -> None:
    """Its metadata is found where the folder is on Python's path, and its entry point is not loaded for a head."""
    place.fill(healthy / "eagle1")
    place.write_module("evil.py")
    metadata = place.head / "evil-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[eagle.drafters]\nevil = evil:Evil\n")
    place.change("settings", kind="evil")
    words = r"drafter\.kind is 'evil', expected a method with weights"

    for load in (load_head, from_pretrained, lambda folder: draft(place, folder)):
        with pytest.raises(ValueError, match=words):
            load(place.head)
    assert not place.marker.exists()
    # a user who names the method loads it
    with pytest.raises(ValueError, match="that method is called 'eagle1'"):
        DRAFTERS.find("evil")
    assert place.marker.exists()


ANSWERS = {"source": "a.jsonl", "out": "b.jsonl"}
# the key that names code, and the values of its section
CODE_KEYS: dict[str, dict[str, Any]] = {
    "drafter.kind": {"kind": "evil.py:Evil"},
    "eval.drafters.mine.head": {"drafters": {"mine": {"head": "ngram,evil:Evil"}}},
    "regenerate.drafter": {**ANSWERS, "drafter": "evil.py:Evil"},
    "target.trust_remote_code": {"trust_remote_code": True},
}


@pytest.mark.parametrize("key", CODE_KEYS)
def test_a_recipe_beside_a_head_names_no_code(
    key: str,
    place: Place,
    healthy: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It does where the user says so: by trust, by the key itself, or by a recipe that lies elsewhere."""
    place.fill(healthy / "eagle1")
    section = key.split(".")[0]
    values = place.recipe.model_dump(mode="json")
    # the section as it was, as a user gives it on the command line
    harmless = json.dumps(values[section])
    values[section] = {**(values[section] or {}), **CODE_KEYS[key]}
    file = place.head / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))

    # each reads a recipe beside a head
    for verb in (measure, tune, lossless):
        with pytest.raises(ValueError, match=rf"would run code: {key} is .*--trust-code"):
            verb.main([str(file)])
    with pytest.raises(ValueError, match=rf"would run code: {key}"):
        Recipe.load(file, ["train.lr=1e-3"])
    assert Recipe.load(file, [f"{section}={harmless}"])
    assert Recipe.load(shutil.copy(file, place.run))

    monkeypatch.setattr(Trust, "in_recipes", True)
    assert Recipe.load(file)


# -- weights, adapters and links --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.nan, "holds numbers that are not finite"),
        (torch.inf, "holds numbers that are not finite"),
        (torch.int8, "is in torch.int8, expected plain floating-point numbers"),
        (torch.float8_e4m3fn, "is in torch.float8_e4m3fn, expected plain floating-point numbers"),
    ],
)
def test_weights_that_are_no_numbers_are_refused(
    value: Any,
    words: str,
    place: Place,
    healthy: Path,
) -> None:
    """One value of a tensor, or a dtype of no plain numbers; half precision is read."""
    place.fill(healthy / "eagle1")
    file = place.head / "model.safetensors"
    weights = load_file(file)
    # plain numbers of another precision are fine
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, file)

    assert load_head(place.head)

    name = sorted(weights)[-1]
    if isinstance(value, torch.dtype):
        weights[name] = weights[name].to(value)
    else:
        weights[name].view(-1)[-1] = value
    save_file(weights, file)
    for load in (load_head, from_pretrained, read_head, lambda folder: draft(place, folder)):
        with pytest.raises(ValueError, match=f"{name} {words}"):
            load(place.head)
    with pytest.raises(SystemExit):
        run_inspect([str(place.head)])


def test_an_adapter_names_no_module(place: Place, tiny_target: Target) -> None:
    """An adapter's config may name the package in which peft looks for parallel layers."""
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(tiny_target.model)
    lora = LoraConfig(r=2, target_modules="all-linear")
    get_peft_model(model, lora).save_pretrained(place.head)
    place.write_module("evil.py")
    file = place.head / "adapter_config.json"
    # peft imports what megatron_core names
    code = {"megatron_config": {"a": 1}, "megatron_core": "evil"}
    file.write_text(json.dumps({**json.loads(file.read_text()), **code}))

    with pytest.raises(ValueError, match="megatron_core"):
        tiny_target.with_adapter(place.head)
    assert not place.marker.exists()


def test_a_link_inside_of_a_folder_is_followed(place: Place, healthy: Path) -> None:
    """What is sent is the file that it leads to; a head may also be named by a link."""
    place.fill(healthy / "eagle1")
    moved = place.head / "moved.yaml"
    (place.head / "recipe.yaml").rename(moved)
    # relative, to a file of the same folder
    (place.head / "recipe.yaml").symlink_to("moved.yaml")
    upload = pack(place.head, "me/mine", [])

    assert upload.files["recipe.yaml"].read() == moved.read_bytes()

    (place.run / "latest").symlink_to(place.head)
    assert pack(place.run / "latest", "me/mine", [])


def test_a_link_that_leaves_a_folder_is_refused_by_its_name(place: Place, healthy: Path) -> None:
    """Beside a head, and in an export that goes alone or with a head."""
    place.fill(healthy / "eagle1")
    link_notes(place)
    with pytest.raises(ValueError, match="|".join(NOTES)):
        pack(place.head, "me/mine", [])

    for name in NOTES:
        (place.run / name).unlink()
    exported = place.run / "exported"
    shutil.copytree(place.head, exported, ignore=shutil.ignore_patterns("*.yaml"))
    (place.outside / "deep").mkdir()
    (exported / "deep").symlink_to(place.outside / "deep")
    # a link to a folder is no file: it stays, and the user is told
    upload = pack(exported, "me/mine", [])

    assert upload.left_out[str(exported / "deep")] == "is a link to no file, which is not followed"

    (exported / "sub").mkdir()
    (place.outside / "secret.txt").write_text(SECRET)
    (exported / "sub/notes.txt").symlink_to(place.outside / "secret.txt")
    words = r"sub/notes\.txt is a link to .*secret\.txt, outside of the folder"

    # alone, and with its head
    for folder, exports in ((exported, []), (place.head, [exported])):
        with pytest.raises(ValueError, match=words):
            pack(folder, "me/mine", exports)


def test_a_card_of_data_reads_no_link(place: Place) -> None:
    """Neither of conversations and the note beside them, nor of a store's index."""
    place.run.mkdir()
    secret = place.outside / "secret"
    secret.write_text(json.dumps({"note": SECRET}))
    answers = place.run / "answers.jsonl"
    answers.write_text(json.dumps({"conversations": []}) + "\n")
    (place.run / "answers.jsonl.settings").symlink_to(secret)
    store = place.run / "store"
    store.mkdir()
    (store / "index.json").symlink_to(secret)
    OPENED.clear()

    for path in (answers, store):
        with pytest.raises(ValueError, match="outside of the folder"):
            write_card.main([str(path), "--out", str(place.run / "card.md")])
    assert not place.opened_outside()
