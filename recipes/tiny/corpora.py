"""Conversations that small models learn: of the documentation that Python carries, and of the stories in stories.json.

Sources are parsed, not imported: harvesting runs no code of theirs and does not depend on what is loaded. Only the
few modules written in C, which have no source to parse, are imported.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import sys
import warnings
import zlib
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

STORIES = Path(__file__).with_name("stories.json")
UNWANTED = r"_|antigravity|distutils|encodings|ensurepip|idlelib|lib2to3|msilib|pydoc_data|test$|this|tkinter|turtle"
STDLIB = sorted(name for name in sys.stdlib_module_names if not re.match(UNWANTED, name))
C_MODULES = ["binascii", "builtins", "cmath", "gc", "itertools", "math", "time", "unicodedata", "zlib"]
PACKAGES = ["torch", "numpy", "networkx"]  # torch brings networkx along
# Tests and scripts are not documentation, and torch's internals mostly repeat the docstrings of its public modules.
SKIPPED = re.compile(
    r"(^|\.)(tests?|testing|_vendor|__main__|conftest|distutils|f2py)(\.|$)"
    r"|^torch\.(_|ao|fx|onnx|jit|distributed|utils\._|nn\.quant|nn\.intr|cuda|mtia|xpu)"
)
HELD_OUT = re.compile(
    r"(csv|ipaddress|itertools|json|shutil|statistics|tempfile|textwrap|urllib|torch\.(amp|optim)|numpy\.(fft|linalg)"
    r"|networkx\.algorithms\.(bipartite|tree))(\.|$)"
)

LONGEST_TEXT, LONGEST_CALL = 700, 240  # characters: a conversation stays below about 400 tokens
PURPOSE = ("What does `{}` do?", "What does {} do?", "Explain `{}`.", "What is {} for?", "Tell me about `{}`.")
ARGUMENTS = ("What are its arguments?", "Which arguments does it take?", "How do I call it?", "Show me its signature.")
PLACE = ("Where is it defined?", "Where do I find it?", "Where does it belong?")
# What ends the prose of a docstring: examples, directives, fields, lists, underlined and Google-style sections.
END_OF_PROSE = re.compile(
    r"(?:\A|\n)(?=\s*(?:>>>|\.\. |:\w+( [^:`]+)?:(?!`)|@|[-*+] |\w[\w ]*\n\s*[-=~^]{3,}|(?:args|arguments|parameters?"
    r"|returns?|raises|yields|examples?|notes?|usage|attributes|shape|inputs?|outputs?|references|warnings?)\s*:))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Documented:
    """A public function, class or method; `arguments` is None where nothing readable says them."""

    name: str
    module: str
    kind: str
    docstring: str
    arguments: ast.arguments | None


def docstring_conversations(held_out: bool, seen: set[str], tally: Counter[str]) -> Iterator[dict[str, Any]]:
    """ShareGPT records of one split, lazily, none about a name or text in `seen`; `tally` counts kept and dropped."""
    for item in documented_items(held_out, tally):
        text = extract_prose(item.docstring)
        call = call_answer(item)
        if not item.docstring:
            tally["dropped: no docstring"] += 1
        elif len(text.split()) < 5:
            tally["dropped: fewer than five words of prose"] += 1
        elif text in seen or item.name in seen:
            tally["dropped: repeats another"] += 1
        else:
            tally["kept" if call else "kept, without its arguments: unknown or too long"] += 1
            seen |= {item.name, text}
            yield {"id": item.name, "module": item.module, "conversations": make_turns(item, text, call)}


def documented_items(held_out: bool, tally: Counter[str]) -> Iterator[Documented]:
    """Everything public in the modules of one split, in an order that depends on the installed versions alone."""
    for module in C_MODULES:
        if bool(HELD_OUT.match(module)) == held_out:
            yield from inspect_module(module)
    for package in (*STDLIB, *PACKAGES):
        for module, path in source_files(package):
            if bool(HELD_OUT.match(module)) == held_out:
                skipped = SKIPPED.search(module)
                tally["files skipped" if skipped else "files read"] += 1
                yield from () if skipped else parse_source(module, path.read_bytes())


def source_files(package: str) -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every Python source of an installed package or module, sorted; nothing if absent."""
    spec = importlib.util.find_spec(package)
    origin = Path(spec.origin or "") if spec else Path()
    if origin.name == "__init__.py":
        for path in sorted(origin.parent.rglob("*.py")):
            inner = path.relative_to(origin.parent).with_suffix("").parts
            yield ".".join((package, *(part for part in inner if part != "__init__"))), path
    elif origin.suffix == ".py":
        yield package, origin


def parse_source(module: str, source: bytes) -> Iterator[Documented]:
    """The public functions, classes and methods that a source text defines, in its order."""

    def visit(body: list[ast.stmt], prefix: str, kind: str) -> Iterator[Documented]:
        for node in body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name[0] != "_":
                name, docstring = f"{prefix}.{node.name}", ast.get_docstring(node) or ""
                if isinstance(node, ast.ClassDef):
                    yield Documented(name, module, "class", docstring, init_arguments(node))
                    yield from visit(node.body, name, "method")
                else:
                    yield Documented(name, module, kind, docstring, written_arguments(node, kind))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of stray backslashes in other people's sources
        tree = ast.parse(source)
    yield from visit(tree.body, module.split("._")[0], "function")


def inspect_module(module: str) -> Iterator[Documented]:
    """The public functions, classes and methods of a module written in C, by name."""

    def visit(owner: object, prefix: str, kind: str) -> Iterator[Documented]:
        for key, value in sorted(vars(owner).items()):
            name, docstring = f"{prefix}.{key}".removeprefix("builtins."), inspect.getdoc(value) or ""
            if key[0] != "_" and isinstance(value, type) and kind == "function":
                yield Documented(name, module, "class", docstring, live_arguments(value))
                yield from visit(value, name, "method")
            elif key[0] != "_" and inspect.isroutine(value):
                yield Documented(name, module, kind, docstring, live_arguments(value))

    return visit(importlib.import_module(module), module, "function")


def init_arguments(node: ast.ClassDef) -> ast.arguments | None:
    """The arguments that a class takes, if it has an `__init__` of its own."""
    inits = (item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__")
    return next((written_arguments(init, "method") for init in inits), None)


def written_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> ast.arguments:
    """The arguments that a caller passes: without annotations and, for a method, without `self`."""
    positional = node.args.posonlyargs or node.args.args
    if kind == "method" and positional and "staticmethod" not in map(ast.unparse, node.decorator_list):
        positional.pop(0)
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return node.args


def live_arguments(value: object) -> ast.arguments | None:
    """The arguments of a live object, where `inspect` knows them and Python can read them back."""
    try:
        signature = re.sub(r"^\((self|cls|type)(, /)?(, )?", "(", str(inspect.signature(value)))  # type: ignore[arg-type]
        return ast.parse(f"lambda {signature[1:-1]}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    except (ValueError, TypeError, SyntaxError):
        return None


def extract_prose(docstring: str) -> str:
    """The leading prose of a docstring, a line per paragraph, without markup, sections, lists and examples."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        head = END_OF_PROSE.split(paragraph, maxsplit=1)[0]
        line = re.sub(r"(^|(?<=[.!?]) )[^.!?]*:$", "", " ".join(head.split()).replace("::", ":"))
        if not line or paragraph[0].isspace() or sum(map(len, kept)) + len(line) > LONGEST_TEXT:
            break
        kept.append(line + "." * line[-1].isalnum())
        if head != paragraph or paragraph.endswith(":"):
            break
    text = re.sub(r":[\w:]+:`~?([^`<]*?)(\s*<[^`]*>)?`", r"`\1`", "\n\n".join(kept))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text.replace("``", "`"))


def call_answer(item: Documented) -> str | None:
    """How to call a documented thing, as code and as a sentence; None if its arguments are unknown or too long."""
    if item.arguments is None:
        return None
    arguments = item.arguments
    call = f"{item.name.rpartition('.')[2]}({ast.unparse(arguments)})"
    names = [f"`{arg.arg}`" for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    names += [f"`{stars}{arg.arg}`" for stars, arg in (("*", arguments.vararg), ("**", arguments.kwarg)) if arg]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    takes = {0: "no arguments", 1: f"one argument: {listed}"}.get(len(names), f"{len(names)} arguments: {listed}")
    return f"```python\n{call}\n```\nIt takes {takes}." if len(call) <= LONGEST_CALL else None


def make_turns(item: Documented, text: str, call: str | None) -> list[dict[str, str]]:
    """Two or three questions about a documented thing with their answers, phrased by a checksum of its name."""
    choice = zlib.crc32(item.name.encode())
    owner, _, name = item.name.rpartition(".")
    texts = [PURPOSE[choice % len(PURPOSE)].format(item.name), text]
    if call:
        texts += [ARGUMENTS[choice // 7 % len(ARGUMENTS)], call]
    if not call or choice // 3 % 3 == 0:
        texts += [PLACE[choice // 5 % len(PLACE)], f"`{name}` is a {item.kind} of `{owner or item.module}`."]
    return [{"from": ("human", "gpt")[place % 2], "value": value} for place, value in enumerate(texts)]


def draw_stories(seed: int, avoid: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """ShareGPT records without end, drawn with `seed` from stories.json; none asks what is in `avoid`."""
    random, kinds = Random(seed), json.loads(STORIES.read_text(encoding="utf-8"))
    for number in count():
        (name,) = random.choices(list(kinds), weights=[kind["weight"] for kind in kinds.values()])
        request, answer = write_story(kinds[name], random)
        if request not in avoid:
            turns = [{"from": "human", "value": request}, {"from": "gpt", "value": answer}]
            yield {"id": f"{name}-{number}", "conversations": turns}


def write_story(kind: dict[str, Any], random: Random) -> tuple[str, str]:
    """A question about one of a kind's subjects and its answer; of what has several wordings one is drawn."""
    fields = dict(zip(kind["fields"], random.choice(kind["subjects"]), strict=True))
    fields |= {name.capitalize(): text.capitalize() for name, text in fields.items()}
    parts = [kind["questions"], *kind["answer"]]
    texts = [(part if isinstance(part, str) else random.choice(part)).format(**fields) for part in parts]
    return texts[0], kind["between"].join(texts[1:])
