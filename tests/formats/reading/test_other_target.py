"""A head goes to no target that it was not made for: every command refuses it and says what differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from eagle import Target, generate, load_drafter
from eagle.__main__ import main
from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import save_head
from eagle.formats.reading.foreign import import_head, inspect
from tests import foreign_heads as made
from tests.formats.every_layout import EVERY
from tests.formats.make_heads import make_head, write_target
from tests.registry import TRAINED

HEADS = [name for name in TRAINED if DRAFTERS[name].stored_as == "head"]
# heads that read states below the last, and do not fit a shallower target
DEEP = ("eagle3", "peagle", "dflash", "dspark", "spire")
# the sizes of other targets
OTHERS = {
    "vocabulary": {"vocab_size": 40},
    "width": {"hidden_size": 64},
    "layers": {"num_hidden_layers": 2},
}
# and what a refusal says of them
WORDS = {
    "vocabulary": "32 and 48 tokens, this one has 32 and 40|vocab_size is 48, the target's is 40",
    "width": "32 and 48 tokens, this one has 64 and 48|hidden_size is 32, the target's is 64",
    "layers": "this one has 2 layers|target has no such layers|layers of 2|0 to 1",
}
# keys by which a config tells how deep the target is
DEPTH_KEYS = ("layer_ids", "target_layer", "num_nextn")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every kind of head for one target, and other targets beside it."""
    folder = tmp_path_factory.mktemp("others")
    target = write_target(folder / "target")
    for kind in HEADS:
        recipe = f"target: {{path: {folder / 'target'}}}\n"
        save_head(folder / kind, make_head({"kind": kind}, target), recipe, {})
    for what, sizes in OTHERS.items():
        write_target(folder / what, **sizes)
    return folder


@pytest.fixture(scope="module")
def targets(work: Path) -> dict[str, Target]:
    """All targets, loaded."""
    return {name: Target.load(work / name, dtype="float32") for name in (*OTHERS, "target")}


def list_misfits(kind: str) -> list[str]:
    """Return the targets that a head of a kind does not fit."""
    return [what for what in OTHERS if what != "layers" or kind in DEEP]


@pytest.mark.quick(
    "hass",
    "eagle3",
    "medusa",
    "hydra",
    "falcon",
    "spire",
    "peagle",
    "mtp",
)
@pytest.mark.parametrize("kind", HEADS)
def test_it_is_not_loaded(
    kind: str,
    work: Path,
    targets: dict[str, Target],
) -> None:
    """For decoding, measuring and serving, which all take it by `load_drafter`."""
    for what in list_misfits(kind):
        with pytest.raises(ValueError, match=WORDS[what]) as refusal:
            load_drafter(work / kind, targets[what])
        assert "its recipe.yaml names" in str(refusal.value)
    target = targets["target"]
    drafter = load_drafter(work / kind, target)
    assert generate(target, drafter, [1, 2, 3], max_new_tokens=2)


@pytest.mark.parametrize("what", OTHERS)
def test_the_commands_refuse_it(
    what: str,
    work: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With what differs, and with nothing written."""
    arguments = [str(work / "eagle3"), "--target", str(work / what)]
    for line in (
        ["export", *arguments, "--to", "vllm", str(tmp_path / "out")],
        ["doctor", *arguments],
    ):
        with pytest.raises((ValueError, SystemExit)) as refusal:
            main(line)
        printed = capsys.readouterr()
        assert re.search(WORDS[what], f"{refusal.value} {printed.out} {printed.err}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", EVERY)
def test_no_foreign_head_is_imported_for_it(name: str, tmp_path: Path) -> None:
    """Of any layout, as far as its files tell."""
    # every layout tells both of these
    others = {"vocab_size": made.V - 4, "hidden_size": made.H + 8}
    if any(key in str(EVERY[name][0]) for key in DEPTH_KEYS):
        others["num_hidden_layers"] = 2
    folder = made.write(tmp_path / "head", EVERY[name])
    for key, size in others.items():
        target = made.write_target(tmp_path / key, **{key: size})
        with pytest.raises(ValueError, match="target"):
            import_head(folder, tmp_path / "out", target)
        assert inspect(folder, target).fatal
    assert not (tmp_path / "out").exists()
