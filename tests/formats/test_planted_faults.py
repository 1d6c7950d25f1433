"""Eight faults planted in the heads of every network: `inspect` finds each one that the network can have."""

# H hidden, V vocabulary

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.formats.checkpoint import save_head
from eagle.formats.reading.foreign import inspect, read_head
from eagle.formats.reading.recognise import NETWORKS
from tests import block_heads
from tests import foreign_heads as made
from tests.formats.every_layout import falcon, hydra, medusa, speculator
from tests.formats.make_heads import change_head, make_head, make_target
from tests.formats.reading.test_inspect_head import OUTER, portable

# what a finding says of each fault
SAYS = {
    "theta": "rope_theta is 500000, the target's is 10000",
    "scale": "rope scaling is linear, the target's is default",
    "swapped q/k": "k_proj.weight is [16,",
    "all-zero tensor": "is all zeros",
    "stale LM head": "differs from the target's in 61 of 61 rows",
    "wrong taps": "layers",
    "another vocabulary": "vocab_size is 61, the target's is 57",
    "missing norm": "is missing",
}
# why a network cannot have a fault
OWN_HEAD = {"stale LM head": "its LM head is its own"}
LAST_STATE = {"wrong taps": "it reads the last state alone"}
NO_ATTENTION = dict.fromkeys(("theta", "scale", "swapped q/k"), "it has no attention")
FIXED_THETA = dict.fromkeys(("theta", "scale"), "its code has one theta for every target")
NO_NORM = {"missing norm": "it has none"}


@dataclass(frozen=True)
class Planted:
    """A head of a network, where its faults go, and why it cannot have the others."""

    head: made.Head
    filled: str  # a tensor that is never zero
    norm: str = ""
    output: str = "lm_head.weight"  # its copy of the target's LM head
    wrong_taps: dict[str, Any] | None = None
    target_layers: int = made.LAYERS
    absent: dict[str, str] = field(default_factory=dict)


# the target has layers 0 to 8
WRONG_OUTPUTS = {"dflash_config/target_layer_ids": [1, 3, 10]}
HEADS = {
    "EAGLE-1": Planted(
        made.eagle1(),
        filled="fc.weight",
        norm="layers.0.post_attention_layernorm.weight",
        absent=LAST_STATE,
    ),
    "EAGLE-3": Planted(
        portable(),
        filled="fc.weight",
        norm="midlayer.hidden_norm.weight",
        wrong_taps={OUTER: [2, 4, 11], "eagle_config": {OUTER: [1, 3, 10]}},
        absent=OWN_HEAD,
    ),
    "a P-EAGLE head": Planted(
        block_heads.peagle(),
        filled="fc.weight",
        norm="norm.weight",
        wrong_taps={OUTER: [2, 4, 11]},
        absent=OWN_HEAD,
    ),
    "a DFlash head": Planted(
        block_heads.zlab(),
        filled="fc.weight",
        norm="hidden_norm.weight",
        wrong_taps=WRONG_OUTPUTS,
    ),
    "a DFlash2 head": Planted(
        block_heads.dflash2(),
        filled="candidate_selector.predecessor_codebook",
        norm="layers.1.post_attention_layernorm.weight",
        wrong_taps=WRONG_OUTPUTS,
    ),
    "a LiLiCorr head": Planted(
        block_heads.lilicorr(),
        filled="lilicorr.out_head.weight",
        norm="lilicorr.output_norm.weight",
        wrong_taps=WRONG_OUTPUTS,
    ),
    "a DSpark head": Planted(
        block_heads.dspark(),
        filled="markov_head.markov_w1.weight",
        norm="layers.1.self_attn.q_norm.weight",
        wrong_taps=WRONG_OUTPUTS,
    ),
    "a Domino head": Planted(
        block_heads.domino(),
        filled="fc.weight",
        norm="norm.weight",
        wrong_taps=WRONG_OUTPUTS,
    ),
    "an XPress head": Planted(
        block_heads.xpress(),
        filled="xpress_head.in_proj.weight",
        norm="hidden_norm.weight",
        wrong_taps=WRONG_OUTPUTS,
    ),
    "a layer of multi-token prediction (MTP)": Planted(
        block_heads.deepseek(),
        filled="model.layers.3.eh_proj.weight",
        norm="model.layers.3.enorm.weight",
        output="model.layers.3.shared_head.head.weight",
        target_layers=3,
        absent=LAST_STATE,
    ),
    "Medusa heads": Planted(
        medusa("vLLM"),
        filled="blocks.0.layers.0.weight",
        absent={**NO_ATTENTION, **OWN_HEAD, **LAST_STATE, **NO_NORM},
    ),
    "Hydra heads": Planted(
        hydra(),
        filled="hydra_lm_head.0.1.weight",
        norm="prefix_embeding_layer.norm.weight",
        absent={**FIXED_THETA, **OWN_HEAD, **LAST_STATE},
    ),
    "an MLP speculator": Planted(
        speculator(),
        filled="emb.1.weight",
        norm="ln.1.weight",
        absent={**NO_ATTENTION, **OWN_HEAD, **LAST_STATE},
    ),
    "a FALCON head": Planted(
        falcon(),
        filled="lstm.weight_ih_l1",
        norm="layers.0.post_attention_layernorm.weight",
        absent=LAST_STATE,
    ),
}


def change_rope(config: dict[str, Any], **rope: Any) -> dict[str, Any]:
    """Return a config with other rotary parameters, in the spelling that it has."""
    block = config.get("transformer_layer_config")
    if isinstance(block, dict):
        return {**config, "transformer_layer_config": change_rope(block, **rope)}
    if "rope_parameters" in config:
        return {**config, "rope_parameters": {**config["rope_parameters"], **rope}}
    if "rope_theta" in rope:
        return {**config, **rope}
    return {**config, "rope_scaling": rope}


def plant(fault: str, planted: Planted) -> made.Head:
    """Return the head with one fault; another vocabulary is its target's."""
    config, tensors = planted.head
    if fault == "theta":
        return change_rope(config, rope_theta=5e5), tensors
    if fault == "scale":
        return change_rope(config, rope_type="linear", factor=2.0), tensors
    changes: dict[str, Any] = {}
    if fault == "swapped q/k":
        # q_proj and k_proj differ in size, as two queries share a key
        query = next(name for name in tensors if name.endswith("q_proj.weight"))
        key = query.replace("q_proj", "k_proj")
        changes = {query: tensors[key], key: tensors[query]}
    elif fault == "all-zero tensor":
        changes = {planted.filled: torch.zeros_like}
    elif fault == "stale LM head":
        changes = {planted.output: made.drawn(made.V, made.H, seed=99)}
    elif fault == "wrong taps":
        changes = planted.wrong_taps or {}
    elif fault == "missing norm":
        changes = {planted.norm: None}
    return change_head(planted.head, changes)


@pytest.mark.parametrize("network", HEADS)
@pytest.mark.parametrize("fault", SAYS)
def test_a_planted_fault_is_found(
    fault: str,
    network: str,
    tmp_path: Path,
) -> None:
    """And a healthy head has none of it, nor anything that would cost acceptance."""
    planted = HEADS[network]
    if fault in planted.absent:
        pytest.skip(f"not applicable: {planted.absent[fault]}")
    layers = planted.target_layers
    target = made.write_target(tmp_path / "target", num_hidden_layers=layers)
    healthy = inspect(made.write(tmp_path / "healthy", planted.head), target)

    assert not any(SAYS[fault] in finding.what for finding in healthy.findings), healthy

    if fault == "another vocabulary":
        other = {"num_hidden_layers": layers, "vocab_size": made.V - 4}
        target = made.write_target(tmp_path / "other", **other)
    found = inspect(made.write(tmp_path / "damaged", plant(fault, planted)), target)
    assert any(SAYS[fault] in finding.what for finding in found.findings), found
    # some heads are trained with another scaling on purpose
    assert found.fatal or fault == "scale", found


def test_every_network_that_is_read_is_planted_with_faults() -> None:
    """A new network joins the table, or this fails."""
    assert HEADS.keys() == NETWORKS.keys()


@pytest.mark.quick("falcon", "eagle3")
@pytest.mark.parametrize("kind", ["eagle3", "peagle", "dflash", "mtp", "falcon", "hydra"])
def test_faults_of_a_head_of_this_project_are_found(kind: str, tmp_path: Path) -> None:
    """A tensor of zeros, and the theta of another target where the head has attention."""
    target = made.write_target(tmp_path / "target")
    sizes = {**made.LLAMA, "num_hidden_layers": made.LAYERS}
    # `rope_parameters` says the same
    del sizes["rope_theta"], sizes["rope_scaling"], sizes["torch_dtype"]
    settings = {"kind": kind}
    if kind == "hydra":
        settings["prefix"] = True
    # the theta of the target beside it, and another one
    for theta in (1e4, 5e5):
        rope = {"rope_type": "default", "rope_theta": theta}
        head = make_head(settings, make_target(**sizes, rope_parameters=rope))
        parameters = dict(head.named_parameters())
        for parameter in parameters.values():
            torch.nn.init.normal_(parameter)
        has_attention = any(".self_attn." in name for name in parameters)
        save_head(tmp_path / kind, head, "", {})
        found = inspect(tmp_path / kind, target)
        assert found.layout == "this project"
        assert found.fatal == (has_attention and theta != 1e4), found
        name = next(name for name in parameters if name.endswith("weight"))
        torch.nn.init.zeros_(parameters[name])
        save_head(tmp_path / kind, head, "", {})
        assert f"{name} is all zeros" in str(inspect(tmp_path / kind, target))


def test_a_refusal_of_other_taps_names_those_that_a_head_reads(tmp_path: Path) -> None:
    """A user who names taps learns that the head says its own."""
    folder = made.write(tmp_path / "head", block_heads.zlab())
    words = r"taps are \(1, 3\), but such heads read \(2, 4, 6\): leave them out"
    with pytest.raises(ValueError, match=words):
        read_head(folder, taps=(1, 3))
    assert read_head(folder, taps=(2, 4, 6)).taps == (2, 4, 6)
