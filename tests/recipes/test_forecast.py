"""Forecasts agree with what is counted, stored and kept, and the page shows what the command prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from data_prep.read_once import read_examples
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
    forecasts_of,
    reading_bytes,
    sizes_of,
    sizes_of_config,
    table,
    tables_of,
    target_bytes,
    token_flops,
    training_bytes,
)
from recipes.text_memory import TextMemory, table_of_states
from tests.registry import BY_DEFAULT
from tests.trained import RECIPE

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT.parent / "shared/data/configs"
VICUNA = ROOT / "recipes/vicuna-7b/eagle1.yaml"
LLAMA = ROOT / "recipes/llama-3.1-8b/eagle3.yaml"
LLAMA_PATH = "meta-llama/Llama-3.1-8B-Instruct"
# wide enough that matrices dominate norms and biases
SHAPE = LlamaConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=2,
)
SECTIONS: list[dict[str, Any]] = [
    {"kind": "eagle1", "fc_bias": False},
    {"kind": "hass"},
    {"kind": "eagle3", "draft_vocab": 128},
    {"kind": "eagle3", "steps": 2, "train_lm_head": False},
    {"kind": "eagle3", "fc_norm": True, "norm_output": True},
    {"kind": "hydra", "layers": 2, "prefix": True},
    *({"kind": name} for name in BY_DEFAULT),
]


def make_empty(**section: Any) -> Any:
    """Return a head for the small shape, without allocating its weights."""
    return empty_head(settings_of(section, "test"), SHAPE)


def small_config() -> LlamaConfig:
    """Return the config of a target of a few thousand weights."""
    return LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        architectures=["LlamaForCausalLM"],
    )


@pytest.mark.slow
@pytest.mark.long
def test_the_page_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/measurements/forecasts.md has its tables of recipes, of states of sequences, and of targets."""
    module.main([])
    page = (ROOT / "docs/measurements/forecasts.md").read_text()
    tables = capsys.readouterr().out.strip().split("\n\n")
    assert len(tables) == 3
    for printed in tables:
        assert printed in page


def test_rows_of_the_page_are_what_the_command_prints() -> None:
    """One row of each table stands for all, since each takes seconds."""
    recipe = Recipe.load(ROOT / "recipes/llama-3.1-8b/eagle1.yaml")
    small = "Qwen/Qwen3-0.6B"
    hybrid = "Qwen/Qwen3-Next-80B-A3B-Instruct"
    tables = [
        tables_of(*forecasts_of(["recipes/vicuna-7b/eagle1.yaml"])),
        table({small: forecast(recipe, sizes_of(small), 68_000)}),
        table_of_states({hybrid: sizes_of(hybrid).text or TextMemory(0, 0)}),
    ]
    page = (ROOT / "docs/measurements/forecasts.md").read_text()
    for printed in tables:
        assert printed.splitlines()[-1] in page


def test_overrides_change_a_recipe_that_is_forecast() -> None:
    """Without a store nothing is on the disk."""
    path = "recipes/vicuna-7b/eagle1.yaml"
    row = tables_of(*forecasts_of([path, "features.store=null"])).splitlines()[-1]
    assert f"| `{path}` |" in row
    assert "| none |" in row
    assert "| none |" not in tables_of(*forecasts_of([path]))


def test_a_forecast_says_what_it_assumes_and_how_many_steps_there_are(
    recipe: Recipe,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tokens are assumed until the data were tokenised, and counted from then on."""
    words = [
        RECIPE,
        f"target.path={recipe.target.path}",
        f"data.train={recipe.data.train}",
        f"data.cache={tmp_path / 'tokens'}",
        "train.batch_size=1",
        "train.epochs=4",
    ]
    module.main(words)
    # one of three conversations validates
    assumed = capsys.readouterr().out.splitlines()[-1]
    assert "in 3 conversations, assuming " in assumed
    assert "for each, as in ShareGPT: your own may be shorter; about 8 training steps" in assumed

    tokens = read_examples(Recipe.load(words[0], words[1:])).tokens
    capsys.readouterr()
    module.main([*words, "train.max_steps=5"])
    counted = capsys.readouterr().out.splitlines()[-1]
    assert f": {tokens:,} tokens in 3 conversations, as counted when they were" in counted
    assert "about 5 training steps" in counted


def test_a_run_that_max_steps_ends_takes_less_time() -> None:
    """It reads the data as often as its steps do."""
    recipe = Recipe.load(VICUNA)
    sizes = sizes_of(recipe.target.path)
    whole = forecast(recipe, sizes, 1000)
    train = recipe.train.model_copy(update={"max_steps": whole.steps // 2})
    half = forecast(recipe.model_copy(update={"train": train}), sizes, 1000)
    assert half.train_hours == pytest.approx(whole.train_hours / 2, rel=0.01)


@pytest.mark.parametrize("ranks", [8, 64])
def test_zero_saves_what_it_splits(ranks: int) -> None:
    """Of each weight's 16 bytes and a copy's 4, stage 2 keeps the copy whole on each rank, stage 3 nothing."""
    bucket = 4 * module.ZERO_BUCKET
    two, three = (
        1_000_000 * 16 + exchange_bytes(1_000_000, ranks, stage) - bucket for stage in (2, 3)
    )

    assert two == pytest.approx(1_000_000 * (4 + 16 / ranks))
    assert three == pytest.approx(1_000_000 * 20 / ranks)
    # without ZeRO, or on one rank, nothing is exchanged
    assert exchange_bytes(1_000_000, ranks) == exchange_bytes(1_000_000, 1, 2) == 0


@pytest.mark.slow
def test_the_published_run_needs_what_its_authors_report() -> None:
    """Features of width 4,096 take 740 GB, and the head has 0.24 billion parameters."""
    recipe = Recipe.load(VICUNA)
    sizes = sizes_of(recipe.target.path)
    run = forecast(recipe, sizes, conversations_of(recipe))

    assert run.features == pytest.approx(740e9, rel=0.01)
    assert run.parameters == pytest.approx(0.24e9, rel=0.02)
    # masters, gradients, moments and bf16 copies; the target's embedding and LM head in bf16
    assert run.memory > 0.236e9 * 18 + 2 * 32_000 * 4_096 * 2

    half = forecast(recipe, sizes, 34_000)
    assert half.features == pytest.approx(run.features / 2)


@pytest.mark.slow
def test_live_features_take_memory_and_are_computed_every_epoch() -> None:
    """Three taps and a part of the teacher's state for each token are stored, or computed by a target in memory."""
    sizes = sizes_of(LLAMA_PATH)
    runs = []
    for changed in ("features.store=somewhere", "train.seed=0", "features.shard_target=true"):
        recipe = Recipe.load(LLAMA, ["data.max_length=256", "drafter.steps=2", changed])
        runs.append(forecast(recipe, sizes, 68_000))

    stored, live, sharded = runs

    assert stored.token_bytes == live.token_bytes == (3 + 0.75) * 4_096 * 2
    assert stored.features == stored.tokens * stored.token_bytes
    assert live.features == 0

    # besides the target, three batches of two sequences and four states, and what it holds while it reads
    batch = 2 * 256 * 4 * 4_096 * 2
    reading = reading_bytes(sizes, 2, 256)
    in_layers = live.target - 2 * sizes.frozen

    assert live.memory - stored.memory == in_layers + 3 * batch + reading

    # of eight ranks each holds an eighth, and two layers while they compute
    saved = in_layers * 7 / 8 - 2 * in_layers // 32 + 2 * batch
    assert live.memory - sharded.memory == pytest.approx(saved, abs=100)

    mlp = 2 * 256 * 14_336 * 2
    assert 3 * mlp < reading < 6 * mlp
    assert live.extract_hours == pytest.approx(10 * stored.extract_hours)
    assert live.train_hours == stored.train_hours


@pytest.mark.slow
@pytest.mark.parametrize("section", [{"kind": "eagle1"}, {"kind": "eagle3", "steps": 2}])
def test_a_window_makes_attention_linear(section: dict[str, Any]) -> None:
    """With a window the FLOPs of a token stop growing with the sequence; memory is the same."""
    # from 256 to 1,024 tokens
    growth = []
    memory = []
    for window in (None, {"sinks": 1, "recent": 32}):
        head = make_empty(**section, window=window)
        growth.append(token_flops(head, SHAPE, 1024) / token_flops(head, SHAPE, 256))
        memory.append(training_bytes(head, SHAPE, [512], torch.float32, 1))

    assert growth[1] < 1.05 < growth[0]
    assert memory[0] == memory[1]


class FlopCounter(TorchDispatchMode):
    """The FLOPs of all products by torch's own formulas, those of autograd functions and the backward pass too."""

    total = 0

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        """Run an operation and count it."""
        output = function(*args, **(kwargs or {}))
        count = flop_registry.get(function.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=output)
        return output


@pytest.mark.quick("section6-0.5", "section11-0.5")
@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("section", SECTIONS)
def test_flops_are_what_a_step_computes(section: dict[str, Any], share: float) -> None:
    """The sequence is short, so that attention hardly counts; a share of its tokens is supervised."""
    torch.manual_seed(0)
    settings = settings_of(section, "test")
    target = TargetHead(
        nn.Embedding(512, 256).requires_grad_(False),
        nn.Linear(256, 512, bias=False).requires_grad_(False),
    )
    head = (
        DRAFTERS[settings.kind]
        .for_target(
            settings,
            SHAPE,
            target,
            supervised=(),
        )
        .train()
    )
    taps = tuple(taps_of(settings, SHAPE))
    # the last slots have the futures that are supervised
    mask = torch.arange(34) >= 2 + round(32 * (1 - share))
    example = Example(torch.randint(512, (34,)), mask, torch.randn(34, len(taps), 256))
    with FlopCounter() as counted:
        head(collate([example], taps), target)["total"].backward()

    expected = 34 * token_flops(make_empty(**section), SHAPE, 34, share)

    assert expected == pytest.approx(counted.total, rel=0.06)


def test_unknown_data_asks_for_its_size() -> None:
    """The number of conversations comes from the option or a limit, never from a guess."""
    data = "data.train=my.jsonl"
    with pytest.raises(ValueError, match=r"my\.jsonl holds is not known: give --conversations N"):
        conversations_of(Recipe.load(VICUNA, [data]))
    assert conversations_of(Recipe.load(VICUNA, [data, "data.limit=7"])) == 7


def test_a_small_target_in_a_folder_is_measured(tmp_path: Path) -> None:
    """Its sizes come from its own config; a few thousand weights are not printed as 0.000 B."""
    config = small_config()
    config.save_pretrained(tmp_path)
    sizes = sizes_of(str(tmp_path))

    assert sizes.parameters == sizes.active == LlamaForCausalLM(config).num_parameters()
    assert sizes.head_dim == 8

    asked = ["recipes/tiny/eagle1.yaml", f"target.path={tmp_path}"]
    row = tables_of(*forecasts_of(asked, conversations=20)).splitlines()[-1].split(" | ")
    # parameters of the head, and tokens
    for cell in (row[2], row[4]):
        assert not {"B", "M"} & set(cell), row


def test_quantised_layers_count_by_their_bits(tmp_path: Path) -> None:
    """Embedding and LM head stay in 16 bits; a method that unpacks its weights counts as plain."""
    config = small_config()
    found = []
    for method in (None, "gptq", "compressed-tensors"):
        if method is not None:
            config.quantization_config = {"quant_method": method, "bits": 4}
        config.save_pretrained(tmp_path)
        found.append(sizes_of(str(tmp_path)))

    plain, packed, unpacked = found

    assert [sizes.bits for sizes in found] == [None, 4, None]
    assert target_bytes(plain) == target_bytes(unpacked) == 2 * plain.parameters

    layers = plain.parameters - plain.frozen
    assert target_bytes(packed) == 2 * plain.frozen + layers // 2


@pytest.mark.skipif(
    not CONFIGS.exists(), reason="the configs of published targets are not beside the checkout"
)
@pytest.mark.parametrize(
    "name", ["llama-3.1-8b-instruct", "qwen3-30b-a3b", "qwen3-0.6b", "gpt-oss-20b"]
)
def test_the_table_of_sizes_is_the_configs_own(name: str) -> None:
    """A row of docs/results/sizes.json is what the published config gives."""
    values = json.loads((CONFIGS / f"{name}.json").read_text())
    values.pop("quantization_config", None)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    known = json.loads(module.KNOWN.read_text())
    [row] = [sizes for path, sizes in known.items() if path.split("/")[1].lower() == name]
    assert sizes_of_config(config) == module.read_sizes(row)
