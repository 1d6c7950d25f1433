"""A head goes to no target that it was not made for: every door refuses it and says what differs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target, generate, load_drafter
from eagle.__main__ import main
from eagle.doctor import examine
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import EXPORTERS
from eagle.formats.reading.foreign import import_head, inspect
from tests import foreign_heads as made
from tests.formats.every_layout import EVERY
from tests.registry import TRAINED
from tests.tables import some_tables

HEADS = [name for name in TRAINED if DRAFTERS[name].stored_as == "head"]
SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
OTHERS = {  # what another target has, and what a refusal says of it
    "vocabulary": (
        {"vocab_size": 40},
        "32 and 48 tokens, this one has 32 and 40|vocab_size is 48, the target's is 40",
    ),
    "width": (
        {"hidden_size": 64},
        "32 and 48 tokens, this one has 64 and 48|hidden_size is 32, the target's is 64",
    ),
    "layers": (
        {"num_hidden_layers": 2},
        "this one has 2 layers|target has no such layers|layers of 2|0 to 1",
    ),
}
LAYERED = (
    "layer_ids",
    "target_layer",
    "num_nextn",
)  # keys by which a config tells how deep the target is


def write_target(folder: Path, **changed: int) -> Target:
    """A random target on the disk, without a tokenizer."""
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**SIZES, **changed}))
    model.save_pretrained(folder)
    return Target(model)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of head for one target, and other targets beside it."""
    folder = tmp_path_factory.mktemp("others")
    target = write_target(folder / "target")
    for name in HEADS:
        method, settings = DRAFTERS[name], settings_of({"kind": name}, "test")
        weights = {"weights": target.tensor} if method.reads.weights else {}
        head = method.for_target(
            settings, target.config, target.head, [torch.arange(40)], **weights
        )
        save_head(folder / name, head, f"target: {{path: {folder / 'target'}}}\n", {})
    for what, (changed, _) in OTHERS.items():
        write_target(folder / what, **changed)
    return folder


@pytest.fixture(scope="module")
def targets(work: Path) -> dict[str, Target]:
    """All targets, loaded."""
    return {what: Target.load(work / what, dtype="float32") for what in (*OTHERS, "target")}


def misfits(kind: str) -> list[str]:
    """Which targets a head of a kind does not fit: one that reads the last state alone fits any number of layers."""
    deep = kind in ("eagle3", "peagle", "dflash", "dspark", "spire")
    return [what for what in OTHERS if what != "layers" or deep]


@pytest.mark.quick(
    "hass",
    "eagle3",
    "medusa",
    "mlp_speculator",
    "blockwise",
    "hydra",
    "falcon",
    "early_exit_adapter",
    "spire",
    "peagle",
    "mtp",
)
@pytest.mark.parametrize("kind", HEADS)
def test_it_is_not_loaded(kind: str, work: Path, targets: dict[str, Target]) -> None:
    """For decoding, measuring and serving, which all take it by `load_drafter`."""
    for what in misfits(kind):
        with pytest.raises(ValueError, match=OTHERS[what][1]) as error:
            load_drafter(work / kind, targets[what])
        assert "its recipe.yaml names" in str(error.value)
    assert generate(
        targets["target"], load_drafter(work / kind, targets["target"]), [1, 2, 3], max_new_tokens=2
    )


@pytest.mark.quick("blockwise", "early_exit_adapter")
@pytest.mark.parametrize("kind", HEADS)
def test_no_exporter_writes_it(kind: str, work: Path, targets: dict[str, Target]) -> None:
    """Nor does any that has a layout for its kind; a target that fits is told nothing of the sort."""
    for what in misfits(kind):
        target = targets[what]
        for engine, write in EXPORTERS.items():
            with pytest.raises(
                ValueError, match=f"{OTHERS[what][1]}|no layout|no model without"
            ) as error:
                write(load_head(work / kind).bind(target.head), target.config)
            assert str(error.value).startswith(f"{engine}: ")


@pytest.mark.parametrize("what", OTHERS)
def test_the_verbs_refuse_it(
    what: str, work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what differs, and with nothing written."""
    arguments = [str(work / "eagle3"), "--target", str(work / what)]
    for line in (
        ["export", *arguments, "--to", "vllm", str(tmp_path / "out")],
        ["doctor", *arguments],
    ):
        with pytest.raises((ValueError, SystemExit)) as error:
            main(line)
        assert re.search(OTHERS[what][1], str(error.value) + "".join(capsys.readouterr()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", HEADS)
def test_the_doctor_examines_no_other_targets_head(kind: str, work: Path) -> None:
    """Of any kind that it examines at all, before a target is loaded."""
    for what in misfits(kind):
        with pytest.raises(
            ValueError, match=f"{OTHERS[what][1]}|expected a head that reads the target's features"
        ):
            diagnosis = examine(work / kind, str(work / what))
            raise ValueError(diagnosis.verdict)


@pytest.mark.parametrize(
    ("name", "what"),
    [
        (name, what)
        for name, (config, _) in EVERY.items()
        for what in ("vocab_size", "hidden_size", "num_hidden_layers")
        if what != "num_hidden_layers" or any(key in str(config) for key in LAYERED)
    ],
)
def test_no_foreign_head_is_imported_for_it(name: str, what: str, tmp_path: Path) -> None:
    """Of any layout, where its files tell."""
    config, tensors = EVERY[name]
    changed = {
        what: {"vocab_size": made.V - 4, "hidden_size": made.H + 8, "num_hidden_layers": 2}[what]
    }
    folder, target = (
        made.write(tmp_path / "head", (config, tensors)),
        made.write_target(tmp_path / "target", **changed),
    )
    with pytest.raises(ValueError, match="target"):
        import_head(folder, tmp_path / "out", target)
    assert inspect(folder, target).fatal
    assert not (tmp_path / "out").exists()


def test_tables_are_of_one_vocabulary(targets: dict[str, Target], tmp_path: Path) -> None:
    """Counted drafters name tokens too."""
    for name, method in DRAFTERS.items():
        if method.stored_as == "files" and name != "draft_model":
            method(some_tables(48)).save(tmp_path / name)
            assert load_drafter(tmp_path / name, targets["target"])
            with pytest.raises(ValueError, match="48"):
                load_drafter(tmp_path / name, targets["vocabulary"])
