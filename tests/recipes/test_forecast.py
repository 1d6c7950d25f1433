"""Forecasts agree with what is counted, stored and kept, and the page shows what the command prints."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from eagle.core.drafter import TargetHead
from eagle.core.examples import Example, collate
from eagle.data.features import taps_of
from eagle.drafters import DRAFTERS, settings_of
from eagle.recipe import Recipe
from recipes import forecast as module
from recipes.forecast import (
    conversations_of,
    empty_head,
    exchange_bytes,
    forecast,
    of_recipes,
    reading_bytes,
    sizes_of,
    sizes_of_config,
    table,
    token_flops,
    training_bytes,
)
from recipes.text_memory import TextMemory, table_of_states
from tests.registry import BY_DEFAULT

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT.parent / "shared/data/configs"
VICUNA = ROOT / "recipes/vicuna-7b/eagle1.yaml"
LLAMA = ROOT / "recipes/llama-3.1-8b/eagle3.yaml"
SHAPE = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
)
HEADS: dict[str, dict[str, Any]] = {
    "eagle1": {"kind": "eagle1", "fc_bias": False},
    "hass": {"kind": "hass"},
    "eagle3": {"kind": "eagle3", "draft_vocab": 128},
    "eagle3, two steps": {"kind": "eagle3", "steps": 2, "train_lm_head": False},
}
PREFIXED = {"kind": "hydra", "layers": 2, "prefix": True}
NORMED = {"kind": "eagle3", "fc_norm": True, "norm_output": True}


@pytest.mark.slow
def test_a_method_of_other_parts_is_forecast() -> None:
    """A model of its own: masters, gradients and moments of its weights, and more of either with more layers."""
    runs = [
        forecast(
            Recipe.load(ROOT / "recipes/tiny/draft_model.yaml", [f"drafter.layers={layers}"]),
            sizes_of_config(SHAPE),
            1_000,
        )
        for layers in (1, 2)
    ]
    assert runs[1].parameters > runs[0].parameters and runs[1].train_hours > runs[0].train_hours > 0
    assert runs[1].memory - runs[0].memory > 16 * (runs[1].parameters - runs[0].parameters)


@pytest.mark.slow
@pytest.mark.long
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """Its tables of docs/recipes.md: recipes, states of texts, and targets."""
    module.main([])
    page = (ROOT / "docs/recipes.md").read_text()
    printed = capsys.readouterr().out.strip().split("\n\n")
    assert len(printed) == 3 and all(part in page for part in printed)


def test_rows_of_the_page_are_what_the_command_prints() -> None:
    """One of each table; a target without states has no row in that of states."""
    page, recipe = (
        (ROOT / "docs/recipes.md").read_text(),
        Recipe.load(ROOT / "recipes/llama-3.1-8b/eagle1.yaml"),
    )
    other = table({"Qwen/Qwen3-0.6B": forecast(recipe, sizes_of("Qwen/Qwen3-0.6B"), 68_000)})
    name = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    states = table_of_states({name: sizes_of(name).text or TextMemory(0, 0)})
    for printed in (of_recipes(["recipes/vicuna-7b/eagle1.yaml"]), other, states):
        assert printed.splitlines()[-1] in page


def test_overrides_are_laid_over_a_recipe_that_is_forecast() -> None:
    """As every other verb does; without a store nothing is on the disk."""
    path = "recipes/vicuna-7b/eagle1.yaml"
    row = of_recipes([path, "features.store=null"]).splitlines()[-1]
    assert f"| `{path}` |" in row and "| none |" in row and "| none |" not in of_recipes([path])


def test_zero_saves_what_it_splits() -> None:
    """Beyond its bucket a rank keeps weights, or nothing, whole: 16 bytes of each weight, and a copy's 4, are split."""
    bucket = 4 * module.ZERO_BUCKET
    for ranks in (8, 64):
        two, three = (
            1_000_000 * 16 + exchange_bytes(1_000_000, ranks, stage) - bucket for stage in (2, 3)
        )
        assert two == pytest.approx(1_000_000 * (4 + 16 / ranks)) and three == pytest.approx(
            1_000_000 * 20 / ranks
        )
    assert exchange_bytes(1_000_000, 8) == exchange_bytes(1_000_000, 1, 2) == 0


@pytest.mark.slow
def test_the_published_run_needs_what_its_authors_report() -> None:
    """740 GB of features for a width of 4,096, and a head of 0.24 B."""
    recipe = Recipe.load(VICUNA)
    run = forecast(recipe, sizes_of(recipe.target.path), conversations_of(recipe))
    assert run.features == pytest.approx(740e9, rel=0.01)
    assert run.parameters == pytest.approx(0.24e9, rel=0.02)
    # 0.236 B weights: masters, gradients, moments and bf16 copies; embedding and LM head in bf16
    assert run.memory > 0.236e9 * 18 + 2 * 32_000 * 4_096 * 2
    assert forecast(recipe, sizes_of(recipe.target.path), 34_000).features == pytest.approx(
        run.features / 2
    )


@pytest.mark.slow
def test_what_is_not_stored_lies_on_the_card_and_is_made_every_epoch() -> None:
    """Three states of a token in two bytes each, and one more where it is learned; or the target, once for all."""
    sizes = sizes_of("meta-llama/Llama-3.1-8B-Instruct")
    stored, live, shared = (
        forecast(
            Recipe.load(LLAMA, ["data.max_length=256", "drafter.steps=2", *changed]), sizes, 68_000
        )
        for changed in (["features.store=somewhere"], [], ["features.shard_target=true"])
    )
    assert stored.token_bytes == live.token_bytes == (3 + 0.75) * 4_096 * 2
    assert (stored.features, live.features) == (stored.tokens * stored.token_bytes, 0)
    # beside the target its batches, three at a time, of two texts and four states, and what it holds while it reads
    batch, reading = 2 * 256 * 4 * 4_096 * 2, reading_bytes(sizes, 2, 256)
    assert live.memory - stored.memory == live.target - 2 * sizes.frozen + 3 * batch + reading
    layers, layer = (
        2 * (sizes.parameters - sizes.frozen),
        2 * (sizes.parameters - sizes.frozen) // 32,
    )
    assert live.memory - shared.memory == pytest.approx(
        layers * 7 / 8 - 2 * layer + 2 * batch, abs=100
    )
    assert 2 * 256 * 14_336 * 2 * 3 < reading < 2 * 256 * 14_336 * 2 * 6
    assert live.extract_hours == pytest.approx(10 * stored.extract_hours)
    assert live.train_hours == stored.train_hours


def stepped(
    section: dict[str, Any], count: int, share: float = 1.0, dtype: torch.dtype = torch.float32
) -> Any:
    """A small head, a text of which so many slots have a future, and what it borrows."""
    torch.manual_seed(0)
    settings = settings_of(section, "test")
    embedding, output = nn.Embedding(512, 256), nn.Linear(256, 512, bias=False)
    frozen = TargetHead(embedding.requires_grad_(False), output.requires_grad_(False))
    head = DRAFTERS[settings.kind].for_target(settings, SHAPE, frozen, supervised=()).train()
    taps = tuple(taps_of(settings, SHAPE))
    features = torch.randn(count + 2, len(taps), 256, dtype=dtype)
    mask = torch.arange(count + 2) >= 2 + round(count * (1 - share))
    batch = collate([Example(torch.randint(512, (count + 2,)), mask, features)], taps)
    return head, batch, frozen.cast(dtype)


@pytest.mark.slow
def test_memory_grows_with_the_steps_and_what_may_be_said() -> None:
    """Linear in the steps but for the logits, of which a chunk is made of all steps."""

    @cache
    def needed(tokens: int = 1_000, kind: str = "eagle3", **changes: Any) -> int:
        head = empty_head(settings_of({"kind": kind, **changes}, "test"), SHAPE)
        return training_bytes(head, SHAPE, [tokens], torch.bfloat16)

    three, five, seven = (needed(100, kind="hass", steps=steps) for steps in (3, 5, 7))
    assert seven - five == pytest.approx(five - three, rel=0.03) and five > three
    for kind in ("eagle3", "peagle"):  # moments, the gradient, and in bf16 a chunk's part of it
        learned = needed(kind=kind) - needed(kind=kind, train_lm_head=False)
        assert learned == pytest.approx(512 * 256 * 14, rel=0.01), kind
    assert needed(kind="eagle3") - needed(draft_vocab=128) > 384 * (
        7 * 1_000 * 2 + 256 * (4 + 2 + 12 + 4)
    )


class Counted(TorchDispatchMode):
    """Sums the FLOPs of all products, those of autograd's own functions and of the backward pass too."""

    total = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Computes, and counts by torch's own formulas."""
        output = function(*args, **(kwargs or {}))
        if count := flop_registry.get(function.overloadpacket):
            self.total += count(*args, **(kwargs or {}), out_val=output)
        return output


@pytest.mark.quick("section6-0.5", "section11-0.5")
@pytest.mark.parametrize("share", [pytest.param(1.0, marks=pytest.mark.slow), 0.5])
@pytest.mark.parametrize(
    "section", [*HEADS.values(), NORMED, PREFIXED, *({"kind": name} for name in BY_DEFAULT)]
)
def test_flops_are_what_a_step_computes(section: dict[str, Any], share: float) -> None:
    """Of a short text, whose attention hardly counts."""
    head, batch, frozen = stepped(section, 32, share)
    with Counted() as counted:
        head(batch, frozen)["total"].backward()
    expected = 34 * token_flops(empty_head(settings_of(section, "test"), SHAPE), SHAPE, 34, share)
    assert expected == pytest.approx(counted.total, rel=0.06)


def test_unknown_data_asks_for_its_size() -> None:
    """No number is invented."""
    with pytest.raises(ValueError, match=r"my\.jsonl holds is not known: give --conversations N"):
        conversations_of(Recipe.load(VICUNA, ["data.train=my.jsonl"]))
    assert conversations_of(Recipe.load(VICUNA, ["data.train=my.jsonl", "data.limit=7"])) == 7


def test_small_figures_are_written_in_full(tmp_path: Path) -> None:
    """A first user's head of a few thousand weights is not 0.000 B, and its tokens are not 0 M."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 4
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    row = of_recipes(
        ["recipes/tiny/eagle1.yaml", f"target.path={tmp_path}"], conversations=20
    ).splitlines()[-1]
    _, _, parameters, _, tokens, *_ = row.split(" | ")
    assert "B" not in parameters + tokens and "M" not in parameters + tokens, row


def test_a_target_in_a_folder_is_measured(tmp_path: Path) -> None:
    """What is not in the table comes from the target's own config."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8
    )
    config.num_attention_heads = config.num_key_value_heads = 4
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    sizes = sizes_of(str(tmp_path))
    counted = sum(tensor.numel() for tensor in LlamaForCausalLM(config).parameters())
    assert (sizes.parameters, sizes.active, sizes.head_dim) == (counted, counted, 8)


def test_quantised_layers_count_by_their_bits(tmp_path: Path) -> None:
    """Embedding and LM head stay in 16; what is unpacked counts as plain."""
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
    config.num_attention_heads = config.num_key_value_heads = 4
    found = {}
    for method in (None, "gptq", "compressed-tensors"):
        if method:
            config.quantization_config = {"quant_method": method, "bits": 4}
        config.save_pretrained(tmp_path)
        found[method] = sizes_of(str(tmp_path))
    plain = found[None]
    assert [sizes.bits for sizes in found.values()] == [None, 4, None]
    layers = plain.parameters - plain.frozen
    assert (
        module.target_bytes(plain)
        == 2 * plain.parameters
        == module.target_bytes(found["compressed-tensors"])
    )
    assert module.target_bytes(found["gptq"]) == 2 * plain.frozen + layers // 2


@pytest.mark.skipif(
    not CONFIGS.exists(), reason="the configs of published targets are not beside the checkout"
)
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b-instruct", "qwen3-30b-a3b", "qwen3-0.6b", "gpt-oss-20b"]
)
def test_the_table_of_sizes_is_the_configs_own(name: str) -> None:
    """Every row of docs/results/sizes.json would be made so again."""
    facts = json.loads((CONFIGS / f"{name}.json").read_text())
    facts.pop("quantization_config", None)
    made = sizes_of_config(AutoConfig.for_model(facts.pop("model_type"), **facts))
    known = json.loads(module.KNOWN.read_text())
    (row,) = (sizes for path, sizes in known.items() if path.split("/")[1].lower() == name)
    assert made == module.read_sizes(row)
