"""Block drafters and MTP layers in the layouts of engines and of their own projects: names, keys, refusals."""

# H hidden, V vocabulary

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from eagle.core.drafter import TargetHead
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import inspect, read_head
from tests import foreign_heads as made
from tests.block_layouts import BLOCKS, GOLDEN, LATTICE, TARGET
from tests.formats.make_heads import assert_equal, borrow_from, random_head

H = made.H
V = made.V
INJECTED = {
    "taps": [2, 4, 7],
    "blocks": BLOCKS,
    "slots": 6,
    "mask_token": 5,
}
# twenty tokens, of which draft vocabularies are made
FREQUENT = [*range(3, 13), *range(20, 50, 3)]
# of the first block, which alone is causal
WINDOWS = {
    "window": {"recent": 9},
    "window_blocks": [0],
    "causal": "window",
}
DFLASH = {"kind": "dflash", **INJECTED}
DFLASH2 = {
    "kind": "dflash2",
    **INJECTED,
    "conv_group_size": 4,
    "selector_rank": 3,
    "selector_top_k": 5,
}
LILICORR = {"kind": "lilicorr", **INJECTED, **LATTICE}
ANCHORED = {**DFLASH, "sample_from_anchor": True}
DSPARK = {
    "kind": "dspark",
    **INJECTED,
    "rank": 4,
    "markov": "vanilla",
    "confidence": True,
}
DOMINO = {**DSPARK, "markov": "domino", "gru_size": 8, "confidence": False}
XPRESS = {"kind": "xpress", **INJECTED, "rank": 4}
PEAGLE = {
    "kind": "peagle",
    "taps": [2, 4, 6],
    "blocks": 3,
    "mask_token": 5,
}
HEADS: dict[str, dict[str, Any]] = {
    "dflash": DFLASH,
    "dflash, causal": {**DFLASH, "causal": True},
    "dflash, windows": {**DFLASH, **WINDOWS},
    "dflash, causal windows": {**DFLASH, "window": {"recent": 9}, "causal": True},
    "dflash, windows and free blocks": {**DFLASH, **WINDOWS, "causal": False},
    "dflash, all causal": {**DFLASH, **WINDOWS, "causal": True},
    "dflash, windows at the root": {**DFLASH, **WINDOWS, "window_end": "root"},
    "dflash, windows with sinks": {**DFLASH, **WINDOWS, "window": {"sinks": 1, "recent": 9}},
    "dflash, draft vocabulary": {**DFLASH, "draft_vocab": 20},
    "dflash from the anchor": ANCHORED,
    "dflash of one block": {**DFLASH, "blocks": 1, "slots": 2},
    "dflash of taps in no order": {**DFLASH, "taps": [7, 2, 4]},
    "dflash2": DFLASH2,
    "dflash2, three taps": {**DFLASH2, "conv_kernel_size": 3, "conv_group_size": 8},
    "dflash2, windows": {**DFLASH2, **WINDOWS},
    "dflash2, draft vocabulary": {**DFLASH2, "draft_vocab": 20},
    "dflash2 from the anchor": {**DFLASH2, "sample_from_anchor": True},
    "dflash2 of taps in no order": {**DFLASH2, "taps": [7, 2, 4]},
    "lilicorr": LILICORR,
    "lilicorr, convolutions": {**LILICORR, "conv_kernel_size": 2, "conv_group_size": 4},
    "lilicorr, five candidates": {**LILICORR, "candidate_topk": 5},
    "lilicorr, draft vocabulary": {**LILICORR, "draft_vocab": 20},
    "lilicorr from the anchor": {**LILICORR, "sample_from_anchor": True},
    "dspark": DSPARK,
    "dspark, causal": {**DSPARK, "causal": True},
    "dspark, windows": {**DSPARK, **WINDOWS},
    "dspark, draft vocabulary": {**DSPARK, "draft_vocab": 20},
    "dspark without confidence": {**DSPARK, "confidence": False},
    "dspark in its places": {**DSPARK, "sample_from_anchor": False},
    "dspark, gated": {**DSPARK, "markov": "gated"},
    "dspark, recurrent": {**DSPARK, "markov": "rnn"},
    "dspark without a Markov head": {**DSPARK, "markov": "none"},
    "domino": DOMINO,
    "domino in its places": {**DOMINO, "sample_from_anchor": False, "unbiased": 2},
    "xpress": XPRESS,
    "xpress, causal": {**XPRESS, "causal": True},
    "xpress, windows": {**XPRESS, **WINDOWS},
    "xpress, draft vocabulary": {**XPRESS, "draft_vocab": 20},
    "xpress from the anchor": {**XPRESS, "sample_from_anchor": True},
    "peagle": {**PEAGLE, "norm_before_residual": True},
    "peagle with norms": {**PEAGLE, "fc_norm": True},
    "peagle of one block": {**PEAGLE, "blocks": 1},
    "peagle of taps in no order": {**PEAGLE, "taps": [6, 2, 4]},
    "mtp": {"kind": "mtp"},
    "mtp, state first": {"kind": "mtp", "hidden_first": True},
}
# the exporters that take each head
TAKERS = {
    "dflash": "vllm sglang trtllm llamacpp speculators zlab specforge",
    "dflash, causal": "vllm sglang llamacpp zlab",
    "dflash, windows": "vllm sglang speculators zlab specforge",
    "dflash, causal windows": "vllm sglang speculators zlab specforge",
    "dflash, windows and free blocks": "vllm sglang speculators zlab",
    "dflash, all causal": "vllm sglang zlab",
    "dflash, windows at the root": "vllm sglang speculators zlab specforge",
    "dflash, windows with sinks": "",
    "dflash, draft vocabulary": "vllm speculators",
    "dflash from the anchor": "speculators deepspec",
    "dflash of one block": "vllm zlab speculators",
    "dflash of taps in no order": "vllm zlab speculators",
    "dflash2": "vllm sglang llamacpp speculators zlab specforge",
    "dflash2, three taps": "vllm sglang llamacpp speculators zlab specforge",
    "dflash2, windows": "vllm sglang speculators zlab specforge",
    "dflash2, draft vocabulary": "",
    "dflash2 from the anchor": "speculators",
    "dflash2 of taps in no order": "vllm zlab speculators",
    "lilicorr": "vllm sglang",
    "lilicorr, convolutions": "vllm sglang",
    "lilicorr, five candidates": "",
    "lilicorr, draft vocabulary": "",
    "lilicorr from the anchor": "",
    "dspark": "vllm sglang trtllm llamacpp speculators deepspec specforge",
    "dspark, causal": "vllm sglang llamacpp",
    "dspark, windows": "vllm sglang speculators specforge",
    "dspark, draft vocabulary": "vllm speculators",
    "dspark without confidence": "vllm trtllm llamacpp speculators deepspec specforge",
    "dspark in its places": "vllm llamacpp speculators",
    "dspark, gated": "sglang speculators deepspec specforge",
    "dspark, recurrent": "sglang speculators deepspec specforge",
    "dspark without a Markov head": "speculators deepspec specforge",
    "domino": "sglang specforge",
    "domino in its places": "sglang specforge",
    "xpress": "vllm speculators",
    "xpress, causal": "vllm",
    "xpress, windows": "vllm speculators",
    "xpress, draft vocabulary": "speculators",
    "xpress from the anchor": "speculators",
    "peagle": "vllm speculators",
    "peagle with norms": "vllm",
    "peagle of one block": "vllm speculators",
    "peagle of taps in no order": "vllm speculators",
    "mtp": "deepseek mimo",
    "mtp, state first": "deepseek mimo",
}


def head_of(name: str, **changes: Any) -> Any:
    """Return a random head, bound to the target's embedding and LM head."""
    return random_head({**HEADS[name], **changes}, borrow_from(TARGET), FREQUENT)


@pytest.mark.parametrize(("engine", "name"), GOLDEN)
def test_names_shapes_and_keys(engine: str, name: str) -> None:
    """As the code that loads them has them."""
    shapes, config = GOLDEN[engine, name]
    layout = EXPORTERS[engine](head_of(name), TARGET)
    assert {key: tuple(tensor.shape) for key, tensor in layout.tensors.items()} == shapes
    assert {tensor.dtype for tensor in layout.tensors.values()} == {torch.float32}
    assert layout.file == "model.safetensors"
    assert layout.config == config


@pytest.mark.parametrize(
    ("name", "reads"),
    [("dspark", True), ("dspark without a Markov head", False)],
)
def test_confidence_says_what_it_reads(name: str, reads: bool) -> None:
    """The state with what the Markov head reads, or the state alone."""
    config = EXPORTERS["deepspec"](head_of(name), TARGET).config
    assert config["confidence_head_with_markov"] == reads


@pytest.mark.parametrize("name", HEADS)
def test_an_export_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """Bit by bit, in whosever names; and nothing is wrong with it."""
    target = made.write_target(tmp_path / "target")
    head = head_of(name)
    expected = head.state_dict()
    for engine in TAKERS[name].split():
        folder = tmp_path / engine
        export(head, TARGET, engine, folder)
        found = inspect(folder, target)
        assert not found.fatal, found
        assert "unknown keys" not in str(found)
        loaded: Any = read_head(folder, target)
        if "no order" in name:
            assert_same_states(head, loaded)
            continue
        tensors = loaded.state_dict()
        if head.settings.kind == "mtp":
            # MiMo's layers have biases, zeros here, and read the state first
            tensors = {key: tensor for key, tensor in tensors.items() if not key.endswith("bias")}
            if loaded.settings.hidden_first != head.settings.hidden_first:
                token, state = tensors["eh_proj.weight"].chunk(2, dim=1)
                tensors["eh_proj.weight"] = torch.cat([state, token], dim=1)
        else:
            assert without_window_end(loaded) == without_window_end(head)
        assert_equal(tensors, dict(expected))


def without_window_end(head: Any) -> dict[str, Any]:
    """Return a head's network; which rule a window was trained with is the layout's, and no config says it."""
    network = dict(head.network)
    window = network.pop("window", {})
    return {**network, **{key: value for key, value in window.items() if key != "end"}}


@torch.no_grad()
def assert_same_states(head: Any, loaded: Any) -> None:
    """Assert that both fuse features alike, which each gets in the order of its own taps."""
    assert loaded.settings.kind == head.settings.kind
    assert list(loaded.taps) == sorted(head.taps)
    assert list(loaded.taps) != list(head.taps)

    # a state of each of ten layers for five tokens
    features = made.drawn(5, 10, H)
    expected = head.fuse_taps(features[:, list(head.taps)])
    fused = loaded.fuse_taps(features[:, list(loaded.taps)])
    torch.testing.assert_close(fused, expected, rtol=1e-4, atol=1e-4)

    if head.settings.kind == "peagle":
        mask = loaded.mask_state()
        torch.testing.assert_close(mask, head.mask_state(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name", [name for name in HEADS if "one block" not in name and "no order" not in name]
)
def test_no_other_exporter_takes_it(name: str) -> None:
    """And each says why, by the method or by the setting that its engine has not."""
    head = head_of(name)
    settings = HEADS[name]
    # which a refusal may name
    names = {
        "sample_from_anchor",
        "causal",
        "window",
        "draft_vocab",
        "fc_norm",
        "confidence",
        "markov",
        "candidate_topk",
    }
    switches = names & settings.keys()
    if settings["kind"] == "dflash":
        switches.add("sample_from_anchor")
    reasons = [f"no layout for '{settings['kind']}'", "own family alone"]
    reasons += [rf"drafter\.{switch}" for switch in switches]
    words = "|".join(reasons)

    for engine in EXPORTERS.keys() - {"transformers", *TAKERS[name].split()}:
        with pytest.raises(ValueError, match=f"(?s)^{engine}: .*({words})"):
            EXPORTERS[engine](head, TARGET)


def test_both_conventions_of_dflash_are_told_apart(tmp_path: Path) -> None:
    """With the wrong one every guess moves by a position; a refusal says where else the head can go."""
    words = r"a slot names the token behind its place, .* Export to deepspec or spec"
    for engine in ("zlab", "vllm", "sglang", "llamacpp"):
        with pytest.raises(ValueError, match=words):
            EXPORTERS[engine](head_of("dflash from the anchor"), TARGET)
    words = r"a slot names the token at its own place, .* Export to zlab or speculators"
    with pytest.raises(ValueError, match=words):
        EXPORTERS["deepspec"](head_of("dflash"), TARGET)
    for engine, name, words in (
        ("zlab", "dflash", "at its own place (z-lab's"),
        ("deepspec", "dflash from the anchor", "behind its place (DeepSpec's"),
        ("speculators", "dflash", "at its own place (z-lab's"),
    ):
        export(head_of(name), TARGET, engine, tmp_path / engine)
        lines = str(inspect(tmp_path / engine)).splitlines()
        (line,) = [line for line in lines if line.startswith("slots")]
        assert words in line


@pytest.mark.parametrize(
    ("engine", "name", "changes", "words"),
    [
        ("zlab", "dflash", {"qk_norm": False}, r"drafter\.qk_norm is false"),
        (
            "zlab",
            "dflash",
            {"taps": [-1, 2]},
            r"drafter\.taps is \(-1, 2\), expected the inputs of some layers of 1 to 8",
        ),
        ("speculators", "peagle", {"blocks": 5}, "the head has 5 blocks, expected 4"),
        ("vllm", "mtp", {}, "the target is a llama, .* its own family alone, by its names.*: mimo"),
    ],
)
def test_refusals_name_what_stands_in_the_way(
    engine: str,
    name: str,
    changes: dict[str, Any],
    words: str,
) -> None:
    """What no reader has, and what would be read otherwise in silence."""
    with pytest.raises(ValueError, match=f"{engine}: {words}"):
        EXPORTERS[engine](head_of(name, **changes), TARGET)


@pytest.mark.parametrize("name", ["xpress, draft vocabulary", "xpress from the anchor"])
def test_a_refusal_of_xpress_names_who_reads_it(name: str) -> None:
    """Who reads DFlash or DSpark with such a setting may not read XPress."""
    with pytest.raises(ValueError, match="xport to speculators"):
        EXPORTERS["vllm"](head_of(name), TARGET)


def test_what_an_export_needs_of_the_target() -> None:
    """An embedding that is not scaled, and one to copy where the layout holds a copy."""
    head = head_of("dflash")
    target = head.target_head
    head.bound_to = (TargetHead(target.embedding, target.output, embed_scale=2.0),)
    with pytest.raises(ValueError, match="sglang: the target multiplies its embedding with 2"):
        EXPORTERS["sglang"](head, TARGET)

    head = head_of("dflash from the anchor")
    # a head that was loaded and not bound
    head.bound_to = ()
    with pytest.raises(
        ValueError, match=r"deepspec: a copy of the target's embedding .* call bind"
    ):
        EXPORTERS["deepspec"](head, TARGET)


# what configs say of each block's attention, by head: vLLM's order is is_causal, then causal, then by layer
STATED: dict[str, dict[str, Any]] = {
    "dflash": {"causal": False},
    "dflash, causal": {"is_causal": True, "causal": True},
    "dflash, windows": {},
    "dflash, causal windows": {"causal": True},
    "dflash, windows and free blocks": {"is_causal": False, "causal": False},
    "dflash, all causal": {"is_causal": True, "causal": True},
}


@pytest.mark.parametrize("name", STATED)
def test_configs_state_windows_and_causal_blocks(name: str) -> None:
    """By the keys that engines read, in the order in which they read them."""
    config = EXPORTERS["vllm"](head_of(name), TARGET).config
    stated = {**config["dflash_config"], **config}
    for key in ("is_causal", "causal"):
        assert (key in stated, stated.get(key)) == (key in STATED[name], STATED[name].get(key))
    kinds = ["full_attention"] * BLOCKS
    if "window" in HEADS[name]:
        kinds = ["sliding_attention"] * BLOCKS
        if "window_blocks" in HEADS[name]:
            kinds[1:] = ["full_attention"] * (BLOCKS - 1)
        assert (config["sliding_window"], config["use_sliding_window"]) == (9, True)
    assert config["layer_types"] == kinds


@pytest.mark.parametrize("engine", ["vllm", "speculators"])
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_draft_vocabulary_is_written(engine: str, name: str) -> None:
    """Offsets, a mask, and the target's rows; the Markov head reads all tokens and writes these."""
    layout = EXPORTERS[engine](head_of(f"{name}, draft vocabulary"), TARGET)
    tokens = torch.tensor(FREQUENT)
    assert layout.config["draft_vocab_size"] == 20
    assert torch.equal(layout.tensors["d2t"] + torch.arange(20), tokens)
    assert torch.equal(layout.tensors["t2d"].nonzero()[:, 0], tokens)
    assert torch.equal(layout.tensors["lm_head.weight"], made.drawn(V, H, seed=8)[tokens])
    if name == "dspark":
        assert layout.tensors["markov_head.markov_w1.weight"].shape == (V, 4)
        assert layout.tensors["markov_head.markov_w2.weight"].shape == (20, 4)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "speculators", "zlab"])
def test_the_readme_says_that_a_window_is_shorter_there(engine: str) -> None:
    """Engines move it with the slots; what was trained on the root's window sees less."""
    words = "slot j sees j + 1 tokens less"
    assert words not in EXPORTERS[engine](head_of("dflash, windows"), TARGET).serve
    serve = EXPORTERS[engine](head_of("dflash, windows at the root"), TARGET).serve
    assert (words in serve) == (engine != "speculators")


def test_a_layer_for_mimo_is_served_by_vllm() -> None:
    """Its config names the family; its layers have biases, which are zeros here."""
    target = LlamaConfig(**{**made.LLAMA, "num_hidden_layers": made.LAYERS})
    target.model_type = "mimo"
    tensors = EXPORTERS["vllm"](head_of("mtp, state first"), target).tensors
    assert not tensors["model.mtp_layers.0.self_attn.k_proj.bias"].any()
    assert torch.equal(tensors["model.embed_tokens.weight"], made.embedding())
    # the seed of the LM head that `borrow_from` gives
    assert torch.equal(tensors["lm_head.weight"], made.drawn(V, H, seed=8))


@pytest.mark.parametrize(
    ("engine", "name", "expected"),
    [
        ("vllm", "dflash", ['"method": "dflash"']),
        ("vllm", "peagle", ['"method": "eagle3", "parallel_drafting": true', "V1 model runner"]),
        ("sglang", "dflash", ["--speculative-algorithm DFLASH", "5 tokens: as many as the head"]),
        ("llamacpp", "dflash", ["--spec-type draft-dflash", "--spec-draft-n-max 5"]),
        ("speculators", "peagle", ['"parallel_drafting": true']),
    ],
)
def test_the_readme_says_how_it_is_served(
    engine: str,
    name: str,
    expected: list[str],
    tmp_path: Path,
) -> None:
    """With no longer a chain than a block names tokens: six slots, of which the first is the root's."""
    export(head_of(name), TARGET, engine, tmp_path)
    readme = (tmp_path / "README.md").read_text()
    for words in expected:
        assert words in readme

    # the mask token stands at the top or in a section
    config = json.loads((tmp_path / "config.json").read_text())
    section = config.get("dflash_config", {})
    assert config.get("mask_token_id", section.get("mask_token_id")) == 5
