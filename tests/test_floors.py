"""Imports go down only; third parties come in by named doors. See CONTRIBUTING.md for the floors."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagle.drafters import DRAFTERS

ROOT = Path(__file__).parent.parent
# a file may import lower floors, and files of its own room
FLOORS = {
    "eagle.shipped": -1,
    "eagle.web": -1,
    "eagle.interrupts": -1,
    "eagle.recipe": 0,
    "eagle.log": 0,
    "eagle.disk": 0,
    "eagle.device": 0,
    "eagle.markup": 0,
    "eagle.demo_model": 1,
    "eagle.core": 1,
    "eagle.target": 2,
    "eagle.decoding": 3,  # knows no drafter
    "eagle.drafters": 3,
    "eagle.data": 4,
    "eagle.formats": 5,
    "eagle.training": 6,
    "eagle.transformers": 6,
    "eagle.doctor": 7,
    "eagle.conformance": 7,
    "data_prep": 7,
    "eval": 7,
    "eagle.api": 8,
    "eagle.command": 8,
    "recipes": 8,
    "tests.engines": 8,
    "eagle.__main__": 9,
    "eagle": 9,  # the public names
}
ROOMS = [name for name in FLOORS if (ROOT / name.replace(".", "/")).is_dir() and name != "eagle"]
# the only modules that may import each of these packages
DOORS = {
    "transformers": {
        "eagle.target.loading",
        "eagle.target.attention",
        "eagle.target.borrowed",
        "eagle.target.cache",
        "eagle.target.trees.mixers",
        "eagle.target.trees.attention_rows",
        "eagle.target.bits.invariant",
        "eagle.target.weights.quantised",
        "data_prep.tokens",
        "eagle.drafters.parts.decoder_block",
        "eagle.drafters.draft_model",
        # what `model.generate` calls with its own processors, criteria and outputs
        "eagle.transformers.node_processors",
        "eagle.transformers.request",
        "eagle.transformers.with_drafter",
        # the untouched model, by which methods are checked
        "eagle.conformance.own_answers",
        "eagle.target.gguf",
    },
    "datasets": {"data_prep.conversations", "eval.prompts"},
    "accelerate": {
        "eagle.training.train",
        "eagle.training.train_joint",
        "eagle.training.launch",
        "eagle.training.resume",
        "eagle.training.choice",
        "eagle.training.trackers",
        "eagle.data.features",
    },
    "wandb": {"eagle.training.trackers"},
    "huggingface_hub": {
        "eagle.demo_model",
        "eagle.data.identity",
        "eagle.formats.checkpoint",
        "eagle.formats.hub",
        "eagle.target.gguf",
    },
    "peft": {"eagle.target.loading"},
    "deepspeed": set(),
    # scripts that an engine's own Python runs, and that import nothing of this project
    "vllm": {"tests.engines.engine_vllm"},
    "openvino": {"tests.engines.engine_openvino"},
    "openvino_genai": {"tests.engines.engine_openvino"},
    "sglang": set(),
    "tensorrt_llm": set(),
    "llama_cpp": set(),
}
# a head's shape is a config, which a checkpoint reads
CONFIG_READERS = {"eagle.formats.checkpoint"}
METHODS_UNKNOWN_TO = (
    "eagle.core.verify",
    "eagle.decoding.decode",
    "eagle.decoding.loop",
    "eagle.decoding.beam",
    "eagle.training.train",
    "eagle.training.joint",
    "eagle.training.train_joint",
    "eagle.formats.export",
)
MAX_FILES = 17  # of a folder
MAX_LINES = 500  # of code in a file
SOURCES = sorted(
    path
    for room in ("eagle", "data_prep", "eval", "recipes")
    for path in (ROOT / room).rglob("*.py")
)
# the only tests that import an engine
SOURCES += sorted((ROOT / "tests/engines").glob("engine_*.py"))


def name_of(path: Path) -> str:
    """Return the dotted module name of a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def floor_of(module: str) -> int | None:
    """Return the floor of the longest known prefix, or None for a third party."""
    while module:
        if module in FLOORS:
            return FLOORS[module]
        module = module.rpartition(".")[0]
    return None


def imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name taken from it) of every import, at any depth."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)


def imported_by(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    return {module for module, _ in imports(ast.parse(path.read_text()))}


def room_of(module: str) -> str:
    """Return the room that a module stands in, else the module itself."""
    return next((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), module)


def wrong_imports(module: str, tree: ast.AST) -> list[str]:
    """Return a sentence for each import that this module may not have."""
    wrong = []
    here = floor_of(module)
    for imported, name in imports(tree):
        package = imported.split(".")[0]
        floor = floor_of(imported)
        if package in DOORS:
            # a config is no model
            reads_config = module in CONFIG_READERS and name in {"AutoConfig", "LlamaConfig"}
            is_door = module in DOORS[package] or module.startswith("recipes")
            if not is_door and not reads_config:
                doors = sorted(DOORS[package])
                wrong.append(f"{module} imports {imported}: its doors are {doors}")
        elif floor is not None and imported != "eagle":
            # data_prep and eval use each other's scripts
            is_beside = room_of(imported) == room_of(module) or floor == FLOORS["eval"]
            if floor > here or (floor == here and not is_beside):
                wrong.append(f"{module} (floor {here}) imports {imported} (floor {floor})")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    """No file imports from its own floor or above, nor a third party except by its door, nor another drafter."""
    module = name_of(path)
    assert not wrong_imports(module, ast.parse(path.read_text()))
    methods = {method.__module__ for method in DRAFTERS.values()}
    if module.startswith("eagle.drafters."):
        assert not imported_by(path) & methods


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("eagle.core.tree", "from eagle.target.target import Target"),
        ("eagle.core.verify", "import eagle.decoding.decode"),
        ("eagle.drafters.recurrent.eagle1", "from eagle.decoding.decode import generate"),
        ("eagle.decoding.decode", "import transformers"),
        ("eagle.training.train", "import wandb"),
        ("eagle.formats.engines.servers", "import vllm"),
    ],
)
def test_a_wrong_import_is_seen(module: str, line: str) -> None:
    """The test itself can fail."""
    assert wrong_imports(module, ast.parse(line))


def find_circles(graph: dict[str, set[str]]) -> list[str]:
    """Return what is left when files that import nothing left are taken away, again and again."""
    left = dict(graph)
    while True:
        free = {name for name, needs in left.items() if not needs & left.keys() - {name}}
        if not free:
            return sorted(left)
        left = {name: needs for name, needs in left.items() if name not in free}


@pytest.mark.slow
def test_no_file_imports_itself_by_way_of_others() -> None:
    """Within a room too; and the search for circles finds one."""
    graph = {name_of(path): imported_by(path) for path in SOURCES}
    graph.pop("eagle")  # whose public names are imported on first use
    assert not find_circles(graph)
    planted = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"c"}}
    assert find_circles(planted) == ["a", "b", "c", "d"]


def test_folders_and_files_are_small_and_no_two_files_share_a_name() -> None:
    """A name says which file is meant, a folder is read at a glance, and no script shadows the standard library."""
    files = Counter(path.parent for path in SOURCES)
    assert [folder for folder, count in files.items() if count > MAX_FILES] == []
    assert files[ROOT / "eagle"] <= 10  # what every room uses
    names = Counter(path.stem for path in SOURCES)
    shared = {name for name, count in names.items() if count > 1}
    assert shared <= {"__init__", "__main__"}
    assert not names.keys() & {"tokenize", "types", "token"}
    long = [path for path in SOURCES if count_code_lines(path) > MAX_LINES]
    assert long == []


def count_code_lines(path: Path) -> int:
    """Return the lines of a file that are neither empty nor comment nor docstring: explanations are not limited."""
    text = path.read_text()
    explained = set()
    for node in ast.walk(ast.parse(text)):
        # a string as a statement
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            explained |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    code = [number for number, line in lines if line.strip() and not line.lstrip().startswith("#")]
    return len({*code} - explained)


def test_families_share_nothing_but_parts() -> None:
    """A family of drafters imports its own files and parts/; P-EAGLE alone puts masks behind another's network."""
    across = set()
    for path in (ROOT / "eagle/drafters").glob("*/*.py"):
        for imported in imported_by(path):
            words = imported.split(".")
            is_drafter = words[:2] == ["eagle", "drafters"] and len(words) > 2
            if is_drafter and words[2] not in (path.parent.name, "parts"):
                across.add((name_of(path), imported))
    assert across == {("eagle.drafters.blocks.peagle", "eagle.drafters.recurrent.fused_head")}


@pytest.mark.parametrize("module", METHODS_UNKNOWN_TO)
def test_the_core_names_no_method(module: str) -> None:
    """What verifies, decodes, trains and dispatches exports knows no method by name."""
    path = ROOT / module.replace(".", "/")
    source = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    texts = {
        node.value
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not texts & (DRAFTERS.keys() - {"none"})


def test_only_entry_points_read_the_environment() -> None:
    """Settings come from recipes; `launch` alone compares the world it got with the one that was asked for."""
    readers = {name_of(path) for path in SOURCES if "os.environ" in path.read_text()}
    entries = {
        "eagle.log",
        "eagle.interrupts",
        "eagle.training.launch",
        "eagle.__main__",
        "eagle.shipped",  # where processes that begin here find the stages
        "eagle.command.answering",
        "data_prep.regenerate",  # a server's key, which no recipe may hold
        "tests.engines.engine_vllm",  # which runs inside vLLM
    }
    assert {name for name in readers - entries if not name.startswith("recipes")} == set()
