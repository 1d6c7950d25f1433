"""`eagle init` writes a recipe that runs, by rules that published recipes agree with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from data_prep.chats.records import Conversation
from eagle.drafters import settings_of
from eagle.recipe import Recipe
from recipes.forecast import KNOWN, read_sizes
from recipes.init_recipe import main, split_held_out, write_hours
from recipes.suggestions import (
    FACTOR,
    PUBLISHED_RATES,
    find_unusual,
    suggest_draft_vocab,
    suggest_rate,
)
from recipes.train_eagle import main as train

ROOT = Path(__file__).parents[2]
SIZES = json.loads(KNOWN.read_text())
PUBLISHED = [path for path in sorted(ROOT.glob("recipes/*/*.yaml")) if path.parent.name != "tiny"]
# a second stage continues a trained head, at a rate of its own
PUBLISHED = [path for path in PUBLISHED if path.parent.name not in ("compare", "accelerate")]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Forty short conversations."""
    lines = []
    for number in range(40):
        turns = [{"role": "user", "content": f"What is {number}?"}]
        turns.append({"role": "assistant", "content": f"A number after {number - 1}."})
        lines.append(json.dumps({"id": str(number), "messages": turns}) + "\n")
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(lines))
    return path


def write_recipe(kind: str, target: Path, chats: Path) -> Path:
    """Return the recipe that the verb writes for a method."""
    out = chats.with_name(f"{kind}.yaml")
    main(["--model", str(target), "--data", str(chats), "--method", kind, "-o", str(out)])
    return out


# a forecast of the others takes many seconds
@pytest.mark.quick("eagle1", "medusa", "mtp")
@pytest.mark.parametrize("kind", PUBLISHED_RATES)
def test_recipes_of_all_methods_load(
    kind: str,
    tiny_target_dir: Path,
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Method, data and held-out conversations are those asked for, and comments name the commands."""
    monkeypatch.chdir(chats.parent)
    path = write_recipe(kind, tiny_target_dir / "target", chats)
    recipe = Recipe.load(path)
    assert settings_of(recipe.drafter.model_dump(), str(path)).kind == kind
    assert recipe.eval.temperatures == (0.0, 1.0)
    assert recipe.regenerate is not None
    assert recipe.regenerate.temperature == 0.0
    text = path.read_text()
    for key in ("temperature", "temperatures"):
        # each with a comment
        assert re.search(rf"^  {key}: .*  # ", text, re.MULTILINE)
    assert "in runs of about 200 steps, 3 to 5 times as much" in text
    for verb in ("train", "prepare", "extract", "measure", "export"):
        assert f"eagle {verb} " in text


def test_held_out_conversations_are_spread_over_the_data(
    tiny_target_dir: Path,
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Sorted data are held out evenly, and nothing that is held out is learned from."""
    monkeypatch.chdir(chats.parent)
    recipe = Recipe.load(write_recipe("mtp", tiny_target_dir / "target", chats))
    assert recipe.regenerate is not None
    ids = []
    for file in (recipe.data.heldout, recipe.regenerate.source):
        assert file is not None
        records = [json.loads(line) for line in Path(file).read_text().splitlines()]
        ids.append([int(record["id"]) for record in records])
    held_out, learned = ids
    first, second = held_out
    assert first < 20 <= second
    assert learned == [number for number in range(40) if number not in held_out]


def test_copies_of_held_out_conversations_are_not_learned_from() -> None:
    """A mix repeats conversations by its weights."""
    conversations = []
    for number in range(100):
        messages = [{"role": "user", "content": str(number)}]
        conversations += [Conversation(str(number), messages)] * 2
    held_out, learned = split_held_out(conversations)
    assert len(held_out) == 10
    assert not set(held_out) & set(learned)
    assert len(learned) == 2 * (100 - len(set(held_out)))


def test_held_out_conversations_of_other_data_stay(
    tiny_target_dir: Path,
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second recipe of the same data shares the file; one of other data is refused and writes nothing."""
    monkeypatch.chdir(chats.parent)
    recipe = Recipe.load(write_recipe("mtp", tiny_target_dir / "target", chats))
    assert recipe.data.heldout is not None
    before = Path(recipe.data.heldout).read_text()
    write_recipe("eagle1", tiny_target_dir / "target", chats)
    chats.write_text(chats.read_text().replace("What is", "What was"))
    with pytest.raises(ValueError, match=r"heldout\.jsonl holds other conversations .* delete it"):
        write_recipe("medusa", tiny_target_dir / "target", chats)
    assert Path(recipe.data.heldout).read_text() == before
    assert not chats.with_name("medusa.yaml").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("eagle1", "eagle3", "mtp", "dflash"))
def test_a_written_recipe_passes_the_check(
    kind: str,
    tiny_target_dir: Path,
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Every stage takes the file as it was written, and finds nothing unusual in it."""
    monkeypatch.chdir(chats.parent)
    train([str(write_recipe(kind, tiny_target_dir / "target", chats)), "--check"])
    printed = capsys.readouterr().out
    assert "the whole run" in printed
    assert "unusual" not in printed


@pytest.mark.parametrize("path", PUBLISHED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_published_rates_agree_with_the_rule(path: Path) -> None:
    """The rule is stated for all widths; recipes of targets from 2,048 to 8,192 say what was published."""
    recipe = Recipe.load(path)
    if recipe.train.init is not None:
        return
    assert not list(find_unusual(recipe, read_sizes(SIZES[recipe.target.path]), 10_000))


def test_what_is_far_from_the_rule_is_said(tmp_path: Path) -> None:
    """Planted: a rate for another width, and most of the vocabulary."""
    sizes = read_sizes(SIZES["Qwen/Qwen3-8B"])
    path = ROOT / "recipes/qwen3-8b/eagle3.yaml"
    values = yaml.safe_load(path.read_text())
    for fault, keyword in (
        ({"train.lr": 5e-5 * (FACTOR + 1)}, "train.lr"),
        ({"train.lr": 5e-5 / (FACTOR + 1)}, "train.lr"),
        ({"drafter.draft_vocab": 100_000}, "draft_vocab"),
    ):
        overrides = [f"{key}={value}" for key, value in fault.items()]
        (line,) = find_unusual(Recipe.load(path, overrides), sizes, 10_000)
        assert keyword in line
    assert values["train"]["lr"] == "5e-5"
    # a short run takes up to five times the rate
    recipe = Recipe.load(path, ["train.lr=2e-4"])
    assert list(find_unusual(recipe, sizes, 10_000))
    assert not list(find_unusual(recipe, sizes, 300))


def test_the_rule_in_figures() -> None:
    """The rates of docs/recipes.md; a head for a small target is not trained at a 7B's rate."""
    rates = [suggest_rate("eagle1", width) for width in (128, 384, 576, 896, 4096, 8192)]
    assert rates == [1e-3, 3e-4, 2e-4, 1e-4, 3e-5, 2e-5]
    assert suggest_rate("medusa", 128) == 3e-3
    sizes = [suggest_draft_vocab(size) for size in (2_048, 32_000, 49_152, 128_256, 262_144)]
    assert sizes == [None, 7_168, 12_288, 31_744, 32_000]


def test_the_table_of_rates_is_the_rule() -> None:
    """Each row of docs/recipes.md names methods, and their rate at each width of its heading."""
    lines = (ROOT / "docs/recipes.md").read_text().splitlines()
    heading = next(line for line in lines if line.startswith("| method | rate at"))
    cells = heading.strip("| ").split(" | ")
    widths = [int(re.sub(r"\D", "", cell)) for cell in cells[2:]]
    assert len(widths) == 6
    seen = set()
    for line in lines[lines.index(heading) + 2 :]:
        if not line.startswith("|"):
            break
        names, _, *rates = line.strip("| ").split(" | ")
        for kind in re.findall(r"`(\w+)`", names):
            assert [float(rate) for rate in rates] == [
                suggest_rate(kind, width) for width in widths
            ]
            seen.add(kind)
    assert seen == PUBLISHED_RATES.keys()


@pytest.mark.parametrize(
    ("hours", "text"),
    [(0.001, "1 minute"), (0.5, "30 minutes"), (1.0, "1.0 hours")],
)
def test_a_duration_is_written_in_the_right_number(hours: float, text: str) -> None:
    """One minute is no minutes."""
    assert write_hours(hours) == text


def test_wrong_inputs_are_refused(
    tiny_target_dir: Path,
    chats: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A recipe is never overwritten, and data too few to hold any out are said so."""
    monkeypatch.chdir(chats.parent)
    target = tiny_target_dir / "target"
    path = write_recipe("eagle1", target, chats)
    with pytest.raises(ValueError, match="is there already"):
        main(["--model", str(target), "--data", str(chats), "-o", str(path)])
    few = chats.with_name("few.jsonl")
    few.write_text("".join(chats.read_text().splitlines(keepends=True)[:5]))
    with pytest.raises(ValueError, match="got 5 conversations"):
        main(["--model", str(target), "--data", str(few), "-o", "other.yaml"])
