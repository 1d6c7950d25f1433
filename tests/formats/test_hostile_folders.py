"""Folders of heads that were made to do harm, in every verb and in Python: none of their code runs, nothing leaks."""

from __future__ import annotations

import copy
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
from eagle.recipe import Recipe, Trust
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
OPENED: list[
    str
] = []  # the paths that Python opens; a hook cannot be taken away again, so one stays for all tests


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
        head = DRAFTERS[kind].for_target(
            settings, tiny_target.config, tiny_target.head, [torch.arange(40)]
        )
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
    """A kind that is a language model, whose sizes name a class."""
    place.change("settings", kind="draft_model")
    place.change("shape", auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})


def take_kernels(place: Place) -> None:
    """The same, whose sizes name a repository of kernels for its attention."""
    place.change("settings", kind="draft_model")
    place.change("shape", attn_implementation="evil/kernels")


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
        (place.outside / name).write_text(
            json.dumps({"note": SECRET, "step": 1, "total": 1.0}) + "\n"
        )
        (place.run / name).symlink_to(place.outside / name)


def large(part: str | None, **values: Any) -> Callable[[Place], None]:
    """Numbers that no head has."""
    return lambda place: place.change(part, **values)


BILLION = 10**9
BUDGET = {"nodes": 10, "depth": 10, "top_k": 10, "paths": None}
HOSTILE: dict[
    str, tuple[str, Callable[[Place], None]]
] = {  # the healthy head, and what is done to it
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
    **{
        f"a link for {name}": ("eagle1", link_one(name))
        for name in ("recipe.yaml", "provenance.json", "README.md")
    },
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
    "a depth": (
        "eagle1",
        large(None, budget={**BUDGET, "depth": BILLION, "nodes": BILLION, "top_k": 1}),
    ),
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
    model.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=2, custom_generate=WithDrafter(str(place.head))
    )


def draft(place: Place, name: Any) -> None:
    """Load by a name and draft a little."""
    target = Target.load(place.target)
    decode(target, load_drafter(name, target), [1, 2, 3, 4], max_new_tokens=3, trace=Trace())


WAYS: dict[str, Callable[[Place], Any]] = {
    "inspect": lambda place: run_inspect([str(place.head), "--target", place.target]),
    "generate": lambda place: generate.main(
        [str(place.head), "Hello", "--target", place.target, "--max-new-tokens", "2"]
    ),
    "chat": lambda place: chat.main(
        [str(place.head), "--target", place.target, "--max-new-tokens", "2"]
    ),
    "doctor": lambda place: run_doctor([str(place.head), "--target", place.target]),
    "export": lambda place: run_export(
        [str(place.head), "--target", place.target, "--to", "portable", str(place.run / "exported")]
    ),
    "import": lambda place: run_import([str(place.head), str(place.run / "imported")]),
    "card": lambda place: write_card.main([str(place.head), "--out", str(place.run / "card.md")]),
    "push": push,
    "push of an export": push_as_export,
    "pull": lambda place: print(next_step(place.head)),
    "measure": lambda place: measure.main(
        [str(place.recipe_file), "eval.count=1", "eval.max_new_tokens=2"]
    ),
    "lossless": lambda place: lossless.main(
        [str(place.recipe_file), "eval.count=1", "eval.max_new_tokens=2"]
    ),
    "tune": lambda place: tune.main(
        [str(place.recipe_file), "eval.count=1", "eval.max_new_tokens=2"]
    ),
    "train.init": lambda place: first_head(
        place.recipe.model_copy(
            update={"train": place.recipe.train.model_copy(update={"init": str(place.head)})}
        ),
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
SLOW = (
    "lossless",
    "tune",
    "from_pretrained",
    "load_drafter of two",
    "push of an export",
)  # ways much like another
LONG = (
    "doctor",
    "measure",
    "lossless",
    "tune",
)  # which do all their work where nothing is wrong with the head
HARMLESS = (
    "a tag in YAML",
    "YAML that grows",
    "YAML that holds itself",
    "a pickled mask",
    "links to folders",
)


def is_long(hostile: str, way: str) -> bool:
    """Whether a way would decode for seconds, as it does not look at what is hostile."""
    in_notes = ("recipe.yaml", "provenance.json", "README.md", "beside the head")
    return way in LONG and (hostile in HARMLESS or hostile.endswith(in_notes))


CASES = [
    pytest.param(hostile, way, marks=[pytest.mark.slow] if way in SLOW else [])
    for hostile in HOSTILE
    for way in WAYS
    if not is_long(hostile, way)
]


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
    hostile: str,
    way: str,
    place: Place,
    healthy: dict[str, Path],
    capsys: pytest.CaptureFixture[str],
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
    new = {
        path for path in place.run.rglob("*") if path.is_file() and not path.is_symlink()
    } - there
    assert not [path for path in new if SECRET.encode() in path.read_bytes()]
    assert "alloc" not in said + printed.out and "MemoryError" not in said + printed.out


PLANTED: dict[
    str, tuple[str, Callable[[Place], Any]]
] = {  # what each check is to see, done on purpose
    "a kind that is a path": (
        "a kind that is a path",
        lambda place: DRAFTERS.find(f"{place.head}/evil.py:Evil"),
    ),
    "a module": ("a kind that is a module", lambda place: DRAFTERS.find("evil:Evil")),
    "a pickle": (
        "a pickled mask",
        lambda place: torch.load(place.head / "mask_embedding.pt", weights_only=False),
    ),
    "a tag": (
        "a tag in YAML",
        lambda place: yaml.unsafe_load((place.head / "recipe.yaml").read_text()),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_the_marker_shows_code_that_runs(name: str, place: Place, healthy: dict[str, Path]) -> None:
    """The same folders do harm where they are read without care."""
    hostile, run = PLANTED[name]
    kind, spoil = HOSTILE[hostile]
    fill(place, kind, healthy)
    spoil(place)
    assert not place.marker.exists()
    try:
        run(place)
    except ValueError as error:  # the class in it has the name of a method that is there
        assert "is called 'eagle1'" in str(error)
    assert place.marker.exists()


def test_what_is_read_outside_and_what_takes_memory_is_seen(
    place: Place, healthy: dict[str, Path]
) -> None:
    """A file that is read through a link is heard of, and a tensor of 4 GB is not to be had."""
    fill(place, "eagle1", healthy)
    link_all(place)
    OPENED.clear()
    assert SECRET in (place.head / "recipe.yaml").read_text()
    assert [path for path in OPENED if os.path.realpath(path).startswith(str(place.outside))]
    with pytest.raises(RuntimeError, match="alloc"):
        in_little_memory(lambda: str(torch.empty(BILLION)), 400)


def test_trusted_code_runs(place: Place, healthy: dict[str, Path]) -> None:
    """The gate opens for a method.py that is trusted, and for nothing else that the config names."""
    fill(place, "eagle1", healthy)
    bring_a_method(place)
    with pytest.raises(ValueError, match=r"Evil is called 'eagle1'|names the method 'evil'"):
        load_head(place.head, trust_code=True)
    assert place.marker.exists()
    place.marker.unlink()
    name_a_file(place)
    with pytest.raises(
        ValueError, match=r"settings\.kind is '.*evil\.py:Evil', which names code to run"
    ):
        load_head(place.head, trust_code=True)
    assert not place.marker.exists()


def test_a_package_in_the_folder_offers_no_method(place: Place, healthy: dict[str, Path]) -> None:
    """Its metadata is found where the folder is on Python's path, and its entry point is not loaded for a head."""
    fill(place, "eagle1", healthy)
    (place.head / "evil.py").write_text(place.evil)
    about = place.head / "evil-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[eagle.drafters]\nevil = evil:Evil\n")
    place.change("settings", kind="evil")
    for load in (load_head, from_pretrained, lambda folder: draft(place, folder)):
        with pytest.raises(
            ValueError, match=r"drafter\.kind is 'evil', expected a method with weights"
        ):
            load(place.head)
    assert not place.marker.exists()
    with pytest.raises(ValueError, match="that method is called 'eagle1'"):
        DRAFTERS.find("evil")  # as a user who names it would
    assert place.marker.exists()


CODE_KEYS = {
    "drafter.kind": ("drafter", {"kind": "evil.py:Evil"}),
    "eval.drafters.mine.head": ("eval", {"drafters": {"mine": {"head": "ngram,evil:Evil"}}}),
    "regenerate.drafter": (
        "regenerate",
        {"source": "a.jsonl", "out": "b.jsonl", "drafter": "evil.py:Evil"},
    ),
    "target.trust_remote_code": ("target", {"trust_remote_code": True}),
}


@pytest.mark.parametrize("key", CODE_KEYS)
def test_a_recipe_beside_a_head_names_no_code(
    key: str, place: Place, healthy: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does where the user says so: by trust, by the key itself, or by a recipe that lies elsewhere."""
    fill(place, "eagle1", healthy)
    section, changed = CODE_KEYS[key]
    values = place.recipe.model_dump(mode="json")
    values[section] = {**(values[section] or {}), **changed}
    file = place.head / "recipe.yaml"
    file.write_text(yaml.safe_dump(values))
    for verb in (measure, tune, lossless):
        with pytest.raises(ValueError, match=rf"would run code: {key} is .*--trust-code"):
            verb.main([str(file)])
    with pytest.raises(ValueError, match=rf"would run code: {key}"):
        Recipe.load(file, ["train.lr=1e-3"])
    assert Recipe.load(
        file, [f"{section}={json.dumps(place.recipe.model_dump(mode='json')[section])}"]
    )
    assert Recipe.load(shutil.copy(file, place.run))
    monkeypatch.setattr(Trust, "in_recipes", True)
    assert Recipe.load(file)


@pytest.mark.parametrize(
    "name", ["weights that are no numbers", "infinite weights", "whole numbers", "eight bits"]
)
def test_weights_that_are_none_are_refused(
    name: str, place: Place, healthy: dict[str, Path]
) -> None:
    """One value of a tensor, or a dtype of no plain numbers; half precision is read."""
    fill(place, "eagle1", healthy)
    file = place.head / "model.safetensors"
    weights = load_file(file)
    key = sorted(weights)[-1]
    halves = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(halves, file)
    assert load_head(place.head)
    if name in ("weights that are no numbers", "infinite weights"):
        weights[key].view(-1)[-1] = torch.inf if "infinite" in name else torch.nan
        words = f"{key} holds numbers that are not finite"
    else:
        dtype = torch.int8 if "whole" in name else torch.float8_e4m3fn
        weights[key] = weights[key].to(dtype)
        words = f"{key} is in {dtype}, expected plain floating-point numbers"
    save_file(weights, file)
    for load in (load_head, from_pretrained, read_head, lambda folder: draft(place, folder)):
        with pytest.raises(ValueError, match=words):
            load(place.head)
    with pytest.raises(SystemExit):
        run_inspect([str(place.head)])


def test_an_adapter_names_no_module(place: Place, tiny_target: Target) -> None:
    """An adapter's config may name the package in which peft looks for parallel layers."""
    from peft import LoraConfig, get_peft_model

    model = copy.deepcopy(tiny_target.model)
    get_peft_model(model, LoraConfig(r=2, target_modules="all-linear")).save_pretrained(place.head)
    config = json.loads((place.head / "adapter_config.json").read_text())
    (place.head / "evil.py").write_text(place.evil)
    values = {**config, "megatron_config": {"a": 1}, "megatron_core": "evil"}
    (place.head / "adapter_config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="megatron_core"):
        tiny_target.with_adapter(place.head)
    assert not place.marker.exists()


def test_a_link_is_refused_by_its_name(place: Place, healthy: dict[str, Path]) -> None:
    """In a head, in an export, in what lies beside; links inside of the folder go as what they lead to."""
    fill(place, "eagle1", healthy)
    (place.head / "README.md").write_text("its card")
    (place.head / "recipe.yaml").rename(place.head / "kept.yaml")
    (place.head / "recipe.yaml").symlink_to("kept.yaml")
    assert (
        pack(place.head, "me/mine", []).files["recipe.yaml"].read()
        == (place.head / "kept.yaml").read_bytes()
    )
    (place.run / "latest").symlink_to(place.head)
    assert pack(place.run / "latest", "me/mine", [])
    link_beside(place)
    with pytest.raises(
        ValueError, match=r"results\.jsonl|metrics\.jsonl|lossless\.json|report\.html"
    ):
        pack(place.head, "me/mine", [])
    for path in place.run.glob("*.*"):
        path.unlink()
    exported = place.run / "exported"
    shutil.copytree(place.head, exported, ignore=shutil.ignore_patterns("*.yaml"))
    (place.outside / "deep").mkdir()
    (exported / "deep").symlink_to(place.outside / "deep")
    parcel = pack(exported, "me/mine", [])
    assert parcel.stays[str(exported / "deep")] == "is a link to no file, which is not followed"
    (exported / "sub").mkdir()
    (place.outside / "secret.txt").write_text(SECRET)
    (exported / "sub/notes.txt").symlink_to(place.outside / "secret.txt")
    for packed in ((exported, []), (place.head, [exported])):
        with pytest.raises(
            ValueError, match=r"sub/notes\.txt is a link to .*secret\.txt, outside of the folder"
        ):
            pack(packed[0], "me/mine", packed[1])


def test_a_card_of_data_reads_no_link(place: Place) -> None:
    """Neither of conversations and the note beside them, nor of a store's index."""
    place.run.mkdir()
    answers, note, store = (
        place.run / "answers.jsonl",
        place.run / "answers.jsonl.settings",
        place.run / "store",
    )
    (place.outside / "kept").write_text(json.dumps({"note": SECRET}))
    answers.write_text(json.dumps({"conversations": []}) + "\n")
    note.symlink_to(place.outside / "kept")
    store.mkdir()
    (store / "index.json").symlink_to(place.outside / "kept")
    OPENED.clear()
    for path in (answers, store):
        with pytest.raises(ValueError, match="outside of the folder"):
            write_card.main([str(path), "--out", str(place.run / "card.md")])
    assert not [path for path in OPENED if os.path.realpath(path).startswith(str(place.outside))]
