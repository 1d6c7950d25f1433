"""A head's folder that is damaged, another tool's, or of another release: a sentence with the file, and what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from eagle import Target, load_drafter
from eagle.core.budget import Budget
from eagle.formats.card import acceptance_of, model_card
from eagle.formats.checkpoint import (
    from_pretrained,
    load_head,
    save_head,
    write_budget,
)
from eagle.formats.export import export
from eagle.formats.reading.foreign import inspect
from eagle.recipe import Recipe
from tests.formats.make_heads import change_head, make_head, make_target

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
POINTER = b"version https://git-lfs.github.com/spec/v1\n" * 9


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target."""
    return make_target()


@pytest.fixture
def folder(target: Target, tmp_path: Path) -> Path:
    """A head as training leaves it."""
    head = make_head({"kind": "eagle3", "taps": (2, 4, 5)}, target)
    save_head(
        tmp_path / "head",
        head,
        "target: {path: some/target}\n",
        {"torch": "1"},
    )
    return tmp_path / "head"


def check_refused(
    folder: Path,
    target: Target,
    words: str,
) -> None:
    """Assert that loading refuses a folder by its name, for training and for users."""
    # what training and exports call, and what users call
    for load in (load_head, lambda path: load_drafter(path, target)):
        with pytest.raises(ValueError, match=f"(?s){words}") as refusal:
            load(folder)
        assert str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "start", "text", "words"),
    [
        # how much is kept of a file, and what follows
        (WEIGHTS, 5000, b"", "model.safetensors"),
        (WEIGHTS, 40, b"", "model.safetensors"),
        (WEIGHTS, 0, b"", "model.safetensors"),
        (WEIGHTS, 0, POINTER, "model.safetensors"),
        (CONFIG, 30, b"", "config.json"),
        (CONFIG, 0, b"\xff\xfe\x00", "config.json"),
        (CONFIG, 0, b"[1]", "eagle import"),
        (CONFIG, 0, b'{"architectures": ["X"]}', "expected the keys settings and shape"),
    ],
)
def test_a_damaged_file_is_named(
    name: str,
    start: int,
    text: bytes,
    words: str,
    folder: Path,
    target: Target,
) -> None:
    """Cut short, empty, a hub's pointer, no text, another tool's."""
    file = folder / name
    file.write_bytes(file.read_bytes()[:start] + text)
    check_refused(folder, target, words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shape": None}, "expected the keys settings and shape"),
        ({"settings": "eagle3"}, "expected the keys settings and shape"),
        ({"shape": {"hidden_size": 32}}, "config.json"),
        ({"shape/hidden_size": "x"}, "config.json"),
        ({"fc.weight": torch.zeros(32, 64)}, r"fc\.weight is \[32, 64\], expected \[32, 96\]"),
        ({"fc.weight": None}, "fc.weight"),
        ({"settings/kind": "eagle9"}, "kind is 'eagle9'.*newer release"),
        ({"settings/warp": 1}, "warp.*newer release"),
        ({"budget": {"nodes": 3, "warp": 1}}, "budget"),
        ({"budget": [3]}, "budget"),
    ],
)
def test_a_wrong_value_is_named(
    changes: dict[str, Any],
    words: str,
    folder: Path,
    target: Target,
) -> None:
    """Of another size, of another type, missing, or of another release."""
    head = (json.loads((folder / CONFIG).read_text()), load_file(folder / WEIGHTS))
    config, tensors = change_head(head, changes)
    (folder / CONFIG).write_text(json.dumps(config))
    save_file(tensors, folder / WEIGHTS)
    check_refused(folder, target, words)


def test_missing_files_are_named(folder: Path) -> None:
    """Weights in another format count as missing."""
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    words = r"model\.safetensors missing; expected the folder `head` of a run"
    with pytest.raises(ValueError, match=words):
        from_pretrained(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(ValueError, match=r"config\.json, model\.safetensors missing"):
        from_pretrained(folder)


def test_a_card_says_what_the_files_say(target: Target, tmp_path: Path) -> None:
    """Front matter, the target, the settings, the ends of the curve, the acceptance of the newest run."""
    target_dir = tmp_path / "target"
    target_dir.mkdir()
    recipe = Recipe.load("recipes/tiny/eagle1.yaml", [f"target.path={target_dir}"])
    folder = tmp_path / "head"
    record = {"validation": {"tree_tau": 2.5}}
    save_head(folder, make_head({"kind": "eagle1"}, target), recipe.dump(), record)
    steps = [{"step": step, "total": 9 - step / 100, "lr": 1e-3} for step in range(0, 201, 10)]
    # one measured answer, but for the tokens and cycles that differ
    answer = {
        "temperature": 0.0,
        "identical": True,
        "loops": False,
        "tokens": 9,
        "seconds": 1.0,
        "drafter": "eagle1",
    }
    results = [
        {"run": {"date": "old"}},
        {**answer, "committed": 30, "cycles": 1},
        {"run": {"date": "new"}},
        {**answer, "committed": 5, "cycles": 5, "drafter": "none"},
        {**answer, "committed": 30, "cycles": 10},
        {**answer, "committed": 30, "cycles": 6},
    ]
    for name, rows in (("metrics.jsonl", steps), ("results.jsonl", results)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    card = model_card(folder, "someone/head")
    front = yaml.safe_load(card.split("---")[1])

    assert front["library_name"] == "eagle"
    assert "eagle1" in front["tags"]
    # the target is a folder, which no hub knows
    assert "base_model" not in front
    # 60 tokens in the 16 cycles of the new run
    for words in (
        str(target_dir),
        f"| `lr` | {recipe.train.lr} |",
        recipe.data.train,
        "| 0 | 9 |",
        "| 200 | 7 |",
        "| `tree_tau` | 2.5 |",
        f"| 0 | `eagle1` | – | {60 / 16:.4g} |",
        "date new",
    ):
        assert words in card

    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "results.jsonl").unlink()
    card = model_card(folder, "someone/head")
    assert "## Curve" not in card
    assert "## Acceptance" not in card


def test_an_acceptance_length_names_its_tree(tmp_path: Path) -> None:
    """One head has many: of chains, and of trees of any size."""
    budgets = {"none": (0, 0, 0), "chain": (4, 4, 1), "tree": (8, 5, 3)}
    engine = {"nodes": 3, "depth": 3, "top_k": 1, "draw": "likeliest"}
    drafters = {}
    rows = []
    for name, (nodes, depth, top_k) in budgets.items():
        drafters[name] = {"budget": {"nodes": nodes, "depth": depth, "top_k": top_k}}
        rows.append({"drafter": name, "temperature": 0.0, "committed": 6, "cycles": 3})
    drafters["engine"] = {"budget": engine}
    rows.append({"drafter": "engine", "temperature": 1.0, "committed": 6, "cycles": 3})
    lines = [{"run": {"drafters": drafters}}, *rows]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "results.jsonl").write_text(text)
    table = acceptance_of(tmp_path)
    assert "| 0 | `none` | – | 2 |" in table
    assert "| 0 | `chain` | chain of 4 tokens | 2 |" in table
    assert "| 0 | `tree` | tree of 8 nodes, depth 5, top-k 3 | 2 |" in table
    # above temperature 0 the same chain is accepted more often if its tokens are drafted otherwise
    assert "| 1 | `engine` | chain of 3 tokens, draw likeliest | 2 |" in table


@pytest.mark.parametrize("rows, unfinished", [(1, True), (2, False)])
def test_an_unfinished_measurement_is_called_so(
    rows: int,
    unfinished: bool,
    tmp_path: Path,
) -> None:
    """An export or a card may be written while `eagle measure` runs."""
    row = {
        "drafter": "eagle1",
        "temperature": 0.0,
        "committed": 6,
        "cycles": 3,
    }
    lines = [{"run": {"prompts": 2}}, *[row] * rows]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "results.jsonl").write_text(text)
    table = acceptance_of(tmp_path)
    assert ("unfinished: 1 of 2 prompts" in table) == unfinished


@pytest.mark.parametrize("engine", ["vllm", "speculators", "eagle"])
def test_an_exported_folder_is_no_head_to_train_from(
    engine: str,
    folder: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """The message names the command that makes one of it."""
    head = load_head(folder).bind(target.head)
    export(head, target.config, engine, out=tmp_path / "out", head=folder)
    with pytest.raises(ValueError, match=rf"eagle import {tmp_path / 'out'}"):
        load_head(tmp_path / "out")


def test_recipe_and_provenance_are_not_needed(
    folder: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """A head without them loads and is exported; a model card, which is made of them, says what it lacks."""
    (folder / "recipe.yaml").unlink()
    (folder / "provenance.json").unlink()
    assert load_drafter(folder, target).taps == (2, 4, 5)

    head = load_head(folder).bind(target.head)
    export(head, target.config, "vllm", out=tmp_path / "out", head=folder)
    assert "Unknown" in (tmp_path / "out/README.md").read_text()

    words = r"recipe\.yaml and provenance\.json are missing.*eagle import"
    with pytest.raises(ValueError, match=words):
        model_card(folder, "me/head")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("recipe.yaml", "a: [1"),
        ("recipe.yaml", "- 1"),
        ("provenance.json", "{"),
        ("provenance.json", "3"),
    ],
)
def test_damaged_notes_are_named_and_nothing_is_written(
    name: str,
    text: str,
    folder: Path,
    target: Target,
    tmp_path: Path,
) -> None:
    """Before the export is half there."""
    (folder / name).write_text(text)
    head = load_head(folder).bind(target.head)
    with pytest.raises(ValueError, match=name):
        export(head, target.config, "vllm", out=tmp_path / "out", head=folder)
    assert not (tmp_path / "out").exists()


def test_a_card_reads_no_store_that_the_recipe_does_not_name(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An index.json in the current folder is some other file."""
    (tmp_path / "index.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    sections = {
        "target": {"path": "x"},
        "drafter": {"kind": "eagle3"},
        "data": {"train": "x"},
        "train": {},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(sections))
    assert "conversations were kept" not in model_card(folder, "me/head")


def test_a_tuned_shape_is_no_unknown_key(folder: Path) -> None:
    """`eagle doctor` lists keys of config.json that it does not read; the tuner's is for decoding."""
    write_budget(folder, Budget(4, 4, 1))
    assert "unknown keys" not in str(inspect(folder))
