"""Names, shapes, dtypes and keys of every engine's layout, as that engine's own code and published heads have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.engines.registry import ENGINES as ALL
from eagle.formats.export import EXPORTERS, export
from eagle.formats.networks.eagle_layouts import FUSED

H, V, D, LAYERS = 32, 96, 40, 12
SIZES = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENGINES = sorted({engine.name for engine in ALL if FUSED in engine.networks})
BLOCK = {
    "self_attn.o_proj.weight": (H, 64),
    "mlp.gate_proj.weight": (48, H),
    "mlp.up_proj.weight": (48, H),
    "mlp.down_proj.weight": (H, 48),
    "post_attention_layernorm.weight": (H,),
}
EAGLE1 = {
    "fc.weight": (H, 2 * H),
    **{f"layers.0.{name}": shape for name, shape in BLOCK.items()},
    "layers.0.self_attn.q_proj.weight": (64, H),
    "layers.0.self_attn.k_proj.weight": (32, H),
    "layers.0.self_attn.v_proj.weight": (32, H),
}
EAGLE3 = {
    "fc.weight": (H, 3 * H),
    **{f"midlayer.{name}": shape for name, shape in BLOCK.items()},
    "midlayer.self_attn.q_proj.weight": (64, 2 * H),
    "midlayer.self_attn.k_proj.weight": (32, 2 * H),
    "midlayer.self_attn.v_proj.weight": (32, 2 * H),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "norm.weight": (H,),
}
REDUCED = {**EAGLE3, "lm_head.weight": (D, H), "d2t": (D,), "t2d": (V,)}
FULL = {**EAGLE3, "lm_head.weight": (V, H)}
EMBEDDING, BIAS = {"embed_tokens.weight": (V, H)}, {"fc.bias": (H,)}
NORMS = {f"fc_norm.{tap}.weight": (H,) for tap in range(3)}
OFFSETS = {"d2t": (V,), "t2d": (V,)}
SPECULATORS = {
    name.replace("midlayer.", "layers.0."): shape
    for name, shape in {**REDUCED, **EMBEDDING}.items()
}


def narrow(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """The same with heads as wide as SafeAILab/EAGLE takes them: width / heads, half of those above."""
    return {
        name: (rows, *width)
        if "self_attn" not in name
        else ((rows, width[0] // 2) if "o_proj" in name else (rows // 2, *width))
        for name, (rows, *width) in shapes.items()
    }


PLAIN = {"kind": "eagle3", "draft_vocab": D}
WIDE = {"kind": "eagle3"}
NEWER = {**PLAIN, "fc_norm": True, "norm_output": True}
NORMED = {**PLAIN, "norm_before_residual": True}
GOLDEN: list[tuple[str, dict[str, Any], dict[str, tuple[int, ...]]]] = [
    *(
        (engine, {"kind": kind, "fc_bias": False}, {**EAGLE1, **BIAS})
        for engine in ("vllm", "sglang", "portable")
        for kind in ("eagle1", "hass")
    ),
    ("sglang", {"kind": "eagle1"}, {**EAGLE1, **BIAS}),
    ("eagle", {"kind": "eagle1"}, narrow({**EAGLE1, **BIAS, **EMBEDDING})),
    ("eagle", {"kind": "hass", "fc_bias": False}, narrow({**EAGLE1, **EMBEDDING})),
    *(
        (engine, PLAIN, REDUCED)
        for engine in ("vllm", "sglang", "trtllm", "openvino", "llamacpp", "portable")
    ),
    *((engine, WIDE, FULL) for engine in ("vllm", "sglang", "trtllm", "llamacpp")),
    ("openvino", WIDE, {**FULL, **OFFSETS}),
    ("eagle", PLAIN, narrow({**REDUCED, **EMBEDDING})),
    ("eagle", WIDE, narrow({**FULL, **EMBEDDING})),
    ("speculators", PLAIN, SPECULATORS),
    *((engine, NEWER, {**REDUCED, **NORMS}) for engine in ("vllm", "sglang", "trtllm")),
    ("speculators", NEWER, {**SPECULATORS, **NORMS}),
    *((engine, NORMED, REDUCED) for engine in ("vllm", "llamacpp")),
    ("speculators", NORMED, SPECULATORS),
]
REFUSED = [
    *((engine, {"kind": "eagle1", "fc_bias": False}, "no layout for 'eagle1'")
      for engine in ("trtllm", "openvino", "llamacpp", "speculators")),
    *((engine, {"kind": "eagle1"}, "drafter.fc_bias=false") for engine in ("vllm", "portable")),
    *((engine, NORMED, "drafter.norm_before_residual")
      for engine in ("sglang", "trtllm", "openvino", "eagle", "portable")),
    *((engine, NEWER, "drafter.fc_norm") for engine in ("openvino", "llamacpp", "eagle", "portable")),
    *((engine, {**PLAIN, "norm_output": True}, "drafter.norm_output") for engine in ("openvino", "llamacpp", "eagle")),
    ("portable", WIDE, "drafter.draft_vocab"),
    ("eagle", {**PLAIN, "taps": (1, 6, 9)}, "drafter.taps"),
    *((engine, {**PLAIN, "taps": (2, 6, -1)}, "drafter.taps") for engine in ENGINES),
    *((engine, {**PLAIN, "taps": (2, 9)}, "drafter.taps") for engine in ENGINES),
]  # fmt: skip


def named(value: Any) -> str:
    """What a case is called."""
    return (
        " ".join(map(str, value.values()))
        if isinstance(value, dict) and "kind" in value
        else str(value)[:24]
    )


def target_for(engine: str) -> Target:
    """A random target of twelve layers, whose heads are as wide as the engine takes them."""
    torch.manual_seed(0)
    return Target(
        LlamaForCausalLM(
            LlamaConfig(**{**SIZES, "head_dim": 8 if engine == "eagle" else 16}, rope_theta=5e5)
        )
    )


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target of twelve layers."""
    return target_for("any")


def head_of(settings: dict[str, Any], target: Target) -> Any:
    """A random head that may say every other token but a few."""
    torch.manual_seed(1)
    known = settings_of(settings, "test")
    head = DRAFTERS[known.kind].for_target(
        known, target.config, target.head, [torch.arange(5, 5 + 2 * D, 2)]
    )
    for tensor in head.parameters():
        torch.nn.init.normal_(tensor)
    return head.bind(target.head)


@pytest.mark.parametrize(("engine", "settings", "expected"), GOLDEN, ids=named)
def test_every_layout_has_the_names_and_shapes_of_its_engine(
    engine: str, settings: dict[str, Any], expected: dict[str, tuple[int, ...]]
) -> None:
    """No tensor more, none less; offsets are whole numbers, the rest as the head is."""
    target = target_for(engine)
    layout = EXPORTERS[engine](head_of(settings, target), target.config)
    assert {name: tuple(tensor.shape) for name, tensor in layout.tensors.items()} == expected
    whole = {"d2t": torch.int64, "t2d": torch.bool}
    assert all(
        tensor.dtype == whole.get(name, torch.float32) for name, tensor in layout.tensors.items()
    )


@pytest.mark.parametrize(("engine", "settings", "switch"), REFUSED, ids=named)
def test_what_an_engine_cannot_serve_is_refused(
    engine: str, settings: dict[str, Any], switch: str, target: Target
) -> None:
    """The message names engine and switch."""
    with pytest.raises(ValueError, match=switch) as said:
        EXPORTERS[engine](head_of(settings, target), target.config)
    assert str(said.value).startswith(f"{engine}: ")


def test_eagle1_configs() -> None:
    """Architectures and keys that the engines look for."""
    configs = {}
    for engine in ("vllm", "sglang", "eagle", "portable"):
        target = target_for(engine)
        head = head_of({"kind": "eagle1", "fc_bias": False}, target)
        configs[engine] = EXPORTERS[engine](head, target.config).config
    both = ["LlamaForCausalLMEagle", "LlamaForCausalLM"]
    assert {engine: config["architectures"] for engine, config in configs.items()} == {
        "vllm": both,
        "sglang": both[:1],
        "eagle": both[1:],
        "portable": both,
    }
    assert configs["eagle"]["bias"] is False
    for config in configs.values():
        assert (config["rope_theta"], config["rope_scaling"], config["num_hidden_layers"]) == (
            5e5,
            None,
            1,
        )
        assert (config["tie_word_embeddings"], config["torch_dtype"]) == (False, "float32")
        assert {
            key: config[key] for key in SIZES if key not in ("num_hidden_layers", "head_dim")
        } == {
            key: value
            for key, value in SIZES.items()
            if key not in ("num_hidden_layers", "head_dim")
        }
    assert {engine: config["head_dim"] for engine, config in configs.items()} == {
        **dict.fromkeys(configs, 16),
        "eagle": 8,
    }


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "openvino", "llamacpp", "portable"])
def test_layer_ids_stand_in_both_conventions(engine: str, target: Target) -> None:
    """Inputs of layers at the top, outputs in the nested config; the offsets lead from draft ids to the target's."""
    layout = EXPORTERS[engine](head_of(PLAIN, target), target.config)
    assert layout.config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert layout.config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert layout.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    assert layout.config["eagle_config"]["use_aux_hidden_state"] is True
    assert (layout.config["draft_vocab_size"], layout.config["norm_before_residual"]) == (D, False)
    drafted = torch.arange(D) + layout.tensors["d2t"]
    assert torch.equal(drafted, layout.tensors["t2d"].nonzero()[:, 0])
    assert torch.equal(drafted, torch.arange(5, 5 + 2 * D, 2))


def test_openvino_has_offsets_of_zero_for_a_full_vocabulary(target: Target) -> None:
    """Where none are given its converter takes memory that nobody has set."""
    tensors = EXPORTERS["openvino"](head_of(WIDE, target), target.config).tensors
    assert not tensors["d2t"].any()
    assert tensors["t2d"].all()


def test_trtllm_finds_the_switches_where_it_looks(target: Target) -> None:
    """In the nested config alone, and the layers in its own settings."""
    layout = EXPORTERS["trtllm"](head_of(NEWER, target), target.config)
    assert layout.config["eagle_config"]["fc_norm"] is True
    assert layout.config["eagle_config"]["norm_output"] is True
    assert "eagle3_layers_to_capture: [1, 5, 8]" in layout.serve


def test_speculators_config_is_nested(target: Target) -> None:
    """Every switch is written, because readers assume different things where one is missing."""
    config = EXPORTERS["speculators"](head_of(NORMED, target), target.config).config
    assert (config["architectures"], config["speculators_model_type"]) == (
        ["Eagle3Speculator"],
        "eagle3",
    )
    said = [
        config[key] for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    ]
    assert said == [True, False, False, False]
    block = config["transformer_layer_config"]
    assert (block["model_type"], block["vocab_size"], block["rope_parameters"]["rope_theta"]) == (
        "llama",
        V,
        5e5,
    )
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert config["speculators_config"]["verifier"]["architectures"] == ["LlamaForCausalLM"]


def test_taps_out_of_order_are_sorted_with_their_weights(target: Target) -> None:
    """Engines sort layer ids: the columns of `fc` and the norms go with them, and what is fused stays the same."""
    head = head_of({**NEWER, "taps": (9, 2, 6)}, target)
    layout = EXPORTERS["vllm"](head, target.config)
    assert layout.config["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    states = torch.randn(5, 3, H)
    assert torch.allclose(
        fused(layout.tensors, states[:, [1, 2, 0]]), head.fuse_taps(states), atol=1e-5
    )
    assert not torch.allclose(fused(layout.tensors, states), head.fuse_taps(states), atol=1e-5)


def fused(tensors: dict[str, Tensor], states: Tensor) -> Tensor:
    """What an engine makes of three layers, written out."""
    normed = []
    for tap in range(3):
        state = states[:, tap]
        scale = (state.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        normed.append(state * scale * tensors[f"fc_norm.{tap}.weight"])
    return torch.cat(normed, dim=-1) @ tensors["fc.weight"].T


@pytest.fixture(scope="module")
def gemma() -> Target:
    """A target that multiplies its embedding, which no engine does for a head."""
    torch.manual_seed(0)
    return Target(GemmaForCausalLM(GemmaConfig(**SIZES)))


@pytest.mark.parametrize("engine", ["vllm", "sglang", "portable"])
def test_the_scale_of_an_embedding_goes_into_fc(engine: str, gemma: Target) -> None:
    """Bare rows times the exported `fc` are scaled rows times the head's."""
    head = head_of({"kind": "eagle1", "fc_bias": False}, gemma)
    tensors, rows = (
        EXPORTERS[engine](head, gemma.config).tensors,
        gemma.model.get_input_embeddings().weight,
    )
    assert gemma.head.scale == pytest.approx(H**0.5, rel=1e-3)
    bare = rows @ tensors["fc.weight"][:, :H].T
    assert torch.allclose(
        bare, gemma.head.embed(torch.arange(V)) @ head.fc.weight[:, :H].T, rtol=1e-4, atol=1e-5
    )


def test_a_scaled_embedding_travels_with_eagle3_where_engines_read_it(gemma: Target) -> None:
    """Elsewhere the norm behind it would see other numbers."""
    head = head_of(PLAIN, gemma)
    expected = gemma.head.embed(torch.arange(V))
    for engine in ("vllm", "llamacpp", "speculators"):
        assert torch.equal(
            EXPORTERS[engine](head, gemma.config).tensors["embed_tokens.weight"], expected
        )
    for engine, why in (
        ("sglang", "multiplies its embedding"),
        ("eagle", "multiplies its embedding|is a gemma"),
    ):
        with pytest.raises(ValueError, match=why):
            EXPORTERS[engine](head, gemma.config)


def test_what_stands_beside_an_export(target: Target, tmp_path: Path) -> None:
    """The serve command with its numbers, the template's arguments, and the acceptance that is known."""
    folder = tmp_path / "run/head"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(
        "target: {path: some/target}\ndata: {template_kwargs: {enable_thinking: false}}\n"
    )
    rates = {"chain/1": 0.8, "chain/2": 0.5, "chain/3": 0.5, "chain/4": 0.5, "chain/tau": 2.5}
    (folder / "provenance.json").write_text(
        json.dumps({"validation": rates, "target": {"weights": "abc"}})
    )
    export(head_of(PLAIN, target), target.config, "vllm", tmp_path / "out", folder)
    said = (tmp_path / "out/README.md").read_text()
    assert f'"method": "eagle3", "model": "{tmp_path / "out"}", "num_speculative_tokens": 3' in said
    assert "vllm serve some/target" in said
    assert '{"enable_thinking": false}' in said
    assert "0.80, 0.40, 0.20, 0.10" in said
    assert "τ = 2.50" in said
    made = json.loads((tmp_path / "out/provenance.json").read_text())
    assert (made["engine"], made["target"]["weights"], made["acceptance"]["tau"]) == (
        "vllm",
        "abc",
        pytest.approx(2.5),
    )


def test_a_head_is_not_overwritten_by_its_export(target: Target, tmp_path: Path) -> None:
    """Its own folder is refused."""
    (tmp_path / "recipe.yaml").write_text("")
    with pytest.raises(ValueError, match="name another folder"):
        export(head_of(PLAIN, target), target.config, "vllm", tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_an_unknown_engine_is_named(target: Target, tmp_path: Path) -> None:
    """With those that are known."""
    with pytest.raises(ValueError, match="no exporter for 'vlm': expected one of portable, vllm"):
        export(head_of(PLAIN, target), target.config, "vlm", tmp_path / "out")
    assert not (tmp_path / "out").exists()
