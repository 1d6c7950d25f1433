"""Every verb on every kind of wrong input ends in a sentence: `EAGLE_TRANSCRIPT=FILE` keeps all that was printed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from documents import ROOT, commands
from forked import Ended, Server

from eagle.__main__ import VERBS
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target

pytestmark = pytest.mark.slow
BY_RECIPE = {
    "prepare": ["--count", "1"],
    "extract": [],
    "train": [],
    "train --check": [],
    "draft-vocab": ["--size", "64", "--out", "vocab.safetensors"],
    "count-tokens": ["--out", "counts"],
    "regenerate": [],
    "inspect-mask": ["--count", "1", "--html", "mask.html"],
    "measure": [],
    "tune": [],
    "lossless": [],
}
PLAIN = {
    "generate": ["HEAD", "Hello", "--target", "TARGET", "--max-new-tokens", "4"],
    "export": ["HEAD", "--target", "TARGET", "--to", "vllm", "OUT"],
    "import": ["HEAD", "OUT", "--target", "TARGET"],
    "inspect": ["HEAD", "--target", "TARGET"],
    "doctor": ["HEAD", "--target", "TARGET"],
    "card": ["HEAD"],
}
# what is wrong with a recipe: its text, made from the right one
RECIPES = {
    "a syntax error": lambda text: re.sub("(?m)^target:", "target: [", text),
    "a tab": lambda text: text + "\n\teval: 3\n",
    "an empty file": lambda text: "",
    "a list": lambda text: "- one\n- two\n",
    "no text": lambda text: b"\x80\x81\xff\x00" * 9,
    "an empty section": lambda text: re.sub(r"train:\n(  .*\n)+", "train:\n", text),
    "an unknown key": lambda text: re.sub("(?m)^target:", "taget:", text),
    "a wrong type": lambda text: re.sub(r"lr: \S+", "lr: many", text),
}
OVERRIDES = {
    "an unknown method": "drafter.kind=eagel1",
    "an override's syntax": "train.lr=[1",
    "no such data": "data.train=nowhere.jsonl",
    "a folder without data": "data.train=EMPTY",
    "data that is no text": "data.train=BINARY",
    "data that is empty": "data.train=NOTHING.jsonl",
    "no such template": "data.template=nowhere.jinja",
}


def cut(path: Path) -> None:
    """Keep two thirds of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def set_in(path: Path, **values: object) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# what is wrong with a model's folder
MODELS = {
    "weights that are cut off": lambda folder: cut(folder / "model.safetensors"),
    "a header that is cut off": lambda folder: (folder / "model.safetensors").write_bytes(
        b"\x00\x01"
    ),
    "a config that is cut off": lambda folder: cut(folder / "config.json"),
    "an empty config": lambda folder: (folder / "config.json").write_text(""),
    "a config of wrong types": lambda folder: set_in(
        folder / "config.json", hidden_size="wide", kind="eagle1"
    ),
    "a config of another kind": lambda folder: set_in(
        folder / "config.json", model_type="none", kind="none"
    ),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "a file for a folder": lambda folder: (shutil.rmtree(folder), folder.write_text("no folder")),
    "an empty folder": lambda folder: (shutil.rmtree(folder), folder.mkdir()),
    "nothing": lambda folder: shutil.rmtree(folder),
}
HEADS = {
    **MODELS,
    "a config of wrong types": lambda folder: set_in(
        folder / "config.json", shape={"hidden_size": "wide"}
    ),
    "a config of another kind": lambda folder: set_in(
        folder / "config.json", settings={"kind": "none"}
    ),
}
TOKENIZERS = {
    "a tokenizer that is cut off": lambda folder: cut(next(folder.glob("tokenizer.json")))
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for the file."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def parts(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a head, a recipe on 24 short conversations, and things that are none."""
    folder = tmp_path_factory.mktemp("parts")
    shutil.copytree(tiny_target_dir / "target", folder / "target")
    torch.manual_seed(0)
    head = Eagle1.for_target(
        Eagle1.Settings(fc_bias=False), Target.load(folder / "target", dtype="float32").config
    )
    text = (ROOT / "recipes/tiny/eagle1.yaml").read_text()
    text = text.replace("runs/tiny/target", str(folder / "target"))
    (folder / "recipe.yaml").write_text(
        text.replace("runs/tiny/data", str(tiny_target_dir / "data"))
    )
    save_head(folder / "head", head, (folder / "recipe.yaml").read_text(), {})
    (folder / "EMPTY").mkdir()
    (folder / "BINARY").write_bytes(bytes(range(256)) * 9)
    (folder / "NOTHING.jsonl").touch()
    (folder / "FILE").write_text("a file")
    return folder


@pytest.fixture
def work(parts: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil."""
    shutil.copytree(parts, tmp_path / "work")
    return tmp_path / "work"


def by_recipe(verb: str, recipe: str, *overrides: str) -> list[str]:
    """A verb on a small part of a recipe."""
    name, *check = verb.split()
    small = [
        "data.limit=24",
        "data.max_length=96",
        "train.epochs=1",
        "eval.count=1",
        "eval.max_new_tokens=4",
    ]
    small += ["target.dtype=float32", "regenerate.max_new_tokens=4"]
    return [name, recipe, *small, *overrides, *BY_RECIPE[verb], *check]


def plain(verb: str, **named: str) -> list[str]:
    """A verb without a recipe, with what stands for HEAD, TARGET and OUT."""
    return [
        verb,
        *(
            named.get(word, {"HEAD": "head", "TARGET": "target", "OUT": "out"}.get(word, word))
            for word in PLAIN[verb]
        ),
    ]


def refused(ended: Ended, *, or_works: bool = False) -> None:
    """A sentence and a status; no traceback. A verb that does not read what is wrong may do its work."""
    assert "Traceback" not in ended.output, ended
    if not (or_works and ended.status == 0):
        last = ended.output[ended.output.rfind("error: ") :]
        is_verdict = ended.argv[0] in ("inspect", "doctor") and ended.status == 1
        assert ended.status in (1, 2) and (
            is_verdict or (last.startswith("error: ") and len(last) > 25)
        ), ended
        assert len(last.splitlines()) < 12, ended


@pytest.mark.parametrize("wrong", RECIPES)
def test_a_wrong_recipe(wrong: str, server: Server, work: Path) -> None:
    """Read by every verb that takes one."""
    text = RECIPES[wrong]((work / "recipe.yaml").read_text())
    (work / "wrong.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    for argv in [
        *(by_recipe(verb, "wrong.yaml") for verb in BY_RECIPE),
        ["forecast", "wrong.yaml"],
        ["compare", "wrong.yaml"],
    ]:
        refused(server.run(argv, work))


def test_no_recipe(server: Server, work: Path) -> None:
    """Nothing there, a folder, and a file under a file."""
    for recipe in ("nowhere.yaml", "EMPTY", "FILE/recipe.yaml", "/proc/nope/recipe.yaml"):
        for argv in [
            *(by_recipe(verb, recipe) for verb in BY_RECIPE),
            ["forecast", recipe],
            ["compare", recipe],
        ]:
            refused(server.run(argv, work))


@pytest.mark.parametrize("wrong", OVERRIDES)
def test_a_wrong_override(wrong: str, server: Server, work: Path) -> None:
    """A method, a value, data."""
    for verb in BY_RECIPE:
        refused(server.run(by_recipe(verb, "recipe.yaml", OVERRIDES[wrong]), work), or_works=True)


@pytest.mark.parametrize("wrong", [*MODELS, *TOKENIZERS])
def test_a_wrong_target(wrong: str, server: Server, work: Path) -> None:
    """For every verb that reads one; what reads its config alone may work."""
    {**MODELS, **TOKENIZERS}[wrong](work / "target")
    target = f"target.path={work / 'target'}"
    for argv in [
        *(by_recipe(verb, "recipe.yaml", target) for verb in BY_RECIPE),
        *(plain(verb) for verb in PLAIN),
    ]:
        refused(server.run(argv, work), or_works=True)


@pytest.mark.parametrize("wrong", HEADS)
def test_a_wrong_head(wrong: str, server: Server, work: Path) -> None:
    """For every verb that reads one."""
    HEADS[wrong](work / "head")
    measured = [
        by_recipe(verb, "recipe.yaml", "eval.drafters={mine: {head: head}}")
        for verb in ("measure", "lossless")
    ]
    for argv in [*(plain(verb) for verb in PLAIN), *measured]:
        refused(server.run(argv, work), or_works=argv[0] == "card")


@pytest.mark.parametrize(
    "path", ["my/model", "/nowhere/model", "./nowhere", "no such id!", "FILE/model"]
)
def test_a_target_that_is_not_there(path: str, server: Server, work: Path) -> None:
    """A hub id that nobody can reach, paths, and neither."""
    for verb in BY_RECIPE:
        refused(server.run(by_recipe(verb, "recipe.yaml", f"target.path={path}"), work))
    for verb in ("generate", "export", "doctor"):
        refused(server.run(plain(verb, TARGET=path), work))


@pytest.mark.parametrize("place", ["/proc/nope/out", "FILE/out", "FULL"])
def test_where_nothing_can_be_written(place: str, server: Server, work: Path) -> None:
    """A folder that cannot be made, a path under a file, and a disk that is full after 300 bytes a file."""
    room = 300 if place == "FULL" else None
    out = "full" if place == "FULL" else place
    train = ["features.store=null", f"train.out={out}"]
    asked = [
        by_recipe("extract", "recipe.yaml", f"features.store={out}"),
        by_recipe("train", "recipe.yaml", *train),
        by_recipe("regenerate", "recipe.yaml", f"regenerate.out={out}/answers.jsonl"),
        by_recipe(
            "measure", "recipe.yaml", f"train.out={out}", "eval.drafters={mine: {head: ngram}}"
        ),
        plain("export", OUT=out),
        plain("import", OUT=out),
        [
            "draft-vocab",
            "recipe.yaml",
            "data.limit=24",
            "--size",
            "64",
            "--out",
            f"{out}/vocab.safetensors",
        ],
        ["count-tokens", "recipe.yaml", "data.limit=24", "--out", f"{out}/counts"],
        [
            "inspect-mask",
            "recipe.yaml",
            "data.limit=24",
            "--count",
            "1",
            "--html",
            f"{out}/mask.html",
        ],
        ["card", "head", "--out", f"{out}/card.md"],
        ["recipes", "tiny/eagle1", "--copy", f"{out}/recipe.yaml"],
    ]
    for argv in asked:
        refused(server.run(argv, work, room))


@pytest.mark.parametrize(
    "verb", ["extract", "train", "measure", "regenerate", "export", "generate"]
)
def test_ctrl_c(verb: str, server: Server, work: Path) -> None:
    """At any moment: status 130 and one line, unless the work was done."""
    argv = (
        by_recipe(verb, "recipe.yaml", "features.store=null") if verb in BY_RECIPE else plain(verb)
    )
    argv = [word for word in argv if verb != "extract" or word != "features.store=null"]
    for seconds in (0.01, 0.1, 0.3, 0.7, 1.5):
        ended = server.run(argv, work, stop=seconds)
        assert "Traceback" not in ended.output and ended.status in (0, 1, 130), ended
        assert ended.status != 130 or ended.output.count("stopped; ") == 1, ended


@pytest.mark.parametrize("page", ["README.md", "docs/guides/laptop.md", "docs/guides/one-gpu.md"])
def test_the_commands_of_a_page_where_nothing_is(page: str, server: Server, tmp_path: Path) -> None:
    """Typed in order into an empty folder, without a network: what is not there is named."""
    for line in commands(ROOT / page):
        words = (
            line.split('"')[0].split()
            + line.split('"')[1:2]
            + " ".join(line.split('"')[2:]).split()
        )
        if (
            words[0] == "eagle"
            and words[1] in VERBS
            and words[1] not in ("demo", "recipes", "tiny-target")
        ):
            refused(server.run(words[1:], tmp_path), or_works=words[1] == "forecast")
