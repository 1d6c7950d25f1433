"""Every verb on every kind of wrong input ends in a sentence: `EAGLE_TRANSCRIPT=FILE` keeps all that was printed."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import ROOT, commands
from forked import Ended, Server

from eagle.__main__ import OLD_VERBS, VERBS
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.target.target import Target

pytestmark = pytest.mark.slow
SMALL = [
    "data.limit=24",
    "data.max_length=96",
    "train.epochs=1",
    "eval.count=1",
    "eval.max_new_tokens=4",
    "target.dtype=float32",
    "regenerate.max_new_tokens=4",
]
# verbs that read a recipe, and what follows it; OUT, HEAD and TARGET stand for paths
BY_RECIPE = {
    "prepare": "--count 1",
    "extract": "",
    "train": "",
    "train --check": "",
    "draft-vocab": "--size 64 --out vocab.safetensors",
    "count-tokens": "--out counts",
    "regenerate": "",
    "inspect-mask": "--count 1 --html mask.html",
    "measure": "",
    "tune": "",
    "lossless": "",
}
PLAIN = {
    "generate": "HEAD Hello --target TARGET --max-new-tokens 4",
    "export": "HEAD --target TARGET --to vllm OUT",
    "import": "HEAD OUT --target TARGET",
    "inspect": "HEAD --target TARGET",
    "doctor": "HEAD --target TARGET",
    "card": "HEAD",
}
# what is wrong with a recipe: its bytes, made from the right text
RECIPES: dict[str, Callable[[str], bytes]] = {
    "a syntax error": lambda text: re.sub("(?m)^target:", "target: [", text).encode(),
    "an empty file": lambda text: b"",
    "a list": lambda text: b"- one\n- two\n",
    "no text": lambda text: b"\x80\x81\xff\x00" * 9,
    "an empty section": lambda text: re.sub(r"train:\n(  .*\n)+", "train:\n", text).encode(),
    "an unknown key": lambda text: re.sub("(?m)^target:", "taget:", text).encode(),
    "a wrong type": lambda text: re.sub(r"lr: \S+", "lr: many", text).encode(),
}
OVERRIDES = {
    # paths in capitals are those of the fixture `right`
    "an unknown method": "drafter.kind=eagel1",
    "an override's syntax": "train.lr=[1",
    "no such data": "data.train=nowhere.jsonl",
    "a folder without data": "data.train=EMPTY",
    "data that is no text": "data.train=BINARY",
    "data that is empty": "data.train=NOTHING.jsonl",
    "no such template": "data.template=nowhere.jinja",
}


# ways to spoil a file or a folder
def cut(path: Path) -> None:
    """Keep two thirds of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def set_in(path: Path, **values: object) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def replace_by_file(folder: Path) -> None:
    """Put a file in a folder's place."""
    shutil.rmtree(folder)
    folder.write_text("no folder")


def empty(folder: Path) -> None:
    """Remove all that a folder holds."""
    shutil.rmtree(folder)
    folder.mkdir()


# what is wrong with the folder of a target or of a head: their configs have no key in common
WRONG_TYPES = {
    "hidden_size": "wide",
    "kind": "eagle1",
    "shape": {"hidden_size": "wide"},
}
OTHER_KIND = {
    "model_type": "none",
    "kind": "none",
    "settings": {"kind": "none"},
}
MODELS: dict[str, Callable[[Path], Any]] = {
    "weights that are cut off": lambda folder: cut(folder / "model.safetensors"),
    "a config that is cut off": lambda folder: cut(folder / "config.json"),
    "an empty config": lambda folder: (folder / "config.json").write_text(""),
    "a config of wrong types": lambda folder: set_in(folder / "config.json", **WRONG_TYPES),
    "a config of another kind": lambda folder: set_in(folder / "config.json", **OTHER_KIND),
    "no config": lambda folder: (folder / "config.json").unlink(),
    "a file for a folder": replace_by_file,
    "an empty folder": empty,
    "nothing": shutil.rmtree,
}
TARGETS = {**MODELS, "a tokenizer that is cut off": lambda folder: cut(folder / "tokenizer.json")}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One process that has imported everything, and is forked for each command."""
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def right(tiny_target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, a head, a recipe on 24 short conversations, and files that are none of these."""
    folder = tmp_path_factory.mktemp("right")
    shutil.copytree(tiny_target_dir / "target", folder / "target")
    text = (ROOT / "recipes/tiny/eagle1.yaml").read_text()
    # the shipped recipe, on the suite's files
    text = text.replace("runs/tiny/target", str(folder / "target"))
    text = text.replace("runs/tiny/data", str(tiny_target_dir / "data"))
    (folder / "recipe.yaml").write_text(text)
    torch.manual_seed(0)
    config = Target.load(folder / "target", dtype="float32").config
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), config)
    save_head(folder / "head", head, text, {})
    (folder / "EMPTY").mkdir()
    (folder / "BINARY").write_bytes(bytes(range(256)) * 9)
    (folder / "NOTHING.jsonl").touch()
    (folder / "FILE").write_text("a file")
    return folder


@pytest.fixture
def work(right: Path, tmp_path: Path) -> Path:
    """A copy of that folder to spoil."""
    return shutil.copytree(right, tmp_path / "work")


def by_recipe(verb: str, recipe: str, *overrides: str) -> list[str]:
    """Return the command of a verb on a small part of a recipe."""
    name, *check = verb.split()
    return [name, recipe, *SMALL, *overrides, *BY_RECIPE[verb].split(), *check]


def all_by_recipe(recipe: str, *overrides: str) -> list[list[str]]:
    """Return the commands of all verbs that read a recipe."""
    return [by_recipe(verb, recipe, *overrides) for verb in BY_RECIPE]


def plain(verb: str, **paths: str) -> list[str]:
    """Return the command of a verb without a recipe, with these paths in the place of HEAD, TARGET and OUT."""
    paths = {"HEAD": "head", "TARGET": "target", "OUT": "out", **paths}
    return [verb, *(paths.get(word, word) for word in PLAIN[verb].split())]


def check_refused(ended: Ended, *, or_works: bool = False) -> None:
    """Check for a sentence, a status and no traceback; a verb that does not read what is wrong may do its work."""
    assert "Traceback" not in ended.output, ended
    if or_works and ended.status == 0:
        return
    # 1 for what a stage refuses, 2 for what a parser does
    assert ended.status in (1, 2), ended
    # these two print a verdict with the faults that they find
    is_verdict = ended.argv[0] in ("inspect", "doctor") and ended.status == 1
    sentence = ended.output[ended.output.rfind("error: ") :]
    assert is_verdict or (sentence.startswith("error: ") and len(sentence) > 25), ended
    assert len(sentence.splitlines()) < 12, ended


@pytest.mark.parametrize("wrong", RECIPES)
def test_a_wrong_recipe(wrong: str, server: Server, work: Path) -> None:
    """Read by every verb that takes one."""
    recipe = RECIPES[wrong]((work / "recipe.yaml").read_text())
    (work / "wrong.yaml").write_bytes(recipe)
    # two verbs that read a recipe and run no stage
    others = [["forecast", "wrong.yaml"], ["compare", "wrong.yaml"]]
    for argv in [*all_by_recipe("wrong.yaml"), *others]:
        check_refused(server.run(argv, work))


def test_no_recipe(server: Server, work: Path) -> None:
    """Nothing there, a folder, and a file under a file."""
    for recipe in ("nowhere.yaml", "EMPTY", "FILE/recipe.yaml"):
        for argv in [by_recipe("train", recipe), ["forecast", recipe], ["compare", recipe]]:
            check_refused(server.run(argv, work))


@pytest.mark.parametrize("wrong", OVERRIDES)
def test_a_wrong_override(wrong: str, server: Server, work: Path) -> None:
    """A method, a value, data."""
    for argv in all_by_recipe("recipe.yaml", OVERRIDES[wrong]):
        check_refused(server.run(argv, work), or_works=True)


@pytest.mark.parametrize("wrong", TARGETS)
def test_a_wrong_target(wrong: str, server: Server, work: Path) -> None:
    """For every verb that reads one; what reads its config alone may work."""
    TARGETS[wrong](work / "target")
    target = f"target.path={work / 'target'}"
    # a verb may read the config alone, which is whole
    for argv in [*all_by_recipe("recipe.yaml", target), *map(plain, PLAIN)]:
        check_refused(server.run(argv, work), or_works=True)


@pytest.mark.parametrize("wrong", MODELS)
def test_a_wrong_head(wrong: str, server: Server, work: Path) -> None:
    """For every verb that reads one."""
    MODELS[wrong](work / "head")
    # measuring reads a head that its recipe names
    mine = "eval.drafters={mine: {head: head}}"
    measured = [by_recipe(verb, "recipe.yaml", mine) for verb in ("measure", "lossless")]
    for argv in [*map(plain, PLAIN), *measured]:
        check_refused(server.run(argv, work), or_works=argv[0] == "card")


@pytest.mark.parametrize("path", ["my/model", "/nowhere/model", "no such id!", "FILE/model"])
def test_a_target_that_is_not_there(path: str, server: Server, work: Path) -> None:
    """A hub id that nobody can reach, paths, and neither."""
    others = [plain(verb, TARGET=path) for verb in ("generate", "export", "doctor")]
    for argv in [*all_by_recipe("recipe.yaml", f"target.path={path}"), *others]:
        check_refused(server.run(argv, work))


@pytest.mark.parametrize("out", ["/proc/nope/out", "FILE/out", "FULL"])
def test_where_nothing_can_be_written(out: str, server: Server, work: Path) -> None:
    """A folder that cannot be made, a path under a file, and a disk that is full after 300 bytes a file."""
    # a drafter without weights, so that nothing but the output is wrong
    ngram = "eval.drafters={mine: {head: ngram}}"
    commands = [
        by_recipe("extract", "recipe.yaml", f"features.store={out}"),
        by_recipe("train", "recipe.yaml", "features.store=null", f"train.out={out}"),
        by_recipe("regenerate", "recipe.yaml", f"regenerate.out={out}/answers.jsonl"),
        by_recipe("measure", "recipe.yaml", f"train.out={out}", ngram),
        plain("export", OUT=out),
        plain("import", OUT=out),
        *(
            line.split()
            for line in (
                f"draft-vocab recipe.yaml data.limit=24 --size 64 --out {out}/vocab.safetensors",
                f"count-tokens recipe.yaml data.limit=24 --out {out}/counts",
                f"inspect-mask recipe.yaml data.limit=24 --count 1 --html {out}/mask.html",
                f"card head --out {out}/card.md",
                f"recipes tiny/eagle1 --copy {out}/recipe.yaml",
            )
        ),
    ]
    for argv in commands:
        check_refused(server.run(argv, work, room=300 if out == "FULL" else None))


@pytest.mark.parametrize("verb", ["extract", "train", "regenerate", "generate"])
def test_ctrl_c(verb: str, server: Server, work: Path) -> None:
    """At any moment: status 130 and one line, unless the work was done."""
    argv = by_recipe(verb, "recipe.yaml") if verb in BY_RECIPE else plain(verb)
    if verb == "train":
        argv.append("features.store=null")
    # while it reads its arguments, loads the target, and works
    for seconds in (0.01, 0.3, 1.5):
        ended = server.run(argv, work, stop=seconds)
        assert "Traceback" not in ended.output, ended
        assert ended.status in (0, 1, 130), ended
        assert ended.status != 130 or ended.output.count("stopped; ") == 1, ended


def test_the_commands_of_a_page_where_nothing_is(server: Server, tmp_path: Path) -> None:
    """README's, typed in order into an empty folder, without a network: what is not there is named."""
    made_here = ("demo", "recipes", "tiny-target", "env", "chat")
    for line in commands(ROOT / "README.md"):
        # what makes its own files would begin to work
        program, *argv = shlex.split(line)
        if program == "eagle" and argv[0] in {*VERBS, *OLD_VERBS} and argv[0] not in made_here:
            check_refused(
                server.run(argv, tmp_path), or_works="--estimate" in argv or argv[0] == "forecast"
            )
