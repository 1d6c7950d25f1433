"""Medusa heads as their authors, vLLM and ModelOpt write them: what is read, told and refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made

H, V, LEVELS, LAYERS = made.H, made.V, 3, 2
OTHER = made.drawn(V, H, seed=50)
Names = dict[str, str]  # theirs, by the names of heads here
SPELLINGS = {  # of a block's linear and of an LM head; I level, J block, N blocks
    "FasterDecoding/Medusa": ("I.J.linear.PART", "I.N.weight"),
    "vLLM": ("blocks.I.layers.J.PART", "lm_heads.I.weight"),
    "ModelOpt": ("medusa_heads.I.J.linear.PART", "medusa_heads.I.N.weight"),
    "ModelOpt, Megatron": (
        "medusa_heads.I.medusa_layers.J.linear.PART",
        "medusa_heads.I.lm_head.weight",
    ),
}
CONFIGS: dict[str, dict[str, Any]] = {
    "FasterDecoding/Medusa": {
        "medusa_num_heads": 2,
        "medusa_num_layers": LAYERS,
        "base_model_name_or_path": "a/b",
    },
    "vLLM": {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": H,
        "vocab_size": V,
        "medusa_num_heads": LEVELS,
        "medusa_num_layers": LAYERS,
        "medusa_fc_bias": True,
    },
    "ModelOpt": {"medusa": {"num_medusa_heads": LEVELS, "num_medusa_layers": LAYERS}},
    "ModelOpt, Megatron": {"medusa": {"num_medusa_heads": LEVELS, "num_medusa_layers": LAYERS}},
}


def names_of(spelling: str, own: bool = True) -> Names:
    """Their name of each tensor that a head here has."""
    linear, output = SPELLINGS[spelling]
    names = {}
    for level in range(LEVELS):
        theirs = output.replace("I", str(level)).replace("N", str(LAYERS))
        names |= {f"heads.{level}.weight": theirs} if own else {}
        for block in range(LAYERS):
            theirs = linear.replace("I", str(level)).replace("J", str(block))
            names |= {
                f"blocks.{level}.{block}.{part}": theirs.replace("PART", part)
                for part in ("weight", "bias")
            }
    return names


def weights_for(names: Names) -> dict[str, Tensor]:
    """Random weights, each different, by the names of heads here."""
    sizes = {"heads": (V, H), "weight": (H, H), "bias": (H,)}
    sized = {
        name: sizes["heads" if name.startswith("heads") else name.split(".")[-1]] for name in names
    }
    return {name: made.drawn(*size, seed=place) for place, (name, size) in enumerate(sized.items())}


def write(folder: Path, spelling: str, own: bool = True, **changed: Any) -> dict[str, Tensor]:
    """Write heads in somebody's names; their tensors by ours."""
    names = names_of(spelling, own)
    weights = weights_for(names)
    config = {**CONFIGS[spelling], **changed}
    made.write(folder, (config, {names[name]: tensor for name, tensor in weights.items()}))
    return weights


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_tensor_of_every_layout_is_read(spelling: str, tmp_path: Path) -> None:
    """To the bit, and kept by the head that is written."""
    weights = write(tmp_path / "theirs", spelling)
    found = inspect(tmp_path / "theirs")
    assert (
        found.kind == "Medusa heads" and not found.fatal and found.layout == spelling.split(",")[0]
    ), found
    told = import_head(tmp_path / "theirs", tmp_path / "ours")
    head = load_head(tmp_path / "ours")
    assert (head.settings.levels, head.settings.layers, head.settings.lm_head) == (
        LEVELS,
        LAYERS,
        "own",
    )
    assert head.state_dict().keys() == weights.keys()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in head.state_dict().items())
    assert ("says 2 heads, the file holds 3" in told) == (
        spelling == "FasterDecoding/Medusa"
    )  # as published ones do


def test_heads_that_borrow_the_targets_lm_head(tmp_path: Path) -> None:
    """The first version of published heads tells no vocabulary; vLLM keeps a copy of the target's LM head."""
    target = made.write_target(tmp_path / "target")
    weights = write(
        tmp_path / "published",
        "FasterDecoding/Medusa",
        own=False,
        version="2",
        medusa_num_heads=LEVELS,
    )
    with pytest.raises(
        ValueError, match=r"no vocab_size in config\.json, and no tensor tells it\. Name"
    ):
        read_head(tmp_path / "published")
    for folder in (tmp_path / "published", tmp_path / "vllm"):
        if folder.name == "vllm":
            config = {**CONFIGS["vLLM"], "original_lm_head": True}
            held = {names_of("vLLM")[name]: tensor for name, tensor in weights.items()}
            made.write(folder, (config, {**held, "lm_heads.0.weight": made.drawn(V, H, seed=8)}))
        head = read_head(folder, target)
        assert head.settings.lm_head == "target" and head.shape.vocab_size == V
        assert all(torch.equal(tensor, weights[name]) for name, tensor in head.state_dict().items())
    assert "they are equal" in str(inspect(tmp_path / "vllm", target))
    made.write(
        tmp_path / "other", (config, {**held, "lm_heads.0.weight": made.drawn(V, H, seed=99)})
    )
    with pytest.raises(ValueError, match=f"differs from the target's in {V} of {V} rows"):
        read_head(tmp_path / "other", target)


def test_heads_in_one_file_with_their_target(tmp_path: Path) -> None:
    """As ModelOpt saves a model that it has given heads: the target's tensors are told and left out."""
    names = names_of("ModelOpt")
    weights = weights_for(names)
    base = {"model.embed_tokens.weight": made.embedding(), "model.norm.weight": made.drawn(H)}
    base["lm_head.weight"] = made.drawn(V, H)
    config = {"architectures": ["LlamaForCausalLM"], **made.LLAMA, **CONFIGS["ModelOpt"]}
    made.write(
        tmp_path / "theirs",
        (config, base | {names[name]: tensor for name, tensor in weights.items()}),
    )
    told = import_head(tmp_path / "theirs", tmp_path / "ours")
    assert (
        "model.embed_tokens.weight, model.norm.weight left out: they are the target's own" in told
    )
    assert "lm_head.weight is left out, heads here use the target's; not compared" in told
    assert all(
        torch.equal(tensor, weights[name])
        for name, tensor in load_head(tmp_path / "ours").state_dict().items()
    )


@pytest.mark.parametrize(
    "name", ["medusa_lm_head.pt", "pytorch_model.bin", "medusa_lm_head.safetensors"]
)
def test_the_files_that_heads_come_in(name: str, tmp_path: Path) -> None:
    """Pickled ones are read as weights alone."""
    weights = write(tmp_path, "FasterDecoding/Medusa")
    whole = tmp_path / "model.safetensors"
    if name.endswith(".safetensors"):
        whole.rename(tmp_path / name)
    else:
        torch.save(load_file(whole), tmp_path / name)
        whole.unlink()
    assert all(
        torch.equal(tensor, weights[key])
        for key, tensor in read_head(tmp_path).state_dict().items()
    )


def test_heads_without_biases_get_zeros(tmp_path: Path) -> None:
    """As vLLM's have none unless their config says so; one that is missing among others is missing."""
    config = {key: value for key, value in CONFIGS["vLLM"].items() if key != "medusa_fc_bias"}
    names = {name: theirs for name, theirs in names_of("vLLM").items() if not name.endswith("bias")}
    held = {names[name]: tensor for name, tensor in weights_for(names).items()}
    told = import_head(made.write(tmp_path / "theirs", (config, held)), tmp_path / "ours")
    assert "no biases: zeros" in told
    assert not any(
        tensor.any()
        for name, tensor in load_head(tmp_path / "ours").state_dict().items()
        if "bias" in name
    )
    some = {**held, "blocks.0.layers.0.bias": made.drawn(H)}
    folder = made.write(tmp_path / "some", (config, some))
    with pytest.raises(ValueError, match=r"blocks\.1\.0\.bias is missing"):
        read_head(folder)
    assert "drops them in silence" in str(inspect(folder))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda config, held: held.pop("1.0.linear.weight"), "blocks.1.0.weight is missing"),
        (lambda config, held: held.pop("2.2.weight"), "heads.2.weight is missing"),
        (lambda config, held: config.update(medusa_num_heads=5), "says 5 heads, the file holds 3"),
        (
            lambda config, held: config.update(medusa_num_layers=3),
            "says 3 layers of each, the file holds 2",
        ),
        (
            lambda config, held: held.update({"extra.weight": made.drawn(2)}),
            "unknown tensors: extra.weight",
        ),
        (lambda config, held: held.update({"token_map": torch.arange(4)}), "token_map"),
        (
            lambda config, held: held.update({"0.1.linear.weight": made.drawn(H, 3)}),
            "is [16, 3], expected [16, 16]",
        ),
        (
            lambda config, held: held.update({"0.3.weight": made.drawn(V, H, seed=50)}),
            "0.3.weight differs from 0.2.weight",
        ),
        (
            lambda config, held: held.update({"0.0.linear.bias": torch.arange(H)}),
            "expected plain weights",
        ),
        (lambda config, held: held["0.0.linear.bias"].fill_(torch.nan), "not finite"),
        (
            lambda config, held: config.update(hidden_size=8),
            "hidden_size is 8, the tensors have 16",
        ),
    ],
)
def test_what_is_damaged_is_named(spoil: Any, words: str, tmp_path: Path) -> None:
    """By inspect and import alike."""
    names = names_of("FasterDecoding/Medusa")
    config = dict(CONFIGS["FasterDecoding/Medusa"])
    held = {names[name]: tensor.clone() for name, tensor in weights_for(names).items()}
    spoil(config, held)
    folder = made.write(tmp_path / "head", (config, held))
    with pytest.raises(ValueError, match=re.escape(words)):
        read_head(folder)
    assert words in str(inspect(folder))


def test_what_vllm_would_take_otherwise(tmp_path: Path) -> None:
    """Biases that it drops, and keys that it takes for counts; unknown keys are told."""
    write(tmp_path, "vLLM", medusa_fc_bias=False, num_attention_heads=4, odd_key=1)
    found = inspect(tmp_path)
    assert (
        found.fatal
        and "drops them in silence [vLLM]" in str(found)
        and "num_attention_heads" in str(found)
    )
    assert "unknown keys of config.json: num_attention_heads, odd_key" in str(found)
    with pytest.raises(ValueError, match=r"taps are \(2,\)"):
        read_head(tmp_path, taps=(2,))
