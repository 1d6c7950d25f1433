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

H = 16
MLP = 24
HEADS = 2
KEYS = 1  # heads of keys and values
WIDE = 8  # numbers of a head
V = 61
D = 40
LAYERS = 9  # of the target
# the default taps of a target with that many layers; some tools name the layers that these are outputs of
TAPS = (2, 4, 6)
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


# how some tools name the layers
AUXILIARY = {"eagle_aux_hidden_state_layer_ids": OUTPUTS, "use_aux_hidden_state": True}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    """Return random weights."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) * 31 + seed))


def embedding() -> Tensor:
    """Return [V, H], the target's embedding."""
    return drawn(V, H, seed=7)


def drafts() -> Tensor:
    """Return [D], the tokens that can be drafted, in ascending order."""
    return torch.randperm(V, generator=torch.Generator().manual_seed(3))[:D].sort().values


def block(prefix: str, reads: int) -> dict[str, Tensor]:
    """Return a Llama block without norms but the last, whose attention reads so many numbers."""
    attention = {
        "q": (HEADS * WIDE, reads),
        "k": (KEYS * WIDE, reads),
        "v": (KEYS * WIDE, reads),
        "o": (H, HEADS * WIDE),
    }
    tensors = {}
    # seeds of their own, so that tensors of one size differ
    for seed, (name, size) in enumerate(attention.items()):
        tensors[f"self_attn.{name}_proj.weight"] = drawn(*size, seed=seed)
    for name in ("gate", "up"):
        tensors[f"mlp.{name}_proj.weight"] = drawn(MLP, H, seed=len(name))
    tensors["mlp.down_proj.weight"] = drawn(H, MLP)
    tensors["post_attention_layernorm.weight"] = drawn(H, seed=4)
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def fused(prefix: str, said: int = D) -> dict[str, Tensor]:
    """Return EAGLE-3's tensors without vocabulary and embedding."""
    return {
        **block(prefix, 2 * H),
        f"{prefix}hidden_norm.weight": drawn(H, seed=len("hidden_norm")),
        f"{prefix}input_layernorm.weight": drawn(H, seed=len("input_layernorm")),
        "fc.weight": drawn(H, 3 * H),
        "norm.weight": drawn(H, seed=9),
        "lm_head.weight": drawn(said, H),
    }


def vocabulary() -> dict[str, Tensor]:
    """Return `d2t` [D], offsets from drafted ids to the target's, and `t2d` [V], which tokens can be drafted."""
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
    config = {"architectures": ["LlamaForCausalLM"], **LLAMA}
    if bias is not None:
        config["bias"] = bias
    if tensor:
        tensors["fc.bias"] = drawn(H)
    return config, tensors


def safeailab() -> Head:
    """SafeAILab's EAGLE-3: nothing says which layers."""
    tensors = {
        **fused("midlayer."),
        **vocabulary(),
        "embed_tokens.weight": embedding(),
    }
    return {"architectures": ["LlamaForCausalLM"], **LLAMA, "draft_vocab_size": D}, tensors


def specforge() -> Head:
    """SpecForge's for SGLang: no embedding, layers by their outputs, rotary parameters in two spellings."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "draft_vocab_size": D,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "eagle_config": AUXILIARY,
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


def speculators_default() -> Head:
    """What the trainer of speculators writes by default: one norm of all three layers."""
    config, tensors = speculators(
        norm_before_fc=True,
        norm_before_residual=True,
        norm_output=True,
    )
    return config, tensors | {"input_norm.weight": drawn(3 * H, seed=1)}


def modelopt() -> Head:
    """ModelOpt's export: neither `t2d` nor embedding, layers by their outputs."""
    nested = {
        **AUXILIARY,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **LLAMA,
        "initializer_range": 0.01,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "pad_token_id": None,
        "draft_vocab_size": D,
        "eagle_config": nested,
    }
    return config, {**fused("layers.0."), "d2t": vocabulary()["d2t"]}


def automodel() -> Head:
    """Automodel's: all names under `model.`, but for the vocabulary's."""
    config = {
        "architectures": ["LlamaEagle3DraftModel"],
        **LLAMA,
        "draft_vocab_size": D,
        "eagle_config": AUXILIARY,
    }
    tensors = {f"model.{name}": tensor for name, tensor in fused("layers.0.").items()}
    tensors["lm_head.weight"] = tensors.pop("model.lm_head.weight")
    return config, {**tensors, **vocabulary()}


def own() -> Head:
    """This project's."""
    settings = {"kind": "eagle3", "taps": list(TAPS), "draft_vocab": D}
    shape = {key: value for key, value in LLAMA.items() if not key.startswith("rope")}
    shape["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    shape["draft_vocab_size"] = D
    return {"settings": settings, "shape": shape}, {**fused("layers.0."), **vocabulary()}


LAYOUTS: dict[str, Head] = {
    # without and with a bias in fc, which the config may not name
    "EAGLE-1": eagle1(),
    "EAGLE-1 with bias": eagle1(bias=None, tensor=True),
    # the layouts of EAGLE-3, by who writes them
    "SafeAILab EAGLE-3": safeailab(),
    "SpecForge": specforge(),
    "speculators trainer": speculators(),
    "speculators converter": speculators("Eagle3Speculator"),
    "speculators EAGLE-3.1": speculators31(),
    "speculators default": speculators_default(),
    "ModelOpt": modelopt(),
    "Automodel": automodel(),
}


def write(folder: Path, head: Head, *, binary: bool = False) -> Path:
    """Write a checkpoint's folder, and return it."""
    config, tensors = head
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if binary:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        # cloned, as safetensors refuses tensors that share memory
        copies = {name: tensor.clone() for name, tensor in tensors.items()}
        save_file(copies, folder / "model.safetensors")
    return folder


def write_target(folder: Path, **changed: Any) -> str:
    """Write the files of a target that are read: its config, embedding and LM head; return its folder."""
    config = {
        **LLAMA,
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": LAYERS,
        **changed,
    }
    tensors = {"model.embed_tokens.weight": embedding(), "lm_head.weight": drawn(V, H, seed=8)}
    return str(write(folder, (config, tensors)))


def without(head: Head, *names: str) -> Head:
    """Return a head without some of its tensors."""
    config, tensors = head
    return config, {name: tensor for name, tensor in tensors.items() if name not in names}


def saying(head: Head, **changed: Any) -> Head:
    """Return a head with other keys in its config; None takes one out."""
    config, tensors = head
    config = {**config, **changed}
    return {name: value for name, value in config.items() if value is not None}, tensors


def everything(root: Path) -> dict[str, Any]:
    """Return each path below a folder, with what it holds or leads to."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        if path.is_symlink():
            found[str(path)] = os.readlink(path)
        # hostile files may be too large to read
        elif path.is_file() and path.stat().st_size < 10**8:
            found[str(path)] = path.read_bytes()
        else:
            found[str(path)] = None
    return found


def refused(folder: Path, out: Path | None = None) -> str:
    """Return the error of an import, which leaves everything as it was."""
    before = everything(folder.parent)
    with pytest.raises(ValueError) as error:
        import_head(folder, out or folder.parent / "out")
    assert everything(folder.parent) == before
    said = str(error.value)
    assert 0 < len(said) < 5000
    return said


def told(folder: Path) -> str:
    """Return the error of an import, which `inspect` finds as well."""
    said = refused(folder)
    assert inspect(folder).findings
    return said
