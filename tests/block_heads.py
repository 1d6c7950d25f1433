"""Random block drafters and MTP layers in the layouts of other projects, made by hand: their names, sizes and keys."""

from __future__ import annotations

from typing import Any

import torch

from eagle.drafters.parts.window import Window
from tests import foreign_heads as made
from tests.block_layouts import (
    CONVOLUTION_SHAPES,
    DOMINO_SHAPES,
    LATTICE,
    LATTICE_KEYS,
    LATTICE_SHAPES,
    MARKOV_SHAPES,
    SELECTOR,
    SELECTOR_SHAPES,
    block_shapes,
    injected_shapes,
    refiner_shapes,
)

H, V = made.H, made.V


def fill(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> dict[str, torch.Tensor]:
    """Return random tensors of these sizes."""
    return {prefix + name: made.drawn(*size, seed=len(name)) for name, size in shapes.items()}


QWEN3 = {
    **made.LLAMA,
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "layer_types": ["full_attention"] * 2,
    "num_target_layers": made.LAYERS,
    "block_size": 4,
    "use_sliding_window": False,
    "max_window_layers": 2,
}
# the first layer slides, as far as a window of nine
SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "use_sliding_window": True,
    "sliding_window": 9,
}
# all layers slide
FAR = {**SLIDING, "layer_types": ["sliding_attention"] * 2}
# by the outputs of layers, where ours are named by inputs: taps 2, 4 and 6
OUTPUTS = {"mask_token_id": 3, "target_layer_ids": [1, 3, 5]}


def zlab(**changed: Any) -> made.Head:
    """As z-lab publishes it, with the name of its own code."""
    nested = {**OUTPUTS, **changed.pop("dflash_config", {})}
    config = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **QWEN3,
        "dflash_config": nested,
        **changed,
    }
    return config, fill(injected_shapes())


def deepspec(**changed: Any) -> made.Head:
    """DeepSpec's DFlash: DSpark without a Markov head, with copies of the target's two matrices."""
    config = {
        "architectures": ["Qwen3DSparkModel"],
        **QWEN3,
        **OUTPUTS,
        "num_anchors": 512,
        "enable_confidence_head": False,
        "markov_rank": 0,
        **changed,
    }
    copies = {"embed_tokens.weight": made.embedding(), "lm_head.weight": lm_head()}
    return config, {**fill(injected_shapes()), **copies}


def speculators(kind: str = "dflash", **changed: Any) -> made.Head:
    """That of speculators, which leaves a switch out where it has the default."""
    layers = {
        **QWEN3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    for key in ("rope_theta", "rope_scaling", "block_size"):
        del layers[key]
    layers |= changed.pop("transformer_layer_config", {})
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "mask_token_id": 3,
        "block_size": 4,
        "draft_vocab_size": V,
        "sliding_window_non_causal": False,
        "transformer_layer_config": layers,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/target"}},
        **changed,
    }
    return config, fill(injected_shapes())


def dflash2(**changed: Any) -> made.Head:
    """DFlash2 of z-lab, whose block size stands among its nested keys."""
    config, tensors = zlab(
        architectures=["DFlash2DraftModel"],
        dflash_config={"block_size": 4, **SELECTOR, **changed},
    )
    del config["block_size"]
    return config, {**tensors, **fill(SELECTOR_SHAPES)}


def dflash2_modules() -> made.Head:
    """The same with the selector's tables as modules."""
    config, tensors = dflash2()
    renamed = {}
    for name, tensor in tensors.items():
        renamed[f"{name}.weight" if name.endswith("codebook") else name] = tensor
    return config, renamed


def lilicorr(**changed: Any) -> made.Head:
    """LiLiCorr as vLLM and SGLang read it."""
    config, tensors = zlab(
        architectures=["LiLiCorrDraftModel"],
        dflash_config={"block_size": 6, "sample_from_anchor": False, **LATTICE_KEYS, **changed},
    )
    del config["block_size"]
    return config, {**tensors, **fill(LATTICE_SHAPES)}


def lilicorr_modelopt() -> made.Head:
    """ModelOpt's names, with convolutions; the lattice has no width of its own in the config."""
    config, tensors = lilicorr(
        projector_type="lilicorr", conv_kernel_size=2, conv_group_size=4, use_swa=False
    )
    indices = {
        "feature_norm.": "feature_mlp.0.",
        "feature_mlp.up_proj.": "feature_mlp.1.",
        "feature_mlp.down_proj.": "feature_mlp.3.",
        "mlp.up_proj.": "mlp.0.",
        "mlp.down_proj.": "mlp.2.",
    }
    renamed = {}
    for name, tensor in {**tensors, **fill(CONVOLUTION_SHAPES)}.items():
        if name.startswith("lilicorr."):
            ours = next((part for part in indices if part in name), "")
            name = name.replace(ours, indices.get(ours, ""))
        renamed[name] = tensor
    return config, renamed


def speculators_dflash2(**changed: Any) -> made.Head:
    """That of speculators, whose slots see their whole block by default."""
    config, tensors = speculators(
        "dflash2",
        architectures=["DFlash2DraftModel"],
        transformer_layer_config=FAR,
        **SELECTOR,
        **changed,
    )
    del config["sliding_window_non_causal"]
    return config, {**tensors, **fill(SELECTOR_SHAPES)}


def peagle(**changed: Any) -> made.Head:
    """P-EAGLE of speculators, with a draft vocabulary and two blocks."""
    config, tensors = made.speculators(
        architecture="PEagleSpeculator", speculators_model_type="peagle", mask_token_id=3
    )
    config["transformer_layer_config"] = {
        **config["transformer_layer_config"],
        "num_hidden_layers": 2,
    }
    # the first block reads embedding and state, the second the first one's output
    second = {name: size for name, size in block_shapes(2).items() if name.startswith("layers.1.")}
    tensors = {**tensors, **fill(second), "mask_hidden": made.drawn(1, 1, 3 * H)}
    return {**config, **changed}, tensors


def lm_head() -> torch.Tensor:
    """Return [V, H], the target's LM head."""
    return made.drawn(V, H, seed=8)


def model_of_three_layers() -> dict[str, torch.Tensor]:
    """Return the tensors of a model that a layer for drafts is published with."""
    return {
        **fill(block_shapes(3), "model."),
        "model.norm.weight": made.drawn(H),
        "model.embed_tokens.weight": made.embedding(),
        "lm_head.weight": lm_head(),
    }


def mimo(whole: bool = False) -> made.Head:
    """The layer that MiMo ships with, whose attention has biases; alone, or in the files of the whole model."""
    shapes = {name.removeprefix("layers.0."): size for name, size in block_shapes(1).items()}
    shapes |= {f"{name}_layernorm.weight": (H,) for name in ("token", "hidden", "final")}
    tensors = {**fill(shapes), "input_proj.weight": made.drawn(H, 2 * H)}
    biases = {"q": made.HEADS * made.WIDE, "k": made.KEYS * made.WIDE, "v": made.KEYS * made.WIDE}
    for name, size in biases.items():
        tensors[f"self_attn.{name}_proj.bias"] = made.drawn(size)
    tensors = {f"model.mtp_layers.0.{name}": tensor for name, tensor in tensors.items()}
    if whole:
        tensors |= model_of_three_layers()
    config = {
        "architectures": ["MiMoForCausalLM"],
        **made.LLAMA,
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": 3,
    }
    return config, tensors


def deepseek(whole: bool = False) -> made.Head:
    """A layer by DeepSeek's names with a Llama's block, after three layers of a model."""
    shapes = {
        name.replace("layers.0.", "layers.3."): size for name, size in block_shapes(1).items()
    }
    shapes |= {f"layers.3.{name}.weight": (H,) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors = fill({**shapes, "layers.3.eh_proj.weight": (H, 2 * H)}, "model.")
    tensors["model.layers.3.embed_tokens.weight"] = made.embedding()
    tensors["model.layers.3.shared_head.head.weight"] = lm_head()
    if whole:
        tensors |= model_of_three_layers()
    config = {
        "architectures": ["SomeForCausalLM"],
        **made.LLAMA,
        "num_nextn_predict_layers": 1,
        "num_hidden_layers": 3,
    }
    return config, tensors


def dspark(markov: str = "vanilla", **changed: Any) -> made.Head:
    """SpecForge's, all of whose keys are nested; early versions had a section of their own for them."""
    nested = {
        **OUTPUTS,
        "projector_type": "dspark",
        "markov_rank": 4,
        "markov_head_type": markov,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "attention_mode": "gqa",
    }
    tensors = fill({**injected_shapes(), **MARKOV_SHAPES})
    # the linear map that two of the kinds have beside the two embeddings
    maps = {"gated": ("gate_proj", 4, H + 4), "rnn": ("joint_proj", 12, H + 8)}
    if markov in maps:
        name, size, read = maps[markov]
        tensors[f"markov_head.{name}.weight"] = made.drawn(size, read)
        tensors[f"markov_head.{name}.bias"] = made.drawn(size)
    config = {"architectures": ["DSparkDraftModel"], **QWEN3, "dflash_config": nested}
    return {**config, **changed}, tensors


def modelopt_dspark(markov: str = "vanilla", **changed: Any) -> made.Head:
    """ModelOpt's, whose tensors have no part's name in front of theirs."""
    config, tensors = dspark(markov)
    nested = {
        **OUTPUTS,
        "projector_type": "dspark",
        "causal": False,
        "shift_label": True,
        "markov_rank": 4,
        "markov_head_type": markov,
        "use_confidence_head": True,
        **changed,
    }
    flat = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix("markov_head.")
        flat[bare.replace("confidence_head.proj.", "confidence_proj.")] = tensor
    return {**config, "architectures": ["DFlashDraftModel"], "dflash_config": nested}, flat


def speculators_dspark(**changed: Any) -> made.Head:
    """That of speculators, whose default for which token a block begins with is not vLLM's."""
    settings = {
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        **changed,
    }
    config, tensors = speculators("dspark", confidence_head_with_markov=True, **settings)
    return config, {**tensors, **fill(MARKOV_SHAPES)}


def xpress(**changed: Any) -> made.Head:
    """The authors' head, by the names that vLLM reads, whose refiner is alone at the top of the config."""
    config, tensors = zlab(block_size=6, sample_from_anchor=False)
    refiner = {
        "xpress_block_size": 6,
        "xpress_rank": 4,
        "xpress_mlp_hidden": 8,
        "xpress_num_passes": 5,
        "xpress_topc": 512,
    }
    config = {**config, "architectures": ["Qwen3XPressModel"], **refiner, **changed}
    del config["auto_map"]
    return config, {**tensors, **fill(refiner_shapes(vllm=True))}


def speculators_xpress(**changed: Any) -> made.Head:
    """That of speculators."""
    settings = {"xpress_rank": 4, "xpress_mlp_ratio": 2, "num_jacobi_passes": 4, **changed}
    config, tensors = speculators("xpress", block_size=6, **settings)
    config["architectures"] = ["XPressSpeculator"]
    return config, {**tensors, **fill(refiner_shapes())}


def domino(**changed: Any) -> made.Head:
    """SpecForge's by its early names, whose first level has no bias."""
    nested = {
        **OUTPUTS,
        "projector_type": "domino",
        "emb_dim": 4,
        "gru_hidden_dim": 8,
        "pure_draft_prefix_len": 2,
        **changed,
    }
    config = {"architectures": ["DominoDraftModel"], "emb_dim": 4, **QWEN3, "dflash_config": nested}
    return config, {**fill(injected_shapes()), **fill(DOMINO_SHAPES, "logit_head.")}


def reduced(head: made.Head) -> made.Head:
    """Return a head of speculators that drafts a part of the vocabulary, by the target's rows of these tokens."""
    config, tensors = head
    tensors = {**tensors, **made.vocabulary(), "lm_head.weight": lm_head()[made.drafts()]}
    for bias in ("markov_head.markov_w2.weight", "refiner_head.readout.weight"):
        if bias in tensors:
            # the bias is of the tokens that can be drafted, and reads any token
            tensors[bias] = tensors[bias][: made.D].clone()
    return {**config, "draft_vocab_size": made.D}, tensors


# a head, the name of its layout, and settings that it has
LAYOUTS: dict[str, tuple[made.Head, str, dict[str, Any]]] = {
    # ids of layers are of outputs, our taps of inputs: one more each
    "z-lab": (
        zlab(),
        "z-lab/dflash",
        {"sample_from_anchor": False, "slots": 4, "taps": (2, 4, 6), "mask_token": 3},
    ),
    # causal blocks, by one key in the nested config
    "JetSpec": (
        zlab(dflash_config={"causal": True}),
        "z-lab/dflash",
        {"sample_from_anchor": False, "causal": True},
    ),
    # windows: of some layers, which are causal; of all, by keys of ModelOpt's; by the defaults of speculators
    "z-lab, windows": (
        zlab(**SLIDING),
        "z-lab/dflash",
        {
            "window": Window(recent=9),
            "window_blocks": (0,),
            "causal": "window",
            "window_end": "slot",
        },
    ),
    "z-lab, free windows": (
        zlab(**SLIDING, is_causal=False),
        "z-lab/dflash",
        {"window": Window(recent=9), "window_blocks": (0,), "causal": False},
    ),
    "ModelOpt, windows": (
        zlab(
            sliding_window=7, dflash_config={"use_swa": True, "swa_window_size": 8, "causal": False}
        ),
        "ModelOpt",
        {"window": Window(recent=8), "window_blocks": None, "causal": False},
    ),
    "speculators, windows": (
        speculators(transformer_layer_config={**SLIDING, "layer_types": ["sliding_attention"] * 2}),
        "speculators",
        {
            "window": Window(recent=9),
            "window_blocks": None,
            "window_end": "root",
            "causal": "window",
        },
    ),
    "speculators, free windows": (
        speculators(sliding_window_non_causal=True, transformer_layer_config=SLIDING),
        "speculators",
        {"window": Window(recent=9), "window_blocks": (0,), "window_end": "root", "causal": False},
    ),
    "speculators, draft vocabulary": (
        reduced(speculators()),
        "speculators",
        {"draft_vocab": made.D, "sample_from_anchor": False},
    ),
    "speculators' DSpark, draft vocabulary": (
        reduced(speculators_dspark()),
        "speculators",
        {"draft_vocab": made.D, "markov": "vanilla"},
    ),
    # no key says that drafts begin at the anchor: the class does
    "DeepSpec": (
        deepspec(),
        "deepseek-ai/DeepSpec",
        {"sample_from_anchor": True, "taps": (2, 4, 6), "mask_token": 3},
    ),
    # taps by inputs already
    "speculators": (
        speculators(),
        "speculators",
        {"sample_from_anchor": False, "taps": (2, 4, 6), "slots": 4},
    ),
    # the switch that speculators leaves out where it is False
    "speculators, from the anchor": (
        speculators(sample_from_anchor=True),
        "speculators",
        {"sample_from_anchor": True},
    ),
    "DFlash2": (
        dflash2(),
        "z-lab/dflash",
        {"slots": 4, **SELECTOR, "sample_from_anchor": False, "causal": False},
    ),
    # factors that change nothing
    "DFlash2, factors": (
        dflash2(output_multiplier=1.0, input_embedding_scale=1, final_logit_softcapping=None),
        "z-lab/dflash",
        SELECTOR,
    ),
    "DFlash2, modules": (dflash2_modules(), "z-lab/dflash", SELECTOR),
    "DFlash2, speculators": (
        speculators_dflash2(),
        "speculators",
        {**SELECTOR, "window": Window(recent=9), "window_end": "root", "causal": False},
    ),
    "LiLiCorr": (
        lilicorr(),
        "z-lab/dflash",
        {"slots": 6, **LATTICE, "conv_kernel_size": None, "sample_from_anchor": False},
    ),
    "LiLiCorr, ModelOpt": (
        lilicorr_modelopt(),
        "ModelOpt",
        {**LATTICE, "conv_kernel_size": 2, "conv_group_size": 4},
    ),
    # three kinds of Markov heads
    "DSpark": (
        dspark(),
        "sgl-project/SpecForge",
        {"sample_from_anchor": True, "markov": "vanilla", "rank": 4},
    ),
    "DSpark, gated": (
        dspark("gated"),
        "sgl-project/SpecForge",
        {"markov": "gated", "confidence": True},
    ),
    "DSpark, recurrent": (
        dspark("rnn"),
        "sgl-project/SpecForge",
        {"markov": "rnn", "confidence": True},
    ),
    "DSpark, flat": (
        modelopt_dspark(),
        "ModelOpt",
        {"sample_from_anchor": True, "markov": "vanilla", "rank": 4, "confidence": True},
    ),
    "DSpark, flat and gated": (modelopt_dspark("gated"), "ModelOpt", {"markov": "gated"}),
    "DSpark, flat and recurrent": (modelopt_dspark("rnn"), "ModelOpt", {"markov": "rnn"}),
    "XPress": (
        xpress(),
        "z-lab/dflash",
        {"sample_from_anchor": False, "rank": 4, "mlp_ratio": 2, "passes": 5, "slots": 6},
    ),
    "speculators' XPress": (
        speculators_xpress(sample_from_anchor=True),
        "speculators",
        {"sample_from_anchor": True, "rank": 4, "mlp_ratio": 2, "passes": 4, "slots": 6},
    ),
    "speculators' XPress, draft vocabulary": (
        reduced(speculators_xpress()),
        "speculators",
        {"draft_vocab": made.D, "sample_from_anchor": False},
    ),
    # two levels without a bias
    "Domino": (
        domino(),
        "sgl-project/SpecForge",
        {"sample_from_anchor": False, "unbiased": 2, "gru_size": 8},
    ),
    "Domino, shifted": (
        domino(shift_label=True),
        "sgl-project/SpecForge",
        {"sample_from_anchor": True},
    ),
    # a draft vocabulary, and the state of a mask
    "P-EAGLE": (
        peagle(),
        "P-EAGLE",
        {"blocks": 2, "mask_token": 3, "draft_vocab": made.D, "fc_norm": False},
    ),
    # the state stands before the embedding in what is projected
    "MiMo": (mimo(), "MiMo", {"hidden_first": True}),
    "MiMo, whole": (mimo(whole=True), "MiMo", {"hidden_first": True}),
    # the embedding stands first
    "DeepSeek": (deepseek(), "DeepSeek", {"hidden_first": False}),
    "DeepSeek, whole": (deepseek(whole=True), "DeepSeek", {"hidden_first": False}),
}
