"""What layouts take from a head and from the engines' tables: blocks, taps, networks, and where a head can go."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from eagle.drafters import settings_of
from eagle.formats.engines.registry import ENGINES, SERVERS
from eagle.formats.export import EXPORTERS
from eagle.formats.networks.eagle_layouts import FUSED, FusedLayout
from eagle.formats.networks.network_layout import network_of
from recipes.forecast import empty_head
from tests.formats.test_export import NEWER, PLAIN, head_of, target_for
from tests.formats.test_export_limits import TARGETS, head_for


@pytest.mark.parametrize(
    "engine", ["vllm", "sglang", "trtllm", "openvino", "llamacpp", "speculators", "eagle"]
)
def test_as_many_layers_as_the_head_has_blocks(engine: str) -> None:
    """Its shape says so, wherever an engine looks for it."""
    target = target_for(engine)
    head = head_of(PLAIN, target)
    head.shape.num_hidden_layers = 3
    config = EXPORTERS[engine](head, target.config).config
    assert config.get("transformer_layer_config", config)["num_hidden_layers"] == 3


def test_taps_out_of_order_are_written_in_order() -> None:
    """Their ids ascend in both places, and the columns and norms go with them."""
    target = target_for("any")
    head = head_of({**NEWER, "taps": (9, 2, 4)}, target)
    layout = FusedLayout("LAYERS", switches=("fc_norm", "norm_output")).write(
        head, target.config, "any"
    )
    assert layout.config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 9]
    assert layout.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 3, 8]
    late, early, middle = head.fc.weight.chunk(3, dim=1)
    assert torch.equal(layout.tensors["fc.weight"], torch.cat([early, middle, late], dim=1))
    assert torch.equal(layout.tensors["fc_norm.0.weight"], head.fc_norm[1].weight)
    assert layout.serve == "1 3 8"


@pytest.mark.parametrize(
    ("kind", "network"), [("eagle1", "features"), ("hass", "features"), ("eagle3", "fused")]
)
def test_methods_of_one_network_share_its_layouts(kind: str, network: str) -> None:
    """Whatever trained a head, an engine reads its network."""
    head = empty_head(settings_of({"kind": kind}, "test"), LlamaConfig(num_hidden_layers=8))
    assert network_of(head) == network


def test_a_refusal_names_no_engine_that_lacks_the_network() -> None:
    """EAGLE-1's heads go to fewer engines than EAGLE-3's."""
    for kind, named in (("eagle1", ("vllm",)), ("eagle3", ("vllm", "openvino", "speculators"))):
        with pytest.raises(ValueError, match="attention_factor") as refusal:
            EXPORTERS["sglang"](
                head_for(kind, "yarn of another size"), TARGETS["yarn of another size"]
            )
        assert f"export to {' or '.join(named)} (" in str(refusal.value)


def test_every_fault_of_an_engine_stands_in_its_table_once() -> None:
    """And every engine reads some network under a name of its own."""
    assert len({engine.name for engine in ENGINES}) == len(ENGINES)
    for engine in SERVERS:
        assert len(set(engine.faults)) == len(engine.faults)
        assert FUSED in engine.networks
