"""Imports go down only; third parties come in by named doors. See CONTRIBUTING.md for the floors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {
    **dict.fromkeys(("eagle.recipe", "eagle.tree", "eagle.noise", "eagle.examples", "eagle.disk", "eagle.log"), 0),
    **dict.fromkeys(("eagle.card", "eagle.spans", "eagle.device", "eagle.attention", "eagle.turns", "eagle.twin"), 0),
    **dict.fromkeys(("eagle.sampling", "eagle.spelling", "eagle.stops"), 0),
    **dict.fromkeys(("eagle.drafter", "eagle.verify", "eagle.objectives", "eagle.reader", "eagle.loading"), 1),
    **dict.fromkeys(("eagle.shards", "eagle.identity", "eagle.judge", "eagle.plan", "eagle.draft_vocab"), 1),
    **dict.fromkeys(("eagle.target", "eagle.borrowed", "eagle.arguments", "eagle.store"), 2),
    "eagle.drafters": 3,
    "eagle.decode": 3,
    **dict.fromkeys(("eagle.checkpoint", "eagle.extract", "eagle.resume", "eagle.launch"), 4),
    "eagle.goodput": 4,
    **dict.fromkeys(("eagle.train", "eagle.own_samples"), 5),
    **dict.fromkeys(("eagle.export", "eagle.foreign"), 5),
    "eagle.doctor": 6,
    "data_prep": 6,
    "eval": 6,
    "eagle.__main__": 7,
    "recipes": 7,
    "eagle": 8,  # the public names
}
ROOMS = (
    "eagle.drafters",
    "eagle.export",
    "eagle.foreign",
    "eagle.doctor",
)  # folders inside which files may import each other
DOORS = {
    "transformers": {
        *("eagle.loading", "eagle.attention", "eagle.borrowed", "data_prep.tokens"),
        *("eagle.drafters.blocks", "eagle.drafters.draft_model"),
    },
    "datasets": {"data_prep.conversations", "eval.prompts"},
    "accelerate": {"eagle.train", "eagle.extract", "eagle.launch", "eagle.resume"},
    "wandb": {"eagle.log"},
    "huggingface_hub": {"eagle.identity", "eagle.checkpoint"},
    "peft": {"eagle.loading"},
    "deepspeed": set(),
    # scripts that an engine's own Python runs, and that import nothing of this project
    **{engine: {f"eval.engine_{engine.partition('_')[0]}"} for engine in ("vllm", "openvino", "openvino_genai")},
    **{engine: set() for engine in ("sglang", "tensorrt_llm", "llama_cpp")},
}
# a head's shape is a config, which a checkpoint reads
CONFIG_READERS = {"eagle.checkpoint", "eagle.foreign.head"}
METHODS_UNKNOWN_TO = ("eagle.verify", "eagle.decode", "eagle.train", "eagle.export")
SOURCES = sorted(path for room in ("eagle", "data_prep", "eval", "recipes") for path in (ROOT / room).rglob("*.py"))


def name_of(path: Path) -> str:
    """The dotted module name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor_of(module: str) -> int | None:
    """The floor of the longest known prefix, or None for a third party."""
    parts = module.split(".")
    known = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((FLOORS[name] for name in known if name in FLOORS), None)


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(module, name taken from it) of every import, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def wrong_imports(module: str, tree: ast.AST) -> list[str]:
    """What this module may not import."""
    wrong, room = [], module if module in ROOMS else module.rpartition(".")[0]
    for imported, name in imports(tree):
        top, floor = imported.split(".")[0], floor_of(imported)
        if top in DOORS:
            allowed = module in DOORS[top] or (module in CONFIG_READERS and name in {"AutoConfig", "LlamaConfig"})
            if not allowed and not module.startswith("recipes"):
                wrong.append(f"{module} imports {imported}: its doors are {sorted(DOORS[top])}")
        elif floor is not None and imported != "eagle":
            here = floor_of(module)
            same_room = room in ROOMS and imported.startswith(room + ".")
            # the libraries of data_prep and eval stand on one floor with their scripts, and may use each other
            same_room |= here == floor and floor >= 6
            if floor > here or (floor == here and not same_room):
                wrong.append(f"{module} (floor {here}) imports {imported} (floor {floor})")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    """No file imports from its own floor or above, nor a third party except by its door."""
    assert not wrong_imports(name_of(path), ast.parse(path.read_text()))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("eagle.tree", "from eagle.verify import walk"),
        ("eagle.verify", "import eagle.drafter"),
        ("eagle.drafters.eagle1", "from eagle.target import Target\nfrom eagle.decode import generate"),
        ("eagle.decode", "import transformers"),
        ("eagle.train", "import wandb"),
        ("eagle.export.vllm", "import vllm"),
    ],
)
def test_a_wrong_import_is_seen(module: str, line: str) -> None:
    """The test itself can fail."""
    assert wrong_imports(module, ast.parse(line))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_drafter_imports_no_other_drafter(path: Path) -> None:
    """What methods share lives in files of its own, which no method is registered from."""
    from eagle.drafters import DRAFTERS

    module, methods = name_of(path), {method.__module__ for method in DRAFTERS.values()}
    if module.startswith("eagle.drafters."):
        others = {name for name, _ in imports(ast.parse(path.read_text())) if name.startswith("eagle.drafters.")}
        assert not others & methods


@pytest.mark.parametrize("module", METHODS_UNKNOWN_TO)
def test_the_core_names_no_method(module: str) -> None:
    """What verifies, decodes, trains and dispatches exports knows no method by name."""
    from eagle.drafters import DRAFTERS

    path = ROOT / module.replace(".", "/")
    words = ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())
    named = {node.value for node in ast.walk(words) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    assert not named & (DRAFTERS.keys() - {"none"})


@pytest.mark.parametrize("path", [p for p in SOURCES if name_of(p) != "eagle.__init__"], ids=name_of)
def test_files_stay_short_and_names_do_not_shadow(path: Path) -> None:
    """A file fits in one reading, and no script shadows the standard library."""
    assert len(path.read_text().splitlines()) <= 320
    assert path.stem not in {"tokenize", "types", "token"}


def test_only_entry_points_read_the_environment() -> None:
    """Settings come from recipes; `launch` alone compares the world it got with the one that was asked for."""
    readers = {name_of(path) for path in SOURCES if "os.environ" in path.read_text()}
    assert readers <= {"eagle.log", "eagle.launch", "eagle.__main__"} | {m for m in readers if m.startswith("recipes")}
