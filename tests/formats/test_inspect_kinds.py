"""`inspect` says of a checkpoint that is no EAGLE head what it is: language models, and heads of other methods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from eagle.__main__ import main
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.formats.reading.foreign import inspect
from tests import foreign_heads as made

H, V, D = made.H, made.V, made.D
SHARED = Path(__file__).parents[3] / "shared/models/bench-llama-25m"
REAL = SHARED if SHARED.is_dir() else Path("/nowhere")


def tensors_of(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Random ones; a double underscore stands for a dot."""
    return {name.replace("__", "."): made.drawn(*shape) for name, shape in shapes.items()}


def numbered(count: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Those of several parts, in whose names N stands for the part."""
    parts = [
        {name.replace("N", str(part)): shape for name, shape in shapes.items()}
        for part in range(count)
    ]
    return {name: tensor for part in parts for name, tensor in tensors_of(**part).items()}


def medusa(**config: Any) -> made.Head:
    """FasterDecoding's: blocks with a residual, and an LM head behind each."""
    keys = {
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "base_model_name_or_path": "some/model",
        "version": "2",
    }
    held = {
        f"{i}.0.linear.{part}": made.drawn(*size)
        for i in range(3)
        for part, size in (("weight", (H, H)), ("bias", (H,)))
    }
    return {**keys, **config}, held | {f"{i}.1.weight": made.drawn(V, H) for i in range(3)}


def medusa_of_vllm() -> made.Head:
    """As vLLM names them."""
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": H,
        "vocab_size": V,
    }
    shapes = {
        "blocks__N__layers__0__weight": (H, H),
        "blocks__N__layers__0__bias": (H,),
        "lm_heads__N__weight": (V, H),
    }
    return {**config, "medusa_num_heads": 3}, numbered(3, **shapes)


def language_model(layers: int = 3) -> made.Head:
    """A plain Llama."""
    held = {
        "model.embed_tokens.weight": made.embedding(),
        "model.norm.weight": made.drawn(H),
        "lm_head.weight": made.drawn(V, H),
    }
    for layer in range(layers):
        held |= made.block(f"model.layers.{layer}.", H)
        held[f"model.layers.{layer}.input_layernorm.weight"] = made.drawn(H)
    return {"architectures": ["LlamaForCausalLM"], **made.LLAMA, "num_hidden_layers": layers}, held


def merged_medusa() -> made.Head:
    """A language model with Medusa heads in one file."""
    config, held = language_model()
    heads = numbered(
        2,
        medusa_heads__N__medusa_layers__0__linear__weight=(H, H),
        medusa_heads__N__lm_head__weight=(V, H),
    )
    return config, held | heads


def speculator(prefix: str = "") -> made.Head:
    """fms-extras' MLP speculator."""
    config = {
        "model_type": "mlp_speculator",
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": H,
        "inner_dim": 8,
        "vocab_size": V,
        "n_predict": 3,
        "tie_weights": False,
        "scale_input": False,
    }
    held = numbered(
        3,
        emb__N__weight=(V, 8),
        proj__N__weight=(8, H),
        ln__N__weight=(8,),
        ln__N__bias=(8,),
        head__N__weight=(V, 8),
    )
    return config, {prefix + name: tensor for name, tensor in held.items()}


def hydra() -> made.Head:
    """Hydra's, with its prefix layer."""
    config = {
        "hydra_num_heads": 2,
        "hydra_num_layers": 1,
        "hydra_head_arch": "prefix-mlp",
        "grounded_heads": True,
    }
    shapes = {
        "hydra_mlp__N__0__linear__weight": (H, 2 * H),
        "hydra_mlp__N__0__res_connection__weight": (H, 2 * H),
        "hydra_lm_head__N__1__weight": (V, H),
    }
    return config, {
        **numbered(2, **shapes),
        **made.block("prefix_embeding_layer.layers.0.", H),
        "input_embed_fn.weight": made.embedding(),
    }


def dflash() -> made.Head:
    """z-lab's: Qwen3 layers, one norm over the fused taps, no embedding and no LM head."""
    config = {
        "architectures": ["DFlashDraftModel"],
        **made.LLAMA,
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "block_size": 8,
        "num_target_layers": 9,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [1, 3, 5]},
    }
    held = {
        "fc.weight": made.drawn(H, 3 * H),
        "hidden_norm.weight": made.drawn(H),
        "norm.weight": made.drawn(H),
    }
    for layer in range(2):
        held |= made.block(f"layers.{layer}.", H)
        norms = ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm")
        held |= {f"layers.{layer}.{name}.weight": made.drawn(H) for name in norms}
    return config, held


def dspark() -> made.Head:
    """DFlash with a Markov head and one of confidence."""
    config, held = dflash()
    extra = tensors_of(markov_head__markov_w1__weight=(V, 4), markov_head__markov_w2__weight=(V, 4))
    extra |= tensors_of(confidence_head__proj__weight=(1, H + 4), confidence_head__proj__bias=(1,))
    return {**config, "architectures": ["DSparkDraftModel"]}, held | extra


def domino() -> made.Head:
    """DFlash with a recurrent cell over the tokens of a block."""
    config, held = dflash()
    extra = tensors_of(
        prefix_gru__weight_ih_l0=(24, H),
        prefix_gru__weight_hh_l0=(24, 8),
        embed_proj__0__weight=(8, H + 8),
    )
    return {
        **config,
        "dflash_config": {**config["dflash_config"], "projector_type": "domino"},
    }, held | extra


def peagle() -> made.Head:
    """Speculators' P-EAGLE: EAGLE-3 and a state for tokens that are not known yet."""
    config, held = made.speculators(
        architecture="PEagleDraftModel", speculators_model_type="peagle", mask_token_id=3
    )
    return config, {**held, "mask_hidden": made.drawn(1, 1, 3 * H)}


def mtp() -> made.Head:
    """The multi-token prediction layer of a DeepSeek-V3, cut out."""
    parts = ("enorm", "hnorm", "shared_head.norm", "input_layernorm")
    held = {
        **made.block("model.layers.9.", H),
        "model.layers.9.eh_proj.weight": made.drawn(H, 2 * H),
    }
    held |= {f"model.layers.9.{part}.weight": made.drawn(H) for part in parts}
    held["model.layers.9.shared_head.head.weight"] = made.drawn(V, H)
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        **made.LLAMA,
        "num_nextn_predict_layers": 1,
    }
    return {**config, "model_type": "deepseek_v3"}, held


def mimo() -> made.Head:
    """MiMo's multi-token prediction layer."""
    held = made.block("model.mtp_layers.0.", H) | {
        "model.mtp_layers.0.input_proj.weight": made.drawn(H, 2 * H)
    }
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    held |= {f"model.mtp_layers.0.{part}.weight": made.drawn(H) for part in norms}
    return {"architectures": ["MiMoForCausalLM"], **made.LLAMA, "model_type": "mimo"}, held


def falcon() -> made.Head:
    """EAGLE-1's tensors with a recurrent cell in place of `fc`."""
    config, held = made.without(made.eagle1(), "fc.weight")
    return {**config, "k_mask": 2}, held | tensors_of(
        lstm__weight_ih_l0=(4 * H, 2 * H), lstm__weight_hh_l0=(4 * H, H)
    )


KINDS: dict[str, tuple[made.Head, str]] = {
    "Medusa": (medusa(), "Medusa"),
    "Medusa of vLLM": (medusa_of_vllm(), "Medusa"),
    "Medusa in a language model": (merged_medusa(), "Medusa"),
    "Medusa with a Llama config": (
        medusa(**made.LLAMA, architectures=["LlamaForCausalLM"]),
        "Medusa",
    ),
    "MLP speculator": (speculator(), "MLP speculator"),
    "MLP speculator of transformers": (speculator("speculator."), "MLP speculator"),
    "Hydra": (hydra(), "Hydra"),
    "DFlash": (dflash(), "DFlash"),
    "DSpark": (dspark(), "DSpark"),
    "Domino": (domino(), "Domino"),
    "P-EAGLE": (peagle(), "P-EAGLE"),
    "MTP": (mtp(), "MTP"),
    "MTP of MiMo": (mimo(), "MTP"),
    "FALCON": (falcon(), "FALCON"),
    "language model": (language_model(), "causal language model"),
    "language model of one layer": (language_model(1), "causal language model"),
}
EAGLE = ("EAGLE-1 (", "EAGLE-3", "EAGLE-3.1")
READABLE = (
    "Medusa",
    "Hydra",
    "MLP speculator",
    "FALCON",
    "DFlash",
    "DSpark",
    "Domino",
    "P-EAGLE",
    "MTP",
)


def check_named(folder: Path, word: str) -> None:
    """The kind has the word, is called no head of EAGLE's, and is what an import refuses it by if none can read it."""
    found = inspect(folder)
    assert word in found.kind and not found.kind.startswith(EAGLE), found
    assert ("not readable here yet" not in str(found)) or word not in READABLE, found
    if word in READABLE:
        return
    assert not found.fatal and found.layout == "unknown", found
    advice = "load_drafter" if word == "causal language model" else "not readable here yet"
    assert advice in str(found), found
    assert word in made.refused(folder)


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_called_by_its_name(name: str, tmp_path: Path) -> None:
    """As its authors lay it out."""
    head, word = KINDS[name]
    check_named(made.write(tmp_path / "head", head), word)


@pytest.mark.parametrize("name", KINDS)
def test_its_tensors_tell_where_the_config_does_not(name: str, tmp_path: Path) -> None:
    """Only sizes are left in it, and an architecture that anything may have."""
    head, word = KINDS[name]
    config = {"architectures": ["LlamaForCausalLM"], **made.LLAMA}
    check_named(made.write(tmp_path / "head", (config, head[1])), word)


HEADS: dict[str, tuple[made.Head, str]] = {
    "EAGLE-1": (made.eagle1(), "EAGLE-1"),
    "EAGLE-3": (made.specforge(), "EAGLE-3"),
}


@pytest.mark.parametrize("name", [*KINDS, *HEADS])
def test_a_config_without_names_leaves_it_what_it_is(name: str, tmp_path: Path) -> None:
    """Neither architectures nor a model_type, as in a config that was written by hand."""
    (config, held), word = {**KINDS, **HEADS}[name]
    unnamed = {
        key: value for key, value in config.items() if key not in ("architectures", "model_type")
    }
    found = inspect(made.write(tmp_path / "head", (unnamed, held)))
    assert word in found.kind and "(," not in found.kind, found


@pytest.mark.parametrize(
    "name", [name for name in KINDS if "language model" not in name and name != "FALCON"]
)
def test_half_of_its_tensors_tell_too(name: str, tmp_path: Path) -> None:
    """Of a checkpoint whose copy broke off; the config stands."""
    (config, held), word = KINDS[name]
    for half in (list(held)[::2], list(held)[: len(held) // 2], list(held)[len(held) // 2 :]):
        check_named(
            made.write(tmp_path / "head", (config, {part: held[part] for part in half})), word
        )


@pytest.mark.parametrize(
    "name", ["Medusa", "Medusa of vLLM", "MLP speculator", "Hydra", "DFlash", "P-EAGLE"]
)
def test_the_config_tells_where_the_weights_cannot_be_read(name: str, tmp_path: Path) -> None:
    """A file may be called what nobody calls it, and may be cut short."""
    head, word = KINDS[name]
    folder = made.write(tmp_path / "head", head)
    (folder / "model.safetensors").rename(folder / f"{name.lower()}_lm_head.weights")
    found = inspect(folder)
    assert (
        found.fatal
        and word in found.kind
        and "unreadable" in found.kind
        and "no weights" in str(found)
    )
    made.write(tmp_path / "head", head)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-7])
    found = inspect(folder)
    assert found.fatal and word in found.kind and "model.safetensors" in str(found)


def test_a_language_model_without_its_first_part(tmp_path: Path) -> None:
    """The second of three shards, and names without a prefix."""
    config, held = language_model(6)
    later = {
        name: tensor for name, tensor in held.items() if any(f"layers.{n}." in name for n in (3, 4))
    }
    check_named(made.write(tmp_path / "shard", (config, later)), "causal language model")
    bare = {name.removeprefix("model."): tensor for name, tensor in held.items()}
    check_named(made.write(tmp_path / "bare", (config, bare)), "causal language model")


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "qwen3",
        "gemma2",
        "gpt2",
        "gpt_neox",
        "opt",
        "mamba",
        "deepseek_v3",
        "bloom",
        "phi3",
    ],
)
def test_language_models_of_transformers(family: str, tmp_path: Path) -> None:
    """As save_pretrained writes them."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    other = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
        "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 2},
        "opt": {**sizes, "ffn_dim": 48, "word_embed_proj_dim": 32},
        "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
        "deepseek_v3": {
            **sizes,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
        },
        "phi3": {**sizes, "pad_token_id": 0},
    }
    config = AutoConfig.for_model(family, **{"vocab_size": 64, **other.get(family, sizes)})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    check_named(tmp_path / "model", "causal language model")


def test_a_real_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The command says what it is, and ends well."""
    if not REAL.is_dir():
        pytest.skip("no ../shared/models/bench-llama-25m")
    main(["inspect", str(REAL)])
    assert "causal language model" in capsys.readouterr().out


def test_what_this_project_makes_beside_heads(tmp_path: Path) -> None:
    """A draft model that it distilled."""
    settings = settings_of({"kind": "draft_model", "layers": 1}, "test")
    target = AutoConfig.for_model(**{**made.LLAMA, "num_hidden_layers": 4})
    save_head(tmp_path / "head", DRAFTERS["draft_model"].for_target(settings, target), "", {})
    found = inspect(tmp_path / "head")
    assert found.kind == "a draft_model of this project" and not found.fatal, found


@pytest.mark.quick("EAGLE-1")
@pytest.mark.parametrize(
    "name", ["EAGLE-1", "SafeAILab EAGLE-3", "speculators EAGLE-3.1", "ModelOpt"]
)
def test_heads_stay_heads(name: str, tmp_path: Path) -> None:
    """Whatever single tensor is missing, and with another architecture."""
    config, held = made.LAYOUTS[name]
    word = "EAGLE-1" if "EAGLE-1" in name else "EAGLE-3"
    for part in held:
        found = inspect(made.write(tmp_path / "head", made.without((config, held), part)))
        assert found.kind.startswith(word), (part, found.kind)
    odd = {**config, "architectures": ["MyHead"]}
    assert inspect(made.write(tmp_path / "head", (odd, held))).kind.startswith(word)
    (tmp_path / "head/config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForCausalLM"]})
    )
    assert inspect(tmp_path / "head").kind.startswith(word)


def test_nothing_that_is_known(tmp_path: Path) -> None:
    """It says so, with some of its names."""
    folder = made.write(tmp_path / "odd", ({"a": 1}, {"weird.weight": torch.ones(3)}))
    found = inspect(folder)
    assert "weird.weight" in str(found) and not found.kind.startswith(EAGLE)
