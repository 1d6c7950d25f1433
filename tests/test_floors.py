"""Imports go down only; third parties come in by named doors. See CONTRIBUTING.md for the floors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FLOORS = {  # a file may import lower floors, and files of its own room
    **dict.fromkeys(("eagle.shipped", "eagle.web"), -1),
    **dict.fromkeys(("eagle.recipe", "eagle.log", "eagle.disk", "eagle.device", "eagle.markup"), 0),
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
    "eagle.command": 8,
    "recipes": 8,
    "tests.engines": 8,
    "eagle.__main__": 9,
    "eagle": 9,  # the public names
}
ROOMS = [name for name in FLOORS if (ROOT / name.replace(".", "/")).is_dir() and name != "eagle"]
DOORS = {
    "transformers": {
        *(
            "eagle.target.loading",
            "eagle.target.attention",
            "eagle.target.borrowed",
            "eagle.target.cache",
        ),
        *("eagle.target.trees.mixers", "eagle.target.bits.invariant"),
        *("eagle.target.trees.attention_rows", "eagle.target.weights.quantised"),
        "data_prep.tokens",
        *("eagle.drafters.parts.decoder_block", "eagle.drafters.draft_model"),
        # what `model.generate` calls with its own processors, criteria and outputs
        "eagle.transformers.node_processors",
        *("eagle.transformers.request", "eagle.transformers.with_drafter"),
        "eagle.conformance.own_answers",  # the untouched model, by which methods are checked
    },
    "datasets": {"data_prep.conversations", "eval.prompts"},
    "accelerate": {
        *(
            "eagle.training.train",
            "eagle.training.train_joint",
            "eagle.training.launch",
            "eagle.training.resume",
        ),
        *("eagle.training.choice", "eagle.training.trackers"),
        "eagle.data.features",
    },
    "wandb": {"eagle.training.trackers"},
    "huggingface_hub": {"eagle.data.identity", "eagle.formats.checkpoint", "eagle.formats.hub"},
    "peft": {"eagle.target.loading"},
    "deepspeed": set(),
    # scripts that an engine's own Python runs, and that import nothing of this project
    **{
        engine: {f"tests.engines.engine_{engine.partition('_')[0]}"}
        for engine in ("vllm", "openvino", "openvino_genai")
    },
    **{engine: set() for engine in ("sglang", "tensorrt_llm", "llama_cpp")},
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
FILES = 17  # at most, in a folder
SOURCES = sorted(
    path
    for room in ("eagle", "data_prep", "eval", "recipes")
    for path in (ROOT / room).rglob("*.py")
)
SOURCES += sorted((ROOT / "tests/engines").glob("engine_*.py"))


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


def room_of(module: str) -> str:
    """The room that a module stands in; the deepest of `ROOMS`."""
    return next((room for room in ROOMS if f"{module}.".startswith(f"{room}.")), module)


def wrong_imports(module: str, tree: ast.AST) -> list[str]:
    """What this module may not import."""
    wrong, here = [], floor_of(module)
    for imported, name in imports(tree):
        top, floor = imported.split(".")[0], floor_of(imported)
        if top in DOORS:
            allowed = module in DOORS[top] or (
                module in CONFIG_READERS and name in {"AutoConfig", "LlamaConfig"}
            )
            if not allowed and not module.startswith("recipes"):
                wrong.append(f"{module} imports {imported}: its doors are {sorted(DOORS[top])}")
        elif floor is not None and imported != "eagle":
            beside = (
                room_of(imported) == room_of(module) or floor == FLOORS["eval"]
            )  # scripts use each other's
            if floor > here or (floor == here and not beside):
                wrong.append(f"{module} (floor {here}) imports {imported} (floor {floor})")
    return wrong


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down_only(path: Path) -> None:
    """No file imports from its own floor or above, nor a third party except by its door."""
    assert not wrong_imports(name_of(path), ast.parse(path.read_text()))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("eagle.core.tree", "from eagle.target.target import Target"),
        ("eagle.core.verify", "import eagle.decoding.decode"),
        (
            "eagle.drafters.recurrent.eagle1",
            "from eagle.decoding.decode import generate",
        ),
        ("eagle.decoding.decode", "import transformers"),
        ("eagle.training.train", "import wandb"),
        ("eagle.formats.engines.servers", "import vllm"),
    ],
)
def test_a_wrong_import_is_seen(module: str, line: str) -> None:
    """The test itself can fail."""
    assert wrong_imports(module, ast.parse(line))


def circles(graph: dict[str, set[str]]) -> list[str]:
    """What is left when files that import nothing left are taken away, again and again."""
    left = dict(graph)
    while free := {name for name, needs in left.items() if not needs & left.keys() - {name}}:
        left = {name: needs for name, needs in left.items() if name not in free}
    return sorted(left)


@pytest.mark.slow
def test_no_file_imports_itself_by_way_of_others() -> None:
    """Within a room too; and the search for circles finds one."""
    graph = {
        name_of(path): {name for name, _ in imports(ast.parse(path.read_text()))}
        for path in SOURCES
    }
    graph.pop("eagle")  # whose public names are imported on first use
    assert not circles(graph)
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"c"}}) == ["a", "b", "c", "d"]


def test_folders_are_small_and_no_two_files_share_a_name() -> None:
    """A name says which file is meant, a folder is read at a glance, and eagle's root holds what every room uses."""
    folders = {path.parent for path in SOURCES}
    assert not {
        folder: count for folder in folders if (count := len(list(folder.glob("*.py")))) > FILES
    }
    names = [path.stem for path in SOURCES if path.stem not in ("__init__", "__main__")]
    assert len(list((ROOT / "eagle").glob("*.py"))) <= 8
    assert not {name for name in names if names.count(name) > 1}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_drafter_imports_no_other_drafter(path: Path) -> None:
    """What methods share lives in files of its own, which no method is registered from."""
    from eagle.drafters import DRAFTERS

    module, methods = name_of(path), {method.__module__ for method in DRAFTERS.values()}
    if module.startswith("eagle.drafters."):
        others = {
            name
            for name, _ in imports(ast.parse(path.read_text()))
            if name.startswith("eagle.drafters.")
        }
        assert not others & methods


def test_families_share_nothing_but_parts() -> None:
    """A family of drafters imports its own files and parts/; P-EAGLE alone puts masks behind another's network."""
    across = set()
    for path in SOURCES:
        if (module := name_of(path)).startswith("eagle.drafters.") and path.stem != "__init__":
            family = path.parent.name
            names = {
                name
                for name, _ in imports(ast.parse(path.read_text()))
                if name.startswith("eagle.drafters.")
            }
            across |= {
                (module, name) for name in names if name.split(".")[2] not in (family, "parts")
            }
    assert across == {("eagle.drafters.blocks.peagle", "eagle.drafters.recurrent.fused_head")}


@pytest.mark.parametrize("module", METHODS_UNKNOWN_TO)
def test_the_core_names_no_method(module: str) -> None:
    """What verifies, decodes, trains and dispatches exports knows no method by name."""
    from eagle.drafters import DRAFTERS

    path = ROOT / module.replace(".", "/")
    words = ast.parse(
        (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    )
    named = {
        node.value
        for node in ast.walk(words)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert not named & (DRAFTERS.keys() - {"none"})


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if name_of(p) != "eagle.__init__"], ids=name_of
)
def test_files_stay_short_and_names_do_not_shadow(path: Path) -> None:
    """A file has 600 lines at most; no script shadows the standard library."""
    assert len(path.read_text().splitlines()) <= 600
    assert path.stem not in {"tokenize", "types", "token"}


def test_only_entry_points_read_the_environment() -> None:
    """Settings come from recipes; `launch` alone compares the world it got with the one that was asked for."""
    readers = {name_of(path) for path in SOURCES if "os.environ" in path.read_text()}
    entries = {"eagle.log", "eagle.training.launch", "eagle.__main__", "eagle.command.answering"}
    entries |= {"data_prep.regenerate"}  # a server's key, which no recipe may hold
    entries |= {"tests.engines.engine_vllm"}  # which runs inside vLLM
    assert readers <= entries | {m for m in readers if m.startswith("recipes")}
