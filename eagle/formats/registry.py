"""All engines, and a head in the layout of one of them."""

from __future__ import annotations

from typing import Any

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engine import Engine
from eagle.formats.layout import Layout
from eagle.formats.llamacpp import LLAMACPP
from eagle.formats.networks import LANGUAGE_MODEL, network_of
from eagle.formats.openvino import OPENVINO
from eagle.formats.reference import REFERENCE
from eagle.formats.sglang import SGLANG
from eagle.formats.speculators import SPECULATORS
from eagle.formats.transformers import TRANSFORMERS
from eagle.formats.trtllm import TRTLLM
from eagle.formats.vllm import VLLM

SERVERS = (VLLM, SGLANG, TRTLLM, OPENVINO, LLAMACPP)
ENGINES = (*SERVERS, SPECULATORS, REFERENCE, TRANSFORMERS)
ADVICE = {
    LANGUAGE_MODEL: "it is a model of its own: export to transformers, a folder that engines load as any other model"
}


def write_layout(engine: Engine, drafter: TrainableDrafter, target_config: Any) -> Layout:
    """The head as one engine reads it, or ValueError with what it would serve badly and where the head can go."""
    network = network_of(drafter)
    if network not in engine.networks:
        kind, advice = drafter.settings.kind, ADVICE.get(network, "docs/serving.md lists what it serves")
        raise ValueError(f"{engine.name}: {engine.unknown.format(kind=kind, advice=advice)}")
    if reason := engine.unread_rotary(drafter.shape):
        readers = [other for other in ENGINES if network in other.networks]
        able = [other.name for other in readers if not other.unread_rotary(drafter.shape)]
        advice = f"export to {' or '.join(able)} (docs/serving.md)" if able else "no exporter has a layout for it"
        raise ValueError(f"{engine.name}: {reason}: {advice}")
    return engine.layout(drafter, target_config)
