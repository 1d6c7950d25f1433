"""The registry of engines, and writing a head in an engine's layout."""

from __future__ import annotations

from dataclasses import replace

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engines.engine import Engine
from eagle.formats.engines.llamacpp import LLAMACPP
from eagle.formats.engines.openvino import OPENVINO
from eagle.formats.engines.published import PUBLISHED
from eagle.formats.engines.sglang import SGLANG
from eagle.formats.engines.speculators import SPECULATORS
from eagle.formats.engines.transformers import LANGUAGE_MODEL, TRANSFORMERS
from eagle.formats.engines.trtllm import TRTLLM
from eagle.formats.engines.vllm import VLLM
from eagle.formats.layout import Layout, TargetConfig, check_fit, has_attention
from eagle.formats.networks.eagle_layouts import FEATURES, FUSED, FeatureLayout, FusedLayout
from eagle.formats.networks.network_layout import network_of

SERVERS = (VLLM, SGLANG, TRTLLM, OPENVINO, LLAMACPP)
ENGINES = (*SERVERS, SPECULATORS, *PUBLISHED, TRANSFORMERS)
ADVICE = {
    LANGUAGE_MODEL: "it is a model of its own: export to transformers, a folder that engines load as any other model"
}


def write_layout(engine: Engine, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """The head in an engine's layout; ValueError names what it would serve badly and the engines that fit."""
    network = network_of(drafter)
    if network not in engine.networks:
        named = " or ".join(name_reader(other.name, drafter) for other in ENGINES if network in other.networks)
        usual = f"export to {named} (docs/serving.md)" if named else "no exporter has one (docs/serving.md)"
        advice = "; ".join([*filter(None, [engine.past.get(network)]), ADVICE.get(network, usual)])
        raise ValueError(f"{engine.name}: {engine.unknown.format(kind=drafter.settings.kind, advice=advice)}")
    if has_attention(drafter) and (reason := engine.unread_rotary(drafter.shape)):
        readers = [other for other in ENGINES if network in other.networks]
        able = [other.name for other in readers if not other.unread_rotary(drafter.shape)]
        advice = f"export to {' or '.join(able)} (docs/serving.md)" if able else "no exporter has a layout for it"
        raise ValueError(f"{engine.name}: {reason}: {advice}")
    check_fit(drafter, target_config, f"{engine.name}: the head")
    return engine.layout(drafter, target_config)


def name_reader(engine: str, drafter: TrainableDrafter) -> str:
    """An engine by its name, with the last version that reads such a head where a later one does not."""
    networks = next((listed.networks for listed in ENGINES if listed.name == engine), {})
    layout = networks.get(network_of(drafter))
    return f"{engine} (up to {layout.until})" if layout and layout.until else engine


# -- one folder that is right for all engines, where one can be -------------------------------------------------------


NOT_RUN = "SGLang and TensorRT-LLM were not run with it; the others were, with the layouts that this one is made of."
NETWORKS = {FEATURES: FeatureLayout("", reads_bias=False), FUSED: FusedLayout("")}
PORTABLE = Engine("portable", "all engines", NETWORKS, scalings=None)


def write_portable(drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
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
