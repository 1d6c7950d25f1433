"""Every recipe parses, every mistake in one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from eagle import Target
from eagle.drafter import TrainableDrafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.examples import Example, collate
from eagle.recipe import Recipe

ROOT = Path(__file__).parent.parent
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "accelerate")
TINY = ROOT / "recipes/tiny/eagle1.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(ROOT)))
def test_recipe_parses_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    """A shipped recipe is valid, its drafter section too, and its dump is the same recipe."""
    recipe = Recipe.load(path)
    settings_of(recipe.drafter.model_dump(), str(path))
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(recipe.dump())
    assert Recipe.load(dumped) == recipe


def test_overrides_are_laid_over_and_numbers_read_as_numbers() -> None:
    """YAML takes 3e-5 for a string; a recipe does not."""
    recipe = Recipe.load(TINY, ["train.lr=3e-5", "data.limit=7", "eval.temperatures=[0.5]"])
    assert (recipe.train.lr, recipe.data.limit, recipe.eval.temperatures) == (3e-5, 7, (0.5,))


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", "did you mean"),
        ("tarin.lr=1", "did you mean train"),
        ("train.batch_sise=1", "did you mean batch_size"),
        ("regenerate.temprature=1", "did you mean temperature"),
        ("train.lr=-1", "train.lr: got -1"),
        ("train.lr.x=1", "holds a value, not a section"),
        ("nonsense", "expected key.sub=value"),
    ],
)
def test_a_mistake_is_named(override: str, message: str) -> None:
    """Unknown keys are refused with the nearest valid one, bad values with what was got."""
    with pytest.raises(ValueError, match=message):
        Recipe.load(TINY, [override])


def test_the_drafter_section_is_checked_by_its_method() -> None:
    """A method refuses what it does not know, and an unknown method names the known ones."""
    with pytest.raises(ValueError, match="did you mean fc_bias"):
        settings_of({"kind": "eagle1", "fc_bais": True}, "test")
    with pytest.raises(ValueError, match="expected a method with weights: eagle1"):
        settings_of({"kind": "eagle7"}, "test")
    with pytest.raises(ValueError, match="no recipe at"):
        Recipe.load("nowhere.yaml")


SIZES = json.loads((ROOT / "docs/results/sizes.json").read_text())
EAGLE1 = sorted(path for path in RECIPES if path.name == "eagle1.yaml" and path.parent.name != "tiny")
FAMILY = {"qwen3-8b": "qwen3", "qwen3-30b-a3b": "qwen3_moe"}


def meta_head(settings: Any, sizes: dict[str, Any]) -> TrainableDrafter:
    """A head of a target's sizes, without numbers."""
    with torch.device("meta"):
        return DRAFTERS["eagle1"].for_target(settings, LlamaConfig(**sizes))


def by_hand(sizes: dict[str, Any], mlp: int, fc_bias: bool) -> int:
    """The parameters of an EAGLE-1 head: fc, attention, MLP, one norm."""
    width, head = sizes["hidden_size"], sizes["head_dim"]
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    fc = 2 * width * width + (width if fc_bias else 0)
    return fc + 2 * width * queries + 2 * width * keys + 3 * width * mlp + width


def settings_in(path: Path) -> Any:
    """The drafter section of a recipe."""
    return settings_of(Recipe.load(path).drafter.model_dump(), str(path))


@pytest.mark.parametrize("path", EAGLE1, ids=lambda path: path.parent.name)
def test_a_head_has_the_parameters_that_its_recipe_asks_for(path: Path) -> None:
    """Counted on the meta device, and by hand."""
    recipe, settings = Recipe.load(path), settings_in(path)
    sizes = SIZES[recipe.target.path]
    mlp = settings.intermediate_size or sizes["intermediate_size"]
    counted = sum(tensor.numel() for tensor in meta_head(settings, sizes).parameters())
    assert counted == by_hand(sizes, mlp, settings.fc_bias)


@pytest.mark.parametrize(
    ("target", "published"),
    [
        ("lmsys/vicuna-7b-v1.3", 0.24),
        ("lmsys/vicuna-13b-v1.3", 0.37),
        ("meta-llama/Llama-2-70b-chat-hf", 0.99),
    ],
)
def test_published_sizes_are_met(target: str, published: float) -> None:
    """The authors' README gives billions of parameters, to two digits."""
    head = meta_head(settings_in(ROOT / "recipes/vicuna-7b/eagle1.yaml"), SIZES[target])
    assert round(sum(tensor.numel() for tensor in head.parameters()) / 1e9, 2) == published


def sixteenth(sizes: dict[str, Any], family: str) -> Target:
    """A target with every size divided by 16: the width of a head of attention, not how many there are."""
    small = {key: sizes[key] // 16 for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": small["intermediate_size"] // 8}
    config = AutoConfig.for_model(
        family,
        **{key: sizes[key] for key in ("num_attention_heads", "num_key_value_heads")},
        **small,
        **(experts if family == "qwen3_moe" else {}),
        num_hidden_layers=2,
    )
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("path", EAGLE1, ids=lambda path: path.parent.name)
def test_a_recipe_takes_a_step_at_a_sixteenth_of_its_size(path: Path) -> None:
    """Features of a real forward, the recipe's loss and optimizer: every weight moves, and the loss falls."""
    recipe, settings = Recipe.load(path), settings_in(path)
    target = sixteenth(SIZES[recipe.target.path], FAMILY.get(path.parent.name, "llama"))
    if settings.intermediate_size:
        settings = settings.model_copy(update={"intermediate_size": settings.intermediate_size // 16})
    head = DRAFTERS["eagle1"].for_target(settings, target.config).train()
    texts = [torch.randint(target.config.vocab_size, (length,)) for length in (40, 24)]
    read = [target.features(tokens[None], (-1,))[0] for tokens in texts]
    batch = collate(
        [
            Example(tokens, torch.arange(len(tokens)) >= 8, features)
            for tokens, features in zip(texts, read, strict=True)
        ],
        (-1,),
    )
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    optimizer = torch.optim.AdamW(
        head.parameters(), lr=recipe.train.lr, betas=recipe.train.betas, weight_decay=recipe.train.weight_decay
    )
    losses = []
    for _ in range(2):
        loss = head(batch, target.head)["total"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[1] < losses[0]
    assert not [name for name, tensor in head.named_parameters() if torch.equal(tensor, before[name])]
