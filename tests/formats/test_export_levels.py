"""Heads that guess several tokens from one state, in the layouts of vLLM and of their authors' code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import GemmaConfig, LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import inspect, read_head
from tests import foreign_heads as made

H, V, LEVELS, INNER = made.H, made.V, 3, 8
TARGET = LlamaConfig(**{**made.LLAMA, "num_hidden_layers": made.LAYERS}, name_or_path="some/target")
READ = ("linear", "res_connection")
Shapes = dict[str, tuple[int, ...]]


def spell(**parts: tuple[int, ...]) -> Shapes:
    """Names and sizes of all levels; N stands for the level and a double underscore for a dot."""
    return {
        name.replace("__", ".").replace("N", str(level)): size
        for level in range(LEVELS)
        for name, size in parts.items()
    }


MEDUSA = spell(N__0__linear__weight=(H, H), N__0__linear__bias=(H,), N__1__weight=(V, H))
SPECULATOR = spell(
    emb__N__weight=(V, INNER),
    proj__N__weight=(INNER, INNER),
    ln__N__weight=(INNER,),
    ln__N__bias=(INNER,),
    head__N__weight=(V, INNER),
)
SPECULATOR |= {"proj.0.weight": (INNER, H)}
SPECULATOR_KEYS = {
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "model_type": "mlp_speculator",
    "emb_dim": H,
    "inner_dim": INNER,
    "vocab_size": V,
    "n_predict": LEVELS,
    "top_k_tokens_per_head": [5, 4, 3],
    "n_candidates": 5,
    "tie_weights": False,
    "scale_input": False,
    "torch_dtype": "float32",
}
HYDRA = {
    f"hydra_mlp.{level}.0.{part}.weight": (H, (level + 2) * H)
    for level in range(LEVELS)
    for part in READ
}
HYDRA |= spell(**{f"hydra_mlp__N__0__{part}__bias": (H,) for part in READ})
HYDRA |= spell(hydra_lm_head__N__weight=(V, H), hydra_lm_head__N__bias=(V,))
PREFIXED = {  # a dropout stands in front of each block and LM head
    re.sub(r"^(hydra_lm_head\.\d)", r"\1.1", re.sub(r"^(hydra_mlp\.\d\.)0", r"\g<1>1", name)): size
    for name, size in HYDRA.items()
}
PREFIXED |= spell(hydra_mlp__N__3__linear__weight=(H, H), hydra_mlp__N__3__linear__bias=(H,))
PREFIXED |= {
    f"prefix_embeding_layer.{name}": tuple(tensor.shape)
    for name, tensor in made.block("layers.0.", H).items()
}
PREFIXED |= {
    f"prefix_embeding_layer.{name}.weight": (H,) for name in ("layers.0.input_layernorm", "norm")
}
LSTM = [
    (layer, side, part, (4 * H, read) if part == "weight" else (4 * H,))
    for layer, sides in enumerate(({"ih": 2 * H, "hh": H}, {"ih": H, "hh": H}))
    for side, read in sides.items()
    for part in ("weight", "bias")
]
LLAMA_KEYS = {
    key: value
    for key, value in made.LLAMA.items()
    if key not in ("use_cache", "transformers_version")
}
HYDRA_KEYS = {
    "hidden_size": H,
    "vocab_size": V,
    "torch_dtype": "float32",
    "hydra_num_heads": LEVELS,
    "hydra_num_layers": 1,
    "hydra_head_arch": "mlp",
    "grounded_heads": True,
    "hidden_state_offset": 0,
    "base_model_name_or_path": "some/target",
}
GOLDEN: dict[
    tuple[str, str], tuple[str, Shapes, dict[str, Any]]
] = {  # engine, head: file, tensors, config
    ("vllm", "medusa"): (
        "model.safetensors",
        spell(
            blocks__N__layers__0__weight=(H, H),
            blocks__N__layers__0__bias=(H,),
            lm_heads__N__weight=(V, H),
        ),
        {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": H,
            "vocab_size": V,
            "torch_dtype": "float32",
            "medusa_num_heads": LEVELS,
            "medusa_num_layers": 1,
            "medusa_fc_bias": True,
            "original_lm_head": False,
        },
    ),
    ("fms", "speculator"): (
        "model.safetensors",
        {f"speculator.{name}": size for name, size in SPECULATOR.items()},
        SPECULATOR_KEYS,
    ),
    ("fms", "tied speculator"): (
        "model.safetensors",
        {f"speculator.{name}": size for name, size in SPECULATOR.items()},
        {**SPECULATOR_KEYS, "tie_weights": True, "scale_input": True},
    ),
    ("falcon", "falcon"): (
        "pytorch_model.bin",
        {
            "embed_tokens.weight": (V, H),
            **{f"lstm.{part}_{side}_l{layer}": size for layer, side, part, size in LSTM},
            **{name: tuple(tensor.shape) for name, tensor in made.block("layers.0.", H).items()},
        },
        {**LLAMA_KEYS, "architectures": ["LlamaForCausalLM"], "bias": True, "k_mask": 2},
    ),
    ("hydra", "hydra"): ("hydra_lm_head.pt", HYDRA, HYDRA_KEYS),
    ("hydra", "hydra with a prefix"): (
        "hydra_lm_head.pt",
        PREFIXED,
        {**HYDRA_KEYS, "hydra_num_layers": 2, "hydra_head_arch": "prefix-mlp"},
    ),
    ("medusa", "medusa"): (
        "medusa_lm_head.pt",
        MEDUSA,
        {
            "model_type": "medusa",
            "hidden_size": H,
            "vocab_size": V,
            "torch_dtype": "float32",
            "medusa_num_heads": LEVELS,
            "medusa_num_layers": 1,
            "base_model_name_or_path": "some/target",
        },
    ),
}
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa"},
    "medusa with the target's LM head": {"kind": "medusa", "lm_head": "target"},
    "medusa with two blocks": {"kind": "medusa", "layers": 2},
    "falcon": {"kind": "falcon"},
    "falcon in blocks of three": {"kind": "falcon", "k": 3, "levels": 8},
    "hydra": {"kind": "hydra"},
    "hydra with a prefix": {"kind": "hydra", "prefix": True, "layers": 2},
    "speculator": {"kind": "mlp_speculator", "inner_dim": INNER},
    "tied speculator": {
        "kind": "mlp_speculator",
        "inner_dim": INNER,
        "tie_weights": True,
        "scale_input": True,
    },
    "speculator of the target's width": {"kind": "mlp_speculator", "levels": 6},
}
READERS = {
    "falcon": ("falcon",),
    "hydra": ("hydra",),
    "medusa": ("vllm", "medusa"),
    "mlp_speculator": ("fms",),
}


def head_of(name: str, config: Any = TARGET) -> Any:
    """A head with random weights, bound to a target's embedding and LM head."""
    embedding, output = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
    embedding.weight.data, output.weight.data = made.embedding(), made.drawn(V, H, seed=8)
    settings = settings_of({"levels": LEVELS, **HEADS[name]}, "test")
    head = DRAFTERS[settings.kind].for_target(settings, config).bind(TargetHead(embedding, output))
    generator = torch.Generator().manual_seed(1)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    return head


@pytest.mark.parametrize(("engine", "name"), GOLDEN)
def test_names_shapes_and_keys(engine: str, name: str) -> None:
    """As the code that loads them has them."""
    file, shapes, config = GOLDEN[engine, name]
    layout = EXPORTERS[engine](head_of(name), TARGET)
    assert {key: tuple(tensor.shape) for key, tensor in layout.tensors.items()} == shapes
    assert {tensor.dtype for tensor in layout.tensors.values()} == {torch.float32}
    assert (layout.file, layout.config) == (file, config)


@pytest.mark.parametrize("name", HEADS)
def test_an_export_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """To the bit, through the files, whoever's names they have; and nothing is wrong with it."""
    target, head = made.write_target(tmp_path / "target"), head_of(name)
    for engine in READERS[HEADS[name]["kind"]]:
        if engine == "medusa" and "two blocks" in name:
            for level in head.blocks:  # which that code has once
                level[1].load_state_dict(level[0].state_dict())
        export(head, TARGET, engine, tmp_path / engine)
        found = inspect(tmp_path / engine, target)
        assert not found.fatal and "unknown keys" not in str(found), found
        again = read_head(tmp_path / engine, target)
        assert again.settings.kind == head.settings.kind and again.network == head.network
        assert again.state_dict().keys() == head.state_dict().keys()
        assert all(
            torch.equal(tensor, again.state_dict()[key])
            for key, tensor in head.state_dict().items()
        )


@torch.no_grad()
def test_falcons_gates_are_an_lstm_that_begins_anew(tmp_path: Path) -> None:
    """torch's own, with the tensors of the export, at one token of each of many texts."""
    head = head_of("falcon")
    tensors = EXPORTERS["falcon"](head, TARGET).tensors
    lstm = nn.LSTM(2 * H, H, num_layers=2).eval()
    lstm.load_state_dict(
        {name.removeprefix("lstm."): tensor for name, tensor in tensors.items() if "lstm" in name}
    )
    embedded, hidden = made.drawn(9, H), made.drawn(9, H, seed=1)
    theirs = lstm(torch.cat([embedded, hidden], dim=-1)[None])[0][0]  # the first axis is time
    torch.testing.assert_close(head.enter(embedded, hidden), theirs, rtol=0, atol=1e-6)


def test_vllm_gets_a_copy_of_the_targets_lm_head() -> None:
    """One for all levels, where the head borrows it."""
    layout = EXPORTERS["vllm"](head_of("medusa with the target's LM head"), TARGET)
    assert torch.equal(layout.tensors["lm_heads.0.weight"], made.drawn(V, H, seed=8))
    assert layout.config["original_lm_head"] and "lm_heads.1.weight" not in layout.tensors
    counts = [key for key in layout.config if "num" in key and ("heads" in key or "layers" in key)]
    assert counts == [
        "medusa_num_heads",
        "medusa_num_layers",
    ]  # vLLM takes any such key for one of these


@pytest.mark.parametrize("name", HEADS)
def test_engines_that_cannot_serve_it_say_what_can(name: str) -> None:
    """By the method's name."""
    head, kind = head_of(name), HEADS[name]["kind"]
    readers = READERS[kind]
    for engine in EXPORTERS.keys() - {"transformers", *readers}:
        named = r" or ".join(rf"{reader}(?: \(up to [\d.]+\))?" for reader in readers)
        with pytest.raises(
            ValueError, match=f"{engine}: no layout for '{kind}'.*export to {named} "
        ):
            EXPORTERS[engine](head, TARGET)


def test_no_exporter_has_a_layout_for_blockwise_heads() -> None:
    """Nobody published any."""
    HEADS["blockwise"] = {"kind": "blockwise"}
    head = head_of("blockwise")
    del HEADS["blockwise"]
    for engine in EXPORTERS.keys() - {"transformers"}:
        with pytest.raises(
            ValueError, match=f"{engine}: no layout for 'blockwise': no exporter has one"
        ):
            EXPORTERS[engine](head, TARGET)


def test_refusals_name_what_stands_in_the_way() -> None:
    """What the published code has once, a target that it cannot load, and a bias that vLLM would drop."""
    with pytest.raises(
        ValueError, match=r"medusa: blocks\.0\.1\.weight differs from block 0.*drafter\.layers=1"
    ):
        EXPORTERS["medusa"](head_of("medusa with two blocks"), TARGET)
    gemma = GemmaConfig(**{**made.LLAMA, "model_type": "gemma"})
    with pytest.raises(ValueError, match="medusa: the target is a gemma"):
        EXPORTERS["medusa"](head_of("medusa", gemma), gemma)
    with pytest.raises(
        ValueError, match=r"vllm: no layout for 'mlp_speculator': vLLM 0\.9\.2 was the last"
    ):
        EXPORTERS["vllm"](head_of("speculator"), TARGET)
    with pytest.raises(ValueError, match=r"trtllm: .*trtllm-build.*--to medusa"):
        EXPORTERS["trtllm"](head_of("medusa"), TARGET)
    head = head_of("medusa with the target's LM head")
    head.frozen[0].output.bias = nn.Parameter(torch.ones(V))
    with pytest.raises(
        ValueError, match=r"vllm: the target's LM head has a bias.*drafter\.lm_head=own"
    ):
        EXPORTERS["vllm"](head, TARGET)


def test_rotary_scaling_is_of_no_matter_to_heads_without_attention() -> None:
    """A target whose positions no engine could turn in a head."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
    }
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = LlamaConfig(**{**made.LLAMA, "rope_parameters": rope, "rope_scaling": None})
    assert EXPORTERS["vllm"](head_of("medusa", target), target).tensors


def test_the_readme_says_no_longer_chain_than_the_head_guesses(tmp_path: Path) -> None:
    """A head of two levels, where three are usual."""
    HEADS["short"] = {"kind": "medusa", "levels": 2}
    export(head_of("short"), TARGET, "vllm", tmp_path)
    del HEADS["short"]
    text = (tmp_path / "README.md").read_text()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without which older transformers fail
    assert (
        '"method": "medusa"' in text
        and '"num_speculative_tokens": 2' in text
        and "2 tokens: as many" in text
    )
    assert json.loads((tmp_path / "config.json").read_text())["medusa_num_heads"] == 2
