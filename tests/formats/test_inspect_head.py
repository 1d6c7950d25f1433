"""What `inspect` says of a checkpoint: each known trap by its name, nothing bad of a healthy one, and never a crash."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.data.identity import target_identity
from eagle.formats.checkpoint import save_head
from eagle.formats.reading.foreign import inspect
from eagle.recipe import TargetSection
from tests import foreign_heads as made
from tests.unrolled_heads import VARIANTS, new_head

Spoil = Callable[[dict[str, Any], dict[str, Any]], None]
OUTER, INNER = "eagle_aux_hidden_state_layer_ids", "eagle_config"


def portable() -> made.Head:
    """A head that every engine reads."""
    config, tensors = made.specforge()
    return {**config, OUTER: list(made.TAPS)}, tensors


def keys(**changed: Any) -> Spoil:
    """Other keys in the config."""
    return lambda config, tensors: config.update(changed)


def tensors(**changed: Any) -> Spoil:
    """Other tensors, or none where one is None; a double underscore stands for a dot."""

    def spoil(_config: dict[str, Any], held: dict[str, Any]) -> None:
        for name, tensor in changed.items():
            held.pop(name.replace("__", "."), None)
            if tensor is not None:
                held[name.replace("__", ".")] = tensor

    return spoil


def renamed(old: str, new: str) -> Spoil:
    """Names that begin otherwise."""

    def spoil(_config: dict[str, Any], held: dict[str, Any]) -> None:
        for name in [name for name in held if name.startswith(old)]:
            held[new + name.removeprefix(old)] = held.pop(name)

    return spoil


def whole(config: dict[str, Any], held: dict[str, Any]) -> None:
    """Zeros as offsets where all tokens may be said."""
    config.update(draft_vocab_size=made.V)
    held.update(d2t=torch.zeros(made.V, dtype=torch.long), lm_head__weight=1)
    held.pop("lm_head__weight"), held.pop("t2d")
    held["lm_head.weight"] = made.drawn(made.V, made.H)


def both(one: Spoil, other: Spoil) -> Spoil:
    """Two of them."""
    return lambda config, held: (one(config, held), other(config, held))[0]


NAN = made.drawn(made.H, 3 * made.H).index_fill(0, torch.tensor([2]), float("nan"))
SAME = {OUTER: list(made.TAPS), INNER: {OUTER: list(made.TAPS), "use_aux_hidden_state": True}}
OFF = {OUTER: [3, 5, 7], INNER: {OUTER: list(made.OUTPUTS)}}
LOW = [1, 2, made.LAYERS]
TRAPS: dict[
    str, tuple[Spoil, str, str, bool]
] = {  # how it comes about, what is said, an engine that it hits, fatal?
    "model. prefix": (renamed("", "model."), "under `model.`", "vLLM", True),
    "fc missing": (tensors(fc__weight=None), "fc.weight is missing", "", True),
    "lm_head missing": (tensors(lm_head__weight=None), "lm_head.weight is missing", "", True),
    "final norm missing": (tensors(norm__weight=None), "norm.weight is missing", "", True),
    "a norm missing": (
        tensors(midlayer__hidden_norm__weight=None),
        "layers.0.hidden_norm.weight is missing",
        "",
        True,
    ),
    "d2t absolute": (tensors(d2t=made.drafts()), "d2t holds token ids", "", True),
    "d2t out of range": (
        tensors(d2t=made.vocabulary()["d2t"] + made.V),
        "leads to token",
        "",
        True,
    ),
    "d2t missing": (tensors(d2t=None), "d2t is missing", "", True),
    "t2d of other tokens": (
        tensors(t2d=~made.vocabulary()["t2d"]),
        "t2d marks other tokens",
        "",
        True,
    ),
    "d2t with a full vocabulary": (whole, "d2t is there although", "vLLM", False),
    "the same in layers.0": (
        both(whole, renamed("midlayer.", "layers.0.")),
        "d2t is there although",
        "vLLM",
        True,
    ),
    "layers.0": (renamed("midlayer.", "layers.0."), "called layers.0", "OpenVINO", False),
    "ids the same in both places": (keys(**SAME), "layer ids disagree", "SGLang", True),
    "ids off by one": (keys(**OFF), "layer ids disagree", "vLLM", True),
    "ids twice": (
        keys(**{OUTER: [2, 2, 4], INNER: {OUTER: [1, 1, 3]}}),
        "reads 3 layers",
        "",
        True,
    ),
    "ids not in order": (
        keys(**{OUTER: [6, 2, 4], INNER: {OUTER: [5, 1, 3]}}),
        "not in order",
        "vLLM",
        True,
    ),
    "ids beyond the target": (
        keys(**{OUTER: LOW, INNER: {OUTER: [0, 1, 8]}}),
        "a target of 9 layers",
        "",
        True,
    ),
    "no ids": (keys(**{OUTER: None, INNER: None}), "no layer ids", "OpenVINO", False),
    "outer ids alone": (keys(**{INNER: None}), "SGLang does not read", "SGLang", False),
    "inner ids alone": (keys(**{OUTER: None}), "llama.cpp does not read", "llama.cpp", False),
    "rope theta": (
        keys(rope_theta=1e5, rope_parameters=None),
        "rope_theta is 100000, the target's is 10000",
        "",
        True,
    ),
    "rope scaling": (
        keys(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters=None),
        "linear",
        "",
        False,
    ),
    "rope in two ways": (
        keys(rope_parameters={"rope_theta": 5e5}),
        "rope_theta is 10000, but 500000",
        "",
        True,
    ),
    "norm_before_residual": (
        keys(norm_before_residual=True),
        "norm_before_residual is true",
        "OpenVINO",
        False,
    ),
    "norm_output": (keys(norm_output=True), "norm_output: these", "llama.cpp", False),
    "fc_norm promised": (keys(fc_norm=True), "fc_norm is True", "", True),
    "fc.bias": (
        tensors(fc__bias=made.drawn(made.H)),
        "fc.bias in an EAGLE-3 head",
        "llama.cpp",
        True,
    ),
    "attention_bias promised": (keys(attention_bias=True), "attention_bias is true", "vLLM", True),
    "tied": (keys(tie_word_embeddings=True), "tie_word_embeddings is true", "", True),
    "dtype": (
        keys(torch_dtype="bfloat16"),
        "says 'bfloat16', the weights are in float32",
        "",
        False,
    ),
    "layers of the target": (keys(num_hidden_layers=40), "num_hidden_layers is 40", "SGLang", True),
    "architecture": (
        keys(architectures=["MyHead"]),
        "['MyHead'], which no engine knows",
        "",
        False,
    ),
    "embedding of another": (
        tensors(embed_tokens__weight=made.drawn(made.V, made.H)),
        "another target",
        "",
        True,
    ),
    "width of another": (keys(hidden_size=32), "the target's is 16", "", True),
    "vocabulary of another": (keys(vocab_size=made.V + 8), f"the target's is {made.V}", "", True),
    "not finite": (tensors(fc__weight=NAN), "not finite", "", True),
    "all zeros": (tensors(norm__weight=torch.zeros(made.H)), "all zeros", "", True),
    "unknown tensor": (tensors(odd__weight=torch.ones(3)), "unknown tensors: odd.weight", "", True),
    "unknown key": (keys(new_switch=True), "unknown keys of config.json: new_switch", "", False),
    "wrong kinds": (
        keys(hidden_size="16", rms_norm_eps=[1]),
        "hidden_size is '16', expected a whole number",
        "",
        True,
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_every_trap_is_named_with_where_it_strikes(name: str, tmp_path: Path) -> None:
    """And a head without the trap is not said to have it."""
    spoil, says, engine, fatal = TRAPS[name]
    target, head = made.write_target(tmp_path / "target"), portable()
    healthy = inspect(made.write(tmp_path / "healthy", head), target)
    assert says not in str(healthy) and not healthy.fatal, healthy
    spoil(*head)
    found = inspect(made.write(tmp_path / "spoilt", head), target)
    named = [one for one in found.findings if says in f"{one.what} {one.fix}"]
    assert named and named[0].fatal == fatal, found
    assert not engine or engine in named[0].engines
    assert says in str(found) and all(one.fix or one.what for one in found.findings)


FEATURES: dict[str, tuple[Spoil, str, bool]] = {
    "input norm": (
        tensors(layers__0__input_layernorm__weight=torch.ones(made.H)),
        "input_layernorm",
        True,
    ),
    "bias": (tensors(fc__bias=made.drawn(made.H)), "vLLM drops it", False),
    "no bias": (keys(), "SGLang keeps a random one", False),
    "bias promised": (keys(bias=True), "fc.bias is missing", True),
    "LM head of another": (
        tensors(lm_head__weight=made.drawn(made.V, made.H)),
        "differs from the target's",
        True,
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_the_traps_of_eagle1(name: str, tmp_path: Path) -> None:
    """It has fewer parts."""
    spoil, says, fatal = FEATURES[name]
    head = made.eagle1()
    spoil(*head)
    found = inspect(made.write(tmp_path / "head", head), made.write_target(tmp_path / "target"))
    assert [one.fatal for one in found.findings if says in one.what] == [fatal], found


def test_what_a_checkpoint_is(tmp_path: Path) -> None:
    """Layout, sizes, parameters, dtype, draft vocabulary, and layers in both conventions."""
    head = portable()
    counted = sum(tensor.numel() for tensor in head[1].values() if tensor.is_floating_point())
    found = inspect(made.write(tmp_path / "head", head))
    assert (found.kind, found.layout) == ("EAGLE-3", "EAGLE-3, midlayer.*")
    for said in (
        f"{counted:,} parameters",
        "float32",
        f"{made.V}, of which it says {made.D}",
        "(2, 4, 6)",
        "(1, 3, 5)",
    ):
        assert said in str(found), said


def test_traps_of_speculators_and_modelopt(tmp_path: Path) -> None:
    """What their layouts alone have: a switch that readers fill in otherwise, and a norm that is used twice."""
    config, held = made.speculators()
    config.pop("norm_before_residual")
    found = inspect(made.write(tmp_path / "speculators", (config, held)))
    assert [one.engines for one in found.findings if one.fatal] == [("vLLM",)]
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 64}
    written = inspect(
        made.write(tmp_path / "modelopt", made.saying(made.modelopt(), rope_scaling=yarn))
    )
    assert (
        "input_layernorm too" in str(written)
        and "(yarn) into exports" in str(written)
        and not written.fatal
    )


@pytest.mark.quick("eagle3", "eagle3 regression", "eagle3 normed residual", "eagle3 hybrid", "hass")
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_head_of_this_project_is_known_and_healthy(variant: str, tmp_path: Path) -> None:
    """And where it is from is compared with the target that is named."""
    target, sibling = (
        made.write_target(tmp_path / "target"),
        made.write_target(tmp_path / "sibling", rms_norm_eps=1e-3),
    )
    true = target_identity(TargetSection(path=target))
    save_head(tmp_path / "head", new_head(tmp_path, variant), "", {"target": true})
    found = inspect(tmp_path / "head")
    assert found.layout == "this project" and not found.findings, found
    assert "others" not in str(inspect(tmp_path / "head", target))
    assert "trained on a target whose config are others" in str(inspect(tmp_path / "head", sibling))
    save_head(
        tmp_path / "head", new_head(tmp_path, variant), "", {"target": {**true, "weights": "0123"}}
    )
    assert any(
        one.fatal and "weights are others" in one.what
        for one in inspect(tmp_path / "head", target).findings
    )


@pytest.mark.parametrize("name", made.LAYOUTS)
def test_a_healthy_head_of_each_layout_is_not_called_broken(name: str, tmp_path: Path) -> None:
    """With its target and without."""
    folder = made.write(tmp_path / "head", made.LAYOUTS[name])
    for target in (None, made.write_target(tmp_path / "target")):
        assert not inspect(folder, target).fatal, inspect(folder, target)


@pytest.mark.slow
def test_whatever_is_missing_it_does_not_fail(tmp_path: Path) -> None:
    """Every tensor and every key gone, alone and together."""
    target = made.write_target(tmp_path / "target")
    for head in (portable(), made.eagle1(), made.speculators()):
        for name in head[1]:
            assert str(inspect(made.write(tmp_path / "head", made.without(head, name)), target))
        for key in head[0]:
            left = {name: value for name, value in head[0].items() if name != key}
            assert str(inspect(made.write(tmp_path / "head", (left, head[1])), target))
    made.write(tmp_path / "head", ({}, {}))
    assert inspect(tmp_path / "head", target).findings
    (tmp_path / "head/config.json").write_text(json.dumps([1]))
    assert inspect(tmp_path / "head").fatal
