"""One folder that is right for all engines, where one can be."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engines.engine import Engine
from eagle.formats.engines.registry import SERVERS, write_layout
from eagle.formats.layout import Layout
from eagle.formats.networks.eagle1_heads import FeatureLayout
from eagle.formats.networks.eagle3_heads import FusedLayout
from eagle.formats.networks.tensor_names import FEATURES, FUSED, network_of

NOT_RUN = "SGLang and TensorRT-LLM were not run with it; the others were, with the layouts that this one is made of."
NETWORKS = {FEATURES: FeatureLayout("", reads_bias=False), FUSED: FusedLayout("")}
PORTABLE = Engine("portable", "all engines", NETWORKS, scalings=None)


def write_portable(drafter: TrainableDrafter, target_config: Any) -> Layout:
    """EAGLE-1's for vLLM and SGLang; EAGLE-3's for all engines, with a draft vocabulary and without its switches."""
    layout = write_layout(PORTABLE, drafter, target_config)
    network = network_of(drafter)
    if network == FUSED and layout.config["draft_vocab_size"] == layout.config["vocab_size"]:
        raise ValueError(
            "portable: vLLM refuses `d2t` where the head may say all tokens, and OpenVINO needs it: export to vllm "
            "(right for SGLang, TensorRT-LLM and llama.cpp too) or to openvino, or train with drafter.draft_vocab"
        )
    engines = [engine for engine in SERVERS if network in engine.networks]
    try:
        parts = [f"### {engine.title}\n\n{write_layout(engine, drafter, target_config).serve}" for engine in engines]
    except ValueError as error:
        raise ValueError(f"portable: {error}; such a head has no folder for all engines") from None
    titles = ", ".join(engine.title for engine in engines)
    return replace(layout, serve="\n\n".join([f"One folder for {titles}. {NOT_RUN}", *parts]))
