"""Every recipe parses, every mistake in one is named."""

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
TINY = ROOT / "recipes/tiny/eagle1.yaml"


def named(path: Path) -> str:
    """A recipe as a test shows it."""
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", RECIPES, ids=named)
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


def test_a_recipe_without_eval_and_features_measures_on_held_out_conversations(
    tmp_path: Path,
) -> None:
    """Neither is needed to train; a recipe that also holds nothing out is told what to set once it is measured."""
    short = tmp_path / "short.yaml"
    values = {"target": {"path": "t"}, "data": {"train": "a.jsonl", "heldout": "b.jsonl"}}
    values |= {"drafter": {"kind": "eagle1"}, "train": {"out": "runs/x"}}
    short.write_text(yaml.safe_dump(values))
    recipe = Recipe.load(short)
    assert recipe.features.store is None and question_sets(recipe) == {"b": "b.jsonl"}
    assert question_sets(Recipe.load(short, ["eval.prompts=c.jsonl"])) == {"c": "c.jsonl"}
    with pytest.raises(ValueError, match=r"set eval\.prompts .* or data\.heldout"):
        question_sets(Recipe.load(short, ["data.heldout=null"]))


def files_of(name: str, *overrides: str) -> dict[str, str | None]:
    """Where a recipe for Llama 3.1 8B reads and leaves its files."""
    recipe = Recipe.load(ROOT / f"recipes/llama-3.1-8b/{name}.yaml", overrides)
    assert recipe.regenerate is not None and recipe.eval.prompts == "runs/mt_bench.jsonl"
    return {
        "data": recipe.data.train,
        "answers": recipe.regenerate.out,
        "features": recipe.features.store,
        "out": recipe.train.out,
        "init": recipe.train.init,
    }


def test_files_of_a_model_of_ones_own_lie_in_a_folder_of_its_name() -> None:
    """Data, features and heads, but for what is given; a copy of the recipe's own target is no other model."""
    written = files_of("hass")
    assert all(
        file is not None and file.startswith("runs/llama-3.1-8b/") for file in written.values()
    )
    moved = {key: str(file).replace("llama-3.1-8b", "model") for key, file in written.items()}
    assert (
        files_of("hass", "target.path=my/model")
        == files_of("hass", "target.path=/disk/my/model/")
        == moved
    )
    assert files_of("hass", "target.adapter=my/adapter")["out"] == "runs/adapter/hass"
    given = files_of("hass", "target.path=my/model", "train.out=runs/llama-3.1-8b/mine")
    assert given == {**moved, "out": "runs/llama-3.1-8b/mine"}
    assert files_of("hass", "target.path=/disk/Llama-3.1-8B-Instruct") == written


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.learning_rate=1", "did you mean lr[?]"),
        ("train.leraning_rate=1", "did you mean lr[?]"),
        ("train.max_grad_norm=1", "did you mean clip[?]"),
        ("train.xyzzy=1", r"unknown key train\.xyzzy\. Known here are out, init"),
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
    with pytest.raises(ValueError, match=r"expected a method with weights: .*eagle1"):
        settings_of({"kind": "eagle7"}, "test")
    with pytest.raises(ValueError, match="no recipe at"):
        Recipe.load("nowhere.yaml")


@pytest.mark.parametrize("kind", DRAFTERS)
def test_every_method_has_a_row_among_the_papers_and_a_recipe(kind: str) -> None:
    """The row names its file, and recipes that are there; a method with weights has a tiny one."""
    rows = [
        line
        for line in (ROOT / "docs/papers.md").read_text().splitlines()
        if line.startswith(f"| `{kind}` |")
    ]
    assert len(rows) == 1 and (ROOT / rows[0].split("|")[3].strip(" `")).is_file()
    for pattern in re.findall(r"`(recipes/[^`]+)`", rows[0]):
        assert list(ROOT.glob(pattern)), pattern
    if issubclass(DRAFTERS[kind], TrainableDrafter):
        assert Recipe.load(ROOT / f"recipes/tiny/{kind}.yaml").drafter.kind == kind


SIZES = json.loads((ROOT / "docs/results/sizes.json").read_text())
LARGE = [path for path in RECIPES if path.parent.name != "tiny"]
FAMILY = {
    **{
        "qwen3-8b": "qwen3",
        "qwen3-30b-a3b": "qwen3_moe",
        "gpt-oss-20b": "gpt_oss",
        "mimo-7b": "qwen2",
    },
    **{
        "qwen3-next-80b": "qwen3_next",
        "qwen3.5-9b": "qwen3_5_text",
        "nemotron-3-nano": "nemotron_h",
    },
    **{"gemma-3n": "gemma3n_text", "llama-4-scout": "llama4_text"},
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
FURTHER = {  # sizes that these families have beside those of all
    "qwen3_moe": {"num_experts": 4, **EXPERTS},
    "gpt_oss": {"num_local_experts": 4, **EXPERTS},
    "qwen3_next": {"num_experts": 4, **EXPERTS, **LINEAR},
    "qwen3_5_text": LINEAR,
    "nemotron_h": {"n_routed_experts": 4, "mamba_num_heads": 8, **EXPERTS},
    "gemma3n_text": {"num_kv_shared_layers": 1},
    "llama4_text": {"num_local_experts": 4},
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}  # of a head whose target turns nothing


def settings_in(path: Path, *overrides: str) -> Any:
    """The drafter section of a recipe."""
    return settings_of(Recipe.load(path, overrides).drafter.model_dump(), str(path))


def learned(settings: Any, target: str) -> int:
    """The parameters of a head for a published target, counted without their numbers."""
    return parameters(empty_head(settings, read_sizes(SIZES[target]).config))


def by_hand(settings: Any, sizes: dict[str, Any]) -> int:
    """The same from the sizes: what fuses, attention, MLP, norms and an LM head of its own."""
    width, head = sizes["hidden_size"], sizes["head_dim"]
    if (
        settings.kind == "mlp_speculator"
    ):  # of each stage an embedding, an LM head, a projection, and a norm's two rows
        inner, rest = settings.inner_dim, settings.inner_dim * (settings.levels - 1)
        return settings.levels * (2 * sizes["vocab_size"] + 2) * inner + inner * (width + rest)
    queries, keys = sizes["num_attention_heads"] * head, sizes["num_key_value_heads"] * head
    if settings.kind == "medusa":
        return settings.levels * (
            settings.layers * (width * width + width) + width * sizes["vocab_size"]
        )
    if (
        settings.kind == "hydra"
    ):  # two matrices side by side, further gates, an LM head; a Llama layer in front
        levels, further, mlp = (
            settings.levels,
            settings.layers - 1,
            3 * width * sizes["intermediate_size"],
        )
        first = sum(2 * width * (level + 2) * width + 2 * width for level in range(levels))
        gates = first + levels * (further * (width + 1) * width + sizes["vocab_size"] * (width + 1))
        return gates + settings.prefix * (2 * width * (queries + keys) + mlp + 3 * width)
    if settings.kind == "mtp":  # a projection, a Llama layer, and norms of token, state and output
        mlp = 3 * width * sizes["intermediate_size"]
        return 2 * width * width + 2 * width * (queries + keys) + mlp + 5 * width
    block = queries * width + 3 * width * (settings.intermediate_size or sizes["intermediate_size"])
    if settings.kind in (
        "dflash",
        "dspark",
    ):  # five states; norms of blocks, heads, what is fused, and a last one
        attention, norms = (queries + 2 * keys) * width, 2 * width + 2 * head
        body = 5 * width * width + settings.blocks * (attention + block + norms) + 2 * width
        # two matrices of a bias, and what rates a state and a token
        return (
            body
            if settings.kind == "dflash"
            else body + (2 * sizes["vocab_size"] + 1) * settings.rank + width + 1
        )
    if settings.kind not in ("eagle3", "peagle"):
        return (
            2 * width * width
            + settings.fc_bias * width
            + width * (queries + 2 * keys)
            + block
            + width
        )
    norms = 4 + 3 * settings.fc_norm
    fused = 3 * width * width + 2 * width * (queries + 2 * keys) + block + norms * width
    if (
        settings.kind == "peagle"
    ):  # further blocks, all tokens, and what a mask reads of three states
        further = width * (queries + 2 * keys) + block + 2 * width
        return fused + (settings.blocks - 1) * further + (sizes["vocab_size"] + 3) * width
    return fused + 32_000 * width


def test_vicuna_trains_and_drafts_as_its_authors_did() -> None:
    """The rate of their scheduler, which ticks once for each of 8 processes; their tree of 25 nodes."""
    recipe = Recipe.load(ROOT / "recipes/vicuna-7b/eagle1.yaml")
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=3e-5)
    (rate,) = get_linear_schedule_with_warmup(optimizer, 2000, 800_000).lr_lambdas
    plan = Plan([1] * 68_000, recipe.train)
    assert 40_000 < len(plan) < 41_000
    for step in (0, 100, 249, 250, 1000, len(plan) - 1):
        assert plan.lr(step) == pytest.approx(
            3e-5 * rate(8 * step), abs=3.1e-5 / 250
        )  # ours is one step ahead while it rises
    (budget,) = (
        section.budget for name, section in recipe.eval.drafters.items() if name == "eagle1"
    )
    assert budget is not None and budget.paths == PUBLISHED_TREE


def test_hydra_trains_as_its_authors_did() -> None:
    """The rate of their scheduler: a cosine from 100 steps on, down to a third; their tree of 63 nodes."""
    recipe = Recipe.load(ROOT / "recipes/vicuna-7b/hydra.yaml")
    plan = Plan([1] * 68_000, recipe.train)
    assert len(plan) == 10 * 2019
    for step in (0, 50, 100, 5000, len(plan) - 1):
        share = max(step - 100, 0) / (len(plan) - 100)
        rate = step / 100 if step < 100 else 0.33 + 0.67 * 0.5 * (1 + math.cos(math.pi * share))
        assert plan.lr(step) == pytest.approx(
            5e-4 * rate, abs=5.1e-4 / 100
        )  # ours is one step ahead while it rises
    budget = recipe.eval.drafters["hydra"].budget
    assert budget is not None and budget.paths is not None
    paths = set(budget.paths)
    assert len(paths) == len(budget.paths) == 63 and all(
        path[:-1] in {(), *paths} for path in paths
    )


@pytest.mark.parametrize("path", LARGE, ids=named)
def test_a_head_has_the_parameters_that_its_recipe_asks_for(path: Path) -> None:
    """Counted, and by hand."""
    settings, target = settings_in(path), Recipe.load(path).target.path
    assert learned(settings, target) == by_hand(settings, SIZES[target])


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
    assert round(learned(settings, target) / 1e9, 2) == published


def test_the_published_head_of_a_mixture_is_as_wide() -> None:
    """lmsys/EAGLE3-gpt-oss-120b-bf16 holds 0.9 billion parameters, the target's embedding among them."""
    target = "openai/gpt-oss-120b"
    embedding = SIZES[target]["vocab_size"] * SIZES[target]["hidden_size"]
    path = ROOT / "recipes/gpt-oss-20b/eagle3.yaml"
    assert round((learned(settings_in(path), target) + embedding) / 1e9, 1) == 0.9
    as_one_expert = settings_in(path, "drafter.intermediate_size=2880")
    assert round((learned(as_one_expert, target) + embedding) / 1e9, 1) == 0.8


STARTED = [path for path in RECIPES if Recipe.load(path).train.init]
ANY = read_sizes(SIZES["Qwen/Qwen3-8B"]).config


@pytest.mark.parametrize("path", STARTED, ids=named)
def test_a_recipe_starts_from_the_head_of_another(path: Path) -> None:
    """One beside it for the same target, of the same network, which decides what weights mean."""
    recipe = Recipe.load(path)
    heads = {f"{Recipe.load(other).train.out}/head": other for other in path.parent.glob("*.yaml")}
    first = heads[str(recipe.train.init)]
    assert recipe.target == Recipe.load(first).target
    one, two = (empty_head(settings_in(each), ANY) for each in (path, first))
    assert one.network == two.network and one.state_dict().keys() == two.state_dict().keys()


def test_recipes_that_share_features_agree_on_what_makes_them() -> None:
    """Target, data, precision and taps."""
    made: dict[str, Any] = {}
    for path in RECIPES:
        recipe = Recipe.load(path)
        if store := recipe.features.store:
            ours = (recipe.target, recipe.data, recipe.features, taps_of(settings_in(path), ANY))
            assert made.setdefault(store, ours) == ours, path
    assert len(made) < sum(Recipe.load(path).features.store is not None for path in RECIPES)


def sixteenth(sizes: dict[str, Any], family: str) -> Target:
    """A target with every size divided by 16: the width of a head of attention, not how many there are."""
    small = {
        key: sizes[key] // 16
        for key in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
    }
    small["hidden_size"] += (
        -small["hidden_size"] % sizes["num_attention_heads"]
    )  # a head's config must divide it
    config = AutoConfig.for_model(
        family,
        **{key: sizes[key] for key in ("num_attention_heads", "num_key_value_heads")},
        **small,
        **FURTHER.get(family, {}),
        num_hidden_layers=4,
    )
    torch.manual_seed(0)
    return Target(AutoModelForCausalLM.from_config(config))


@pytest.mark.quick(
    "llama-3.1-8b/eagle1",
    "mimo-7b/mtp",
    "qwen3-30b-a3b/eagle3",
    "qwen3-8b/hass",
    "vicuna-7b/medusa",
    "vicuna-7b/medusa2",
)
@pytest.mark.parametrize("path", LARGE, ids=named)
def test_a_recipe_takes_a_step_at_a_sixteenth_of_its_size(path: Path) -> None:
    """Features of a real forward, the recipe's loss and optimizer: every weight moves, and the loss falls."""
    recipe, settings = Recipe.load(path), settings_in(path)
    target = sixteenth(SIZES[recipe.target.path], FAMILY.get(path.parent.name, "llama"))
    small = {
        name: getattr(settings, name, None)
        for name in ("intermediate_size", "draft_vocab", "inner_dim", "mask_token")
    }
    settings = settings.model_copy(
        update={name: size // 16 for name, size in small.items() if size}
    )
    texts = [torch.randint(target.config.vocab_size, (length,)) for length in (40, 24)]
    head = (
        DRAFTERS[settings.kind]
        .for_target(settings, target.config, target.head, supervised=texts)
        .train()
    )
    assert head.shape.rope_parameters == getattr(target.config, "rope_parameters", PLAIN_ROPE)
    taps = taps_of(settings, target.config)
    read = [target.features(tokens[None], taps)[0] for tokens in texts]
    batch = collate(
        [
            Example(tokens, torch.arange(len(tokens)) >= 8, features)
            for tokens, features in zip(texts, read, strict=True)
        ],
        taps,
    )
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    optimizer = torch.optim.AdamW(
        head.parameters(),
        lr=recipe.train.lr,
        betas=recipe.train.betas,
        weight_decay=recipe.train.weight_decay,
    )
    losses = []
    for _ in range(3):  # a confidence head overshoots in its first
        loss = head(batch, target.head)["total"]
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    assert not [
        name for name, tensor in head.named_parameters() if torch.equal(tensor, before[name])
    ]
