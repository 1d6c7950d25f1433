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
from eagle.formats.foreign import import_head, inspect, read_head
from tests import foreign_heads as made
from tests.block_layouts import block_shapes, injected_shapes

H, V = made.H, made.V
FUZZ = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def fill(shapes: dict[str, tuple[int, ...]], prefix: str = "") -> dict[str, torch.Tensor]:
    """Random tensors of these sizes."""
    return {prefix + name: made.drawn(*size, seed=len(name)) for name, size in shapes.items()}


QWEN3 = {**made.LLAMA, "model_type": "qwen3", "num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
QWEN3 |= {"num_target_layers": made.LAYERS, "block_size": 4, "use_sliding_window": False, "max_window_layers": 2}


def zlab(**changed: Any) -> made.Head:
    """As z-lab publishes it, with the code of its own that it names."""
    nested = {"mask_token_id": 3, "target_layer_ids": [1, 3, 5], **changed.pop("dflash_config", {})}
    config = {"architectures": ["DFlashDraftModel"], "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, **QWEN3}
    return {**config, "dflash_config": nested, **changed}, fill(injected_shapes())


def deepspec(**changed: Any) -> made.Head:
    """DeepSpec's DFlash: DSpark without a Markov head, with copies of the target's two matrices."""
    told = {"mask_token_id": 3, "target_layer_ids": [1, 3, 5], "num_anchors": 512, "enable_confidence_head": False}
    config = {"architectures": ["Qwen3DSparkModel"], **QWEN3, **told, "markov_rank": 0, **changed}
    return config, {**fill(injected_shapes()), "embed_tokens.weight": made.embedding(), "lm_head.weight": lm_head()}


def speculators(kind: str = "dflash", **changed: Any) -> made.Head:
    """That of speculators, which leaves a switch out where it is the default."""
    block = {key: value for key, value in QWEN3.items() if key not in ("rope_theta", "rope_scaling", "block_size")}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "aux_hidden_state_layer_ids": [2, 4, 6],
        "mask_token_id": 3,
        "block_size": 4,
        "draft_vocab_size": V,
        "sliding_window_non_causal": False,
        "transformer_layer_config": {**block, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "some/target"}},
    }
    return {**config, **changed}, fill(injected_shapes())


def peagle(**changed: Any) -> made.Head:
    """P-EAGLE of speculators, with a draft vocabulary and two blocks."""
    config, held = made.speculators(architecture="PEagleSpeculator", speculators_model_type="peagle", mask_token_id=3)
    held |= fill({name: size for name, size in block_shapes(2).items() if name.startswith("layers.1.")})
    config["transformer_layer_config"] = {**config["transformer_layer_config"], "num_hidden_layers": 2}
    return {**config, **changed}, {**held, "mask_hidden": made.drawn(1, 1, 3 * H)}


def mimo(whole: bool = False) -> made.Head:
    """The layer that MiMo ships with, whose attention has biases; alone, or in the files of the whole model."""
    held = fill({name.removeprefix("layers.0."): size for name, size in block_shapes(1).items()})
    held |= fill({f"{name}_layernorm.weight": (H,) for name in ("token", "hidden", "final")})
    held |= {"input_proj.weight": made.drawn(H, 2 * H)}
    biases = {"q": made.HEADS * made.WIDE, "k": made.KEYS * made.WIDE, "v": made.KEYS * made.WIDE}
    held |= {f"self_attn.{name}_proj.bias": made.drawn(size) for name, size in biases.items()}
    held = {f"model.mtp_layers.0.{name}": tensor for name, tensor in held.items()}
    if whole:
        held |= fill(block_shapes(3), "model.") | {"model.norm.weight": made.drawn(H)}
        held |= {"model.embed_tokens.weight": made.embedding(), "lm_head.weight": lm_head()}
    told = {"model_type": "mimo", "num_nextn_predict_layers": 1, "num_hidden_layers": 3}
    return {"architectures": ["MiMoForCausalLM"], **made.LLAMA, **told}, held


def deepseek(whole: bool = False) -> made.Head:
    """A layer by DeepSeek's names with a Llama's block, behind three layers of a model."""
    own = {name.replace("layers.0.", "layers.3."): size for name, size in block_shapes(1).items()}
    own |= {f"layers.3.{name}.weight": (H,) for name in ("enorm", "hnorm", "shared_head.norm")}
    held = fill({**own, "layers.3.eh_proj.weight": (H, 2 * H)}, "model.")
    held["model.layers.3.embed_tokens.weight"] = made.embedding()
    held["model.layers.3.shared_head.head.weight"] = lm_head()
    if whole:
        held |= fill(block_shapes(3), "model.") | {"model.norm.weight": made.drawn(H)}
        held |= {"model.embed_tokens.weight": made.embedding(), "lm_head.weight": lm_head()}
    told = {"num_nextn_predict_layers": 1, "num_hidden_layers": 3}
    return {"architectures": ["SomeForCausalLM"], **made.LLAMA, **told}, held


def lm_head() -> torch.Tensor:
    """[V, H], the target's."""
    return made.drawn(V, H, seed=8)


LAYOUTS: dict[str, tuple[made.Head, str, dict[str, Any]]] = {  # head, whose it is, settings that it has
    "z-lab": (zlab(), "z-lab/dflash", {"sample_from_anchor": False, "slots": 4, "taps": (2, 4, 6), "mask_token": 3}),
    "JetSpec": (zlab(dflash_config={"causal": True}), "z-lab/dflash", {"sample_from_anchor": False, "causal": True}),
    "DeepSpec": (deepspec(), "deepseek-ai/DeepSpec", {"sample_from_anchor": True, "taps": (2, 4, 6), "mask_token": 3}),
    "speculators": (speculators(), "speculators", {"sample_from_anchor": False, "taps": (2, 4, 6), "slots": 4}),
    "speculators, from the anchor": (speculators(sample_from_anchor=True), "speculators", {"sample_from_anchor": True}),
    "P-EAGLE": (peagle(), "P-EAGLE", {"blocks": 2, "mask_token": 3, "draft_vocab": made.D, "fc_norm": False}),
    "MiMo": (mimo(), "MiMo", {"hidden_first": True}),
    "MiMo, whole": (mimo(whole=True), "MiMo", {"hidden_first": True}),
    "DeepSeek": (deepseek(), "DeepSeek", {"hidden_first": False}),
    "DeepSeek, whole": (deepseek(whole=True), "DeepSeek", {"hidden_first": False}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_tensor_is_read(name: str, tmp_path: Path) -> None:
    """Each is one of the head's to the bit, or is told to be left out."""
    (config, held), layout, expected = LAYOUTS[name]
    target, folder = made.write_target(tmp_path / "target"), made.write(tmp_path / "theirs", (config, held))
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
    assert all(key.endswith(borrowed) or ("whole" in name and key.startswith("model.")) for key in missing), missing
    assert "equal" in told or not missing


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (zlab(), "no sample_from_anchor: false, as z-lab/dflash takes it"),
        (deepspec(), "no sample_from_anchor: true, as deepseek-ai/DeepSpec takes it"),
        (speculators(), "no sample_from_anchor: false, as speculators takes it"),
        (peagle(norm_before_residual=None), "no norm_before_residual: false, as P-EAGLE's readers take it"),
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


def test_the_mask_of_the_drafts_tokens_follows_from_them(tmp_path: Path) -> None:
    """A P-EAGLE head without t2d."""
    config, held = made.without(peagle(), "t2d")
    head = read_head(made.write(tmp_path / "head", (config, held)))
    assert torch.equal(head.state_dict()["t2d"], made.vocabulary()["t2d"])
    assert head.state_dict()["d2t"].dtype == torch.long


@pytest.mark.parametrize(
    ("head", "spoil", "words"),
    [
        ("z-lab", lambda config, held: held.pop("hidden_norm.weight"), "hidden_norm.weight is missing"),
        ("z-lab", lambda config, held: held.pop("layers.1.self_attn.k_norm.weight"), "k_norm.weight is missing"),
        ("z-lab", lambda config, held: config["dflash_config"].pop("mask_token_id"), "no mask_token_id"),
        ("z-lab", lambda config, held: config["dflash_config"].update(mask_token_id=V), f"has {V} tokens"),
        ("z-lab", lambda config, held: config["dflash_config"].update(mask_token_id=True), "expected a whole number"),
        ("z-lab", lambda config, held: config["dflash_config"].update(use_swa=True), "use_swa is True"),
        ("z-lab", lambda config, held: config["dflash_config"].update(target_layer_ids=[1, 3, 8]), "behind the last"),
        ("z-lab", lambda config, held: config["dflash_config"].update(target_layer_ids=[1, 3]), "expected [16, 32]"),
        ("z-lab", lambda config, held: config.pop("block_size"), "no block_size"),
        ("z-lab", lambda config, held: config.update(num_hidden_layers=3), "says 3 layers, the file holds 2"),
        ("z-lab", lambda config, held: config.update(layer_types=["sliding_attention"] * 2), "layer_types is"),
        ("z-lab", lambda config, held: config.update(hidden_act="gelu"), "hidden_act is 'gelu'"),
        ("z-lab", lambda config, held: config.update(draft_vocab_size=9), "draft_vocab_size is 9"),
        ("z-lab", lambda config, held: held.update({"d2t": torch.arange(9)}), "unknown tensors: d2t"),
        ("z-lab", lambda config, held: held.update({"layers.0.self_attn.q_proj.bias": made.drawn(16)}), "q_proj.bias"),
        ("z-lab", lambda config, held: held["fc.weight"].fill_(torch.nan), "not finite"),
        ("DeepSpec", lambda config, held: config.update(markov_rank=4), "markov_rank is 4, and markov_head"),
        ("DeepSpec", lambda config, held: config.update(enable_confidence_head=True), "enable_confidence_head is true"),
        ("DeepSpec", lambda config, held: held["lm_head.weight"].add_(1), "lm_head.weight differs from the target's"),
        (
            "DeepSpec",
            lambda config, held: config.update(sample_from_anchor=True, dspark_bonus_anchor=True),
            "sample_from_anchor and dspark_bonus_anchor are both True",
        ),
        ("speculators", lambda config, held: config.pop("aux_hidden_state_layer_ids"), "no ids of the layers"),
        ("P-EAGLE", lambda config, held: config.pop("mask_token_id"), "no mask_token_id"),
        ("P-EAGLE", lambda config, held: config.update(pard_token=4), "the mask tokens disagree"),
        ("P-EAGLE", lambda config, held: held.pop("mask_hidden"), "mask_hidden is missing"),
        ("P-EAGLE", lambda config, held: held.pop("d2t"), "d2t is missing"),
        ("P-EAGLE", lambda config, held: held["t2d"].logical_not_(), "t2d marks other tokens"),
        ("P-EAGLE", lambda config, held: held["d2t"].add_(30), "d2t leads to token"),
        ("P-EAGLE", lambda config, held: config.update(norm_before_fc=True), "norm_before_fc is True"),
        ("P-EAGLE", lambda config, held: held["embed_tokens.weight"].add_(1), "Another target, or trained?"),
        ("MiMo", lambda config, held: held.pop("model.mtp_layers.0.input_proj.weight"), "eh_proj.weight is missing"),
        (
            "MiMo",
            lambda config, held: held.update({"model.mtp_layers.1.input_proj.weight": made.drawn(H, 2 * H)}),
            "it holds 2 such layers",
        ),
        (
            "DeepSeek",
            lambda config, held: held.update({"model.layers.3.self_attn.kv_a_proj_with_mqa.weight": made.drawn(9, H)}),
            "multi-head latent attention",
        ),
        (
            "DeepSeek",
            lambda config, held: held.update({"model.layers.3.mlp.experts.0.up_proj.weight": made.drawn(9, H)}),
            "a mixture of experts",
        ),
    ],
)
def test_a_spoilt_head_is_refused(head: str, spoil: Any, words: str, tmp_path: Path) -> None:
    """By inspect and import alike."""
    (config, held), _, _ = LAYOUTS[head]
    config, held = json.loads(json.dumps(config)), {name: tensor.clone() for name, tensor in held.items()}
    spoil(config, held)
    target, folder = made.write_target(tmp_path / "target"), made.write(tmp_path / "head", (config, held))
    with pytest.raises(ValueError, match=re.escape(words)):
        read_head(folder, target)
    assert words in str(inspect(folder, target))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from([10**40, -1])
VALUES = SCALARS | st.lists(SCALARS, max_size=4) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=4)
KEYS = sorted({key for (config, _), _, _ in LAYOUTS.values() for key in [*config, *config.get("dflash_config", {})]})


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
