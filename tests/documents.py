"""What pages tell a reader to type: their fenced blocks, and commands parsed by the programs that they call."""

from __future__ import annotations

import argparse
import ast
import io
import re
import shlex
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest.mock import patch

from accelerate.commands.launch import launch_command_parser
from PIL import Image

from eagle.__main__ import VERBS, find_program, take_code_options
from eagle.command.launcher import launcher_options
from eagle.drafters import settings_of
from eagle.drafters.draft_model import DraftModel
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import save_head
from eagle.recipe import Recipe
from eagle.shipped import find_recipe
from eagle.target.target import Target
from eval.comparison.compare_plan import Comparison
from eval.measure import measure
from tests.seeing_folders import save_llava

ROOT = Path(__file__).parent.parent
GUIDES = sorted((ROOT / "docs/guides").glob("*.md"))
DOCS = [page for page in sorted((ROOT / "docs").glob("**/*.md")) if page not in GUIDES]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
# a block in a tab of a page is indented
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"[A-Z_]+=")  # set for one command
# verbs of `eagle` that take minutes, or end with what does
STAGES = {
    "prepare",
    "regenerate",
    "extract",
    "train",
    "measure",
    "tune",
    "compare",
    "lossless",
    "demo",
    "tiny-target",
    "chat",  # which downloads a model
}
ROOMS = ("eagle", "data_prep", "eval", "recipes")
TRAINS = {"recipes/train_eagle.py", "recipes/train_medusa2.py"}


class Parsed(Exception):
    """A program has parsed its arguments; here it ends."""


@dataclass(frozen=True)
class Call:
    """A program of this project and its arguments."""

    program: str  # a module, `eagle`, or a file
    arguments: list[str]


def blocks(page: Path, language: str) -> list[str]:
    """Return every fenced block of a language."""
    found = FENCE.findall(page.read_text())
    return [dedent(text) for _, name, text in found if name == language]


def commands(page: Path) -> list[str]:
    """Return every command of a page's shell blocks, without comments; lines that end in a backslash are joined."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    # a comment follows its command after a space
    lines = [" ".join(line.partition(" #")[0].split()) for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def messages_of_the_project() -> str:
    """Return every text of the sources in a line of its own, with `...` for what is put in."""
    texts: list[str] = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            texts += _texts(ast.parse(path.read_text(encoding="utf-8")))
    return "\n".join(text.replace("\n", " ") for text in texts)


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            pieces = [
                str(piece.value) if isinstance(piece, ast.Constant) else "..."
                for piece in node.values
            ]
            yield "".join(pieces)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def written_files(page: Path) -> dict[str, str]:
    """Return the files that a page has a reader write: blocks of YAML or Python whose first line is `# PATH`."""
    files = {}
    for text in [*blocks(page, "yaml"), *blocks(page, "python")]:
        path = text.partition("\n")[0].removeprefix("# ").strip()
        if path.endswith((".yaml", ".yml", ".py")) and " " not in path:
            files[path] = text
    return files


def words_of(line: str) -> list[str]:
    """Return the words of a command, without the variables that are set for it."""
    words = shlex.split(line)
    while words and VARIABLE.match(words[0]):
        words = words[1:]
    return words


def as_call(line: str) -> Call:
    """Return the program of this project that a command runs."""
    program, *words = words_of(line)
    if program == "eagle":
        return Call("eagle", take_code_options(words)[2])
    if program == "accelerate":
        launched = launch_command_parser().parse_args(words[1:])
        script = ["-m"] * bool(launched.module) + [launched.training_script]
        return as_call(shlex.join(["python", *script, *launched.training_script_args]))
    if program not in ("python", "python3"):
        raise ValueError(f"{line}: expected eagle, python or accelerate launch")
    if words[0] == "-m":
        words = words[1:]
    return Call(words[0], words[1:])


def check_call(call: Call, written: dict[str, Path]) -> None:
    """Parse a call with its program's own parser, then load the recipe with its overrides.

    `written` holds the files that the page has the reader make, by the name that its commands use.
    """
    if call == Call("eagle", ["--version"]):
        return
    recipe: Any
    is_training = call.arguments[:1] == ["train"] and "--estimate" not in call.arguments
    if call.program in TRAINS or is_training:
        # training has no parser: whatever is left of the launcher's options are a recipe and overrides
        words = call.arguments
        if call.program == "eagle":
            words = launcher_options(call.arguments[1:])[1]
        recipe, *overrides = [word for word in words if word != "--check"]
    else:
        args = parse(call)
        recipe = getattr(args, "recipe", None) or getattr(args, "comparison", None)
        overrides = getattr(args, "overrides", [])
        if "copy" in args and args.name:
            written[str(args.copy)] = find_recipe(args.name)
        if "method" in args and "model" in args:
            # `eagle init` writes a recipe of this method
            written[str(args.out)] = find_recipe(f"tiny/{args.method}")
    if isinstance(recipe, str):
        load_recipe(written.get(recipe) or find_recipe(recipe), overrides)


def parse(call: Call) -> argparse.Namespace:
    """Return what a program's own parser makes of its arguments; a refusal is raised with the parser's words."""
    main, arguments = _main_of(call)
    printed = io.StringIO()
    parser = argparse.ArgumentParser
    try:
        with (
            patch.object(parser, "parse_args", _end_after(parser.parse_args)),
            patch.object(parser, "parse_intermixed_args", _end_after(parser.parse_intermixed_args)),
            redirect_stderr(printed),
        ):
            main(arguments)
    except Parsed as parsed:
        return parsed.args[0]
    except SystemExit:
        raise ValueError(f"{call}: {printed.getvalue()}") from None
    raise AssertionError(f"{call.program} ran without parsing its arguments")


def _end_after(parse: Any) -> Any:
    """Return a method of a parser that raises `Parsed` where its program would go on with the arguments."""

    def parse_and_end(self: Any, *args: Any) -> None:
        raise Parsed(parse(self, *args))

    return parse_and_end


def _main_of(call: Call) -> tuple[Callable[[list[str]], None], list[str]]:
    """Return the function that a program runs, and the arguments that it gets."""
    if call.program != "eagle":
        module = import_module(call.program.removesuffix(".py").replace("/", "."))
        if hasattr(module, "__path__"):  # a package runs its __main__
            module = import_module(f"{module.__name__}.__main__")
        return module.main, call.arguments
    # the launcher takes its own options away first
    name, arguments = find_program(call.arguments)
    if name not in VERBS:
        raise ValueError(f"eagle {name}: expected one of {', '.join(VERBS)}")
    verb = VERBS[name]
    if not verb.module.startswith("eagle."):
        arguments = launcher_options(arguments)[1]
    return getattr(import_module(verb.module), verb.function), arguments


def load_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Load a recipe or a comparison with overrides, the drafter's settings included."""
    if "arms" in path.read_text():
        Comparison.load(path, overrides)
        return
    recipe = Recipe.load(path, overrides)
    settings_of(recipe.drafter.model_dump(), str(path))


def make_checkout(folder: Path, tiny: Path, target: Target) -> None:
    """Let a folder look as if `eagle demo --tiny` and `make tiny` had run there: a target, data, heads and results.

    Args:
        folder: where the reader would be.
        tiny: the folder of the suite's target and data.
        target: that target.
    """
    tiny = shutil.copytree(tiny, folder / "runs/tiny")
    (folder / "runs/demo").symlink_to("tiny")
    name = "recipes/tiny/eagle1.yaml"
    where = [f"target.path={tiny / 'target'}", f"train.out={tiny / 'eagle1'}"]
    # untrained heads: commands need heads that load, not good ones
    head = Eagle1.for_target(Eagle1.Settings(fc_bias=False), target.config)
    save_head(
        tiny / "eagle1/head",
        head,
        Recipe.load(ROOT / name, where).dump(),
        {},
    )
    small = DraftModel.for_target(DraftModel.Settings(layers=2), target.config)
    save_head(tiny / "draft_model/head", small, "", {})
    answers = (tiny / "data/train.jsonl").read_text().splitlines(keepends=True)
    (tiny / "data/regenerated.jsonl").write_text("".join(answers[:20]))
    few = [f"eval.prompts={tiny / 'data/heldout.jsonl'}", "eval.count=2", "eval.max_new_tokens=4"]
    measure(Recipe.load(ROOT / name, [*where, *few]), name)
    save_llava(tiny / "target", folder / "my/qwen2.5-vl")  # as good as another model with images
    Image.new("RGB", (24, 16), (200, 30, 10)).save(folder / "cat.png")
    for room in (*ROOMS, "tests"):
        (folder / room).symlink_to(ROOT / room)
