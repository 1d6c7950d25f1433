"""Block drafters and MTP layers as other tools write them: what is read, what is taken by default, what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle.formats.checkpoint import load_head
from eagle.formats.reading.foreign import import_head, inspect, read_head
from tests import foreign_heads as made
from tests.block_heads import (
    LAYOUTS,
    deepspec,
    domino,
    dspark,
    peagle,
    speculators,
    speculators_dspark,
    zlab,
)
from tests.formats.test_hostile_heads import Code

H, V = made.H, made.V
FUZZ = settings(
    max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write_target_of(config: dict[str, Any], folder: Path) -> str:
    """A target as deep as the config of an MTP layer says, and as usual for other heads."""
    deep = (
        {"num_hidden_layers": config["num_hidden_layers"]}
        if "num_nextn_predict_layers" in config
        else {}
    )
    return made.write_target(folder / "target", **deep)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_read(name: str, tmp_path: Path) -> None:
    """Each is one of the head's to the bit, or is told to be left out."""
    (config, held), layout, expected = LAYOUTS[name]
    target, folder = (
        write_target_of(config, tmp_path),
        made.write(tmp_path / "theirs", (config, held)),
    )
    found = inspect(folder, target)
    assert not found.fatal and found.layout == layout, found
    told = import_head(folder, tmp_path / "ours", target)
    head = load_head(tmp_path / "ours")
    assert {key: getattr(head.settings, key) for key in expected} == expected
    theirs, ours = list(held.values()), head.state_dict()
    used = [tensor for tensor in theirs if any(torch.equal(tensor, mine) for mine in ours.values())]
    made_here = {"t2d"} & ours.keys()
    assert len(used) >= len(ours) - len(made_here)
    missing = [key for key, tensor in held.items() if not any(tensor is one for one in used)]
    borrowed = ("embed_tokens.weight", "lm_head.weight", "shared_head.head.weight")
    assert all(
        key.endswith(borrowed) or ("whole" in name and key.startswith("model.")) for key in missing
    ), missing
    assert "equal" in told or not missing


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (zlab(), "no sample_from_anchor: false, as z-lab/dflash takes it"),
        (deepspec(), "no sample_from_anchor: true, as deepseek-ai/DeepSpec takes it"),
        (speculators(), "no sample_from_anchor: false, as speculators takes it"),
        (speculators_dspark(), "no sample_from_anchor: true, as speculators takes it"),
        (dspark(), "no sample_from_anchor: true, as sgl-project/SpecForge takes it"),
        (domino(), "no shift_label: false, as sgl-project/SpecForge takes it"),
        (peagle(norm_before_residual=None), "no norm_before_residual: false"),
        (
            zlab(dflash_config={"target_layer_ids": None}),
            "no target_layer_ids: taps (2, 7), as that code takes them of 9 layers",
        ),
    ],
)
def test_what_is_taken_by_default_is_told(head: made.Head, words: str, tmp_path: Path) -> None:
    """Layouts differ in it, and one slot off every token is another."""
    config, held = head
    if "(2, 7)" in words:
        held = {**held, "fc.weight": made.drawn(H, 2 * H)}
    assert f"by default: {words}" in str(inspect(made.write(tmp_path / "head", (config, held))))


def test_what_slots_name_must_be_said_to_engines(tmp_path: Path) -> None:
    """speculators takes DSpark to name what comes behind each slot, vLLM and llama.cpp take its folders otherwise."""
    trap = "sample_from_anchor is not written: some readers take true and others false"
    assert f"{trap}, and every token stands one place off [vLLM, llama.cpp]" in str(
        inspect(made.write(tmp_path / "unsaid", speculators_dspark()))
    )
    for head in (speculators_dspark(sample_from_anchor=True), speculators(), dspark(), zlab()):
        assert trap not in str(inspect(made.write(tmp_path / "said", head)))


def test_the_mask_of_the_drafts_tokens_follows_from_them(tmp_path: Path) -> None:
    """A P-EAGLE head without t2d."""
    config, held = made.without(peagle(), "t2d")
    head = read_head(made.write(tmp_path / "head", (config, held)))
    assert torch.equal(head.state_dict()["t2d"], made.vocabulary()["t2d"])
    assert head.state_dict()["d2t"].dtype == torch.long


@pytest.mark.parametrize(
    ("head", "spoil", "words"),
    [
        (
            "z-lab",
            lambda config, held: held.pop("hidden_norm.weight"),
            "hidden_norm.weight is missing",
        ),
        (
            "z-lab",
            lambda config, held: held.pop("layers.1.self_attn.k_norm.weight"),
            "k_norm.weight is missing",
        ),
        (
            "z-lab",
            lambda config, held: config["dflash_config"].pop("mask_token_id"),
            "no mask_token_id",
        ),
        (
            "z-lab",
            lambda config, held: config["dflash_config"].update(mask_token_id=V),
            f"has {V} tokens",
        ),
        (
            "z-lab",
            lambda config, held: config["dflash_config"].update(mask_token_id=True),
            "expected a whole number",
        ),
        (
            "z-lab",
            lambda config, held: config["dflash_config"].update(use_swa=True),
            "use_swa is True",
        ),
        (
            "z-lab",
            lambda config, held: config["dflash_config"].update(target_layer_ids=[1, 3, 8]),
            "behind the last",
        ),
        (
            "z-lab",
            lambda config, held: config["dflash_config"].update(target_layer_ids=[1, 3]),
            "expected [16, 32]",
        ),
        ("z-lab", lambda config, held: config.pop("block_size"), "no block_size"),
        (
            "z-lab",
            lambda config, held: config.update(num_hidden_layers=3),
            "says 3 layers, the file holds 2",
        ),
        (
            "z-lab",
            lambda config, held: config.update(layer_types=["sliding_attention"] * 2),
            "layer_types is",
        ),
        ("z-lab", lambda config, held: config.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("z-lab", lambda config, held: config.update(draft_vocab_size=9), "draft_vocab_size is 9"),
        (
            "z-lab",
            lambda config, held: held.update({"d2t": torch.arange(9)}),
            "unknown tensors: d2t",
        ),
        (
            "z-lab",
            lambda config, held: held.update({"layers.0.self_attn.q_proj.bias": made.drawn(16)}),
            "q_proj.bias",
        ),
        ("z-lab", lambda config, held: held["fc.weight"].fill_(torch.nan), "not finite"),
        (
            "DeepSpec",
            lambda config, held: config.update(markov_rank=4),
            "markov_rank is 4, and markov_head",
        ),
        (
            "DeepSpec",
            lambda config, held: config.update(enable_confidence_head=True),
            "enable_confidence_head is true",
        ),
        (
            "DeepSpec",
            lambda config, held: held["lm_head.weight"].add_(1),
            "lm_head.weight differs from the target's",
        ),
        (
            "DeepSpec",
            lambda config, held: config.update(sample_from_anchor=True, dspark_bonus_anchor=True),
            "sample_from_anchor and dspark_bonus_anchor are both True",
        ),
        (
            "DSpark",
            lambda config, held: held.pop("markov_head.markov_w2.weight"),
            "markov_w2.weight is missing",
        ),
        (
            "DSpark",
            lambda config, held: config["dflash_config"].update(markov_rank=5),
            "is 5, the tensors have 4",
        ),
        (
            "DSpark",
            lambda config, held: config["dflash_config"].update(markov_head_type="rnn"),
            "are vanilla",
        ),
        (
            "Domino",
            lambda config, held: held.pop("logit_head.embed_proj.2.weight"),
            "embed_proj.2.weight is missing",
        ),
        (
            "Domino",
            lambda config, held: held.pop("logit_head.prefix_gru.weight_ih_l0"),
            "weight_ih_l0 is missing",
        ),
        (
            "Domino, shifted",
            lambda config, held: config.update(sample_from_anchor=False),
            "and shift_label True",
        ),
        (
            "speculators",
            lambda config, held: config.pop("aux_hidden_state_layer_ids"),
            "no ids of the layers",
        ),
        ("P-EAGLE", lambda config, held: config.pop("mask_token_id"), "no mask_token_id"),
        ("P-EAGLE", lambda config, held: config.update(pard_token=4), "the mask tokens disagree"),
        ("P-EAGLE", lambda config, held: held.pop("mask_hidden"), "mask_hidden is missing"),
        ("P-EAGLE", lambda config, held: held.pop("d2t"), "d2t is missing"),
        ("P-EAGLE", lambda config, held: held["t2d"].logical_not_(), "t2d marks"),
        ("P-EAGLE", lambda config, held: held["d2t"].add_(30), "d2t leads to token"),
        (
            "P-EAGLE",
            lambda config, held: config.update(norm_before_fc=True),
            "norm_before_fc is True",
        ),
        (
            "P-EAGLE",
            lambda config, held: held["embed_tokens.weight"].add_(1),
            "Another target, or trained?",
        ),
        (
            "MiMo",
            lambda config, held: held.pop("model.mtp_layers.0.input_proj.weight"),
            "eh_proj.weight is missing",
        ),
        (
            "MiMo",
            lambda config, held: held.update(
                {"model.mtp_layers.1.input_proj.weight": made.drawn(H, 2 * H)}
            ),
            "it holds 2 such layers",
        ),
        (
            "DeepSeek",
            lambda config, held: held.update(
                {"model.layers.3.self_attn.kv_a_proj_with_mqa.weight": made.drawn(9, H)}
            ),
            "multi-head latent attention",
        ),
        (
            "DeepSeek",
            lambda config, held: held.update(
                {"model.layers.3.mlp.experts.0.up_proj.weight": made.drawn(9, H)}
            ),
            "a mixture of experts",
        ),
    ],
)
def test_a_spoilt_head_is_refused(head: str, spoil: Any, words: str, tmp_path: Path) -> None:
    """By inspect and import alike."""
    (config, held), _, _ = LAYOUTS[head]
    config, held = (
        json.loads(json.dumps(config)),
        {name: tensor.clone() for name, tensor in held.items()},
    )
    spoil(config, held)
    target, folder = (
        write_target_of(config, tmp_path),
        made.write(tmp_path / "head", (config, held)),
    )
    with pytest.raises(ValueError, match=re.escape(words)):
        read_head(folder, target)
    assert words in str(inspect(folder, target))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**40, -1])
)
VALUES = (
    SCALARS
    | st.lists(SCALARS, max_size=4)
    | st.dictionaries(st.text(max_size=5), SCALARS, max_size=4)
)
KEYS = sorted(
    {
        key
        for (config, _), _, _ in LAYOUTS.values()
        for key in [*config, *config.get("dflash_config", {})]
    }
)


@pytest.mark.slow
@given(
    changed=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4),
    name=st.sampled_from(sorted(LAYOUTS)),
)
@FUZZ
def test_any_config_is_read_or_refused(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Values of any kind in place of any keys, in the config and in its sections."""
    (config, held), _, _ = LAYOUTS[name]
    nested = {key: {**value, **changed} for key, value in config.items() if isinstance(value, dict)}
    for spoilt in ({**config, **changed}, {**config, **nested}):
        made.write(tmp_path / "head", (config, held))
        (tmp_path / "head/config.json").write_text(json.dumps(spoilt))
        assert str(inspect(tmp_path / "head"))
        try:
            read_head(tmp_path / "head")
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize("head", [zlab(), deepspec(), dspark(), domino()])
def test_a_mask_row_of_its_own_is_refused(head: made.Head, tmp_path: Path) -> None:
    """The file that vLLM puts in place of the target's row is not passed over, and its pickle is not read."""
    folder, marker = made.write(tmp_path / "theirs", head), tmp_path / "marker"
    assert not inspect(folder).fatal
    torch.save({"embedding": Code(marker), "mask_token_id": 3}, folder / "mask_embedding.pt")
    assert inspect(folder).fatal and "mask_embedding.pt lies beside it" in str(inspect(folder))
    with pytest.raises(ValueError, match=r"mask_embedding\.pt lies beside it"):
        read_head(folder)
    assert not marker.exists()


@pytest.mark.parametrize("key", ["is_neox_style", "rope_is_neox_style"])
@pytest.mark.parametrize(
    ("head", "nested"), [(zlab(), False), (speculators(), True), (made.speculators(), True)]
)
def test_rotary_positions_of_neighbours_are_refused(
    key: str, head: made.Head, nested: bool, tmp_path: Path
) -> None:
    """A head that turns neighbours instead of halves is another network; true is what is read, and says nothing new."""
    config, tensors = head
    for place in ([], ["transformer_layer_config"]) if nested else ([],):
        for value in (True, False):
            changed = json.loads(json.dumps(config))
            section = changed
            for name in place:
                section = section[name]
            section[key] = value
            folder = made.write(tmp_path / "theirs", (changed, tensors))
            assert (f"{key} is False, which no head here can be" in str(inspect(folder))) == (
                not value
            )
            assert key not in str(inspect(folder)) or not value
            if not value:
                with pytest.raises(ValueError, match=f"{key} is False"):
                    read_head(
                        folder,
                        taps=made.TAPS
                        if nested and config.get("draft_vocab_size") == made.D
                        else None,
                    )
