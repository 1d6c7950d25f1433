"""Eight faults planted in the heads of every network: `inspect` finds each one that the network can have."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import save_head
from eagle.formats.reading.foreign import inspect, read_head
from eagle.formats.reading.recognise import NETWORKS
from tests import block_heads
from tests import foreign_heads as made
from tests.formats.test_import_levels import falcon, hydra, speculator
from tests.formats.test_inspect_head import portable
from tests.formats.test_inspect_kinds import medusa_of_vllm

SAYS = {  # what a finding says of each fault
    "theta": "rope_theta is 500000, the target's is 10000",
    "scale": "rope scaling is linear, the target's is default",
    "swapped q/k": "k_proj.weight is [16,",
    "all-zero tensor": "is all zeros",
    "stale LM head": "differs from the target's in 61 of 61 rows",
    "wrong taps": "layers",
    "another vocabulary": "vocab_size is 61, the target's is 57",
    "missing norm": "is missing",
}
OWN_HEAD = "its LM head is its own"
LAST_STATE = "it reads the last state alone"
NO_ATTENTION = "it has no attention"
FIXED = "its code has one theta for every target"


@dataclass(frozen=True)
class Planted:
    """A head of a network, where its faults go, and why it cannot have the others."""

    head: Callable[[], made.Head]
    filled: str  # a tensor that is never zero
    norm: str = ""
    output: str = ""  # its copy of the target's LM head
    taps: dict[str, Any] | None = None  # wrong ones
    layers: int = made.LAYERS  # of its target
    absent: dict[str, str] = field(default_factory=dict)


WRONG_IDS = {"target_layer_ids": [1, 3, 10], "mask_token_id": 3}
OUTER = "eagle_aux_hidden_state_layer_ids"
HEADS = {
    "EAGLE-1": Planted(
        made.eagle1,
        "fc.weight",
        "layers.0.post_attention_layernorm.weight",
        "lm_head.weight",
        absent={"wrong taps": LAST_STATE},
    ),
    "EAGLE-3": Planted(
        portable,
        "fc.weight",
        "midlayer.hidden_norm.weight",
        taps={OUTER: [2, 4, 11], "eagle_config": {OUTER: [1, 3, 10]}},
        absent={"stale LM head": OWN_HEAD},
    ),
    "a P-EAGLE head": Planted(
        block_heads.peagle,
        "fc.weight",
        "norm.weight",
        taps={OUTER: [2, 4, 11]},
        absent={"stale LM head": OWN_HEAD},
    ),
    "a DFlash head": Planted(
        block_heads.zlab,
        "fc.weight",
        "hidden_norm.weight",
        "lm_head.weight",
        {"dflash_config": WRONG_IDS},
    ),
    "a DSpark head": Planted(
        block_heads.dspark,
        "markov_head.markov_w1.weight",
        "layers.1.self_attn.q_norm.weight",
        "lm_head.weight",
        {"dflash_config": {**WRONG_IDS, "projector_type": "dspark", "markov_rank": 4}},
    ),
    "a Domino head": Planted(
        block_heads.domino,
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        {"dflash_config": {**WRONG_IDS, "projector_type": "domino"}},
    ),
    "a layer of multi-token prediction (MTP)": Planted(
        block_heads.deepseek,
        "model.layers.3.eh_proj.weight",
        "model.layers.3.enorm.weight",
        "model.layers.3.shared_head.head.weight",
        layers=3,
        absent={"wrong taps": LAST_STATE},
    ),
    "Medusa heads": Planted(
        medusa_of_vllm,
        "blocks.0.layers.0.weight",
        absent={
            **dict.fromkeys(("theta", "scale", "swapped q/k"), NO_ATTENTION),
            "stale LM head": OWN_HEAD,
            "wrong taps": LAST_STATE,
            "missing norm": "it has none",
        },
    ),
    "Hydra heads": Planted(
        hydra,
        "hydra_lm_head.0.1.weight",
        "prefix_embeding_layer.norm.weight",
        absent={
            **dict.fromkeys(("theta", "scale"), FIXED),
            "stale LM head": OWN_HEAD,
            "wrong taps": LAST_STATE,
        },
    ),
    "an MLP speculator": Planted(
        speculator,
        "emb.1.weight",
        "ln.1.weight",
        absent={
            **dict.fromkeys(("theta", "scale", "swapped q/k"), NO_ATTENTION),
            "stale LM head": OWN_HEAD,
            "wrong taps": LAST_STATE,
        },
    ),
    "a FALCON head": Planted(
        falcon,
        "lstm.weight_ih_l1",
        "layers.0.post_attention_layernorm.weight",
        "lm_head.weight",
        absent={"wrong taps": LAST_STATE},
    ),
}


def turn(config: dict[str, Any], **rope: Any) -> dict[str, Any]:
    """The config with other rotary parameters, in the spelling that it has."""
    if isinstance(block := config.get("transformer_layer_config"), dict):
        return {**config, "transformer_layer_config": turn(block, **rope)}
    if "rope_parameters" in config:
        return {**config, "rope_parameters": {**config["rope_parameters"], **rope}}
    theta = {name: value for name, value in rope.items() if name == "rope_theta"}
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return {**config, **theta, **({"rope_scaling": scaling} if scaling else {})}


def plant(fault: str, planted: Planted) -> made.Head:
    """The head with one fault; another vocabulary is its target's."""
    config, held = planted.head()
    held = {name: tensor.clone() for name, tensor in held.items()}
    if fault == "theta":
        config = turn(config, rope_theta=5e5)
    elif fault == "scale":
        config = turn(config, rope_type="linear", factor=2.0)
    elif fault == "swapped q/k":
        query = next(name for name in held if name.endswith("q_proj.weight"))
        key = query.replace("q_proj", "k_proj")
        held[query], held[key] = held[key], held[query]
    elif fault == "all-zero tensor":
        held[planted.filled].zero_()
    elif fault == "stale LM head":
        held[planted.output] = made.drawn(made.V, made.H, seed=99)
    elif fault == "wrong taps":
        config = {**config, **(planted.taps or {})}
    elif fault == "missing norm":
        held.pop(planted.norm)
    return config, held


@pytest.mark.parametrize("network", HEADS)
@pytest.mark.parametrize("fault", SAYS)
def test_a_planted_fault_is_found(fault: str, network: str, tmp_path: Path) -> None:
    """And a healthy head has none of it, nor anything that would cost acceptance."""
    planted = HEADS[network]
    if reason := planted.absent.get(fault):
        pytest.skip(f"not applicable: {reason}")
    target = made.write_target(tmp_path / "target", num_hidden_layers=planted.layers)
    healthy = inspect(made.write(tmp_path / "healthy", planted.head()), target)
    assert SAYS[fault] not in " ".join(finding.what for finding in healthy.findings), healthy
    if fault == "another vocabulary":
        target = made.write_target(
            tmp_path / "other", num_hidden_layers=planted.layers, vocab_size=made.V - 4
        )
    found = inspect(made.write(tmp_path / "spoilt", plant(fault, planted)), target)
    assert any(SAYS[fault] in finding.what for finding in found.findings), found
    assert found.fatal or fault == "scale", found  # which some heads are trained with on purpose


def test_every_network_that_is_read_is_planted_with_faults() -> None:
    """A new network joins the table, or this fails."""
    assert HEADS.keys() == NETWORKS.keys()


SIZES = {
    key: value
    for key, value in made.LLAMA.items()
    if key not in ("rope_theta", "rope_scaling", "torch_dtype")
}
SIZES["num_hidden_layers"] = made.LAYERS
OWN = [
    "eagle1",
    "eagle3",
    "peagle",
    "dflash",
    "dspark",
    "mtp",
    "falcon",
    "hydra",
    "medusa",
    "mlp_speculator",
]


@pytest.mark.quick("falcon")
@pytest.mark.parametrize("kind", OWN)
def test_a_head_of_this_project_is_looked_at_too(kind: str, tmp_path: Path) -> None:
    """A tensor of zeros, and the theta of another target where the head turns positions."""
    target = made.write_target(tmp_path / "target")
    for theta in (1e4, 5e5):
        rope = {"rope_type": "default", "rope_theta": theta}
        frozen = Target(LlamaForCausalLM(LlamaConfig(**{**SIZES, "rope_parameters": rope})))
        settings = settings_of(
            {"kind": kind, **({"prefix": True} if kind == "hydra" else {})}, "test"
        )
        head = DRAFTERS[kind].for_target(
            settings, frozen.config, frozen.head, [torch.arange(made.V)]
        )
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter)
        turns = any(".self_attn." in name for name, _ in head.named_parameters())
        save_head(tmp_path / kind, head, "", {})
        found = inspect(tmp_path / kind, target)
        assert found.layout == "this project" and found.fatal == (turns and theta != 1e4), found
        name, parameter = next(
            (name, each) for name, each in head.named_parameters() if name.endswith("weight")
        )
        torch.nn.init.zeros_(parameter)
        save_head(tmp_path / kind, head, "", {})
        assert f"{name} is all zeros" in str(inspect(tmp_path / kind, target))


def test_asking_for_other_taps_tells_those_that_a_head_reads(tmp_path: Path) -> None:
    """Five or three of them, or the last state."""
    folder = made.write(tmp_path / "head", block_heads.zlab())
    with pytest.raises(
        ValueError, match=r"taps are \(1, 3\), but such heads read \(2, 4, 6\): leave them out"
    ):
        read_head(folder, taps=(1, 3))
    assert read_head(folder, taps=(2, 4, 6)).taps == (2, 4, 6)
