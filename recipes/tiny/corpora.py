"""Make conversations for small models from the docstrings of installed packages, and from stories.json.

Sources are parsed, not imported: that runs no code of theirs and does not depend on what is loaded. Only the few
modules written in C, which have no source to parse, are imported.
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
C_MODULES = [
    "binascii",
    "builtins",
    "cmath",
    "gc",
    "itertools",
    "math",
    "time",
    "unicodedata",
    "zlib",
]
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

# Characters, so that a conversation stays below about 400 tokens.
LONGEST_TEXT = 700
LONGEST_CALL = 240
PURPOSE = (
    "What does `{}` do?",
    "What does {} do?",
    "Explain `{}`.",
    "What is {} for?",
    "Tell me about `{}`.",
)
ARGUMENTS = (
    "What are its arguments?",
    "Which arguments does it take?",
    "How do I call it?",
    "Show me its signature.",
)
PLACE = ("Where is it defined?", "Where do I find it?", "Where does it belong?")
# What ends the prose of a docstring: examples, directives, fields, lists, underlined and Google-style sections.
END_OF_PROSE = re.compile(
    r"(?:\A|\n)(?=\s*(?:>>>|\.\. |:\w+( [^:`]+)?:(?!`)|@|[-*+] |\w[\w ]*\n\s*[-=~^]{3,}|(?:args|arguments|parameters?"
    r"|returns?|raises|yields|examples?|notes?|usage|attributes|shape|inputs?|outputs?|references|warnings?)\s*:))",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Documented:
    """A public function, class or method; `arguments` is None if they are unknown."""

    name: str
    module: str
    kind: str
    docstring: str
    arguments: ast.arguments | None


def docstring_conversations(
    held_out: bool, seen: set[str], tally: Counter[str]
) -> Iterator[dict[str, Any]]:
    """Yield ShareGPT records of one split; names and texts in `seen` are left out, and `tally` counts the decisions."""
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
            yield {
                "id": item.name,
                "module": item.module,
                "conversations": make_turns(item, text, call),
            }


def documented_items(held_out: bool, tally: Counter[str]) -> Iterator[Documented]:
    """Yield everything public in the modules of one split, in an order that only the installed versions decide."""
    for module in C_MODULES:
        if bool(HELD_OUT.match(module)) == held_out:
            yield from inspect_module(module)
    for package in (*STDLIB, *PACKAGES):
        for module, path in source_files(package):
            if bool(HELD_OUT.match(module)) != held_out:
                continue
            if SKIPPED.search(module):
                tally["files skipped"] += 1
            else:
                tally["files read"] += 1
                yield from parse_source(module, path.read_bytes())


def source_files(package: str) -> Iterator[tuple[str, Path]]:
    """Yield the dotted name and path of every Python source of an installed package, sorted; nothing if absent."""
    spec = importlib.util.find_spec(package)
    origin = Path(spec.origin or "") if spec else Path()
    if origin.name == "__init__.py":
        for path in sorted(origin.parent.rglob("*.py")):
            names = path.relative_to(origin.parent).with_suffix("").parts
            yield ".".join([package, *(name for name in names if name != "__init__")]), path
    elif origin.suffix == ".py":
        yield package, origin


def parse_source(module: str, source: bytes) -> Iterator[Documented]:
    """Yield the public functions, classes and methods that a source text defines, in its order."""
    with warnings.catch_warnings():
        # Other people's sources may have stray backslashes.
        warnings.simplefilter("ignore")
        tree = ast.parse(source)
    # What a private module defines is imported from the package above it.
    public_module = module.split("._")[0]
    yield from _parse_body(tree.body, module, prefix=public_module, kind="function")


def _parse_body(body: list[ast.stmt], module: str, prefix: str, kind: str) -> Iterator[Documented]:
    for node in body:
        if (
            not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            or node.name[0] == "_"
        ):
            continue
        name = f"{prefix}.{node.name}"
        docstring = ast.get_docstring(node) or ""
        if isinstance(node, ast.ClassDef):
            yield Documented(name, module, "class", docstring, arguments=init_arguments(node))
            yield from _parse_body(node.body, module, prefix=name, kind="method")
        else:
            yield Documented(name, module, kind, docstring, arguments=written_arguments(node, kind))


def inspect_module(module: str) -> Iterator[Documented]:
    """Yield the public functions, classes and methods of a module written in C, by name."""
    return _inspect_members(importlib.import_module(module), module, prefix=module, kind="function")


def _inspect_members(owner: object, module: str, prefix: str, kind: str) -> Iterator[Documented]:
    for key, value in sorted(vars(owner).items()):
        if key[0] == "_":
            continue
        name = f"{prefix}.{key}".removeprefix("builtins.")
        docstring = inspect.getdoc(value) or ""
        if isinstance(value, type) and kind == "function":
            yield Documented(name, module, "class", docstring, arguments=live_arguments(value))
            yield from _inspect_members(value, module, prefix=name, kind="method")
        elif inspect.isroutine(value):
            yield Documented(name, module, kind, docstring, arguments=live_arguments(value))


def init_arguments(node: ast.ClassDef) -> ast.arguments | None:
    """Return the arguments that a class takes, if it has an `__init__` of its own."""
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            return written_arguments(item, "method")
    return None


def written_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef, kind: str) -> ast.arguments:
    """Return the arguments that a caller passes: without annotations and, for a method, without `self`."""
    positional = node.args.posonlyargs or node.args.args
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    if kind == "method" and positional and "staticmethod" not in decorators:
        positional.pop(0)
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return node.args


def live_arguments(value: object) -> ast.arguments | None:
    """Return the arguments of a live object, if `inspect` knows them and Python can parse them."""
    try:
        signature = str(inspect.signature(value))  # type: ignore[arg-type]
        signature = re.sub(r"^\((self|cls|type)(, /)?(, )?", "(", signature)
        return ast.parse(f"lambda {signature[1:-1]}: 0", mode="eval").body.args  # type: ignore[attr-defined]
    except (ValueError, TypeError, SyntaxError):
        return None


def extract_prose(docstring: str) -> str:
    """Return the leading prose of a docstring, a line per paragraph, without markup, sections, lists and examples."""
    paragraphs: list[str] = []
    length = 0
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        prose = END_OF_PROSE.split(paragraph, maxsplit=1)[0]
        line = " ".join(prose.split()).replace("::", ":")
        # A last sentence that ends in a colon announces what is cut off.
        line = re.sub(r"(^|(?<=[.!?]) )[^.!?]*:$", "", line)
        if not line or paragraph[0].isspace() or length + len(line) > LONGEST_TEXT:
            break
        if line[-1].isalnum():
            line += "."
        paragraphs.append(line)
        length += len(line)
        if prose != paragraph or paragraph.endswith(":"):
            break
    text = re.sub(r":[\w:]+:`~?([^`<]*?)(\s*<[^`]*>)?`", r"`\1`", "\n\n".join(paragraphs))
    # Addresses differ in every process.
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text.replace("``", "`"))


def call_answer(item: Documented) -> str | None:
    """Return how to call an item, as code and as a sentence; None if its arguments are unknown or too long."""
    arguments = item.arguments
    if arguments is None:
        return None
    call = f"{item.name.rpartition('.')[2]}({ast.unparse(arguments)})"
    if len(call) > LONGEST_CALL:
        return None
    names = [
        argument.arg
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    ]
    if arguments.vararg:
        names.append(f"*{arguments.vararg.arg}")
    if arguments.kwarg:
        names.append(f"**{arguments.kwarg.arg}")
    quoted = [f"`{name}`" for name in names]
    if not names:
        takes = "no arguments"
    elif len(names) == 1:
        takes = f"one argument: {quoted[0]}"
    else:
        takes = f"{len(names)} arguments: {', '.join(quoted[:-1])} and {quoted[-1]}"
    return f"```python\n{call}\n```\nIt takes {takes}."


def make_turns(item: Documented, text: str, call: str | None) -> list[dict[str, str]]:
    """Return two or three questions about an item with their answers."""
    # The wording depends on the name alone, so that it is the same in every run.
    choice = zlib.crc32(item.name.encode())
    owner, _, name = item.name.rpartition(".")
    texts = [PURPOSE[choice % len(PURPOSE)].format(item.name), text]
    if call:
        texts += [ARGUMENTS[choice // 7 % len(ARGUMENTS)], call]
    if not call or choice // 3 % 3 == 0:
        texts += [
            PLACE[choice // 5 % len(PLACE)],
            f"`{name}` is a {item.kind} of `{owner or item.module}`.",
        ]
    return [{"from": ("human", "gpt")[i % 2], "value": value} for i, value in enumerate(texts)]


def draw_stories(seed: int, avoid: Container[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield ShareGPT records from stories.json without end; none asks a question in `avoid`."""
    random = Random(seed)
    kinds = json.loads(STORIES.read_text(encoding="utf-8"))
    weights = [kind["weight"] for kind in kinds.values()]
    for number in count():
        name = random.choices(list(kinds), weights)[0]
        question, answer = write_story(kinds[name], random)
        if question not in avoid:
            turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
            yield {"id": f"{name}-{number}", "conversations": turns}


def write_story(kind: dict[str, Any], random: Random) -> tuple[str, str]:
    """Return a question about one of a kind's subjects and its answer, in random wordings."""
    fields = dict(zip(kind["fields"], random.choice(kind["subjects"]), strict=True))
    # At the beginning of a sentence a template names the capitalised field.
    fields |= {name.capitalize(): text.capitalize() for name, text in fields.items()}
    texts = []
    for wordings in [kind["questions"], *kind["answer"]]:
        template = wordings if isinstance(wordings, str) else random.choice(wordings)
        texts.append(template.format(**fields))
    question, *sentences = texts
    return question, kind["between"].join(sentences)
