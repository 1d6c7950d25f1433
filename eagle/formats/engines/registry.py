"""The registry of engines, and writing a head in an engine's layout."""

from __future__ import annotations

from dataclasses import replace

from eagle.core.drafter import TrainableDrafter
from eagle.formats.engines.engine import Engine
from eagle.formats.engines.published import LANGUAGE_MODEL, PUBLISHED
from eagle.formats.engines.servers import SERVERS
from eagle.formats.layout import Layout, TargetConfig, check_fit, has_attention
from eagle.formats.networks.eagle_layouts import FEATURES, FUSED, FeatureLayout, FusedLayout
from eagle.formats.networks.network_layout import network_of

ENGINES = (*SERVERS, *PUBLISHED)


def write_layout(engine: Engine, drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """Return the head's config, tensors and guide in an engine's layout; nothing is written.

    ValueError names what the engine would serve badly, and engines that would serve it well.
    """
    network = network_of(drafter)
    readers = [reader for reader in ENGINES if network in reader.networks]
    if network not in engine.networks:
        advice = _advise(engine, drafter, readers)
        raise ValueError(
            f"{engine.name}: {engine.unknown.format(kind=drafter.settings.kind, advice=advice)}"
        )
    # only attention uses rotary positions
    if has_attention(drafter):
        reason = engine.unread_rotary(drafter.shape)
        if reason:
            able = [reader.name for reader in readers if not reader.unread_rotary(drafter.shape)]
            advice = "no exporter has a layout for it"
            if able:
                advice = f"export to {' or '.join(able)} (docs/serving.md)"
            raise ValueError(f"{engine.name}: {reason}: {advice}")
    # a head for another target would otherwise fail only in the engine
    check_fit(drafter, target_config, f"{engine.name}: the head")
    return engine.layout(drafter, target_config)


def _advise(engine: Engine, drafter: TrainableDrafter, readers: list[Engine]) -> str:
    """Return advice on where to export a head whose network an engine does not read.

    Args:
        engine: The engine.
        drafter: The head.
        readers: The engines that read its network.
    """
    network = network_of(drafter)
    if network == LANGUAGE_MODEL:
        advice = "it is a model of its own: export to transformers, a folder that engines load as any other model"
    elif readers:
        names = " or ".join(name_reader(reader.name, drafter) for reader in readers)
        advice = f"export to {names} (docs/serving.md)"
    else:
        advice = "no exporter has one (docs/serving.md)"
    if network in engine.former_support:
        return f"{engine.former_support[network]}; {advice}"
    return advice


def name_reader(engine: str, drafter: TrainableDrafter) -> str:
    """Return an engine's name for a message, with the last version that reads such a head if later ones do not.

    Args:
        engine: The engine's name, as in `eagle export --to NAME`.
        drafter: The head.
    """
    for reader in ENGINES:
        layout = reader.networks.get(network_of(drafter))
        if reader.name == engine and layout and layout.until:
            return f"{engine} (up to {layout.until})"
    return engine


# -- one folder that is right for all engines, where one can be -------------------------------------------------------

NOT_RUN = "SGLang and TensorRT-LLM were not run with it; the others were, with the layouts that this one is made of."
PORTABLE = Engine(
    name="portable",
    title="all engines",
    networks={FEATURES: FeatureLayout("", reads_bias=False), FUSED: FusedLayout("")},
    scalings=None,
)


def write_portable(drafter: TrainableDrafter, target_config: TargetConfig) -> Layout:
    """Return a layout that all engines read: EAGLE-1's, or EAGLE-3's with a draft vocabulary and without its switches.

    The switches are the boolean settings of EAGLE-3's network, which some engines do not know. The guide is put
    together from those of all engines. ValueError for a head that some engine would serve badly.
    """
    layout = write_layout(PORTABLE, drafter, target_config)
    network = network_of(drafter)
    if network == FUSED and layout.config["draft_vocab_size"] == layout.config["vocab_size"]:
        raise ValueError(
            "portable: vLLM refuses `d2t` where the head may say all tokens, and OpenVINO needs it: export to vllm "
            "(right for SGLang, TensorRT-LLM and llama.cpp too) or to openvino, or train with drafter.draft_vocab"
        )
    # each engine writes its own layout only for its checks, whose reasons are passed on, and for its guide
    titles = []
    guides = []
    for engine in SERVERS:
        if network in engine.networks:
            try:
                guide = write_layout(engine, drafter, target_config).serve
            except ValueError as error:
                raise ValueError(
                    f"portable: {error}; such a head has no folder for all engines"
                ) from None
            titles.append(engine.title)
            guides.append(f"### {engine.title}\n\n{guide}")
    return replace(
        layout, serve="\n\n".join([f"One folder for {', '.join(titles)}. {NOT_RUN}", *guides])
    )
