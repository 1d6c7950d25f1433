"""Folders of heads that were made to do harm, in every verb and in Python: none of their code runs, nothing leaks."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eagle import Target, load_drafter
from eagle.command import chat, generate, write_card
from eagle.command.share import next_step, pack, run_push
from eagle.command.ship import run_doctor, run_export, run_import, run_inspect
from eagle.core.trace import Trace
from eagle.decoding.decode import generate as decode
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.outside import METHOD_FILE
from eagle.formats.checkpoint import from_pretrained, load_head, save_head
from eagle.formats.reading.foreign import read_head
from eagle.recipe import Recipe
from eagle.training.first_head import first_head
from eagle.transformers import WithDrafter
from eval import lossless, measure, tune
from tests.formats.test_hostile_heads import Code, in_little_memory

SECRET = "what lies outside of the folder"
EVIL = """
from pathlib import Path
Path({marker!r}).touch()
from eagle.drafters.recurrent.eagle1 import Eagle1
class Evil(Eagle1):
    pass
"""
OPENED: list[str] = []  # the paths that Python opens; a hook cannot be taken away again, so one stays for all tests


@pytest.fixture(scope="module", autouse=True)
def _heard() -> None:
    """Hear of every file that is opened."""
    sys.addaudithook(lambda event, args: OPENED.append(str(args[0])) if event == "open" else None)


class Place:
    """A run's folder with a healthy head, a marker that hostile code would make, and a secret outside."""

    def __init__(self, root: Path, recipe: Recipe, target_dir: Path) -> None:
        self.run, self.head, self.marker = root / "run", root / "run/head", root / "marker"
        self.outside, self.target = root / "outside", str(target_dir)
        self.outside.mkdir()
        self.evil = EVIL.format(marker=str(self.marker))
        values = recipe.model_dump(mode="json")
        values["target"]["path"] = self.target
        values["train"]["out"] = str(self.run)
        values["eval"]["drafters"] = {"foreign": {"head": str(self.head)}}
        self.recipe = Recipe.parse(values, "test")
        self.recipe_file = root / "recipe.yaml"
        self.recipe_file.write_text(self.recipe.dump())

    @property
    def config(self) -> dict[str, Any]:
        """The head's config."""
        values: dict[str, Any] = json.loads((self.head / "config.json").read_text())
        return values

    def change(self, part: str | None = None, **changed: Any) -> None:
        """Write other values into the config, or into a part of it."""
        config = self.config
        (config if part is None else config[part]).update(changed)
        (self.head / "config.json").write_text(json.dumps(config))

    def link(self, name: str) -> None:
        """Put a link in place of a file of the head, to a file outside that is as whole and holds the secret."""
        path, kept = self.head / name, self.outside / name
        text = path.read_bytes() if path.exists() else b"{}"
        if name == "config.json":
            kept.write_text(json.dumps({**json.loads(text), "note": SECRET}))
        elif name == "provenance.json":
            kept.write_text(json.dumps({"note": SECRET}))
        elif name == "recipe.yaml":
            values = yaml.safe_load(text)
            values["data"]["train"] = SECRET
            kept.write_text(yaml.safe_dump(values))
        elif name == "model.safetensors":
            save_file(load_file(path), kept, {"note": SECRET})
        else:
            kept.write_text(SECRET)
        path.unlink(missing_ok=True)
        path.symlink_to(kept)


@pytest.fixture(scope="module")
def healthy(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Heads of a few kinds for the tiny target, as training leaves them."""
    folder, heads = tmp_path_factory.mktemp("healthy"), {}
    for kind in ("eagle1", "dflash", "peagle", "falcon", "mlp_speculator"):
        torch.manual_seed(0)
        settings = settings_of({"kind": kind}, "test")
        head = DRAFTERS[kind].for_target(settings, tiny_target.config, tiny_target.head, [torch.arange(40)])
        save_head(folder / kind, head, "", {"torch": "1"})
        heads[kind] = folder / kind
    return heads


@pytest.fixture
def place(
    healthy: dict[str, Path],
    tiny_target: Target,
    tiny_target_dir: Path,
    recipe: Recipe,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Place]:
    """A place to work in; the target, which is no part of the folder, is loaded once for all tests."""
    place = Place(tmp_path, recipe, tiny_target_dir / "target")
    real = Target.load

    def load(path: Any, **options: Any) -> Target:
        return tiny_target if str(path) == place.target else real(path, **options)

    monkeypatch.setattr(Target, "load", load)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n"))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(place.head))  # as for whoever works in that folder
    known, tokenizer = dict(DRAFTERS), tiny_target.tokenizer
    yield place
    tiny_target.tokenizer = tokenizer
    for name in DRAFTERS.keys() - known.keys():
        del DRAFTERS[name]
    for name in [name for name in sys.modules if name.startswith("outside_") or name == "evil"]:
        del sys.modules[name]


def fill(place: Place, kind: str, healthy: dict[str, Path]) -> None:
    """Copy a healthy head of a kind to the place, with the recipe that the place has."""
    shutil.copytree(healthy[kind], place.head)
    (place.head / "recipe.yaml").write_text(place.recipe.dump())


# -- what is hostile --------------------------------------------------------------------------------------------------


def name_a_file(place: Place) -> None:
    """A kind that is a path."""
    (place.head / "evil.py").write_text(place.evil)
    place.change("settings", kind=f"{place.head}/evil.py:Evil")


def name_a_module(place: Place) -> None:
    """A kind that is a module which can be imported."""
    (place.head / "evil.py").write_text(place.evil)
    place.change("settings", kind="evil:Evil")


def forge_a_package(place: Place) -> None:
    """A kind that is a path, and an entry of an installed package's code."""
    name_a_file(place)
    place.change(code={"module": "evil", "class": "Evil", "package": "evil 1.0"})


def forge_a_checksum(place: Place) -> None:
    """A kind that is a path, and an entry with the right checksum of the file beside it."""
    name_a_file(place)
    bring_a_method(place)
    place.change("settings", kind=f"{place.head}/evil.py:Evil")


def bring_a_method(place: Place) -> None:
    """A method.py with its right checksum."""
    (place.head / METHOD_FILE).write_text(place.evil)
    digest = hashlib.sha256(place.evil.encode()).hexdigest()
    place.change("settings", kind="evil")
    place.change(code={"file": "evil.py", "class": "Evil", "sha256": digest})


def bring_modeling_code(place: Place) -> None:
    """A language model whose code lies beside it, as transformers names it."""
    (place.head / "modeling_evil.py").write_text(place.evil)
    classes = {"AutoConfig": "modeling_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    config = {"model_type": "evil", "architectures": ["Evil"], "auto_map": classes}
    (place.head / "config.json").write_text(json.dumps(config))


def map_code_in_the_shape(place: Place) -> None:
    """Sizes that name a class of their own."""
    (place.head / "modeling_evil.py").write_text(place.evil)
    place.change("shape", auto_map={"AutoConfig": "modeling_evil.Evil"}, model_type="evil")


def take_a_language_model(place: Place) -> None:
    """A kind that is loaded in another way, whose sizes name a repository of kernels."""
    place.change("settings", kind="draft_model")
    place.change("shape", attn_implementation="evil/kernels", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})


def pickle_the_weights(place: Place) -> None:
    """A pickle that runs, in every name that weights may have."""
    (place.head / "model.safetensors").unlink()
    for name in ("pytorch_model.bin", "model.safetensors", "medusa_lm_head.pt"):
        torch.save({"fc.weight": Code(place.marker)}, place.head / name)


def pickle_a_mask(place: Place) -> None:
    """A pickle that runs beside healthy weights."""
    torch.save({"embedding": Code(place.marker)}, place.head / "mask_embedding.pt")


def tag_the_recipe(place: Place) -> None:
    """YAML that makes an object."""
    text = (place.head / "recipe.yaml").read_text()
    tagged = f"!!python/object/apply:os.mkdir ['{place.marker}']"
    (place.head / "recipe.yaml").write_text(f"{text}\nextra: {tagged}\n")


def swell_the_recipe(place: Place) -> None:
    """YAML whose references stand for 9^12 values."""
    lines = ["data:", "  a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"  a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
    values = yaml.safe_load((place.head / "recipe.yaml").read_text())
    rest = yaml.safe_dump({name: value for name, value in values.items() if name != "data"})
    (place.head / "recipe.yaml").write_text("\n".join(lines) + "\n" + rest)


def bend_the_recipe(place: Place) -> None:
    """YAML that holds itself."""
    text = (place.head / "recipe.yaml").read_text()
    (place.head / "recipe.yaml").write_text(f"{text}\nextra: &extra [*extra]\n")


def link_all(place: Place) -> None:
    """Every file a link to one outside."""
    for name in ("config.json", "model.safetensors", "recipe.yaml", "provenance.json", "README.md"):
        place.link(name)


def link_a_folder(place: Place) -> None:
    """A folder and a file below it, both of which lead outside."""
    (place.outside / "notes").mkdir()
    (place.outside / "notes/notes.txt").write_text(SECRET)
    (place.head / "notes").symlink_to(place.outside / "notes")
    (place.head / "custom_generate").symlink_to(place.outside / "notes")
    (place.outside / "notes/generate.py").write_text(f"# {SECRET}\n")


def link_one(name: str) -> Callable[[Place], None]:
    """One file a link to one outside."""
    return lambda place: place.link(name)


def link_beside(place: Place) -> None:
    """What a run tells beside its head, as links."""
    for name in ("results.jsonl", "metrics.jsonl", "lossless.json", "report.html"):
        (place.outside / name).write_text(json.dumps({"note": SECRET, "step": 1, "total": 1.0}) + "\n")
        (place.run / name).symlink_to(place.outside / name)


def large(part: str | None, **values: Any) -> Callable[[Place], None]:
    """Numbers that no head has."""
    return lambda place: place.change(part, **values)


BILLION = 10**9
BUDGET = {"nodes": 10, "depth": 10, "top_k": 10, "paths": None}
HOSTILE: dict[str, tuple[str, Callable[[Place], None]]] = {  # the healthy head, and what is done to it
    "a kind that is a path": ("eagle1", name_a_file),
    "a kind that is a module": ("eagle1", name_a_module),
    "a kind that is a path, with a package's entry": ("eagle1", forge_a_package),
    "a kind that is a path, with a checksum": ("eagle1", forge_a_checksum),
    "a method beside it": ("eagle1", bring_a_method),
    "modeling code": ("eagle1", bring_modeling_code),
    "modeling code in the shape": ("eagle1", map_code_in_the_shape),
    "a language model's kind": ("eagle1", take_a_language_model),
    "pickled weights": ("eagle1", pickle_the_weights),
    "a pickled mask": ("dflash", pickle_a_mask),
    "a tag in YAML": ("eagle1", tag_the_recipe),
    "YAML that grows": ("eagle1", swell_the_recipe),
    "YAML that holds itself": ("eagle1", bend_the_recipe),
    "links for all files": ("eagle1", link_all),
    **{f"a link for {name}": ("eagle1", link_one(name)) for name in ("recipe.yaml", "provenance.json", "README.md")},
    "a link for the weights": ("eagle1", link_one("model.safetensors")),
    "links to folders": ("eagle1", link_a_folder),
    "links beside the head": ("eagle1", link_beside),
    "slots": ("dflash", large("settings", slots=BILLION)),
    "a mask token": ("dflash", large("settings", mask_token=BILLION)),
    "depths": ("peagle", large("settings", depths=BILLION)),
    "slots of a block": ("falcon", large("settings", k=BILLION)),
    "levels": ("mlp_speculator", large("settings", levels=BILLION, tie_weights=True)),
    "layers": ("eagle1", large("shape", num_hidden_layers=BILLION, model_type="qwen3")),
    "a width": ("eagle1", large("shape", hidden_size=BILLION)),
    "nodes": ("eagle1", large(None, budget={**BUDGET, "nodes": BILLION})),
    "a depth": ("eagle1", large(None, budget={**BUDGET, "depth": BILLION, "nodes": BILLION, "top_k": 1})),
    "candidates": ("eagle1", large(None, budget={**BUDGET, "top_k": BILLION, "nodes": BILLION})),
}

# -- verbs and Python -------------------------------------------------------------------------------------------------


def push(place: Place) -> None:
    """What would be sent holds no secret."""
    run_push([str(place.head), "me/foreign"])
    parcel = pack(place.head, "me/foreign", [])
    assert not [name for name, item in parcel.files.items() if SECRET.encode() in item.read()]


def push_as_export(place: Place) -> None:
    """A folder without a recipe goes as it lies there."""
    (place.head / "recipe.yaml").unlink(missing_ok=True)
    push(place)


def call_generate(place: Place) -> None:
    """The model's own `generate`, with the folder as its drafter."""
    model = Target.load(place.target).model
    model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, custom_generate=WithDrafter(str(place.head)))


def draft(place: Place, name: Any) -> None:
    """Load by a name and draft a little."""
    target = Target.load(place.target)
    decode(target, load_drafter(name, target), [1, 2, 3, 4], max_new_tokens=3, trace=Trace())


WAYS: dict[str, Callable[[Place], Any]] = {
    "inspect": lambda place: run_inspect([str(place.head), "--target", place.target]),
    "generate": lambda place: generate.main(
        [str(place.head), "Hello", "--target", place.target, "--max-new-tokens", "2"]
    ),
    "chat": lambda place: chat.main([str(place.head), "--target", place.target, "--max-new-tokens", "2"]),
    "doctor": lambda place: run_doctor([str(place.head), "--target", place.target]),
    "export": lambda place: run_export(
        [str(place.head), "--target", place.target, "--to", "portable", str(place.run / "exported")]
    ),
    "import": lambda place: run_import([str(place.head), str(place.run / "imported")]),
    "card": lambda place: write_card.main([str(place.head), "--out", str(place.run / "card.md")]),
    "push": push,
    "push of an export": push_as_export,
    "pull": lambda place: print(next_step(place.head)),
    "measure": lambda place: measure.main([str(place.recipe_file), "eval.count=1", "eval.max_new_tokens=2"]),
    "lossless": lambda place: lossless.main([str(place.recipe_file), "eval.count=1", "eval.max_new_tokens=2"]),
    "tune": lambda place: tune.main([str(place.recipe_file), "eval.count=1", "eval.max_new_tokens=2"]),
    "train.init": lambda place: first_head(
        place.recipe.model_copy(update={"train": place.recipe.train.model_copy(update={"init": str(place.head)})}),
        settings_of({"kind": "eagle1"}, "test"),
        Target.load(place.target),
        [],  # type: ignore[arg-type]
    ),
    "load_head": lambda place: load_head(place.head),
    "from_pretrained": lambda place: from_pretrained(place.head),
    "read_head": lambda place: read_head(place.head),
    "load_drafter": lambda place: draft(place, place.head),
    "load_drafter of two": lambda place: draft(place, [place.head, "ngram"]),
    "model.generate": call_generate,
}
LONG = ("doctor", "measure", "lossless", "tune")  # which do all their work where nothing is wrong with the head
HARMLESS = ("a tag in YAML", "YAML that grows", "YAML that holds itself", "a pickled mask", "links to folders")


def is_long(hostile: str, way: str) -> bool:
    """Whether a way would decode for seconds, as it does not look at what is hostile."""
    in_notes = ("recipe.yaml", "provenance.json", "README.md", "beside the head")
    return way in LONG and (hostile in HARMLESS or hostile.endswith(in_notes))


CASES = [(hostile, way) for hostile in HOSTILE for way in WAYS if not is_long(hostile, way)]


def try_way(way: Callable[[Place], Any], place: Place) -> str:
    """What a way says where it refuses the folder; any other error than a sentence is raised."""
    try:
        way(place)
    except ValueError as error:
        return str(error)
    except SystemExit:
        return ""
    return ""


@pytest.mark.parametrize(("hostile", "way"), CASES)
def test_nothing_of_a_hostile_folder_runs_or_leaks(
    hostile: str, way: str, place: Place, healthy: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """No code of it runs, nothing outside of it is read, printed, written or sent, and no memory is taken."""
    kind, spoil = HOSTILE[hostile]
    fill(place, kind, healthy)
    spoil(place)
    there = {path for path in place.run.rglob("*") if not path.is_symlink()}
    OPENED.clear()
    said = in_little_memory(lambda: try_way(WAYS[way], place), 400)
    opened = [path for path in OPENED if os.path.realpath(path).startswith(str(place.outside))]
    printed = capsys.readouterr()
    assert not place.marker.exists(), "code of the folder was run"
    assert not opened, "a file outside was read"
    assert SECRET not in said + printed.out + printed.err
    new = {path for path in place.run.rglob("*") if path.is_file() and not path.is_symlink()} - there
    assert not [path for path in new if SECRET.encode() in path.read_bytes()]
    assert "alloc" not in said + printed.out and "MemoryError" not in said + printed.out
