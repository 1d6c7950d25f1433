"""Random heads in the layouts of other projects, made by hand: their names, sizes and keys; and a target for them."""

# H width, D tokens that can be drafted, V vocabulary

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle.formats.reading.foreign import import_head, inspect

H, MLP, HEADS, KEYS, WIDE, V, D, LAYERS = 16, 24, 2, 1, 8, 61, 40, 9
TAPS = (2, 4, 6)  # of a target with that many layers, where nothing is said
OUTPUTS = [1, 3, 5]
Head = tuple[dict[str, Any], dict[str, Tensor]]
LLAMA = {
    "model_type": "llama",
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEYS,
    "head_dim": WIDE,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": True,
    "torch_dtype": "float32",
    "transformers_version": "4.51.3",
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Random weights."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) * 31 + seed))


def embedding() -> Tensor:
    """[V, H], the target's."""
    return drawn(V, H, seed=7)


def drafts() -> Tensor:
    """[D], some tokens in ascending order."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(3))[:D].sort().values


def block(prefix: str, reads: int) -> dict[str, Tensor]:
    """A Llama block without norms but the last, whose attention reads so many numbers."""
    attention = {
        "q": (HEADS * WIDE, reads),
        "k": (KEYS * WIDE, reads),
        "v": (KEYS * WIDE, reads),
        "o": (H, HEADS * WIDE),
    }
    found = {
        f"self_attn.{name}_proj.weight": drawn(*size, seed=place)
        for place, (name, size) in enumerate(attention.items())
    }
    found |= {f"mlp.{name}_proj.weight": drawn(MLP, H, seed=len(name)) for name in ("gate", "up")}
    found |= {
        "mlp.down_proj.weight": drawn(H, MLP),
        "post_attention_layernorm.weight": drawn(H, seed=4),
    }
    return {f"{prefix}{name}": tensor for name, tensor in found.items()}


def fused(prefix: str, said: int = D) -> dict[str, Tensor]:
    """EAGLE-3's tensors without vocabulary and embedding."""
    norms = {
        f"{prefix}{name}.weight": drawn(H, seed=len(name))
        for name in ("hidden_norm", "input_layernorm")
    }
    others = {
        "fc.weight": drawn(H, 3 * H),
        "norm.weight": drawn(H, seed=9),
        "lm_head.weight": drawn(said, H),
    }
    return {**block(prefix, 2 * H), **norms, **others}


def vocabulary() -> dict[str, Tensor]:
    """`d2t` and `t2d`."""
    mask = torch.zeros(V, dtype=torch.bool)
    mask[drafts()] = True
    return {"d2t": drafts() - torch.arange(D), "t2d": mask}


def eagle1(bias: bool | None = False, tensor: bool = False) -> Head:
    """SafeAILab's EAGLE-1 and -2, and HASS; `bias` may be unsaid in the config."""
    tensors = {
        "embed_tokens.weight": embedding(),
        "fc.weight": drawn(H, 2 * H),
        **block("layers.0.", H),
    }
    said = {} if bias is None else {"bias": bias}
    return {"architectures": ["LlamaForCausalLM"], **LLAMA, **said}, tensors | (
        {"fc.bias": drawn(H)} if tensor else {}
    )


def safeailab() -> Head:
    """SafeAILab's EAGLE-3: nothing says which layers."""
    tensors = {**fused("midlayer."), **vocabulary(), "embed_tokens.weight": embedding()}
    return {"architectures": ["LlamaForCausalLM"], **LLAMA, "draft_vocab_size": D}, tensors


def specforge() -> Head:
    """SpecForge's for SGLang: no embedding, layers by their outputs, rotary parameters in two spellings."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    ids = {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": OUTPUTS, "use_aux_hidden_state": True}
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "draft_vocab_size": D,
        **rope,
        **ids,
    }
    return config, {**fused("midlayer."), **vocabulary()}


def speculators(architecture: str = "Eagle3DraftModel", **changed: Any) -> Head:
    """Of speculators' trainer, or of its converter, which calls the architecture otherwise."""
    llama = {
        key: value
        for key, value in LLAMA.items()
        if key not in ("rope_theta", "rope_scaling", "torch_dtype")
    }
    config = {
        "architectures": [architecture],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "has_no_defaults_at_init": False,
        "draft_vocab_size": D,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "transformers_version": "5.19.0",
        "transformer_layer_config": {
            **llama,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]},
        },
        **changed,
    }
    return config, {**fused("layers.0."), **vocabulary(), "embed_tokens.weight": embedding()}


def speculators31() -> Head:
    """EAGLE-3.1 of speculators."""
    config, tensors = speculators(fc_norm=True, norm_output=True)
    return config, tensors | {f"fc_norm.{tap}.weight": drawn(H, seed=tap + 1) for tap in range(3)}


def modelopt() -> Head:
    """ModelOpt's export: neither `t2d` nor embedding, layers by their outputs."""
    nested = {
        "eagle_aux_hidden_state_layer_ids": OUTPUTS,
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    extra = {
        "initializer_range": 0.01,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "pad_token_id": None,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        **extra,
        "draft_vocab_size": D,
        "eagle_config": nested,
    }
    return config, {**fused("layers.0."), "d2t": vocabulary()["d2t"]}


def automodel() -> Head:
    """Automodel's: all names under `model.`, but for the vocabulary's."""
    config = {"architectures": ["LlamaEagle3DraftModel"], **LLAMA, "draft_vocab_size": D}
    tensors = {
        f"model.{name}": tensor
        for name, tensor in fused("layers.0.").items()
        if name != "lm_head.weight"
    }
    ids = {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": OUTPUTS, "use_aux_hidden_state": True}
    }
    return {**config, **ids}, {**tensors, "lm_head.weight": drawn(D, H), **vocabulary()}


def own() -> Head:
    """This project's."""
    settings = {"kind": "eagle3", "taps": list(TAPS), "draft_vocab": D}
    rope = {
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "draft_vocab_size": D,
    }
    shape = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    return {"settings": settings, "shape": {**shape, **rope}}, {
        **fused("layers.0."),
        **vocabulary(),
    }


LAYOUTS: dict[str, Head] = {
    "EAGLE-1": eagle1(),
    "EAGLE-1 with bias": eagle1(bias=None, tensor=True),
    "SafeAILab EAGLE-3": safeailab(),
    "SpecForge": specforge(),
    "speculators trainer": speculators(),
    "speculators converter": speculators("Eagle3Speculator"),
    "speculators EAGLE-3.1": speculators31(),
    "ModelOpt": modelopt(),
    "Automodel": automodel(),
}


def write(folder: Path, head: Head, *, binary: bool = False) -> Path:
    """A checkpoint's folder."""
    config, tensors = head
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(
            {name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
        )
    return folder


def write_target(folder: Path, **changed: Any) -> str:
    """The files of a target that are looked at: its config, embedding and LM head."""
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        **changed,
    }
    tensors = {"model.embed_tokens.weight": embedding(), "lm_head.weight": drawn(V, H, seed=8)}
    return str(write(folder, (config, tensors)))


def without(head: Head, *names: str) -> Head:
    """The same without some tensors."""
    config, tensors = head
    return config, {name: tensor for name, tensor in tensors.items() if name not in names}


def saying(head: Head, **changed: Any) -> Head:
    """The same with other keys in its config; None takes one out."""
    config, tensors = head
    return {
        name: value for name, value in {**config, **changed}.items() if value is not None
    }, tensors


def everything(root: Path) -> dict[str, Any]:
    """Each path below a folder, with what it holds or leads to."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        elif path.is_file() and path.stat().st_size < 10**8:
            found[str(path)] = path.read_bytes()
        else:
            found[str(path)] = None
    return found


def refused(folder: Path, out: Path | None = None) -> str:
    """The error of an import, which leaves everything as it was; and `inspect` tells it too."""
    before = everything(folder.parent)
    with pytest.raises(ValueError) as error:
        import_head(folder, out or folder.parent / "out")
    assert everything(folder.parent) == before
    said = str(error.value)
    assert said and len(said) < 5000
    return said


def told(folder: Path) -> str:
    """The error, which `inspect` tells as well."""
    said = refused(folder)
    assert inspect(folder).findings
    return said
