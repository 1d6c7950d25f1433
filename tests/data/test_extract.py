"""Extracted features are the untouched model's hidden states, whatever else is in the batch."""

# T tokens, L taps, H hidden

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle import Target
from eagle.core.examples import Example
from eagle.data.features import (
    LiveFeatures,
    compute_rows,
    forecast,
    plan_extraction,
    resolve_batch_tokens,
)
from eagle.data.identity import identity
from eagle.data.shards import plan_shards
from eagle.data.stored_rows import SequenceSizes, TapRoles, parts_of
from eagle.recipe import Recipe
from tests.families import FAMILIES, VOCAB_SIZE, build
from tests.quantised import add_config, write_fp8, write_plain

LENGTHS = (9, 30, 17, 30, 3)
TAPS = (0, 1, 3, -1)
ROLES = TapRoles((-1,), (-1,))
RECIPE = "recipes/tiny/eagle1.yaml"


def make_sequences(seed: int) -> list[Tensor]:
    """Return random sequences of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            5,
            VOCAB_SIZE,
            (length,),
            generator=generator,
        )
        for length in LENGTHS
    ]


def compute_features(target: Target, sequences: list[Tensor]) -> list[Tensor]:
    """Return the features of all tokens of each sequence, computed together, [T, L, H] each."""
    masks = [torch.ones(len(tokens), dtype=torch.bool) for tokens in sequences]
    (rows,) = compute_rows(
        target,
        sequences,
        masks,
        parts_of({"taps": TAPS}),
        "float32",
    )
    return list(rows[0].split(LENGTHS))


@torch.no_grad()
def hidden_of(
    target: Target,
    tokens: Tensor,
    taps: tuple[int, ...] = TAPS,
) -> Tensor:
    """Return the untouched model's hidden states of a sequence by itself, [T, L, H]."""
    output = target.model(
        input_ids=tokens[None],
        use_cache=False,
        output_hidden_states=True,
    )
    return torch.stack([output.hidden_states[tap][0] for tap in taps], dim=1)


@pytest.mark.parametrize("name", FAMILIES)
def test_padding_and_neighbours_change_nothing(name: str) -> None:
    """Batched features equal each sequence's own hidden states, with any other sequences in the batch."""
    target = Target(build(name))
    sequences = make_sequences(1)
    others = make_sequences(2)
    # padding is at most 27 of 30 slots
    batched = compute_features(target, sequences)
    for row, tokens in enumerate(sequences):
        alone = hidden_of(target, tokens)
        mixed = compute_features(target, [*others[:row], tokens, *others[row + 1 :]])
        for got in (batched[row], mixed[row]):
            assert (got - alone).abs().max() <= 1e-5 * alone.abs().max()
        # the check can fail: a neighbour's states, or those of the next layer, are far away
        length = min(len(tokens), len(sequences[row - 1]))
        assert not torch.allclose(
            batched[row - 1][:length],
            alone[:length],
            atol=1e-2,
        )
        assert not torch.allclose(
            batched[row][:, :-1],
            alone[:, 1:],
            atol=1e-2,
        )


def test_one_sequence_at_a_time_where_batches_would_change_it() -> None:
    """A CPU is faster so; where rotary frequencies depend on the length nothing else is right."""
    target = Target(build("llama"))
    assert resolve_batch_tokens(target, None) == 1
    assert resolve_batch_tokens(target, 512) == 512
    # the length from which on some models scale their rotary frequencies
    target.border = 64
    assert resolve_batch_tokens(target, 512) == 1


def test_sequences_beyond_the_targets_positions_are_refused() -> None:
    """Such states would be of no use, and nobody would see why."""
    target = Target(build("llama"))
    mask = torch.ones(257, dtype=torch.bool)
    message = r"257 tokens, this target has 256 positions: set data\.max_length"
    with pytest.raises(ValueError, match=message):
        LiveFeatures(
            target,
            [Example(mask.long(), mask)],
            {"taps": [-1], "dtype": "float32"},
        )
    section = Recipe.load(RECIPE).features
    sizes = SequenceSizes.of([(mask, 0)])
    with pytest.raises(ValueError, match=r"set data\.max_length to at most 256"):
        plan_extraction(
            sizes,
            target,
            parts_of({"taps": [-1]}),
            section,
        )


@pytest.mark.parametrize(("processes", "shards"), [(1, 1), (2, 8), (3, 12)])
def test_every_process_gets_shards(processes: int, shards: int) -> None:
    """Of a store that fits into one file, too: each process computes whole shards."""
    target = Target(build("llama"))
    sizes = SequenceSizes.of((torch.ones(10, dtype=torch.bool), 0) for _ in range(48))
    section = Recipe.load(RECIPE).features
    plan = plan_extraction(
        sizes,
        target,
        parts_of({"taps": [-1]}),
        section,
        processes,
    )
    assert len(plan) == shards


@pytest.mark.parametrize(
    ("fields", "num_rows"),
    [
        ({"taps": [0, -1]}, 2 * sum(LENGTHS)),
        # token 2 is learned, or with `train.gate: read` token 4: inputs are read up to it, two states teach each
        ({"taps": [0, -1], "inputs": [0]}, (5 * 4 + 3) + (4 * 4 + 2)),
    ],
)
def test_a_forecast_tells_size_and_time(fields: dict[str, Any], num_rows: int) -> None:
    """Bytes are exact, by the masks; the time comes from a calibration."""
    target = Target(build("llama"))
    examples = [Example(tokens, torch.arange(len(tokens)) == 2) for tokens in make_sequences(4)]
    sizes = SequenceSizes.of((example.loss_mask, 0) for example in examples)
    plan = plan_shards(LENGTHS, 1, 40)
    line = forecast(
        target,
        examples,
        sizes,
        plan,
        parts_of(fields),
        "bfloat16",
    )
    size = num_rows * 32 * 2
    bytes_per_token = f"{size / sum(LENGTHS):,.0f} bytes a token, in {len(plan)}"
    assert f"{sum(LENGTHS)} tokens, 2 taps in bfloat16: {size / 1000:.3g} kB" in line
    assert bytes_per_token in line
    assert "tokens/s" in line


@pytest.fixture
def recipe(tiny_target_dir: Path, tmp_path: Path) -> Recipe:
    """A recipe whose target, data and template lie in a folder of the test's own."""
    shutil.copytree(tiny_target_dir / "target", tmp_path / "target")
    (tmp_path / "data.jsonl").write_text('{"conversations": []}\n')
    (tmp_path / "template.jinja").write_text("{{ messages }}")
    overrides = [
        f"target.path={tmp_path / 'target'}",
        f"data.train={tmp_path / 'data.jsonl'}",
        f"data.template={tmp_path / 'template.jinja'}",
    ]
    return Recipe.load(RECIPE, overrides)


def with_target(recipe: Recipe, **changes: Any) -> Recipe:
    """Return the recipe with other settings of its target."""
    return recipe.model_copy(update={"target": recipe.target.model_copy(update=changes)})


@pytest.mark.parametrize(
    ("file", "section", "key"),
    [
        ("target/model.safetensors", "target", "weights"),
        ("target/config.json", "target", "config"),
        ("target/tokenizer.json", "tokenizer", None),
        ("target/generation_config.json", "masks", None),
        ("template.jinja", "template", None),
        ("data.jsonl", "data", "source"),
    ],
)
def test_identity_holds_every_file_that_decides_the_features(
    recipe: Recipe,
    tmp_path: Path,
    file: str,
    section: str,
    key: str | None,
) -> None:
    """Each file changes its own entry."""
    before = identity(recipe, ROLES)[section]
    path = tmp_path / file
    new = b'{"eos_token_id": [2, 3]}' if section == "masks" else path.read_bytes() + b"\n"
    path.write_bytes(new)
    after = identity(recipe, ROLES)[section]
    assert (after != before) if key is None else (after[key] != before[key])


def test_identity_holds_settings_and_no_paths(recipe: Recipe, tmp_path: Path) -> None:
    """A moved folder changes nothing; the template's arguments and an adapter do."""
    before = identity(recipe, ROLES)
    # a store may be used on another machine
    shutil.copytree(recipe.target.path, tmp_path / "elsewhere")
    assert identity(with_target(recipe, path=str(tmp_path / "elsewhere")), ROLES) == before
    data = recipe.data.model_copy(update={"template_kwargs": {"date": "today"}})
    other = recipe.model_copy(update={"data": data})
    assert identity(other, ROLES)["data"] != before["data"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    save_file({"weight": torch.zeros(1)}, adapter / "adapter_model.safetensors")
    adapted = identity(with_target(recipe, adapter=str(adapter)), ROLES)
    assert adapted["target"]["adapter"] != before["target"]["adapter"]


def test_a_spread_target_gives_the_same_features(recipe: Recipe) -> None:
    """A target that accelerate has placed, here partly on the disk, is read like any other."""
    tokens = torch.arange(20, 60)[None]
    whole = Target.load(recipe.target.path, dtype="float32").features(tokens, (0, 7, -1))
    # layers on the disk are loaded as they are read
    device_map = dict.fromkeys(
        ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu"
    )
    for layer in range(10):
        device_map[f"model.layers.{layer}"] = "disk" if layer > 6 else "cpu"
    spread = Target.load(
        recipe.target.path,
        dtype="float32",
        device_map=device_map,
    )
    assert torch.equal(spread.features(tokens, (0, 7, -1)), whole)


def test_a_quantised_checkpoint_is_a_target(tmp_path: Path) -> None:
    """A checkpoint in fp8 blocks, as large models are published, gives the features of its dequantised weights."""
    plain = Target.load(write_plain(tmp_path / "plain"), dtype="float32")
    folder = write_fp8(tmp_path / "fp8")
    tensors = load_file(folder / "model.safetensors")
    weights = plain.model.state_dict()
    for name in [name for name in tensors if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        # each block of 64 x 64 has a scale of its own
        scales = tensors[name].repeat_interleave(64, 0).repeat_interleave(64, 1)
        weights[weight] = tensors[weight].float() * scales
    tokens = torch.arange(20, 60)[None]
    before = plain.features(tokens, (1, -1))
    features = Target.load(folder, dtype="float32").features(tokens, (1, -1))
    # the truth: the same model with weights dequantised here
    plain.model.load_state_dict(weights)
    expected = plain.features(tokens, (1, -1))
    assert (features - expected).norm() < 1e-2 * expected.norm()
    # rounding the weights is seen
    assert (features - before).norm() > 1e-2 * before.norm()


def test_identity_names_the_quantisation(recipe: Recipe) -> None:
    """A quantised target is another one."""
    config = {"quant_method": "fp8", "weight_block_size": [64, 64]}
    add_config(Path(recipe.target.path), config)
    assert identity(recipe, ROLES)["target"]["quantization"]["quant_method"] == "fp8"
