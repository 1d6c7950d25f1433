"""Folders of heads that were made to do harm, in every command and in Python: no code of theirs runs, nothing leaks."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from eagle import Target
from eagle.__main__ import VERBS, find_program, main
from eagle.command.share import next_step, pack, run_push
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import from_pretrained, load_head
from eagle.formats.reading.foreign import read_head
from eagle.training.start import first_head
from eagle.transformers import WithDrafter
from tests.formats.hostile_place import (
    OPENED,
    SECRET,
    Code,
    Place,
    bring_a_method,
    draft,
    in_little_memory,
    link_notes,
    name_a_file,
)

# -- what is hostile --------------------------------------------------------------------------------------------------


def name_a_module(place: Place) -> None:
    """Make the kind a module that can be imported."""
    place.write_module("evil.py")
    place.change("settings", kind="evil:Evil")


def forge_a_package(place: Place) -> None:
    """Make the kind a path, with an entry as of an installed package's code."""
    name_a_file(place)
    place.change(code={"module": "evil", "class": "Evil", "package": "evil 1.0"})


def forge_a_checksum(place: Place) -> None:
    """Make the kind a path, with an entry that has the right checksum of the file beside it."""
    bring_a_method(place)
    name_a_file(place)


def bring_modeling_code(place: Place) -> None:
    """Make the head a language model whose code lies beside it, as transformers names it."""
    place.write_module("modeling_evil.py")
    classes = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    config = {
        "model_type": "evil",
        "architectures": ["Evil"],
        "auto_map": classes,
    }
    (place.head / "config.json").write_text(json.dumps(config))


def map_code_in_the_shape(place: Place) -> None:
    """Let the sizes name a class of their own."""
    place.write_module("modeling_evil.py")
    place.change("shape", auto_map={"AutoConfig": "modeling_evil.Evil"}, model_type="evil")


def take_a_language_model(place: Place) -> None:
    """Make the kind a language model whose sizes name a class."""
    place.change("settings", kind="draft_model")
    place.change("shape", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})


def take_kernels(place: Place) -> None:
    """Make the kind a language model whose sizes name a repository of kernels for its attention."""
    place.change("settings", kind="draft_model")
    place.change("shape", attn_implementation="evil/kernels")


def pickle_the_weights(place: Place) -> None:
    """Write a pickle that runs, in every name that weights may have."""
    (place.head / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors", "medusa_lm_head.pt"):
        torch.save({"fc.weight": Code(place.marker)}, place.head / name)


def pickle_a_mask(place: Place) -> None:
    """Write a pickle that runs beside healthy weights."""
    torch.save({"embedding": Code(place.marker)}, place.head / "mask_embedding.pt")


def tag_the_recipe(place: Place) -> None:
    """Write YAML that calls a function."""
    place.add_to_recipe(f"extra: !!python/object/apply:os.mkdir ['{place.marker}']")


def swell_the_recipe(place: Place) -> None:
    """Write YAML whose references stand for 9^12 values."""
    lines = ["data:", "  a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for level in range(1, 12):
        references = ", ".join([f"*a{level - 1}"] * 9)
        lines.append(f"  a{level}: &a{level} [{references}]")
    values = yaml.safe_load((place.head / "recipe.yaml").read_text())
    del values["data"]
    text = "\n".join([*lines, yaml.safe_dump(values)])
    (place.head / "recipe.yaml").write_text(text)


def bend_the_recipe(place: Place) -> None:
    """Write YAML that holds itself."""
    place.add_to_recipe("extra: &extra [*extra]")


def link_all(place: Place) -> None:
    """Make every file a link to one outside."""
    for name in ("config.json", "model.safetensors", "recipe.yaml", "provenance.json", "README.md"):
        place.link(name)


def link_folders(place: Place) -> None:
    """Put links to a folder outside, in a name that means nothing and in one that means code."""
    notes = place.outside / "notes"
    notes.mkdir()
    (notes / "notes.txt").write_text(SECRET)
    (notes / "generate.py").write_text(f"# {SECRET}\n")
    (place.head / "notes").symlink_to(notes)
    (place.head / "custom_generate").symlink_to(notes)


Spoil = Callable[[Place], None]


def link(name: str) -> Spoil:
    """Return what makes one file a link to one outside."""
    return lambda place: place.link(name)


def change(section: str | None, **values: Any) -> Spoil:
    """Return what writes numbers that no head has into the config."""
    return lambda place: place.change(section, **values)


BILLION = 10**9
BUDGET = {"nodes": 10, "depth": 10, "top_k": 10, "paths": None}
DEEP = {**BUDGET, "depth": BILLION, "nodes": BILLION, "top_k": 1}
WIDE = {**BUDGET, "top_k": BILLION, "nodes": BILLION}
# the kind of the healthy head, and what is done to it
HOSTILE: dict[str, tuple[str, Spoil]] = {
    "a kind that is a path": ("eagle1", name_a_file),
    "a kind that is a module": ("eagle1", name_a_module),
    "a kind that is a path, with a package's entry": ("eagle1", forge_a_package),
    "a kind that is a path, with a checksum": ("eagle1", forge_a_checksum),
    "a method beside it": ("eagle1", bring_a_method),
    "modeling code": ("eagle1", bring_modeling_code),
    "modeling code in the shape": ("eagle1", map_code_in_the_shape),
    "a language model's kind": ("eagle1", take_a_language_model),
    "a repository of kernels": ("eagle1", take_kernels),
    "pickled weights": ("eagle1", pickle_the_weights),
    "a pickled mask": ("dflash", pickle_a_mask),
    "a tag in YAML": ("eagle1", tag_the_recipe),
    "YAML that grows": ("eagle1", swell_the_recipe),
    "YAML that holds itself": ("eagle1", bend_the_recipe),
    "links for all files": ("eagle1", link_all),
    "a link for recipe.yaml": ("eagle1", link("recipe.yaml")),
    "a link for provenance.json": ("eagle1", link("provenance.json")),
    "a link for README.md": ("eagle1", link("README.md")),
    "a link for the weights": ("eagle1", link("model.safetensors")),
    "links to folders": ("eagle1", link_folders),
    "links beside the head": ("eagle1", link_notes),
    "slots": ("dflash", change("settings", slots=BILLION)),
    "a mask token": ("dflash", change("settings", mask_token=BILLION)),
    "depths": ("peagle", change("settings", depths=BILLION)),
    "slots of a block": ("falcon", change("settings", k=BILLION)),
    "levels": ("mlp_speculator", change("settings", levels=BILLION, tie_weights=True)),
    "layers": ("eagle1", change("shape", num_hidden_layers=BILLION, model_type="qwen3")),
    "a width": ("eagle1", change("shape", hidden_size=BILLION)),
    "nodes": ("eagle1", change(None, budget={**BUDGET, "nodes": BILLION})),
    "a depth": ("eagle1", change(None, budget=DEEP)),
    "candidates": ("eagle1", change(None, budget=WIDE)),
}

# -- commands and Python ----------------------------------------------------------------------------------------------

# HEAD, TARGET, RECIPE and RUN stand for paths of the place
LINES = {
    "inspect": "inspect HEAD --target TARGET",
    "generate": "generate HEAD Hello --target TARGET --max-new-tokens 2",
    "chat": "chat HEAD --target TARGET --max-new-tokens 2",
    "doctor": "doctor HEAD --target TARGET",
    "export": "export HEAD --target TARGET --to portable RUN/exported",
    "import": "import HEAD RUN/imported",
    "card": "card HEAD --out RUN/card.md",
    "measure": "measure RECIPE eval.count=1 eval.max_new_tokens=2",
    "lossless": "lossless RECIPE eval.count=1 eval.max_new_tokens=2",
    "tune": "tune RECIPE eval.count=1 eval.max_new_tokens=2",
}
# which do all their work, for seconds, where the weights and the config are healthy
LONG = ("doctor", "measure", "lossless", "tune")


def push(place: Place) -> None:
    """Show what would be sent, which holds no secret."""
    run_push([str(place.head), "me/foreign"])
    for item in pack(place.head, "me/foreign", []).files.values():
        assert SECRET.encode() not in item.read()


def push_as_export(place: Place) -> None:
    """Push a folder without a recipe, whose files go as they are."""
    (place.head / "recipe.yaml").unlink(missing_ok=True)
    push(place)


def warm_start(place: Place) -> None:
    """Begin a training run with the head's weights."""
    train = place.recipe.train.model_copy(update={"init": str(place.head)})
    recipe = place.recipe.model_copy(update={"train": train})
    settings = settings_of({"kind": "eagle1"}, "test")
    first_head(
        recipe,
        settings,
        Target.load(place.target),
        [],
    )  # type: ignore[arg-type]


def call_generate(place: Place) -> None:
    """Call the model's own `generate`, with the folder as its drafter."""
    model = Target.load(place.target).model
    drafter = WithDrafter(str(place.head))
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, custom_generate=drafter)


CALLS: dict[str, Callable[[Place], Any]] = {
    "push": push,
    "push of an export": push_as_export,
    "pull": lambda place: print(next_step(place.head)),
    "train.init": warm_start,
    "load_head": lambda place: load_head(place.head),
    "from_pretrained": lambda place: from_pretrained(place.head),
    "read_head": lambda place: read_head(place.head),
    "load_drafter": lambda place: draft(place, place.head),
    "load_drafter of two": lambda place: draft(place, [place.head, "ngram"]),
    "model.generate": call_generate,
}
# each hostile folder meets these ways, which between them read all of its files
MAIN_WAYS = ("inspect", "import", "card", "push", "load_drafter")
# and one of each sort meets every way: code by name, in files, in weights; links; numbers
MAIN_HOSTILE = (
    "a kind that is a path",
    "a method beside it",
    "modeling code",
    "pickled weights",
    "links for all files",
    "slots",
)
WAYS = (*LINES, *CALLS)
PAIRS = {(hostile, way) for hostile in HOSTILE for way in MAIN_WAYS}
PAIRS |= {(hostile, way) for hostile in MAIN_HOSTILE for way in WAYS}
# what reads a recipe beside a head, but for the ways that would go on for seconds
PAIRS |= {("a tag in YAML", way) for way in WAYS if way not in LONG}


def try_way(way: str, place: Place) -> str:
    """Return the sentence with which a way refuses the folder; any other error is raised."""
    try:
        if way in CALLS:
            CALLS[way](place)
        else:
            line = LINES[way].replace("HEAD", str(place.head)).replace("TARGET", place.target)
            line = line.replace("RECIPE", str(place.recipe_file)).replace("RUN", str(place.run))
            main(line.split())
    except ValueError as error:
        return str(error)
    except SystemExit:
        return ""
    return ""


@pytest.mark.parametrize(("hostile", "way"), sorted(PAIRS))
def test_nothing_of_a_hostile_folder_runs_or_leaks(
    hostile: str,
    way: str,
    place: Place,
    healthy: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No code of it runs, nothing outside of it is read, printed, written or sent, and no memory is taken."""
    kind, spoil = HOSTILE[hostile]
    place.fill(healthy / kind)
    spoil(place)
    before = set(place.run.rglob("*"))
    if way in LINES:
        # imports need memory that the folder shall not take
        import_module(VERBS[find_program([way])[0]].module)
    OPENED.clear()
    refusal = in_little_memory(lambda: try_way(way, place), 400)
    opened = place.opened_outside()
    printed = capsys.readouterr()
    shown = refusal + printed.out + printed.err

    assert not place.marker.exists(), "code of the folder was run"
    assert not opened, "a file outside was read"
    assert SECRET not in shown
    for path in set(place.run.rglob("*")) - before:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes()
    assert "alloc" not in shown
    assert "MemoryError" not in shown


# -- the test itself --------------------------------------------------------------------------------------------------

# what each check is to see, done on purpose
CARELESS: dict[str, Callable[[Place], Any]] = {
    "a kind that is a path": lambda place: DRAFTERS.find(f"{place.head}/evil.py:Evil"),
    "a kind that is a module": lambda place: DRAFTERS.find("evil:Evil"),
    "a pickled mask": lambda place: torch.load(
        place.head / "mask_embedding.pt", weights_only=False
    ),
    "a tag in YAML": lambda place: yaml.unsafe_load((place.head / "recipe.yaml").read_text()),
}


@pytest.mark.parametrize("hostile", CARELESS)
def test_the_marker_shows_code_that_runs(
    hostile: str,
    place: Place,
    healthy: Path,
) -> None:
    """The same folders do harm where they are read without care."""
    kind, spoil = HOSTILE[hostile]
    place.fill(healthy / kind)
    spoil(place)
    assert not place.marker.exists()

    try:
        CARELESS[hostile](place)
    except ValueError as error:
        # the class in it has the name of a method that is there
        assert "is called 'eagle1'" in str(error)
    assert place.marker.exists()


def test_a_read_outside_and_a_large_tensor_are_seen(place: Place, healthy: Path) -> None:
    """A file that is read through a link is recorded, and a tensor of 4 GB is not to be had."""
    place.fill(healthy / "eagle1")
    link_all(place)
    OPENED.clear()
    assert SECRET in (place.head / "recipe.yaml").read_text()
    assert place.opened_outside()
    with pytest.raises(RuntimeError, match="alloc"):
        in_little_memory(lambda: str(torch.empty(BILLION)), 400)
