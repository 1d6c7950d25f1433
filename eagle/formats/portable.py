"""One folder that is right for all engines, where one can be."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.feature_layout import features_layout, is_features, without_bias
from eagle.formats.fused import fused_layout
from eagle.formats.layout import Layout
from eagle.formats.llamacpp import layout as llamacpp
from eagle.formats.openvino import layout as openvino
from eagle.formats.sglang import layout as sglang
from eagle.formats.trtllm import layout as trtllm
from eagle.formats.vllm import layout as vllm

NOT_RUN = "SGLang and TensorRT-LLM were not run with it; the others were, with the layouts that this one is made of."
FEATURES = {"vLLM": vllm, "SGLang": sglang}
FUSED = {**FEATURES, "TensorRT-LLM": trtllm, "OpenVINO": openvino, "llama.cpp": llamacpp}


def layout(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """EAGLE-1's for vLLM and SGLang; EAGLE-3's for all engines, with a draft vocabulary and without its switches."""
    if is_features(drafter):
        made, engines = without_bias(features_layout(drafter, target_config, "portable"), "portable"), FEATURES
    else:
        made, engines = fused_layout(drafter, target_config, "portable"), FUSED
        if made.config["draft_vocab_size"] == made.config["vocab_size"]:
            raise ValueError(
                "portable: vLLM refuses `d2t` where the head may say all tokens, and OpenVINO needs it: export to vllm "
                "(right for SGLang, TensorRT-LLM and llama.cpp too) or to openvino, or train with drafter.draft_vocab"
            )
    try:
        serve = [f"### {name}\n\n{layout(drafter, target_config).serve}" for name, layout in engines.items()]
    except ValueError as error:
        raise ValueError(f"portable: {error}; such a head has no folder for all engines") from None
    return made.of("\n\n".join([f"One folder for {', '.join(engines)}. {NOT_RUN}", *serve]))
