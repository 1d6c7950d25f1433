"""Block drafters and MTP layers as other tools write them: what is read, what is taken by default, what is refused."""

# H hidden, V vocabulary

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.drafters.parts.window import Window
from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made
from tests.block_heads import (
    LAYOUTS,
    SLIDING,
    deepspec,
    domino,
    dspark,
    peagle,
    speculators,
    speculators_dspark,
    zlab,
)
from tests.formats.hostile_place import Code
from tests.formats.make_heads import assert_refused, change_head

H = made.H
V = made.V


def write_target_of(config: dict[str, Any], folder: Path) -> str:
    """Write a target as deep as the config of an MTP layer says, and of the usual depth for other heads."""
    # an MTP layer is the one after the last of its target
    depth = made.LAYERS
    if "num_nextn_predict_layers" in config:
        depth = config["num_hidden_layers"]
    return made.write_target(folder / "target", num_hidden_layers=depth)


def is_one_of(tensor: torch.Tensor, others: Any) -> bool:
    """Return whether a tensor has the values of one of the others."""
    return any(torch.equal(tensor, other) for other in others)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_read(name: str, tmp_path: Path) -> None:
    """Each becomes one of the head's, bit by bit, or is the target's and left out."""
    (config, tensors), layout, expected = LAYOUTS[name]
    target = write_target_of(config, tmp_path)
    folder = made.write(tmp_path / "theirs", (config, tensors))
    found = inspect(folder, target)

    assert not found.fatal, found
    assert found.layout == layout

    message = import_head(folder, tmp_path / "ours", target)
    head = load_head(tmp_path / "ours")
    assert {key: getattr(head.settings, key) for key in expected} == expected

    ours = head.state_dict()
    used = [key for key, tensor in tensors.items() if is_one_of(tensor, ours.values())]
    # the mask of the draft vocabulary follows from its offsets
    assert len(used) >= len(ours.keys() - {"t2d"})

    unused = tensors.keys() - used
    for key in unused:
        is_borrowed = key.endswith(("embed_tokens.weight", "head.weight"))
        is_of_target = "whole" in name and key.startswith("model.")
        assert is_borrowed or is_of_target, key
    assert "equal" in message or not unused


MIXED = speculators(transformer_layer_config=SLIDING), "", {}
NO_IDS = change_head(
    zlab(),
    {"dflash_config/target_layer_ids": None, "fc.weight": made.drawn(H, 2 * H)},
)
DEFAULTS = [
    (zlab(), "no sample_from_anchor: false, as z-lab/dflash takes it"),
    (deepspec(), "no sample_from_anchor: true, as deepseek-ai/DeepSpec takes it"),
    (speculators(), "no sample_from_anchor: false, as speculators takes it"),
    (speculators_dspark(), "no sample_from_anchor: true, as speculators takes it"),
    (dspark(), "no sample_from_anchor: true, as sgl-project/SpecForge takes it"),
    (domino(), "no shift_label: false, as sgl-project/SpecForge takes it"),
    (peagle(norm_before_residual=None), "no norm_before_residual: false"),
    (NO_IDS, "no target_layer_ids: taps (2, 7), as that code takes them of 9 layers"),
]


@pytest.mark.parametrize(("head", "words"), DEFAULTS)
def test_a_default_is_named(
    head: made.Head,
    words: str,
    tmp_path: Path,
) -> None:
    """Writers' defaults differ, and a wrong one moves every guess to another position."""
    assert f"by default: {words}" in str(inspect(made.write(tmp_path / "head", head)))


@pytest.mark.parametrize("bonus", [True, False])
def test_deepspecs_opposite_key_is_enough(bonus: bool, tmp_path: Path) -> None:
    """Each slot predicts the next token unless the anchor's is a bonus."""
    folder = made.write(tmp_path / "head", deepspec(dspark_bonus_anchor=bonus))
    head: Any = read_head(folder, made.write_target(tmp_path / "target"))
    assert head.settings.sample_from_anchor is not bonus


@pytest.mark.parametrize(
    ("nested", "causal"),
    [({}, True), ({"causal": True}, True), ({"causal": False}, False)],
)
def test_another_name_of_causal_blocks_is_read(
    nested: dict[str, Any],
    causal: bool,
    tmp_path: Path,
) -> None:
    """Heads for Nemotron have both; `causal` decides, as vLLM reads it alone."""
    made_head = zlab(dflash_query_causal=True, dflash_config=nested)
    folder = made.write(tmp_path / "head", made_head)
    head: Any = read_head(folder, made.write_target(tmp_path / "target"))
    assert head.settings.causal is causal
    assert "dflash_query_causal" not in str(inspect(folder))


# of a config: layer_types, the blocks that slide by it, and which of them are causal
FORCED: list[tuple[list[str], tuple[int, ...] | None, bool | str]] = [
    (["full_attention"] * 2, None, False),
    (["sliding_attention"] * 2, None, "window"),
    (["sliding_attention", "full_attention"], (0,), "window"),
]


@pytest.mark.parametrize(("types", "blocks", "causal"), FORCED)
def test_use_swa_is_read_as_vllm_reads_it(
    types: list[str],
    blocks: tuple[int, ...] | None,
    causal: bool | str,
    tmp_path: Path,
) -> None:
    """MiMo's config does not say whether blocks are causal; layer_types that name sliding layers decide."""
    made_head = zlab(layer_types=types, sliding_window=9, dflash_config={"use_swa": True})
    folder = made.write(tmp_path / "head", made_head)
    head: Any = read_head(folder, made.write_target(tmp_path / "target"))
    assert head.settings.window == Window(recent=9)
    assert (head.settings.window_blocks, head.settings.causal) == (blocks, causal)


@pytest.mark.parametrize(
    "name",
    ["output_multiplier", "input_embedding_scale", "attention_value_scale"],
)
def test_a_factor_is_refused_unless_it_is_one(name: str, tmp_path: Path) -> None:
    """As the multiplication by one changes nothing."""
    assert read_head(made.write(tmp_path / "one", zlab(dflash_config={name: 1.0})))
    folder = made.write(tmp_path / "other", zlab(dflash_config={name: 0.5}))
    assert_refused(folder, f"{name} is 0.5, which no block here can be")


def test_sample_from_anchor_must_be_written_for_engines(tmp_path: Path) -> None:
    """Where it is missing, speculators reads DSpark's slots as vLLM and llama.cpp do not."""
    trap = "sample_from_anchor is not written: some readers take true and others false"
    unsaid = made.write(tmp_path / "unsaid", speculators_dspark())
    assert f"{trap}, and every token stands one place off [vLLM, llama.cpp]" in str(inspect(unsaid))
    for head in (speculators_dspark(sample_from_anchor=True), speculators(), dspark(), zlab()):
        assert trap not in str(inspect(made.write(tmp_path / "said", head)))


def test_the_mask_of_a_draft_vocabulary_follows_from_its_offsets(tmp_path: Path) -> None:
    """A P-EAGLE head without t2d gets it from d2t."""
    head = read_head(made.write(tmp_path / "head", made.without(peagle(), "t2d")))
    assert torch.equal(head.state_dict()["t2d"], made.vocabulary()["t2d"])
    assert head.state_dict()["d2t"].dtype == torch.long


IDS = "dflash_config/target_layer_ids"
MASK = "dflash_config/mask_token_id"
MTP_LAYER = "model.mtp_layers.1.input_proj.weight"
REDUCED = "speculators, draft vocabulary"
W2 = "markov_head.markov_w2.weight"
SINK = "layers.1.self_attn.attention_sink_bias"
LATENT = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.3.mlp.experts.0.up_proj.weight"
BOTH_ANCHORS = {"sample_from_anchor": True, "dspark_bonus_anchor": True}
# layout, what is changed in it, and a word of the refusal
DAMAGED: list[tuple[str, dict[str, Any], str]] = [
    ("z-lab", {MASK: None}, "no mask_token_id"),
    ("z-lab", {MASK: V}, f"has {V} tokens"),
    ("z-lab", {"dflash_config/use_swa": True}, "no sliding_window says how far"),
    ("z-lab", {"use_sliding_window": True, "layer_types": None}, "layer_types is"),
    ("z-lab, windows", {"sliding_window": 3}, "window.recent is 3, expected at least slots, 4"),
    ("z-lab, windows", {"layer_types": ["sliding_attention"]}, "1 layer_types for 2 layers"),
    ("z-lab, windows", {"layer_types": ["chunked_attention"] * 2}, "layer_types is"),
    (REDUCED, {"d2t": None}, "d2t is missing"),
    (REDUCED, {"d2t": lambda offsets: made.drafts()}, "d2t holds token ids, expected offsets"),
    (REDUCED, {"t2d": torch.logical_not}, "t2d marks"),
    (REDUCED, {"lm_head.weight": lambda weight: weight.flip(0)}, "differs from the target's in"),
    (REDUCED, {"draft_vocab_size": V + 1}, f"draft_vocab_size is {V + 1}"),
    ("speculators' DSpark, draft vocabulary", {W2: made.drawn(V, 4)}, f"expected [{made.D}, 4]"),
    ("z-lab", {SINK: made.drawn(2)}, "attention sinks"),
    ("z-lab", {"dflash_config/attention_sink_bias": True}, "attention_sink_bias is True"),
    ("z-lab", {IDS: [1, 3, 8]}, "behind the last"),
    ("z-lab", {IDS: [1, 3]}, "expected [16, 32]"),
    ("z-lab", {"block_size": None}, "no block_size"),
    ("z-lab", {"num_key_value_heads": 3}, "heads cannot share 3 key-value heads"),
    ("z-lab", {"num_hidden_layers": 3}, "says 3 layers, the file holds 2"),
    ("z-lab", {"d2t": torch.arange(9)}, f"d2t is [9], expected [{V}]"),
    ("z-lab", {"layers.0.self_attn.q_proj.bias": made.drawn(16)}, "q_proj.bias"),
    ("z-lab", {"fc.weight": lambda weight: weight.fill_(torch.nan)}, "not finite"),
    ("z-lab", {"is_neox_style": False}, "is_neox_style is False, which no head here can be"),
    (
        "speculators",
        {"transformer_layer_config/rope_is_neox_style": False},
        "rope_is_neox_style is False, which no head here can be",
    ),
    ("DeepSpec", {"markov_rank": 4}, "markov_rank is 4, and markov_head"),
    ("DeepSpec", {"enable_confidence_head": True}, "enable_confidence_head is true"),
    (
        "DeepSpec",
        {"lm_head.weight": lambda weight: weight.add_(1)},
        "lm_head.weight differs from the target's",
    ),
    ("DeepSpec", BOTH_ANCHORS, "sample_from_anchor and dspark_bonus_anchor are both True"),
    ("DSpark", {"markov_head.markov_w2.weight": None}, "markov_w2.weight is missing"),
    ("DSpark", {"dflash_config/markov_rank": 5}, "is 5, the tensors have 4"),
    ("DSpark", {"dflash_config/markov_head_type": "rnn"}, "are vanilla"),
    ("DSpark", {"confidence_head.proj.weight": made.drawn(1, H)}, "reads states alone"),
    ("DSpark, flat", {"confidence_proj.weight": None}, "enable_confidence_head is true"),
    (
        "DSpark, flat",
        {"dflash_config/shift_label": False, "sample_from_anchor": True},
        "label False",
    ),
    ("Domino, shifted", {"sample_from_anchor": False}, "and shift_label True"),
    ("speculators", {"aux_hidden_state_layer_ids": None}, "no ids of the layers"),
    ("P-EAGLE", {"pard_token": 4}, "the mask tokens disagree"),
    ("P-EAGLE", {"d2t": None}, "d2t is missing"),
    ("P-EAGLE", {"t2d": torch.logical_not}, "t2d marks"),
    ("P-EAGLE", {"d2t": lambda offsets: offsets + 30}, "d2t leads to token"),
    ("P-EAGLE", {"d2t": made.drafts() + V - made.drafts()[-1]}, "d2t leads to token"),
    ("P-EAGLE", {"norm_before_fc": True}, "norm_before_fc is True"),
    (
        "P-EAGLE",
        {"embed_tokens.weight": lambda weight: weight + 1},
        "Another target, or trained?",
    ),
    ("MiMo", {MTP_LAYER: made.drawn(H, 2 * H)}, "it holds 2 such layers"),
    ("DeepSeek", {LATENT: made.drawn(9, H)}, "multi-head latent attention"),
    ("DeepSeek", {EXPERT: made.drawn(9, H)}, "a mixture of experts"),
]


@pytest.mark.parametrize(("name", "changes", "words"), DAMAGED)
def test_a_damaged_head_is_refused(
    name: str,
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    """By inspect and import alike, with what is wrong in it."""
    head = change_head(LAYOUTS[name][0], changes)
    target = write_target_of(head[0], tmp_path)
    assert_refused(made.write(tmp_path / "head", head), words, target)


def test_inspect_says_that_an_import_would_fail(tmp_path: Path) -> None:
    """Where the head is sound, and only this project has no counterpart of a part of it."""
    head = change_head(zlab(), {SINK: made.drawn(2)})
    found = inspect(made.write(tmp_path / "head", head))
    assert not found.fatal
    assert "no head here has that. `eagle import` refuses the head for it" in str(found)


@pytest.mark.parametrize("head", [zlab(), dspark()])
def test_a_mask_row_beside_a_head_is_refused(head: made.Head, tmp_path: Path) -> None:
    """vLLM puts that file in place of the target's row; it is not passed over, and its pickle does not run."""
    folder = made.write(tmp_path / "theirs", head)
    # which the pickle would make if it were loaded
    marker = tmp_path / "marker"
    assert not inspect(folder).fatal

    torch.save({"embedding": Code(marker), "mask_token_id": 3}, folder / "mask_embedding.pt")
    assert inspect(folder).fatal
    assert_refused(folder, "mask_embedding.pt lies beside it")
    assert not marker.exists()


READ_OTHERWISE = [
    ("ModelOpt, windows", "use_swa alone makes its layers slide", "SGLang"),
    (REDUCED, "it drafts a part of the vocabulary", "SGLang"),
    ("speculators, windows", "slot j sees j + 1 tokens less of the context", "vLLM"),
    ("speculators, mixed windows", "vLLM makes all layers of such a head causal", "vLLM"),
]


@pytest.mark.parametrize(("name", "words", "engine"), READ_OTHERWISE)
def test_windows_that_engines_read_otherwise_are_named(
    name: str,
    words: str,
    engine: str,
    tmp_path: Path,
) -> None:
    """Keys that an engine does not read, another window in training, and layers that become causal."""
    for other, (head, _, _) in {**LAYOUTS, "speculators, mixed windows": MIXED}.items():
        if other in (name, "z-lab, windows", "z-lab"):
            found = str(inspect(made.write(tmp_path / other.replace("/", " "), head)))
            lines = [line for line in found.splitlines() if words in line]
            assert bool(lines) == (other == name)
            assert all(f"[{engine}]" in line for line in lines)


def test_rotary_positions_of_halves_are_read(tmp_path: Path) -> None:
    """The key that refuses heads which rotate neighbours says nothing new where it is true."""
    folder = made.write(tmp_path / "head", change_head(zlab(), {"is_neox_style": True}))
    assert read_head(folder)
    assert "is_neox_style" not in str(inspect(folder))
