"""Every recipe parses and trains, its head has the published size, and every mistake in a recipe is named."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, get_linear_schedule_with_warmup

from eagle import Target
from eagle.core.drafter import TrainableDrafter
from eagle.core.examples import Example, collate
from eagle.core.tree import PUBLISHED_TREE
from eagle.data.features import taps_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import Recipe
from eagle.training.plan import Plan
from eval.prompts import question_sets
from recipes.forecast import empty_head, parameters, read_sizes

ROOT = Path(__file__).parents[2]
RECIPES = sorted(
    path
    for path in (ROOT / "recipes").rglob("*.yaml")
    if path.parent.name not in ("accelerate", "compare")
)
LARGE = [path for path in RECIPES if path.parent.name != "tiny"]
TINY = ROOT / "recipes/tiny/eagle1.yaml"

# configs of published targets
SIZES = json.loads((ROOT / "docs/results/sizes.json").read_text())
CONFIG = read_sizes(SIZES["Qwen/Qwen3-8B"]).config

# the model type of each folder's target, where it is no Llama
FAMILY = {
    "qwen3-8b": "qwen3",
    "qwen3-30b-a3b": "qwen3_moe",
    "gpt-oss-20b": "gpt_oss",
    "mimo-7b": "qwen2",
    "qwen3-next-80b": "qwen3_next",
    "qwen3.5-9b": "qwen3_5_text",
    "nemotron-3-nano": "nemotron_h",
    "gemma-3n": "gemma3n_text",
    "llama-4-scout": "llama4_text",
    "qwen2.5-coder-0.5b": "qwen2",
    "gemma3-270m": "gemma3_text",
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
# sizes that these families have besides those of all
FURTHER = {
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, **EXPERTS},
    "qwen3_next": {"num_experts": 4, **EXPERTS, **LINEAR},
    "qwen3_5_text": LINEAR,
    "nemotron_h": {"n_routed_experts": 4, "mamba_num_heads": 8, **EXPERTS},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "llama4_text": {"num_local_experts": 4},
}
# of a head whose target has no rotary embedding
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}


def name_recipe(path: Path) -> str:
    """Return the id of a case."""
    return f"{path.parent.name}/{path.stem}"


def settings_in(path: Path, *overrides: str) -> Any:
    """Return the drafter section of a recipe."""
    return settings_of(Recipe.load(path, overrides).drafter.model_dump(), str(path))


@pytest.mark.parametrize("path", RECIPES, ids=name_recipe)
def test_recipe_parses_and_survives_a_round_trip(path: Path, tmp_path: Path) -> None:
    """A shipped recipe and its drafter section are valid, and its dump is the same recipe."""
    recipe = Recipe.load(path)
    settings_in(path)
    dumped = tmp_path / "dumped.yaml"
    dumped.write_text(recipe.dump())
    assert Recipe.load(dumped) == recipe


def test_overrides_change_a_recipe_and_numbers_are_read_as_numbers() -> None:
    """YAML takes 3e-5 for a string; a recipe does not."""
    recipe = Recipe.load(TINY, ["train.lr=3e-5", "data.limit=7", "eval.temperatures=[0.5]"])
    assert recipe.train.lr == 3e-5
    assert recipe.data.limit == 7
    assert recipe.eval.temperatures == (0.5,)


def test_a_recipe_without_eval_and_features_measures_on_held_out_conversations(
    tmp_path: Path,
) -> None:
    """A recipe that holds out nothing is told what to set once it is measured."""
    short = tmp_path / "short.yaml"
    values = {
        "target": {"path": "t"},
        "data": {"train": "a.jsonl", "heldout": "b.jsonl"},
        "drafter": {"kind": "eagle1"},
        "train": {"out": "runs/x"},
    }
    short.write_text(yaml.safe_dump(values))
    recipe = Recipe.load(short)

    assert recipe.features.store is None
    assert question_sets(recipe) == {"b": "b.jsonl"}
    assert question_sets(Recipe.load(short, ["eval.prompts=c.jsonl"])) == {"c": "c.jsonl"}

    with pytest.raises(ValueError, match=r"set eval\.prompts .* or data\.heldout"):
        question_sets(Recipe.load(short, ["data.heldout=null"]))


def files_of(*overrides: str) -> list[Any]:
    """Return where a recipe for Llama 3.1 8B reads and leaves its files."""
    recipe = Recipe.load(ROOT / "recipes/llama-3.1-8b/hass.yaml", overrides)
    assert recipe.regenerate is not None
    return [
        recipe.train.out,
        recipe.data.train,
        recipe.regenerate.out,
        recipe.features.store,
        recipe.train.init,
    ]


def test_files_for_another_model_lie_in_a_folder_of_its_name() -> None:
    """Only files that are given stay; a local copy of the recipe's own target is no other model."""
    files = files_of()
    assert all(file.startswith("runs/llama-3.1-8b/") for file in files)

    moved = [file.replace("llama-3.1-8b", "model") for file in files]
    for path, expected in (
        ("my/model", moved),
        ("/disk/my/model/", moved),
        ("/disk/Llama-3.1-8B-Instruct", files),
    ):
        assert files_of(f"target.path={path}") == expected

    assert files_of("target.adapter=my/adapter")[0] == "runs/adapter/hass"
    mine = "runs/llama-3.1-8b/mine"
    assert files_of("target.path=my/model", f"train.out={mine}") == [mine, *moved[1:]]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.learning_rate=1", "did you mean lr[?]"),
        ("train.max_grad_norm=1", "did you mean clip[?]"),
        ("train.xyzzy=1", r"unknown key train\.xyzzy\. Known here are out, init"),
        ("tarin.lr=1", "did you mean train"),
        ("regenerate.temprature=1", "did you mean temperature"),
        ("train.lr=-1", "train.lr: got -1"),
        ("train.lr.x=1", "holds a value, not a section"),
        ("nonsense", "expected key.sub=value"),
    ],
)
def test_a_mistake_is_named(override: str, words: str) -> None:
    """Unknown keys are refused with the nearest valid one, bad values with the value."""
    with pytest.raises(ValueError, match=words):
        Recipe.load(TINY, [override])


def test_the_drafter_section_is_checked_by_its_method() -> None:
    """A method refuses unknown keys, and an unknown method's error lists those that exist."""
    with pytest.raises(ValueError, match="did you mean fc_bias"):
        settings_of({"kind": "eagle1", "fc_bais": True}, "test")
    with pytest.raises(ValueError, match=r"expected a method with weights: .*eagle1"):
        settings_of({"kind": "eagle7"}, "test")
    with pytest.raises(ValueError, match="no recipe at"):
        Recipe.load("nowhere.yaml")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_method_has_a_row_among_the_papers_and_a_recipe(kind: str) -> None:
    """The row names its file and recipes that exist; a method with weights has a tiny recipe."""
    page = (ROOT / "docs/papers.md").read_text()
    [row] = re.findall(rf"^\| `{kind}` \|.*", page, flags=re.M)
    assert (ROOT / row.split("|")[3].strip(" `")).is_file()
    for pattern in re.findall(r"`(recipes/[^`]+)`", row):
        assert list(ROOT.glob(pattern)), pattern
    if issubclass(DRAFTERS[kind], TrainableDrafter):
        assert Recipe.load(ROOT / f"recipes/tiny/{kind}.yaml").drafter.kind == kind


# -- the sizes of heads -----------------------------------------------------------------------------------------------


def count_parameters(settings: Any, target: str) -> int:
    """Return the parameters of a head for a published target, without allocating them."""
    return parameters(empty_head(settings, read_sizes(SIZES[target]).config))


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
    settings = settings_in(ROOT / "recipes/vicuna-7b/eagle1.yaml")
    assert round(count_parameters(settings, target) / 1e9, 2) == published


@pytest.mark.parametrize(
    ("overrides", "billions"), [([], 0.9), (["drafter.intermediate_size=2880"], 0.8)]
)
def test_the_published_head_of_a_mixture_is_as_wide(overrides: list[str], billions: float) -> None:
    """lmsys/EAGLE3-gpt-oss-120b-bf16 has 0.9 billion parameters; as wide as one expert it would have 0.8."""
    target = "openai/gpt-oss-120b"
    settings = settings_in(ROOT / "recipes/gpt-oss-20b/eagle3.yaml", *overrides)
    # the published count includes the target's embedding
    embedding = SIZES[target]["vocab_size"] * SIZES[target]["hidden_size"]
    assert round((count_parameters(settings, target) + embedding) / 1e9, 1) == billions


# -- how heads are trained --------------------------------------------------------------------------------------------


def test_vicuna_trains_and_drafts_as_its_authors_did() -> None:
    """The rates are those of their scheduler, which ticks once for each of 8 processes; the tree has 25 nodes."""
    recipe = Recipe.load(ROOT / "recipes/vicuna-7b/eagle1.yaml")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    [rate] = get_linear_schedule_with_warmup(optimizer, 2000, 800_000).lr_lambdas
    plan = Plan([1] * 68_000, recipe.train)

    assert 40_000 < len(plan) < 41_000
    for step in (0, 100, 249, 250, 1000, len(plan) - 1):
        # ours is one step ahead during warmup
        expected = pytest.approx(3e-5 * rate(8 * step), abs=3.1e-5 / 250)
        assert plan.lr(step) == expected

    budget = recipe.eval.drafters["eagle1"].budget
    assert budget is not None
    assert budget.paths == PUBLISHED_TREE


def test_hydra_trains_as_its_authors_did() -> None:
    """After 100 steps the rate follows a cosine down to a third; the tree has 63 nodes."""
    recipe = Recipe.load(ROOT / "recipes/vicuna-7b/hydra.yaml")
    plan = Plan([1] * 68_000, recipe.train)

    assert len(plan) == 10 * 2019
    for step in (0, 50, 100, 5000, len(plan) - 1):
        share = max(step - 100, 0) / (len(plan) - 100)
        cosine = 0.33 + 0.67 * 0.5 * (1 + math.cos(math.pi * share))
        # ours is one step ahead during warmup
        expected = pytest.approx(5e-4 * min(step / 100, cosine), abs=5.1e-4 / 100)

        assert plan.lr(step) == expected

    budget = recipe.eval.drafters["hydra"].budget
    assert budget is not None
    assert budget.paths is not None
    assert len(set(budget.paths)) == len(budget.paths) == 63
    assert {path[:-1] for path in budget.paths} <= {(), *budget.paths}


STARTED = [path for path in RECIPES if Recipe.load(path).train.init]


@pytest.mark.parametrize("path", STARTED, ids=name_recipe)
def test_a_recipe_starts_from_the_head_of_another(path: Path) -> None:
    """The other recipe lies beside it, for the same target and a network with the same weights."""
    recipe = Recipe.load(path)
    recipes = {
        f"{Recipe.load(other).train.out}/head": other for other in path.parent.glob("*.yaml")
    }
    first = recipes[str(recipe.train.init)]

    assert recipe.target == Recipe.load(first).target

    one, other = (empty_head(settings_in(each), CONFIG) for each in (path, first))
    assert one.network == other.network
    assert one.state_dict().keys() == other.state_dict().keys()


def test_recipes_that_share_features_agree_on_what_makes_them() -> None:
    """Those are target, data, precision and taps."""
    made: dict[str, Any] = {}
    num_stores = 0
    for path in RECIPES:
        recipe = Recipe.load(path)
        if recipe.features.store:
            num_stores += 1
            taps = taps_of(settings_in(path), CONFIG)
            facts = (recipe.target, recipe.data, recipe.features, taps)

            assert made.setdefault(recipe.features.store, facts) == facts, path

    # some recipes do share a store
    assert len(made) < num_stores


def make_sixteenth(sizes: dict[str, Any], family: str) -> Target:
    """Return a target with every size divided by 16: attention has as many heads, which are narrower."""
    small = {}
    for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim"):
        small[name] = sizes[name] // 16
    heads = {name: sizes[name] for name in ("num_attention_heads", "num_key_value_heads")}
    # configs want a hidden size that the heads divide
    small["hidden_size"] += -small["hidden_size"] % heads["num_attention_heads"]
    values = {**small, **heads, **FURTHER.get(family, {})}
    config = AutoConfig.for_model(family, **values, num_hidden_layers=4)
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config))


def divide_settings(settings: Any) -> Any:
    """Return a drafter's settings with every size divided by 16."""
    small = {}
    for name in ("intermediate_size", "draft_vocab", "loss_vocab", "inner_dim", "mask_token"):
        size = getattr(settings, name, None)
        if size is not None:
            small[name] = size // 16
    return settings.model_copy(update=small)


@pytest.mark.quick(
    "llama-3.1-8b/eagle1",
    "mimo-7b/mtp",
    "qwen3-30b-a3b/eagle3",
    "qwen3-8b/hass",
    "vicuna-7b/medusa",
    "vicuna-7b/medusa2",
)
@pytest.mark.parametrize("path", LARGE, ids=name_recipe)
def test_a_recipe_takes_a_step_at_a_sixteenth_of_its_size(path: Path) -> None:
    """With features of a real forward and the recipe's loss and optimizer, all weights move and the loss falls."""
    recipe = Recipe.load(path)
    settings = settings_in(path)
    target = make_sixteenth(SIZES[recipe.target.path], FAMILY.get(path.parent.name, "llama"))
    settings = divide_settings(settings)
    taps = taps_of(settings, target.config)
    texts = [torch.randint(target.config.vocab_size, (length,)) for length in (40, 24)]
    examples = []
    for tokens in texts:
        features = target.features(tokens[None], taps)[0]
        examples.append(Example(tokens, torch.arange(len(tokens)) >= 8, features))

    batch = collate(examples, taps)

    method = DRAFTERS[settings.kind]
    head = method.for_target(
        settings,
        target.config,
        target.head,
        supervised=texts,
    ).train()

    assert head.shape.rope_parameters == getattr(target.config, "rope_parameters", PLAIN_ROPE)

    before = {name: tensor.clone() for name, tensor in head.named_parameters()}
    options = recipe.train.model_dump(include={"lr", "betas", "weight_decay"})
    optimizer = torch.optim.AdamW(head.parameters(), **options)
    losses = []
    # a confidence head overshoots in its first step
    for _ in range(3):
        terms = head(batch, target.head)
        loss = terms["total"]
        # LiLiCorr's lattice counts slots whose token is a candidate, of which a new head has none
        losses.append((loss - terms.get("lattice", 0)).item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    assert losses[-1] < losses[0]

    for name, tensor in head.named_parameters():
        # for the same reason its weights may still rest; that they learn is a check of eagle.conformance
        if not name.startswith("lilicorr."):
            assert not torch.equal(tensor, before[name]), name
