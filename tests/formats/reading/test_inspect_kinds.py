"""`inspect` names the kind of a checkpoint: heads of every method, language models, and what is damaged of both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.formats.reading.foreign import inspect
from tests import foreign_heads as made
from tests.formats.every_layout import EVERY
from tests.formats.make_heads import make_head, make_target

# one head of each network, and a second where its names have little in common with the first's
KINDS = {
    "EAGLE-1": "EAGLE-1 (",
    "SpecForge": "EAGLE-3",
    "Medusa: FasterDecoding/Medusa": "Medusa",
    "Medusa: vLLM": "Medusa",
    "Medusa: ModelOpt, Megatron": "Medusa",
    "fms-extras": "MLP speculator",
    "Hydra with a prefix": "Hydra",
    "Falcon": "FALCON",
    "block: z-lab": "DFlash",
    "block: DFlash2": "DFlash2",
    "block: LiLiCorr, ModelOpt": "LiLiCorr",
    "block: DSpark": "DSpark",
    "block: Domino": "Domino",  # by its early names
    "block: P-EAGLE": "P-EAGLE",
    "block: DeepSeek": "MTP",
    "block: MiMo": "MTP",
}
# their tensors are EAGLE-1's but for a few, so that half of them may be EAGLE-1's
ALIKE = ("EAGLE-1", "SpecForge", "Falcon")


def language_model(layers: int) -> made.Head:
    """Return a plain Llama."""
    held = {
        "model.embed_tokens.weight": made.embedding(),
        "model.norm.weight": made.drawn(made.H),
        "lm_head.weight": made.drawn(made.V, made.H),
    }
    for layer in range(layers):
        held |= made.block(f"model.layers.{layer}.", made.H)
        held[f"model.layers.{layer}.input_layernorm.weight"] = made.drawn(made.H)
    config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": layers}
    return {**made.LLAMA, **config}, held


def list_variants(head: made.Head) -> dict[str, made.Head]:
    """Return the head as it is, with less in its config, and with half of its tensors."""
    tensors = head[1]
    names = list(tensors)
    middle = len(names) // 2
    unnamed = made.saying(head, architectures=None, model_type=None)
    sizes = {"architectures": ["LlamaForCausalLM"], **made.LLAMA}
    return {
        "whole": head,
        "config without names": unnamed,
        "config of sizes alone": (sizes, tensors),
        # as copies that broke off leave them
        "every other tensor": made.without(head, *names[1::2]),
        "first half": made.without(head, *names[middle:]),
        "second half": made.without(head, *names[:middle]),
    }


@pytest.mark.parametrize("name", KINDS)
def test_a_head_is_called_by_its_name(name: str, tmp_path: Path) -> None:
    """Whole or half, and also where its tensors alone tell what it is."""
    word = KINDS[name]
    config, tensors = EVERY[name]
    for variant, head in list_variants((config, tensors)).items():
        if name in ALIKE and ("half" in variant or "tensor" in variant):
            continue
        found = inspect(made.write(tmp_path / variant, head))
        assert word in found.kind, (variant, found)
        assert found.kind.startswith("EAGLE") == word.startswith("EAGLE"), (variant, found)
        assert "not readable here yet" not in str(found)


def test_what_begins_as_zeros_may_be_zeros(tmp_path: Path) -> None:
    """A new DFlash2 head has no dynamic kernels and no scores; other zeros were never filled."""
    target = make_target()
    head = make_head({"kind": "dflash2", "slots": 4}, target)
    save_head(tmp_path / "new", head, "", {})
    found = inspect(tmp_path / "new")
    assert not found.fatal, found
    head.layers[0].mlp_conv.base_kernel.data.zero_()
    save_head(tmp_path / "empty", head, "", {})
    assert "layers.0.mlp_conv.base_kernel is all zeros" in str(inspect(tmp_path / "empty"))


def assert_language_model(folder: Path) -> None:
    """Assert that inspect and import call a folder a language model, and say how it is loaded."""
    found = inspect(folder)
    assert "causal language model" in found.kind, found
    assert not found.fatal
    assert found.layout == "unknown"
    assert "load_drafter" in str(found)
    assert "causal language model" in made.refused(folder)


def test_a_language_model_in_parts(tmp_path: Path) -> None:
    """Of one layer, as the second of three shards, and with names without a prefix."""
    config, tensors = language_model(6)
    shard = {name: tensors[name] for name in tensors if "layers.3." in name or "layers.4." in name}
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert_language_model(made.write(tmp_path / "one", language_model(1)))
    assert_language_model(made.write(tmp_path / "shard", (config, shard)))
    assert_language_model(made.write(tmp_path / "bare", (config, bare)))


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
# families whose layers have different names
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": SIZES,
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neox": SIZES,
    "opt": {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "deepseek_v3": {**SIZES, **EXPERTS},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_language_models_of_transformers(family: str, tmp_path: Path) -> None:
    """As save_pretrained writes them."""
    config = AutoConfig.for_model(family, vocab_size=64, **FAMILIES[family])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert_language_model(tmp_path / "model")


@pytest.mark.parametrize(
    "name",
    ["Medusa: FasterDecoding/Medusa", "fms-extras", "Hydra", "block: z-lab", "block: P-EAGLE"],
)
def test_the_config_tells_where_the_weights_cannot_be_read(name: str, tmp_path: Path) -> None:
    """A file may have a name that nobody looks for, and may be cut short."""
    word = KINDS.get(name, name)
    folder = made.write(tmp_path / "head", EVERY[name])
    weights = folder / "model.safetensors"
    # a name that nobody looks for, then a file that is cut short
    data = weights.read_bytes()
    weights.rename(folder / "odd.weights")
    found = inspect(folder)

    assert found.fatal
    assert word in found.kind
    assert "unreadable" in found.kind
    assert "no weights" in str(found)

    weights.write_bytes(data[:-7])
    found = inspect(folder)
    assert found.fatal
    assert word in found.kind
    assert "model.safetensors" in str(found)


def test_a_draft_model_of_this_project(tmp_path: Path) -> None:
    """A smaller language model that it distilled, saved as heads are."""
    settings = settings_of({"kind": "draft_model", "layers": 1}, "test")
    target = AutoConfig.for_model(**{**made.LLAMA, "num_hidden_layers": 4})
    draft = DRAFTERS["draft_model"].for_target(settings, target)
    save_head(tmp_path / "head", draft, "", {})
    found = inspect(tmp_path / "head")

    assert found.kind == "a draft_model of this project"
    assert not found.fatal, found


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "lilicorr", "dspark", "xpress"])
def test_block_drafters_of_this_project(kind: str, tmp_path: Path) -> None:
    """Their blocks are alike, and each is shown with its own method."""
    target = make_target()
    save_head(
        tmp_path / "head",
        make_head({"kind": kind, "slots": 4}, target),
        "",
        {},
    )
    found = inspect(tmp_path / "head")

    assert found.kind == f"a {kind} of this project"
    assert found.facts["method"] == kind
    assert not found.fatal, found


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("EAGLE-1", "EAGLE-1"),
        ("ModelOpt", "EAGLE-3"),
    ],
)
def test_a_head_stays_a_head(
    name: str,
    word: str,
    tmp_path: Path,
) -> None:
    """Whatever single tensor is missing, and with another architecture."""
    config, tensors = made.LAYOUTS[name]
    for missing in tensors:
        folder = made.write(tmp_path / "head", made.without((config, tensors), missing))
        assert inspect(folder).kind.startswith(word), missing
    for architecture in ("MyHead", "LlamaForCausalLM"):
        odd = {**config, "architectures": [architecture]}
        assert inspect(made.write(tmp_path / "head", (odd, tensors))).kind.startswith(word)


def test_an_unknown_checkpoint(tmp_path: Path) -> None:
    """It says so, with some of its names."""
    folder = made.write(tmp_path / "odd", ({"a": 1}, {"weird.weight": torch.ones(3)}))
    found = inspect(folder)
    assert "weird.weight" in str(found)
    assert not found.kind.startswith("EAGLE")
