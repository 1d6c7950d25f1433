"""Heads with EAGLE-3's network, as every engine that serves them names their parts."""

# D tokens that can be drafted, V vocabulary, H width

from __future__ import annotations

from typing import Any

import torch

from eagle.core.drafter import TrainableDrafter
from eagle.formats.layout import Layout, embedding_of, llama_config, scale_of, tensors_of

SWITCHES = ("norm_before_residual", "fc_norm", "norm_output")


def fused_layout(
    drafter: TrainableDrafter,
    target_config: Any,
    engine: str,
    serves: tuple[str, ...] = (),
    *,
    own_embedding: bool = False,
) -> Layout:
    """The layer ids stand in it twice, each time as those who look there count them.

    `serves` are the switches that the engine knows; `own_embedding` says whether it reads one that the head brings.
    """
    _refuse(drafter, target_config, engine, serves)
    taps = drafter.taps
    order = sorted(range(len(taps)), key=taps.__getitem__)  # engines sort them
    tensors = tensors_of(drafter)
    tensors["fc.weight"] = torch.cat([tensors["fc.weight"].chunk(len(taps), dim=1)[tap] for tap in order], dim=1)
    norms = {f"fc_norm.{place}.weight": f"fc_norm.{tap}.weight" for place, tap in enumerate(order)}
    tensors |= {name: tensors[was] for name, was in norms.items() if was in tensors}
    if scale_of(drafter) != 1.0:
        if not own_embedding:
            raise ValueError(
                f"{engine}: the target multiplies its embedding with {scale_of(drafter):g}, which this engine leaves "
                "out when it drafts: use vllm, llamacpp or speculators, where the head brings its own embedding"
            )
        tensors["embed_tokens.weight"] = embedding_of(drafter, engine)
    inputs = [taps[tap] for tap in order]
    config = llama_config(
        drafter,
        target_config,
        engine,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=drafter.lm_head.out_features,  # type: ignore[union-attr]
        **{switch: bool(getattr(drafter.settings, switch)) for switch in SWITCHES},
        eagle_aux_hidden_state_layer_ids=inputs,
        eagle_config={
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in inputs],
        },
    )
    return Layout(config, {_midlayer(name): tensor for name, tensor in tensors.items()}, "")


def _midlayer(name: str) -> str:
    """What most engines, and all of them one way or the other, call the block."""
    return name.replace("layers.0.", "midlayer.")


def _refuse(drafter: TrainableDrafter, target_config: Any, engine: str, serves: tuple[str, ...]) -> None:
    """Say what keeps a head from being served."""
    if not all(hasattr(drafter.settings, switch) for switch in SWITCHES):
        advice = "docs/serving.md lists what it serves"
        if hasattr(drafter, "model"):
            advice = "it is a model of its own: export to transformers, a folder that engines load as any other model"
        raise ValueError(f"{engine}: no layout for {drafter.settings.kind!r}: {advice}")
    for switch in SWITCHES:
        if getattr(drafter.settings, switch) and switch not in serves:
            raise ValueError(
                f"{engine}: drafter.{switch} is unknown there, and acceptance would be lost in silence: train with "
                f"drafter.{switch}=false, or export to an engine that knows it (docs/serving.md)"
            )
    layers, taps = target_config.num_hidden_layers, drafter.taps
    if len(taps) != 3 or not all(0 < tap < layers for tap in taps):
        raise ValueError(
            f"{engine}: drafter.taps is {taps}, expected the inputs of three layers of 1 to {layers - 1}: "
            "train with such"
        )


def with_offsets(layout: Layout) -> Layout:
    """The same with offsets of zero where the head may say all tokens."""
    said, known = layout.config["draft_vocab_size"], layout.config["vocab_size"]
    if said < known:
        return layout
    offsets = {"d2t": torch.zeros(said, dtype=torch.long), "t2d": torch.ones(known, dtype=torch.bool)}
    return Layout(layout.config, {**layout.tensors, **offsets}, layout.serve)
