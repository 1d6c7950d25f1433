"""Extracted features are the untouched model's hidden states, whoever stands beside them in the batch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import FAMILIES, VOCAB_SIZE, build
from safetensors.torch import load_file, save_file

from eagle import Target
from eagle.core.examples import Example
from eagle.data.features import LiveFeatures, batch_slots, compute_rows, forecast, plan_extraction
from eagle.data.identity import identity
from eagle.data.shards import plan_shards
from eagle.data.stored_rows import TapRoles, TextSizes, parts_of
from eagle.recipe import Recipe

LENGTHS = (9, 30, 17, 30, 3)
TAPS = (0, 1, 3, -1)
PARTS = parts_of({"taps": TAPS})
ROLES = TapRoles((-1,), (-1,))


def texts(seed: int) -> list[torch.Tensor]:
    """Random texts of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in LENGTHS]


def compute_features(target: Target, ours: list[torch.Tensor]) -> list[torch.Tensor]:
    """The features of all tokens of each text, computed together."""
    masks = [torch.ones(len(text), dtype=torch.bool) for text in ours]
    (rows,) = compute_rows(target, ours, masks, PARTS, "float32")
    return list(rows[0].split(LENGTHS))


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_and_neighbours_change_nothing(name: str) -> None:
    """Batched features equal each text's own hidden states, and stay when the texts beside it are others."""
    target = Target(build(name))
    ours, others = texts(1), texts(2)
    values = compute_features(target, ours)
    for row, text in enumerate(ours):
        with torch.no_grad():
            states = target.model(
                input_ids=text[None], use_cache=False, output_hidden_states=True
            ).hidden_states
        alone = torch.stack([states[tap][0] for tap in TAPS], dim=1)
        beside = compute_features(target, [*others[:row], text, *others[row + 1 :]])
        for got in (values[row], beside[row]):
            assert (got - alone).abs().max() <= 1e-5 * alone.abs().max()
        # the check can fail: a neighbour's states, or those of the next layer, are far away
        least = min(len(text), len(ours[row - 1]))
        assert not torch.allclose(values[row - 1][:least], alone[:least], atol=1e-2)
        assert not torch.allclose(values[row][:, :-1], alone[:, 1:], atol=1e-2)


def test_live_features_come_in_the_order_asked() -> None:
    """Batches are formed by length, answers by place."""
    target, ours = Target(build("llama")), texts(3)
    examples = [Example(text, torch.ones(len(text), dtype=torch.bool)) for text in ours]
    live = LiveFeatures(target, examples, {"taps": [1, -1], "dtype": "float32"}, batch_tokens=64)
    for place, got in zip((4, 1, 0, 2), live.read([4, 1, 0, 2]), strict=True):
        assert torch.equal(got.tokens, ours[place])
        alone = target.features(ours[place][None], (1, -1))[0]
        torch.testing.assert_close(got.features, alone, rtol=1e-5, atol=1e-5)


def test_one_text_at_a_time_where_batches_would_change_it() -> None:
    """A CPU is faster so; beyond a border of frequencies nothing else is right."""
    target = Target(build("llama"))
    assert batch_slots(target, None) == 1 and batch_slots(target, 512) == 512
    target.border = 64
    assert batch_slots(target, 512) == 1


def test_texts_beyond_the_targets_positions_are_refused() -> None:
    """Such states would be of no use, and nobody would see why."""
    target = Target(build("llama"))
    examples = [Example(torch.ones(257, dtype=torch.long), torch.ones(257, dtype=torch.bool))]
    with pytest.raises(
        ValueError, match=r"257 tokens, this target has 256 positions: set data\.max_length"
    ):
        LiveFeatures(target, examples, {"taps": [-1], "dtype": "float32"})
    section = Recipe.load("recipes/tiny/eagle1.yaml").features
    with pytest.raises(ValueError, match=r"set data\.max_length to at most 256"):
        plan_extraction(
            TextSizes.of([(examples[0].loss_mask, 0)]), target, parts_of({"taps": [-1]}), section
        )


def test_a_forecast_tells_size_and_time() -> None:
    """Bytes are exact, by the masks; the time comes from a calibration."""
    target, examples = (
        Target(build("llama")),
        [Example(text, torch.arange(len(text)) == 2) for text in texts(4)],
    )
    plan = plan_shards(LENGTHS, 1, 40)
    sizes = TextSizes.of((example.loss_mask, 0) for example in examples)
    line = forecast(target, examples, sizes, plan, parts_of({"taps": [0, -1]}), "bfloat16")
    size = sum(LENGTHS) * 2 * 32 * 2
    assert (
        f"{sum(LENGTHS)} tokens, 2 taps in bfloat16: {size / 1000:.3g} kB, 128 bytes a token, in {len(plan)}"
        in line
    )
    assert "tokens/s" in line
    # one supervised token, or two with `train.gate: read`: heads read up to it, and learn from two states before each
    line = forecast(
        target, examples, sizes, plan, parts_of({"taps": [0, -1], "inputs": [0]}), "bfloat16"
    )
    size = (5 * 4 + 3 + 4 * 4 + 2) * 32 * 2
    assert f": {size / 1000:.3g} kB, {size / sum(LENGTHS):,.0f} bytes a token" in line


@pytest.fixture
def recipe(tiny_target_dir: Path, tmp_path: Path) -> Recipe:
    """A recipe whose target, data and template lie in a folder of the test's own."""
    shutil.copytree(tiny_target_dir / "target", tmp_path / "target")
    (tmp_path / "data.jsonl").write_text('{"conversations": []}\n')
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    overrides = {
        "target.path": tmp_path / "target",
        "data.train": tmp_path / "data.jsonl",
        "data.template": tmp_path / "template.jinja",
    }
    return Recipe.load(
        "recipes/tiny/eagle1.yaml", [f"{key}={value}" for key, value in overrides.items()]
    )


def change_file(recipe: Recipe, file: str, new: bytes) -> None:
    """Change a file that the recipe names."""
    path = Path(recipe.data.train).parent / file
    path.write_bytes(path.read_bytes() + new)


def test_identity_holds_everything_that_decides_the_features(
    recipe: Recipe, tmp_path: Path
) -> None:
    """Weights, config, tokenizer, template, data: each changes its own entry, and a moved folder changes none."""
    before = identity(recipe, ROLES)
    moved = tmp_path / "elsewhere"
    shutil.copytree(recipe.target.path, moved)
    same = recipe.model_copy(
        update={"target": recipe.target.model_copy(update={"path": str(moved)})}
    )
    assert identity(same, ROLES) == before
    places = {
        "target/model.safetensors": ("target", "weights"),
        "target/config.json": ("target", "config"),
        "target/tokenizer.json": ("tokenizer",),
        "template.jinja": ("template",),
        "data.jsonl": ("data", "source"),
    }
    for file, keys in places.items():
        change_file(recipe, file, b"\n")
        after = identity(recipe, ROLES)
        old, new = before, after
        for key in keys:
            old, new = old[key], new[key]
        assert old != new, file
        before = after
    (Path(recipe.target.path) / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert identity(recipe, ROLES)["masks"] != before["masks"]
    other = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"template_kwargs": {"date": "today"}})}
    )
    assert identity(other, ROLES)["data"] != before["data"]


def test_a_spread_target_gives_the_same_features(recipe: Recipe) -> None:
    """What accelerate places by itself is read like any other, here with a part of it on the disk."""
    text = torch.arange(20, 60)[None]
    rest = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    layers = {f"model.layers.{layer}": "disk" if layer > 6 else "cpu" for layer in range(10)}
    whole = Target.load(recipe.target.path, dtype="float32").features(text, (0, 7, -1))
    for device_map in ("auto", {**rest, **layers}):
        spread = Target.load(recipe.target.path, dtype="float32", device_map=device_map)
        assert torch.equal(spread.features(text, (0, 7, -1)), whole)


def test_a_lora_adapter_is_part_of_the_target(recipe: Recipe, tmp_path: Path) -> None:
    """Merged at load: the features are those of W + scale * B A, and the identity knows it."""
    pytest.importorskip("peft", reason="peft is not installed")
    folder, rank, alpha = tmp_path / "adapter", 2, 6.0
    plain = Target.load(recipe.target.path, dtype="float32")
    generator = torch.Generator().manual_seed(0)
    tensors, merged = {}, plain.model.state_dict()
    for layer in range(3):
        name = f"model.layers.{layer}.self_attn.q_proj"
        down, up = (
            torch.randn(rank, 128, generator=generator) / 5,
            torch.randn(128, rank, generator=generator) / 5,
        )
        tensors |= {
            f"base_model.model.{name}.lora_A.weight": down,
            f"base_model.model.{name}.lora_B.weight": up,
        }
        merged[f"{name}.weight"] = merged[f"{name}.weight"] + alpha / rank * up @ down
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"]}
    config["layers_to_transform"] = [0, 1, 2]
    (folder / "adapter_config.json").write_text(json.dumps(config))
    text = torch.arange(20, 60)[None]
    adapted = Target.load(recipe.target.path, dtype="float32", adapter=str(folder)).features(
        text, (5, -1)
    )
    before = plain.features(text, (5, -1))
    plain.model.load_state_dict(merged)
    torch.testing.assert_close(adapted, plain.features(text, (5, -1)), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(adapted, before, atol=1e-2)
    with_adapter = recipe.model_copy(
        update={"target": recipe.target.model_copy(update={"adapter": str(folder)})}
    )
    assert (
        identity(with_adapter, ROLES)["target"]["adapter"]
        != identity(recipe, ROLES)["target"]["adapter"]
    )


def test_a_quantised_checkpoint_is_a_target(recipe: Recipe, tmp_path: Path) -> None:
    """One in fp8 blocks, as large models are published: its features are those of its dequantised weights."""
    full, folder = Target.load(recipe.target.path, dtype="float32"), tmp_path / "fp8"
    shutil.copytree(recipe.target.path, folder)
    tensors, rebuilt = load_file(folder / "model.safetensors"), full.model.state_dict()
    text = torch.arange(20, 60)[None]
    before = full.features(text, (5, -1))
    for name, weight in list(tensors.items()):
        if name.endswith("proj.weight"):
            blocks = weight.float().unflatten(0, (-1, 64)).unflatten(2, (-1, 64))
            scales = blocks.abs().amax((1, 3), keepdim=True) / 448
            small = (blocks / scales).to(torch.float8_e4m3fn)
            rebuilt[name] = (small.float() * scales).flatten(2).flatten(0, 1).bfloat16().float()
            tensors[name] = small.flatten(2).flatten(0, 1)
            tensors[f"{name}_scale_inv"] = scales[:, 0, :, 0].contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    (folder / "config.json").write_text(json.dumps(config))
    features = Target.load(folder, dtype="float32").features(text, (5, -1))
    full.model.load_state_dict(rebuilt)
    expected = full.features(text, (5, -1))
    assert (
        (features - expected).norm() / expected.norm()
        < 1e-2
        < (features - before).norm() / before.norm()
    )
    other = recipe.model_copy(
        update={"target": recipe.target.model_copy(update={"path": str(folder)})}
    )
    assert identity(other, ROLES)["target"]["quantization"]["quant_method"] == "fp8"
