"""EAGLE heads that other tools wrote become the same heads here, and every default that is assumed is named."""

# H hidden, V vocabulary, D draft vocabulary

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.formats.card import model_card
from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made
from tests.formats.make_heads import assert_equal, change_head

H = made.H
V = made.V
# ids of the layers, as inputs at the top of a config and as outputs in its section
OUTER = "eagle_aux_hidden_state_layer_ids"
INNER = "eagle_config"


def rename(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names that they have here, without the embedding, which heads here do not keep."""
    renamed = {}
    for name, tensor in tensors.items():
        ours = name.replace("model.", "").replace("midlayer.", "layers.0.")
        if ours != "embed_tokens.weight":
            renamed[ours] = tensor
    return renamed


@pytest.mark.parametrize("name", made.LAYOUTS)
def test_every_layout_becomes_the_same_head(name: str, tmp_path: Path) -> None:
    """Bit by bit, with the taps and switches that its config means; and nothing is called broken."""
    target = made.write_target(tmp_path / "target")
    tensors = made.LAYOUTS[name][1]
    folder = made.write(tmp_path / "head", made.LAYOUTS[name])
    message = import_head(folder, tmp_path / "out", target)
    head = load_head(tmp_path / "out")
    expected = rename(tensors)
    if "d2t" in expected:
        # the mask of the draft vocabulary is made where a layout has none
        expected["t2d"] = made.vocabulary()["t2d"]

    assert_equal(head.state_dict(), expected)
    assert head.taps == ((-1,) if "EAGLE-1" in name else made.TAPS)
    has_norms = "3.1" in name or "default" in name
    assert has_norms == bool(getattr(head.settings, "norm_output", False))
    assert ("embed_tokens.weight is left out" in message) == ("embed_tokens.weight" in tensors)
    for known_target in (None, target):
        assert not inspect(folder, known_target).fatal


def test_a_pickle_holds_the_same(tmp_path: Path) -> None:
    """EAGLE-1's first heads are `pytorch_model.bin`."""
    head = made.eagle1(bias=True, tensor=True)
    folder = made.write(tmp_path / "head", head, binary=True)
    assert_equal(read_head(folder).state_dict(), rename(head[1]))


def test_an_imported_head_has_a_card_and_is_no_foreign_one(tmp_path: Path) -> None:
    """What publishing reads is there, says where the head is from, and importing it again is refused."""
    folder = made.write(tmp_path / "head", made.speculators())
    out = tmp_path / "out"
    message = import_head(folder, out)
    assert model_card(out, "me/head").count("org/target") >= 2

    record = json.loads((out / "provenance.json").read_text())["imported"]
    assert record["layout"] == "speculators"
    assert all(note in message for note in record["notes"])
    assert_equal(read_head(out).state_dict(), read_head(folder).state_dict())
    with pytest.raises(ValueError, match="already"):
        import_head(out, tmp_path / "again")


# -- what a config leaves open ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "taps"),
    [
        ([2, 4, 6], None, (2, 4, 6)),
        (None, [1, 3, 5], (2, 4, 6)),
        ([2, 4, 6], [1, 3, 5], (2, 4, 6)),
        ([1, 3, 5], None, (1, 3, 5)),
        # by the target's depth
        (None, None, (2, 4, 6)),
    ],
)
def test_layer_ids_count_inputs_outside_and_outputs_inside(
    outer: list[int] | None,
    inner: list[int] | None,
    taps: tuple[int, ...],
    tmp_path: Path,
) -> None:
    """The two conventions of the field; what the user says comes first."""
    section = {OUTER: inner} if inner else None
    head = made.saying(made.safeailab(), **{OUTER: outer, INNER: section})
    folder = made.write(tmp_path / "head", head)
    target = made.write_target(tmp_path / "target")

    assert read_head(folder, target).taps == taps
    assert read_head(folder, target, taps=(1, 2, 3)).taps == (1, 2, 3)
    if outer or inner:
        assert read_head(folder).taps == taps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({OUTER: [2, 4, 6], INNER: {OUTER: [2, 4, 6]}}, "disagree"),
        ({}, "no layer ids"),
        ({OUTER: [2, 4]}, "expected 3 different"),
        ({OUTER: [2, 4, 4]}, "expected 3 different"),
        ({OUTER: [2, 4, "6"]}, "whole numbers"),
    ],
)
def test_layer_ids_that_mean_nothing_are_refused(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    """Unless the user says which layers are meant."""
    folder = made.write(tmp_path / "head", made.saying(made.safeailab(), **changes))
    with pytest.raises(ValueError, match=words):
        read_head(folder)


def test_layer_ids_beyond_the_target_are_refused(tmp_path: Path) -> None:
    """The last input is that of the last layer."""
    head = made.saying(made.safeailab(), **{OUTER: [2, 4, made.LAYERS]})
    folder = made.write(tmp_path / "head", head)
    assert read_head(folder).taps == (2, 4, made.LAYERS)
    with pytest.raises(ValueError, match=f"of 0 to {made.LAYERS - 1}"):
        read_head(folder, made.write_target(tmp_path / "target"))


@pytest.mark.parametrize(
    ("said", "tensor", "expected"),
    [
        (True, made.drawn(H), True),
        (None, made.drawn(H), True),
        (False, None, False),
        (None, None, False),
        (None, torch.zeros(H), False),
        (True, None, "fc has a bias, and fc.bias is missing"),
        (False, made.drawn(H), "bias is false, and fc.bias is there"),
    ],
)
def test_the_bias_of_eagle1(
    said: bool | None,
    tensor: Tensor | None,
    expected: bool | str,
    tmp_path: Path,
) -> None:
    """What the file holds decides, and its config must not deny it."""
    config, tensors = made.eagle1(said)
    if tensor is not None:
        tensors["fc.bias"] = tensor
    folder = made.write(tmp_path / "head", (config, tensors))
    if isinstance(expected, str):
        with pytest.raises(ValueError, match=expected):
            read_head(folder)
    else:
        assert read_head(folder).settings.fc_bias is expected
        assert ("no `bias`" in import_head(folder, tmp_path / "out")) == (said is None)


def test_every_default_is_named(tmp_path: Path) -> None:
    """Keys that are missing, and tensors that are not taken."""
    missing = (
        "rope_theta",
        "head_dim",
        "num_key_value_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    )
    # without num_key_value_heads each query has a key of its own
    square = made.drawn(H, H)
    changes: dict[str, Any] = {
        **dict.fromkeys(missing),
        "layers.0.self_attn.k_proj.weight": square,
        "layers.0.self_attn.v_proj.weight": square,
        "rotary_emb.inv_freq": torch.ones(4),
        "lm_head.weight": made.drawn(V, H, seed=8),
        "some_new_switch": True,
    }
    head = change_head(made.eagle1(), changes)
    message = import_head(made.write(tmp_path / "head", head), tmp_path / "out")

    for words in (
        *missing,
        "some_new_switch",
        "rotary_emb.inv_freq",
        "lm_head.weight is left out",
        "embed_tokens.weight is left",
    ):
        assert words in message


def test_what_is_borrowed_is_compared_with_the_target(tmp_path: Path) -> None:
    """Another embedding is named, another LM head refused, other sizes too; rounded ones are equal."""
    target = made.write_target(tmp_path / "target")
    config, tensors = made.eagle1()
    # published heads are in half precision, and their targets too
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    folder = made.write(tmp_path / "rounded", (config, rounded))

    assert "they are equal" in import_head(folder, tmp_path / "out", target)

    # an embedding that differs is named, as heads here use the target's
    tensors["embed_tokens.weight"][3] += 1
    folder = made.write(tmp_path / "embedding", (config, tensors))
    assert f"1 of {V} rows DIFFER" in import_head(folder, tmp_path / "other", target)
    with pytest.raises(ValueError, match="name the right target"):
        read_head(folder, made.write_target(tmp_path / "wide", hidden_size=32))

    tensors["lm_head.weight"] = made.drawn(V, H, seed=5)
    folder = made.write(tmp_path / "lm_head", (config, tensors))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs"):
        read_head(folder, target)


# -- what is not a head of this project -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["EAGLE-1 with bias", "speculators EAGLE-3.1"])
def test_every_missing_tensor_is_named_and_so_is_every_wrong_size(
    name: str, tmp_path: Path
) -> None:
    """One after the other, and all at once."""
    head = made.LAYOUTS[name]
    if name == "EAGLE-1 with bias":
        head = made.saying(head, bias=True)
    folder = tmp_path / "head"
    needed = [tensor for tensor in head[1] if tensor not in ("embed_tokens.weight", "t2d")]
    for tensor in needed:
        wrong = torch.zeros(3, 5, dtype=head[1][tensor].dtype)
        # missing, then of a size that no tensor has
        for value in (None, wrong):
            made.write(folder, change_head(head, {tensor: value}))
            with pytest.raises(ValueError, match=re.escape(tensor)):
                read_head(folder)
    # several at once, and one too many
    some = needed[2:6]
    odd = {"odd.weight": torch.ones(2)}
    made.write(folder, change_head(head, {**dict.fromkeys(some), **odd}))

    with pytest.raises(ValueError) as refusal:
        read_head(folder)
    for tensor in (*some, "odd.weight"):
        assert tensor in str(refusal.value)


UNREADABLE_TENSORS = {
    "mask_hidden": "P-EAGLE",
    "markov_head.markov_w1.weight": "DSpark",
    "layers.1.mlp.up_proj.weight": "a second layer",
    "layers.0.self_attn.q_proj.bias": "qkv_bias",
    "layers.0.self_attn.q_norm.weight": "Qwen3",
    "layers.0.self_attn.kv_a_proj_with_mqa.weight": "latent attention",
    "input_norm.weight": "norm_before_fc",
    "parallel_draft_heads.0.medusa_layers.0.linear.weight": "Medusa",
    "fc.bias": "fc.bias is not zero",
    "lm_head.bias": "a bias in the LM head",
    "layers.0.mlp.up_proj.weight_scale": "quantised",
}
UNREADABLE: list[tuple[dict[str, Any], str]] = [
    *[({name: made.drawn(H)}, words) for name, words in UNREADABLE_TENSORS.items()],
    ({"norm_before_fc": True}, "norm_before_fc is True"),
    ({"target_hidden_size": 32}, "target_hidden_size is 32"),
    ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
    ({"sliding_window": 32}, "sliding_window is 32"),
    ({"draft_vocab_size": V + 3}, "more than the vocabulary"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"is_neox_style": False}, "is_neox_style is False"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000, but 500000"),
    ({"fc_norm": True}, "fc_norm is True"),
    ({"dflash_config": {"mask_token_id": 3}}, r"a DFlash head, cannot become .*no block_size"),
    ({"speculators_model_type": "peagle"}, r"a P-EAGLE head, cannot become .*no mask_token_id"),
    # token ids in place of offsets, offsets that lead elsewhere, a mask of other tokens
    ({"d2t": made.drafts()}, "d2t holds token ids"),
    ({"d2t": lambda offsets: offsets + V}, "leads to token"),
    ({"d2t": lambda offsets: -offsets - 1}, "leads to token -"),
    ({"d2t": lambda offsets: offsets - torch.eye(made.D)[5].long()}, "to some tokens twice"),
    ({"d2t": torch.Tensor.float}, "d2t is in torch.float32"),
    ({"t2d": torch.logical_not}, f"t2d marks {V - made.D} tokens"),
    ({"t2d": lambda mask: mask.roll(1)}, f"t2d marks {made.D} tokens"),
]


@pytest.mark.parametrize(("changes", "words"), UNREADABLE)
def test_what_has_no_counterpart_is_refused_by_its_name(
    changes: dict[str, Any],
    words: str,
    tmp_path: Path,
) -> None:
    """And `inspect` finds something without failing."""
    folder = made.write(tmp_path / "head", change_head(made.specforge(), changes))
    with pytest.raises(ValueError, match=f"(?s){words}"):
        read_head(folder)
    assert inspect(folder).findings
