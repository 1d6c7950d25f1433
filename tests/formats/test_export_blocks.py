"""Block drafters and MTP layers in the layouts of engines and of their own projects: names, keys, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import inspect, read_head
from tests import foreign_heads as made
from tests.block_layouts import BLOCKS, GOLDEN, TARGET

H, V = made.H, made.V
INJECTED = {"taps": [2, 4, 7], "blocks": BLOCKS, "slots": 6, "mask_token": 5}
DSPARK = {"kind": "dspark", **INJECTED, "rank": 4, "markov": "vanilla", "confidence": True}
DOMINO = {**DSPARK, "markov": "domino", "gru_size": 8, "confidence": False}
FUSED = {"kind": "peagle", "taps": [2, 4, 6], "blocks": 3, "mask_token": 5}
HEADS: dict[str, tuple[dict[str, Any], str]] = {  # settings, the exporters that take it
    "dflash": (
        {"kind": "dflash", **INJECTED},
        "vllm sglang trtllm llamacpp speculators zlab specforge",
    ),
    "dflash, causal": ({"kind": "dflash", **INJECTED, "causal": True}, "vllm llamacpp zlab"),
    "dflash from the anchor": (
        {"kind": "dflash", **INJECTED, "sample_from_anchor": True},
        "speculators deepspec",
    ),
    "dflash of one block": (
        {"kind": "dflash", **INJECTED, "blocks": 1, "slots": 2},
        "vllm zlab speculators",
    ),
    "dflash of taps in no order": (
        {"kind": "dflash", **INJECTED, "taps": [7, 2, 4]},
        "vllm zlab speculators",
    ),
    "dspark": (DSPARK, "vllm sglang trtllm llamacpp speculators deepspec specforge"),
    "dspark, causal": ({**DSPARK, "causal": True}, "vllm llamacpp"),
    "dspark without confidence": (
        {**DSPARK, "confidence": False},
        "vllm trtllm llamacpp speculators deepspec specforge",
    ),
    "dspark in its places": ({**DSPARK, "sample_from_anchor": False}, "vllm llamacpp speculators"),
    "dspark, gated": ({**DSPARK, "markov": "gated"}, "sglang speculators deepspec specforge"),
    "dspark, recurrent": ({**DSPARK, "markov": "rnn"}, "sglang speculators deepspec specforge"),
    "dspark without a Markov head": (
        {**DSPARK, "markov": "none"},
        "speculators deepspec specforge",
    ),
    "domino": (DOMINO, "sglang specforge"),
    "domino in its places": (
        {**DOMINO, "sample_from_anchor": False, "unbiased": 2},
        "sglang specforge",
    ),
    "peagle": ({**FUSED, "norm_before_residual": True}, "vllm speculators"),
    "peagle with norms": ({**FUSED, "fc_norm": True}, "vllm"),
    "peagle of one block": ({**FUSED, "blocks": 1}, "vllm speculators"),
    "peagle of taps in no order": ({**FUSED, "taps": [6, 2, 4]}, "vllm speculators"),
    "mtp": ({"kind": "mtp"}, "deepseek mimo"),
    "mtp, state first": ({"kind": "mtp", "hidden_first": True}, "deepseek mimo"),
}


def head_of(name: str, config: Any = TARGET, **changed: Any) -> Any:
    """A head with random weights, bound to a target's embedding and LM head."""
    embedding, output = nn.Embedding(V, H), nn.Linear(H, V, bias=False)
    embedding.weight.data, output.weight.data = made.embedding(), made.drawn(V, H, seed=8)
    frozen = TargetHead(embedding, output)
    settings = settings_of({**HEADS[name][0], **changed}, "test")
    head = DRAFTERS[settings.kind].for_target(settings, config, frozen).bind(frozen)
    generator = torch.Generator().manual_seed(1)
    for weight in head.parameters():
        weight.data.normal_(generator=generator)
    return head


@pytest.mark.parametrize(("engine", "name"), GOLDEN)
def test_names_shapes_and_keys(engine: str, name: str) -> None:
    """As the code that loads them has them."""
    shapes, config = GOLDEN[engine, name]
    layout = EXPORTERS[engine](head_of(name), TARGET)
    assert {key: tuple(tensor.shape) for key, tensor in layout.tensors.items()} == shapes
    assert {tensor.dtype for tensor in layout.tensors.values()} == {torch.float32}
    assert (layout.file, layout.config) == ("model.safetensors", config)


@pytest.mark.parametrize("name", HEADS)
def test_an_export_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """What it computes, to the bit, whoever's names it has; and nothing is wrong with it."""
    target, head = made.write_target(tmp_path / "target"), head_of(name)
    for engine in HEADS[name][1].split():
        export(head, TARGET, engine, tmp_path / engine)
        found = inspect(tmp_path / engine, target)
        assert not found.fatal and "unknown keys" not in str(found), found
        again: Any = read_head(tmp_path / engine, target)
        if "no order" in name:  # columns go where the layout wants them
            assert again.settings.kind == head.settings.kind
            assert_same_function(head, again)
            continue
        tensors = again.state_dict()
        if "mtp" in name and again.settings.hidden_first != head.settings.hidden_first:
            token, state = tensors["eh_proj.weight"].chunk(2, dim=1)
            tensors["eh_proj.weight"] = torch.cat([state, token], dim=1)
        else:
            assert again.network == head.network
        biases = {
            key for key in tensors.keys() - head.state_dict().keys() if not tensors[key].any()
        }
        assert tensors.keys() - biases == head.state_dict().keys()
        assert all(torch.equal(tensor, tensors[key]) for key, tensor in head.state_dict().items())


@torch.no_grad()
def assert_same_function(head: Any, again: Any) -> None:
    """The same states of features that each gets in the order of its own taps."""
    every = made.drawn(5, 10, H)
    ours, theirs = (part.fuse_taps(every[:, list(part.taps)]) for part in (head, again))
    assert list(again.taps) == sorted(head.taps) != list(head.taps)
    if head.settings.kind == "peagle":
        torch.testing.assert_close(head.mask_state(), again.mask_state(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", HEADS)
def test_no_other_exporter_takes_it(name: str) -> None:
    """And each says why, by the method or by the setting that its engine has not."""
    head, (settings, takers) = head_of(name), HEADS[name]
    switches = {"sample_from_anchor", "causal", "fc_norm", "confidence", "markov"} & settings.keys()
    for engine in EXPORTERS.keys() - {"transformers", *takers.split()}:
        if "of one block" in name or "no order" in name:
            continue
        with pytest.raises(ValueError, match=f"^{engine}: ") as refusal:
            EXPORTERS[engine](head, TARGET)
        told = [
            f"no layout for '{settings['kind']}'",
            *(f"drafter.{switch}" for switch in switches),
            "own family alone",
        ]
        told += ["drafter.sample_from_anchor"] * (settings["kind"] == "dflash")
        assert any(words in str(refusal.value) for words in told), refusal.value


def test_the_two_conventions_that_are_called_dflash_are_told_apart(tmp_path: Path) -> None:
    """One slot off, every token is another; a refusal says where else the head can go."""
    for engine in ("zlab", "vllm", "sglang", "llamacpp"):
        with pytest.raises(
            ValueError,
            match=r"a slot names the token behind its place, .* Export to deepspec or spec",
        ):
            EXPORTERS[engine](head_of("dflash from the anchor"), TARGET)
    with pytest.raises(
        ValueError,
        match=r"a slot names the token at its own place, .* Export to zlab or speculators",
    ):
        EXPORTERS["deepspec"](head_of("dflash"), TARGET)
    for engine, name in (
        ("zlab", "dflash"),
        ("deepspec", "dflash from the anchor"),
        ("speculators", "dflash"),
    ):
        export(head_of(name), TARGET, engine, tmp_path / engine)
        (told,) = [
            line
            for line in str(inspect(tmp_path / engine)).splitlines()
            if line.startswith("slots")
        ]
        assert (
            "behind its place (DeepSpec's" if engine == "deepspec" else "at its own place (z-lab's"
        ) in told


def test_refusals_name_what_stands_in_the_way() -> None:
    """What no reader has, and what would be read otherwise in silence."""
    with pytest.raises(ValueError, match=r"zlab: drafter\.qk_norm is false"):
        EXPORTERS["zlab"](head_of("dflash", qk_norm=False), TARGET)
    with pytest.raises(
        ValueError,
        match=r"zlab: drafter\.taps is \(-1, 2\), expected the inputs of some layers of 1 to 8",
    ):
        EXPORTERS["zlab"](head_of("dflash", taps=[-1, 2]), TARGET)
    with pytest.raises(ValueError, match=r"speculators: the head has 5 blocks, expected 4"):
        EXPORTERS["speculators"](head_of("peagle", blocks=5), TARGET)
    with pytest.raises(
        ValueError,
        match=r"vllm: the target is a llama, .* its own family alone, by its names.*: mimo",
    ):
        EXPORTERS["vllm"](head_of("mtp"), TARGET)
    head = head_of("dflash")
    head.frozen = (TargetHead(head.frozen[0].embedding, head.frozen[0].output, embed_scale=2.0),)
    with pytest.raises(ValueError, match="sglang: the target multiplies its embedding with 2"):
        EXPORTERS["sglang"](head, TARGET)
    head = head_of("dflash from the anchor")
    head.frozen = ()
    with pytest.raises(
        ValueError,
        match="deepspec: a copy of the target's embedding is part of this layout: call bind",
    ):
        EXPORTERS["deepspec"](head, TARGET)


def test_a_layer_for_mimo_is_served_by_vllm() -> None:
    """Whose config names the family; it has biases, of zeros here."""
    target = LlamaConfig(**{**made.LLAMA, "num_hidden_layers": made.LAYERS})
    target.model_type = "mimo"
    tensors = EXPORTERS["vllm"](head_of("mtp, state first"), target).tensors
    assert not tensors["model.mtp_layers.0.self_attn.k_proj.bias"].any()
    assert torch.equal(tensors["model.embed_tokens.weight"], made.embedding())
    assert torch.equal(tensors["lm_head.weight"], made.drawn(V, H, seed=8))


@pytest.mark.parametrize(
    ("engine", "name", "told"),
    [
        ("vllm", "dflash", ('"method": "dflash"',)),
        ("vllm", "peagle", ('"method": "eagle3", "parallel_drafting": true', "V1 model runner")),
        (
            "sglang",
            "dflash",
            ("--speculative-algorithm DFLASH", "1 tokens: as many as the head guesses"),
        ),
        ("llamacpp", "dflash", ("--spec-type draft-dflash", "--spec-draft-n-max 1")),
        ("speculators", "peagle", ('"parallel_drafting": true',)),
    ],
)
def test_the_readme_says_how_it_is_served(
    engine: str, name: str, told: tuple[str, ...], tmp_path: Path
) -> None:
    """With no longer a chain than a block names tokens."""
    head = head_of(name, slots=2) if name == "dflash" else head_of(name)
    export(head, TARGET, engine, tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert all(words in text for words in told), text
    written = json.loads((tmp_path / "config.json").read_text())
    assert written.get("mask_token_id", written.get("dflash_config", {}).get("mask_token_id")) == 5
