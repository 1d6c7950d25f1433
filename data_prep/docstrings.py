"""Conversations built from the documentation that a Python installation already carries.

Sources are parsed, not imported: harvesting runs no code of theirs and does not depend on what is loaded. Only the
few modules written in C, which have no source to parse, are imported.
"""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNWANTED = set("antigravity this idlelib turtledemo turtle tkinter test lib2to3 distutils ensurepip pydoc_data encodings"
               " msilib".split())
STDLIB = tuple(sorted(name for name in sys.stdlib_module_names if name[0] != "_" and name not in UNWANTED))
C_MODULES = tuple("binascii builtins cmath errno gc itertools math sys time unicodedata zlib".split())
PACKAGES = ("torch", "numpy", "networkx")
SKIPPED = re.compile(r"(^|\.)(tests?|testing|_vendor|__main__|conftest|distutils|f2py)(\.|$)"
                     r"|^torch\.(_|ao|fx|onnx|jit|distributed|utils\._|nn\.quant|nn\.intr|cuda|mtia|xpu)")
HELD_OUT = tuple("csv ipaddress json shutil statistics tempfile textwrap urllib itertools torch.optim torch.amp numpy.fft"
                 " numpy.linalg networkx.algorithms.bipartite networkx.algorithms.tree".split())

LONGEST_TEXT, LONGEST_CALL = 700, 240  # characters: a conversation stays below about 400 tokens
PURPOSE = ("What does {} do?", "What is {} for?", "Explain {}.", "Can you describe {}?", "Tell me about {}.")
ARGUMENTS = ("What are its arguments?", "Which arguments does it take?", "How do I call it?", "Show me its signature.")
PLACE = ("Where is it defined?", "Where do I find it?", "Which module is it in?")
SECTION = re.compile(
    r">>>|\.\. |:\w+( [^:`]+)?:(?!`)|@|[-*+] |\w[\w ]*\n\s*[-=~^]{3,}|(Args|Arguments|Parameters?|Returns?|Raises|Yields|Examples?|Notes?"
    r"|Usage|Attributes|Shape|Inputs?|Outputs?|Keyword arg\w*|References|See also|Warnings?)\s*:", re.IGNORECASE)


@dataclass(frozen=True)
class Documented:
    """One public function, class or method; `arguments` is None where nothing readable says them."""

    name: str
    module: str
    kind: str
    docstring: str
    arguments: ast.arguments | None


def is_held_out(module: str) -> bool:
    """Whether a module belongs to the held-out split, which never shares a module with the training split."""
    return any(module == name or module.startswith(name + ".") for name in HELD_OUT)


def source_files(package: str) -> Iterator[tuple[str, Path]]:
    """Dotted name and path of every Python source of an installed package or module, in sorted order."""
    spec = importlib.util.find_spec(package)
    if spec is None or not (spec.origin or "").endswith(".py"):
        return
    origin = Path(spec.origin)
    found = sorted(origin.parent.rglob("*.py")) if spec.submodule_search_locations else []
    for path in found or [origin]:
        inner = path.relative_to(origin.parent).with_suffix("").parts if found else ()
        module = ".".join((package, *(part for part in inner if part != "__init__")))
        if not SKIPPED.search(module):
            yield module, path


def parsed(module: str, source: str) -> Iterator[Documented]:
    """The public functions, classes and methods that a source text defines, in its order."""

    def visit(body: list[ast.stmt], prefix: str, in_class: bool) -> Iterator[Documented]:
        for node in body:
            is_class = isinstance(node, ast.ClassDef)
            if (is_class or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)) and node.name[0] != "_":
                name = f"{prefix}.{node.name}"
                kind = "class" if is_class else "method" if in_class else "function"
                yield Documented(name, module, kind, ast.get_docstring(node) or "", call_arguments(node, in_class))
                if is_class:
                    yield from visit(node.body, name, True)

    return visit(ast.parse(source).body, module.split("._")[0], False)


def call_arguments(node: ast.stmt, in_class: bool) -> ast.arguments | None:
    """The arguments that a caller passes, without `self` and annotations; a class takes those of its `__init__`."""
    if isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
        return call_arguments(inits[0], True) if inits else None
    named = node.args.posonlyargs or node.args.args
    if in_class and named and "staticmethod" not in {ast.unparse(mark) for mark in node.decorator_list}:
        named.pop(0)
    for argument in ast.walk(node.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return node.args


def inspected(module: str) -> Iterator[Documented]:
    """The public functions, classes and methods of a module written in C, by name."""

    def visit(owner: object, prefix: str, in_class: bool) -> Iterator[Documented]:
        for key, value in sorted(vars(owner).items()):
            is_class = isinstance(value, type)
            if key[0] != "_" and callable(value) and not (is_class and in_class):
                name = f"{prefix}.{key}".removeprefix("builtins.")
                kind = "class" if is_class else "method" if in_class else "function"
                yield Documented(name, module, kind, inspect.getdoc(value) or "", live_arguments(value))
                if is_class:
                    yield from visit(value, name, True)

    return visit(importlib.import_module(module), module, False)


def live_arguments(value: object) -> ast.arguments | None:
    """The arguments of a live object, where `inspect` knows them and Python can read them back."""
    try:
        signature = re.sub(r"^\((self|cls|type)(, /)?(, )?", "(", str(inspect.signature(value)))
        return ast.parse(f"def call{signature}: ...").body[0].args
    except (ValueError, TypeError, SyntaxError):
        return None


def prose(docstring: str) -> str:
    """The leading prose of a docstring, one line a paragraph, without markup, sections, lists and examples."""
    kept: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        lines = re.split(r"\n(?=\s*(?:" + SECTION.pattern + "))", paragraph, flags=re.IGNORECASE)
        line = " ".join(lines[0].split()).rstrip(":")
        if SECTION.match(paragraph) or paragraph[:1].isspace() or sum(map(len, kept)) + len(line) > LONGEST_TEXT:
            break
        kept.append(line + "." * (line[-1:].isalnum()))
        if len(lines) > 1 or paragraph.endswith(":"):
            break
    text = re.sub(r":[\w:]+:`~?([^`<]*?)(\s*<[^`]*>)?`", r"`\1`", "\n\n".join(kept))
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text.replace("``", "`"))


def call_answer(item: Documented) -> str | None:
    """How to call the thing, as code and as a sentence; None where the arguments are unknown or too long to tell."""
    if item.arguments is None:
        return None
    known = item.arguments
    call = f"{item.name.rsplit('.', 1)[-1]}({re.sub(r' at 0x[0-9a-fA-F]+', '', ast.unparse(known))})"
    names = [f"`{one.arg}`" for one in (*known.posonlyargs, *known.args, *known.kwonlyargs)]
    names += [f"`{star}{one.arg}`" for star, one in (("*", known.vararg), ("**", known.kwarg)) if one]
    if len(call) > LONGEST_CALL:
        return None
    listed = " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
    number = {0: "no arguments", 1: f"one argument: {listed}"}.get(len(names), f"{len(names)} arguments: {listed}")
    return f"```python\n{call}\n```\nIt takes {number}."


def conversation(item: Documented, text: str) -> dict:
    """Two or three turns about one documented thing; the phrasing is chosen by its name alone."""
    pick = zlib.crc32(item.name.encode())
    owner, _, short = item.name.rpartition(".")
    place = f"`{short}` is a method of `{owner}`." if item.kind == "method" else f"`{short}` is a {item.kind} of `{owner or item.module}`."
    turns = [(PURPOSE[pick % len(PURPOSE)].format(f"`{item.name}`"), text)]
    call = call_answer(item)
    if call:
        turns.append((ARGUMENTS[pick // 7 % len(ARGUMENTS)], call))
    if not call or pick // 3 % 3 == 0:
        turns.append((PLACE[pick // 5 % len(PLACE)], place))
    said = [{"from": who, "value": value} for turn in turns for who, value in zip(("human", "gpt"), turn, strict=True)]
    return {"id": item.name, "module": item.module, "conversations": said}


def documented(held_out: bool) -> Iterator[Documented]:
    """Everything of one split, module after module; sources that do not parse in this Python are reported by name."""
    for module in C_MODULES:
        if is_held_out(module) == held_out:
            yield from inspected(module)
    for package in (*STDLIB, *PACKAGES):
        for module, path in source_files(package):
            if is_held_out(module) == held_out:
                yield from parsed(module, path.read_text(encoding="utf-8"))


def docstring_conversations(held_out: bool, seen: set[str], tally: Counter) -> Iterator[dict]:
    """Conversations of one split, lazily; texts in `seen` are not repeated and `tally` counts kept and dropped."""
    for item in documented(held_out):
        text = prose(item.docstring)
        reason = ("no docstring" if not item.docstring else "no prose" if not text
                  else "too short" if len(text.split()) < 5 else "duplicate" if text in seen else "kept")
        tally[reason] += 1
        if reason == "kept":
            seen.add(text)
            yield conversation(item, text)
