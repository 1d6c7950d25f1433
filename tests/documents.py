"""What pages tell a reader to type: their fenced blocks, and commands parsed by the programs that they call."""

from __future__ import annotations

import argparse
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command_parser

from eagle.drafters import settings_of
from eagle.recipe import Recipe
from eval.compare_plan import Comparison

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += sorted((ROOT / "docs/measurements").glob("*.md"))
GUIDES = sorted((ROOT / "docs/guides").glob("**/*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# verbs of `eagle` that stand for a module
VERBS = {
    "prepare": "data_prep.regenerate",
    "extract": "data_prep.extract",
    "measure": "eval.measure",
    "compare": "eval.compare",
    "lossless": "eval.lossless",
    "report": "eval.report",
    "tune": "eval.tune",
}
TRAINS = {"recipes/train_eagle.py", "recipes/train_medusa2.py"}


class Parsed(Exception):
    """A program has parsed its arguments; here it ends."""


@dataclass(frozen=True)
class Call:
    """A program of this project and its arguments."""

    program: str  # a module, `eagle`, or a file
    arguments: list[str]


def blocks(page: Path, language: str) -> list[str]:
    """Every fenced block of a language."""
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def commands(page: Path) -> list[str]:
    """Every command of a page's shell blocks, without comments; lines that end in a backslash are one."""
    text = "\n".join(blocks(page, "bash")).replace("\\\n", " ")
    lines = [" ".join(line.partition(" #")[0].split()) for line in text.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def written_files(page: Path) -> dict[str, str]:
    """The files that a page tells a reader to write: YAML blocks whose first line is `# PATH`."""
    texts = [(text.partition("\n")[0].removeprefix("# ").strip(), text) for text in blocks(page, "yaml")]
    return {path: text for path, text in texts if path.endswith((".yaml", ".yml")) and " " not in path}


def as_call(line: str) -> Call:
    """The program of this project that a command runs."""
    words = shlex.split(line)
    if words[0] == "eagle":
        return Call("eagle", words[1:])
    if words[0] == "accelerate":
        launched = launch_command_parser().parse_args(words[2:])
        script = ["-m"] * bool(launched.module) + [launched.training_script]
        return as_call(shlex.join(["python", *script, *launched.training_script_args]))
    if words[0] not in ("python", "python3"):
        raise ValueError(f"{line}: expected eagle, python or accelerate launch")
    return Call(words[2], words[3:]) if words[1] == "-m" else Call(words[1], words[2:])


def check_call(call: Call, written: dict[str, Path]) -> None:
    """Parse a call with its program's own parser, then load the recipe and lay its overrides over it.

    `written` holds the files that the page has the reader make, by the name that its commands use.
    """
    if call.program == "eagle" and call.arguments[0] == "recipes":
        _copy_recipe(call.arguments[1:], written)
        return
    if call.program == "eagle" and call.arguments[0] in ("train", *VERBS):
        verb, *arguments = call.arguments
        program = "recipes/train_eagle.py" if verb == "train" else VERBS[verb]
        call = Call(program, _without_processes(arguments) if verb == "train" else arguments)
    if call.program in TRAINS:
        recipe, *overrides = [word for word in call.arguments if word != "--check"]
    else:
        args = parse(call)
        recipe = getattr(args, "recipe", None) or getattr(args, "comparison", None)
        overrides = getattr(args, "overrides", [])
    if recipe is not None:
        load_recipe(written.get(recipe) or find_recipe(recipe), overrides)


def parse(call: Call) -> argparse.Namespace:
    """What a program's own parser makes of its arguments; a refusal is raised with the parser's words."""
    program = "eagle.__main__" if call.program == "eagle" else call.program
    module = import_module(program.removesuffix(".py").replace("/", "."))
    said = io.StringIO()
    try:
        with _ending_after_parsing(), redirect_stderr(said):
            module.main(call.arguments)
    except Parsed as parsed:
        return parsed.args[0]
    except SystemExit:
        raise ValueError(f"{call}: {said.getvalue()}") from None
    raise AssertionError(f"{call.program} ran without parsing its arguments")


@contextmanager
def _ending_after_parsing() -> Iterator[None]:
    """Programs raise `Parsed` where they would go on with their arguments."""
    parser: Any = argparse.ArgumentParser
    names = ("parse_args", "parse_intermixed_args")
    own = {name: getattr(parser, name) for name in names}

    def ending(parse: Any) -> Any:
        def parse_and_end(self: Any, *args: Any) -> None:
            raise Parsed(parse(self, *args))

        return parse_and_end

    for name in names:
        setattr(parser, name, ending(own[name]))
    try:
        yield
    finally:
        for name in names:
            setattr(parser, name, own[name])


def find_recipe(name: str) -> Path:
    """A recipe's file, by its path in the checkout or by its name in the package."""
    for path in (ROOT / name, ROOT / "recipes" / f"{name}.yaml"):
        if path.is_file():
            return path
    raise ValueError(f"no recipe is called {name}")


def load_recipe(path: Path, overrides: Sequence[str]) -> None:
    """Load a recipe or a comparison with overrides, the drafter's settings included."""
    if "arms" in path.read_text():
        Comparison.load(path, overrides)
        return
    recipe = Recipe.load(path, overrides)
    settings_of(recipe.drafter.model_dump(), str(path))


def _copy_recipe(arguments: list[str], written: dict[str, Path]) -> None:
    """Check `eagle recipes [NAME --copy FILE]`, whose file later commands may name."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name", nargs="?")
    parser.add_argument("--copy")
    args = parser.parse_args(arguments)
    if args.name:
        written[args.copy] = find_recipe(args.name)


def _without_processes(arguments: list[str]) -> list[str]:
    """The arguments of `eagle train` that the training script reads."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int)
    parser.add_argument("--config_file")
    return parser.parse_known_args(arguments)[1]
