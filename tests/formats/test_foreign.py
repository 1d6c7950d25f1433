"""Heads that other tools wrote become the same heads here, and nothing about them is assumed in silence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle.formats.card import model_card
from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made


def ours(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by the names that they must have here, without what heads here do not keep."""
    named = {
        name.replace("model.", "").replace("midlayer.", "layers.0."): tensor
        for name, tensor in tensors.items()
    }
    return {name: tensor for name, tensor in named.items() if name != "embed_tokens.weight"}


@pytest.mark.parametrize("name", made.LAYOUTS)
def test_every_layout_becomes_the_same_head(name: str, tmp_path: Path) -> None:
    """Bit by bit, with the taps and switches that its config means; and nothing is called broken."""
    target = made.write_target(tmp_path / "target")
    config, tensors = made.LAYOUTS[name]
    folder = made.write(tmp_path / "head", (config, tensors))
    said = import_head(folder, tmp_path / "out", target)
    head, wanted = load_head(tmp_path / "out"), ours(tensors)
    if "d2t" in wanted:
        wanted["t2d"] = made.vocabulary()["t2d"]
    found = head.state_dict()
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[part], wanted[part]) for part in wanted)
    assert head.taps == ((-1,) if "EAGLE-1" in name else made.TAPS)
    assert ("3.1" in name) == bool(getattr(head.settings, "norm_output", False))
    assert not inspect(folder, target).fatal, inspect(folder, target)
    assert ("embed_tokens.weight is left out" in said) == ("embed_tokens.weight" in tensors)


def test_a_pickle_holds_the_same(tmp_path: Path) -> None:
    """EAGLE-1's first heads are `pytorch_model.bin`."""
    head = made.eagle1(bias=True, tensor=True)
    folder = made.write(tmp_path / "head", head, binary=True)
    found = read_head(folder).state_dict()
    assert found.keys() == ours(head[1]).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in ours(head[1]).items())


def test_an_imported_head_has_a_card_and_is_no_foreign_one(tmp_path: Path) -> None:
    """What publishing reads is there, says where the head is from, and importing it again is refused."""
    folder = made.write(tmp_path / "head", made.speculators())
    said = import_head(folder, tmp_path / "out")
    assert model_card(tmp_path / "out", "me/head").count("org/target") >= 2
    made_by = json.loads((tmp_path / "out/provenance.json").read_text())["imported"]
    assert made_by["layout"] == "speculators" and all(note in said for note in made_by["notes"])
    assert torch.equal(read_head(tmp_path / "out").fc.weight, read_head(folder).fc.weight)  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="already"):
        import_head(tmp_path / "out", tmp_path / "again")


# -- what a config leaves open ----------------------------------------------------------------------------------------

OUTER, INNER = "eagle_aux_hidden_state_layer_ids", "eagle_config"


@pytest.mark.parametrize(
    ("outer", "inner", "taps"),
    [
        ([2, 4, 6], None, (2, 4, 6)),
        (None, [1, 3, 5], (2, 4, 6)),
        ([2, 4, 6], [1, 3, 5], (2, 4, 6)),
        ([1, 3, 5], None, (1, 3, 5)),
        (None, [2, 4, 6], (3, 5, 7)),
        (None, None, (2, 4, 6)),  # by the target's depth
    ],
)
def test_layer_ids_count_inputs_outside_and_outputs_inside(
    outer: list[int] | None, inner: list[int] | None, taps: tuple[int, ...], tmp_path: Path
) -> None:
    """The two conventions of the field."""
    nested = {INNER: {OUTER: inner} if inner else None}
    folder = made.write(
        tmp_path / "head", made.saying(made.safeailab(), **{OUTER: outer}, **nested)
    )
    target = made.write_target(tmp_path / "target")
    assert read_head(folder, target).taps == taps
    if outer or inner:
        assert read_head(folder).taps == taps
    assert read_head(folder, target, taps=(1, 2, 3)).taps == (1, 2, 3)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({OUTER: [2, 4, 6], INNER: {OUTER: [2, 4, 6]}}, "disagree"),
        ({}, "no layer ids"),
        ({OUTER: [2, 4]}, "expected 3 different"),
        ({OUTER: [2, 4, 4]}, "expected 3 different"),
        ({OUTER: [2, 4, 9.5]}, "whole numbers"),
        ({OUTER: [2, 4, "6"]}, "whole numbers"),
    ],
)
def test_layer_ids_that_mean_nothing_are_refused(
    changed: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Unless the user says which layers are meant."""
    folder = made.write(tmp_path / "head", made.saying(made.safeailab(), **changed))
    with pytest.raises(ValueError, match=says):
        read_head(folder)


def test_layer_ids_beyond_the_target_are_refused(tmp_path: Path) -> None:
    """The last input is that of the last layer."""
    folder = made.write(
        tmp_path / "head", made.saying(made.safeailab(), **{OUTER: [2, 4, made.LAYERS]})
    )
    assert read_head(folder).taps == (2, 4, made.LAYERS)
    with pytest.raises(ValueError, match=f"of 0 to {made.LAYERS - 1}"):
        read_head(folder, made.write_target(tmp_path / "target"))


@pytest.mark.parametrize(
    ("says", "tensor", "outcome"),
    [
        (True, "random", True),
        (None, "random", True),
        (False, None, False),
        (None, None, False),
        (None, "zeros", False),
        (True, None, "fc has a bias, and fc.bias is missing"),
        (False, "random", "bias is false, and fc.bias is there"),
    ],
)
def test_the_bias_of_eagle1(
    says: bool | None, tensor: str | None, outcome: bool | str, tmp_path: Path
) -> None:
    """What the file holds decides, and its config must not deny it."""
    config, tensors = made.eagle1(says, tensor is not None)
    if tensor == "zeros":
        tensors["fc.bias"] = torch.zeros(made.H)
    folder = made.write(tmp_path / "head", (config, tensors))
    if isinstance(outcome, str):
        with pytest.raises(ValueError, match=outcome):
            read_head(folder)
    else:
        assert read_head(folder).settings.fc_bias is outcome
        assert says is not None or "no `bias`" in import_head(folder, tmp_path / "out")


def test_every_default_is_told(tmp_path: Path) -> None:
    """Keys that are not there, and tensors that are not taken."""
    gone = dict.fromkeys(
        ("rope_theta", "head_dim", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings")
    )
    head = made.saying(made.eagle1(), **gone, num_attention_heads=made.HEADS)
    head[1]["layers.0.self_attn.k_proj.weight"] = head[1]["layers.0.self_attn.v_proj.weight"] = (
        made.drawn(made.H, made.H)
    )
    head[1]["rotary_emb.inv_freq"] = torch.ones(4)
    head[1]["lm_head.weight"] = made.drawn(made.V, made.H, seed=8)
    folder = made.write(tmp_path / "head", made.saying(head, some_new_switch=True))
    said = import_head(folder, tmp_path / "out")
    for told in (
        *gone,
        "some_new_switch",
        "rotary_emb.inv_freq",
        "lm_head.weight is left out",
        "embed_tokens.weight is left",
    ):
        assert told in said, told


def test_what_is_borrowed_is_compared_with_the_target(tmp_path: Path) -> None:
    """Another embedding is told, another LM head refused, other sizes too; rounded ones are equal."""
    target = made.write_target(tmp_path / "target")
    config, tensors = made.eagle1()
    rounded = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert "they are equal" in import_head(
        made.write(tmp_path / "a", (config, rounded)), tmp_path / "out", target
    )
    tensors["embed_tokens.weight"][3] += 1
    folder = made.write(tmp_path / "b", (config, tensors))
    assert f"1 of {made.V} rows DIFFER" in import_head(folder, tmp_path / "other", target)
    tensors["lm_head.weight"] = made.drawn(made.V, made.H, seed=5)
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        read_head(made.write(tmp_path / "c", (config, tensors)), target)
    with pytest.raises(ValueError, match="name the right target"):
        read_head(folder, made.write_target(tmp_path / "wide", hidden_size=32))


# -- what is not a head of this project -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["EAGLE-1 with bias", "SafeAILab EAGLE-3", "speculators EAGLE-3.1", "ModelOpt"]
)
def test_every_missing_tensor_is_named_and_so_is_every_wrong_size(
    name: str, tmp_path: Path
) -> None:
    """One after the other, and all at once."""
    head = made.saying(made.LAYOUTS[name], **({"bias": True} if name.startswith("EAGLE-1") else {}))
    needed = [part for part in head[1] if part not in ("embed_tokens.weight", "t2d")]
    for part in needed:
        shown = part.replace("midlayer.", "layers.0.")
        with pytest.raises(ValueError, match=shown.replace(".", r"\.")):
            read_head(made.write(tmp_path / "head", made.without(head, part)), taps=taps_of(name))
        wrong = (head[0], {**head[1], part: torch.zeros(3, 5, dtype=head[1][part].dtype)})
        with pytest.raises(ValueError, match=part.replace(".", r"\.")):
            read_head(made.write(tmp_path / "head", wrong), taps=taps_of(name))
    with pytest.raises(ValueError) as refused:
        read_head(
            made.write(
                tmp_path / "head",
                (head[0], {**made.without(head, *needed[2:6])[1], "odd.weight": torch.ones(2)}),
            )
        )
    assert all(
        part.replace("midlayer.", "layers.0.") in str(refused.value)
        for part in (*needed[2:6], "odd.weight")
    )


def taps_of(name: str) -> tuple[int, ...] | None:
    """What to say for a layout that does not."""
    return None if "EAGLE-1" in name else made.TAPS


@pytest.mark.parametrize(
    ("tensor", "changed", "what"),
    [
        ("mask_hidden", {}, "P-EAGLE"),
        ("markov_head.markov_w1.weight", {}, "DSpark"),
        ("layers.1.mlp.up_proj.weight", {}, "a second layer"),
        ("layers.0.self_attn.q_proj.bias", {}, "qkv_bias"),
        ("layers.0.self_attn.q_norm.weight", {}, "Qwen3"),
        ("layers.0.self_attn.kv_a_proj_with_mqa.weight", {}, "latent attention"),
        ("input_norm.weight", {}, "norm_before_fc"),
        ("parallel_draft_heads.0.medusa_layers.0.linear.weight", {}, "Medusa"),
        ("fc.bias", {}, "fc.bias is not zero"),
        ("lm_head.bias", {}, "a bias in the LM head"),
        ("layers.0.mlp.up_proj.weight_scale", {}, "quantised"),
        (None, {"norm_before_fc": True}, "norm_before_fc is True"),
        (None, {"target_hidden_size": 32}, "target_hidden_size is 32"),
        (None, {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        (None, {"sliding_window": 32}, "sliding_window is 32"),
        (None, {"draft_vocab_size": made.V + 3}, "more than the vocabulary"),
        (None, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (None, {"quantization_config": {"bits": 4}}, "quantization_config"),
        (None, {"rope_parameters": {"rope_theta": 5e5}}, "rope_theta is 10000, but 500000"),
        (None, {"fc_norm": True}, "fc_norm is True"),
        (
            None,
            {"dflash_config": {"mask_token_id": 3}},
            r"a DFlash head, cannot become .*(\n.*)*no block_size",
        ),
        (
            None,
            {"speculators_model_type": "peagle"},
            r"a P-EAGLE head, cannot become .*(\n.*)*no mask_token_id",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_by_its_name(
    tensor: str | None, changed: dict[str, Any], what: str, tmp_path: Path
) -> None:
    """And `inspect` tells the same without failing."""
    config, tensors = made.saying(made.specforge(), **changed)
    folder = made.write(
        tmp_path / "head", (config, {**tensors, **({tensor: made.drawn(made.H)} if tensor else {})})
    )
    with pytest.raises(ValueError, match=what):
        read_head(folder)
    assert inspect(folder).findings


def test_a_head_of_medusa_is_recognised(tmp_path: Path) -> None:
    """It has no block at all."""
    tensors = {
        "0.0.linear.weight": made.drawn(4, 4),
        "0.0.linear.bias": made.drawn(4),
        "0.1.weight": made.drawn(9, 4),
    }
    folder = made.write(
        tmp_path / "head", ({"medusa_num_heads": 1, "model_type": "medusa"}, tensors)
    )
    assert read_head(folder).settings.kind == "medusa"
    assert "Medusa" in inspect(folder).kind


VOCABULARY = made.vocabulary()


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"d2t": made.drafts()}, "d2t holds token ids"),
        ({"d2t": VOCABULARY["d2t"] + made.V}, "leads to token"),
        ({"d2t": -VOCABULARY["d2t"] - 1}, "leads to token -"),
        (
            {"d2t": VOCABULARY["d2t"] - torch.eye(made.D, dtype=torch.long)[5]},
            "to some tokens twice",
        ),
        ({"d2t": VOCABULARY["d2t"].float()}, "d2t is in torch.float32"),
        ({"t2d": ~VOCABULARY["t2d"]}, "t2d marks 21 tokens"),
        ({"t2d": VOCABULARY["t2d"].roll(1)}, f"t2d marks {made.D} tokens"),
    ],
)
def test_a_wrong_draft_vocabulary_is_refused(
    changed: dict[str, Tensor], says: str, tmp_path: Path
) -> None:
    """Token ids in place of offsets, offsets that lead elsewhere, and a mask of other tokens."""
    config, tensors = made.specforge()
    with pytest.raises(ValueError, match=says):
        read_head(made.write(tmp_path / "head", (config, {**tensors, **changed})))
