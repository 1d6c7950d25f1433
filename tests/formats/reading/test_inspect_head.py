"""What `inspect` says of a checkpoint: each fault by its name, nothing bad of a healthy one, and never a crash."""

# H hidden, V vocabulary, D draft vocabulary

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle.data.identity import target_identity
from eagle.formats.checkpoint import save_head
from eagle.formats.reading.foreign import inspect
from eagle.recipe import TargetSection
from tests import foreign_heads as made
from tests.block_heads import zlab
from tests.formats.make_heads import change_head
from tests.unrolled_heads import new_head

H = made.H
V = made.V
# ids of the layers, as inputs at the top of a config and as outputs in its section
OUTER = "eagle_aux_hidden_state_layer_ids"
INNER = "eagle_config"


def portable() -> made.Head:
    """Return an EAGLE-3 head that every engine reads."""
    return made.saying(made.specforge(), **{OUTER: list(made.TAPS)})


@dataclass(frozen=True)
class Trap:
    """A fault of a portable head, a finding's words, an engine that the finding names, and whether it is fatal."""

    changes: dict[str, Any]
    words: str
    engine: str = ""
    fatal: bool = True
    prefix: str = "midlayer."  # of the tensors that are called midlayer.* in a healthy head


def layer_ids(outer: list[int], inner: list[int]) -> dict[str, Any]:
    """Return keys of a config that name layers in both places."""
    return {OUTER: outer, INNER: {OUTER: inner}}


WHOLE = {
    # zeros as offsets where the head may say all tokens
    "draft_vocab_size": V,
    "d2t": torch.zeros(V, dtype=torch.long),
    "t2d": None,
    "lm_head.weight": made.drawn(V, H),
}
NAN = made.drawn(H, 3 * H).index_fill(0, torch.tensor([2]), float("nan"))
OTHER_TOKENS = ~made.vocabulary()["t2d"]
TAPS = list(made.TAPS)
ROPE = {"rope_parameters": {"rope_theta": 5e5}}
TRAPS = {
    "fc missing": Trap({"fc.weight": None}, "fc.weight is missing"),
    "d2t absolute": Trap({"d2t": made.drafts()}, "d2t holds token ids"),
    "d2t missing": Trap({"d2t": None}, "d2t is missing"),
    "t2d of other tokens": Trap({"t2d": OTHER_TOKENS}, "t2d marks other tokens"),
    "t2d of as many": Trap({"t2d": lambda mask: mask.roll(1)}, "t2d marks other tokens"),
    "d2t of a full vocabulary": Trap(WHOLE, "d2t is there although", "vLLM", fatal=False),
    "the same in layers.0": Trap(WHOLE, "d2t is there although", "vLLM", prefix="layers.0."),
    "layers.0": Trap({}, "called layers.0", "OpenVINO", fatal=False, prefix="layers.0."),
    "ids the same in both places": Trap(layer_ids(TAPS, TAPS), "layer ids disagree", "SGLang"),
    "ids off by one": Trap(layer_ids([3, 5, 7], [1, 3, 5]), "layer ids disagree", "vLLM"),
    "ids not in order": Trap(layer_ids([6, 2, 4], [5, 1, 3]), "not in order", "vLLM"),
    "ids beyond the target": Trap(layer_ids([1, 2, 9], [0, 1, 8]), "a target of 9 layers"),
    "no ids": Trap({OUTER: None, INNER: None}, "no layer ids", "OpenVINO", fatal=False),
    "outer ids alone": Trap({INNER: None}, "SGLang does not read", "SGLang", fatal=False),
    "inner ids alone": Trap({OUTER: None}, "llama.cpp does not read", "llama.cpp", fatal=False),
    "rope in two ways": Trap(ROPE, "rope_theta is 10000, but 500000"),
    "norm_before_residual": Trap(
        {"norm_before_residual": True},
        "norm_before_residual is true",
        "OpenVINO",
        fatal=False,
    ),
    "norm_output": Trap({"norm_output": True}, "norm_output: these", "llama.cpp", fatal=False),
    "fc_norm promised": Trap({"fc_norm": True}, "fc_norm is True"),
    "fc.bias": Trap({"fc.bias": made.drawn(H)}, "fc.bias in an EAGLE-3 head", "llama.cpp"),
    "attention_bias promised": Trap({"attention_bias": True}, "attention_bias is true", "vLLM"),
    "tied": Trap({"tie_word_embeddings": True}, "tie_word_embeddings is true"),
    "dtype": Trap(
        {"torch_dtype": "bfloat16"},
        "says 'bfloat16', the weights are in float32",
        fatal=False,
    ),
    "layers of the target": Trap({"num_hidden_layers": 40}, "num_hidden_layers is 40", "SGLang"),
    "architecture": Trap(
        {"architectures": ["MyHead"]},
        "['MyHead'], which no engine knows",
        fatal=False,
    ),
    "embedding of another": Trap({"embed_tokens.weight": made.drawn(V, H)}, "another target"),
    "width of another": Trap({"hidden_size": 32}, "the target's is 16"),
    "not finite": Trap({"fc.weight": NAN}, "not finite"),
    "unknown tensor": Trap({"odd.weight": torch.ones(3)}, "unknown tensors: odd.weight"),
    "unknown key": Trap(
        {"new_switch": True},
        "unknown keys of config.json: new_switch",
        fatal=False,
    ),
    "wrong types": Trap(
        {"hidden_size": "16", "rms_norm_eps": [1]},
        "hidden_size is '16', expected a whole number",
    ),
    "model. prefix": Trap({}, "under `model.`", "vLLM", prefix="model."),
}


def rename(head: made.Head, prefix: str) -> made.Head:
    """Return the head with another prefix: in place of `midlayer.`, or `model.` before all names."""
    config, tensors = head
    if prefix == "model.":
        return config, {f"model.{name}": tensor for name, tensor in tensors.items()}
    return config, {name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", TRAPS)
def test_every_fault_is_named_with_the_engine_that_it_hits(name: str, tmp_path: Path) -> None:
    """And a head without the fault is not said to have it."""
    # a healthy head first, else a fault that is always named would pass
    trap = TRAPS[name]
    target = made.write_target(tmp_path / "target")
    healthy = inspect(made.write(tmp_path / "healthy", portable()), target)
    assert not healthy.fatal, healthy
    assert trap.words not in str(healthy)

    head = rename(change_head(portable(), trap.changes), trap.prefix)
    found = inspect(made.write(tmp_path / "damaged", head), target)
    named = [finding for finding in found.findings if trap.words in f"{finding.what} {finding.fix}"]
    assert named, found
    assert named[0].fatal == trap.fatal
    assert not trap.engine or trap.engine in named[0].engines
    assert trap.words in str(found)


def test_the_usual_theta_may_be_meant(tmp_path: Path) -> None:
    """A trainer that keeps to 10,000 for every target is only told of."""
    target = made.write_target(tmp_path / "target", rope_theta=5e5)
    found = inspect(made.write(tmp_path / "head", portable()), target)
    assert "some trainers do that on purpose" in str(found)
    assert not found.fatal, found


@pytest.mark.parametrize(
    ("changes", "words", "fatal"),
    [
        ({"layers.0.input_layernorm.weight": torch.ones(H)}, "input_layernorm", True),
        ({"fc.bias": made.drawn(H)}, "vLLM drops it", False),
        ({}, "SGLang keeps a random one", False),
        ({"bias": True}, "fc.bias is missing", True),
    ],
)
def test_the_faults_of_eagle1(
    changes: dict[str, Any],
    words: str,
    fatal: bool,
    tmp_path: Path,
) -> None:
    """It has fewer tensors, and engines disagree about its bias."""
    folder = made.write(tmp_path / "head", change_head(made.eagle1(), changes))
    found = inspect(folder, made.write_target(tmp_path / "target"))
    named = [finding for finding in found.findings if words in finding.what]
    assert [finding.fatal for finding in named] == [fatal], found


@pytest.mark.parametrize(
    ("bias", "says"),
    [
        (made.drawn(H), "yes"),
        (torch.zeros(H), "all zeros, as exports have it without fc_bias: does nothing"),
        (None, "no"),
    ],
)
def test_a_bias_of_zeros_is_called_that(bias: Any, says: str, tmp_path: Path) -> None:
    """The name of a tensor alone says nothing of what it does."""
    changes = {} if bias is None else {"fc.bias": bias}
    found = inspect(made.write(tmp_path / "head", change_head(made.eagle1(bias=None), changes)))
    assert found.facts["bias of fc"] == says
    # the note on a config without `bias` says it, too
    note = "fc.bias is there, all zeros as exports have it without fc_bias, and does nothing"
    assert (note in str(found)) == says.startswith("all zeros")


def test_what_a_checkpoint_is(tmp_path: Path) -> None:
    """Layout, sizes, parameters, dtype, draft vocabulary, and layers in both conventions."""
    head = portable()
    # offsets and masks are no parameters
    floats = [tensor for tensor in head[1].values() if tensor.is_floating_point()]
    num_parameters = sum(tensor.numel() for tensor in floats)
    found = inspect(made.write(tmp_path / "head", head))

    assert found.kind == "EAGLE-3"
    assert found.layout == "EAGLE-3, midlayer.*"
    for words in (
        f"{num_parameters:,} parameters",
        "float32",
        f"{V}, of which it drafts {made.D}",
        "(2, 4, 6)",
        "(1, 3, 5)",
    ):
        assert words in str(found)


def test_faults_of_speculators_and_modelopt(tmp_path: Path) -> None:
    """A switch that readers fill in differently, and a norm that training uses twice."""
    head = made.saying(made.speculators(), norm_before_residual=None)
    found = inspect(made.write(tmp_path / "speculators", head))
    assert [finding.engines for finding in found.findings if finding.fatal] == [("vLLM",)]

    # what ModelOpt writes into every export
    yarn = {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
    }
    head = made.saying(made.modelopt(), rope_scaling=yarn)
    found = inspect(made.write(tmp_path / "modelopt", head))
    assert "input_layernorm too" in str(found)
    assert "(yarn) into exports" in str(found)
    assert not found.fatal


@pytest.mark.parametrize("variant", ["eagle3.1", "eagle3 normed residual", "hass"])
def test_a_head_of_this_project_is_healthy(variant: str, tmp_path: Path) -> None:
    """Its record of where it was trained is compared with the target that is named."""
    target = made.write_target(tmp_path / "target")
    sibling = made.write_target(tmp_path / "sibling", rms_norm_eps=1e-3)
    # what training records of the target
    identity = target_identity(TargetSection(path=target))
    head = new_head(tmp_path, variant)
    folder = tmp_path / "head"
    save_head(folder, head, "", {"target": identity})
    found = inspect(folder)

    assert found.layout == "this project"
    assert not found.findings, found
    assert "others" not in str(inspect(folder, target))
    assert "trained on a target whose config are others" in str(inspect(folder, sibling))

    save_head(folder, head, "", {"target": {**identity, "weights": "0123"}})
    fatal = [finding.what for finding in inspect(folder, target).findings if finding.fatal]
    assert any("weights are others" in what for what in fatal)


@pytest.mark.parametrize(
    ("mask_token", "is_ordinary"),
    # a token of texts, a special one, one beyond the tokenizer, and the last of the vocabulary
    [
        (5, True),
        (0, False),
        (7, False),
        (V - 1, False),
    ],
)
def test_a_mask_token_that_texts_contain_is_named(
    mask_token: int,
    is_ordinary: bool,
    tmp_path: Path,
) -> None:
    """A block drafter's mask must be no token that a prompt may hold; without a target nothing is said."""
    head = change_head(zlab(), {"dflash_config/mask_token_id": mask_token})
    folder = made.write(tmp_path / "head", head)
    target = made.write_target(tmp_path / "target")
    tokenizer = tmp_path / "target/tokenizer.json"
    vocabulary = {f"t{token}": token for token in range(7)}
    special = {"id": 0, "content": "t0", "special": True}
    tokenizer.write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": [special]}))
    words = f"mask_token is {mask_token} ('t{mask_token}'), an ordinary token"

    assert (words in str(inspect(folder, target))) == is_ordinary
    assert "an ordinary token" not in str(inspect(folder))

    tokenizer.write_text("no JSON")
    assert "an ordinary token" not in str(inspect(folder, target))


def test_taps_of_a_block_drafter_out_of_order_are_named(tmp_path: Path) -> None:
    """As the config has them, whatever the target."""
    head = change_head(zlab(), {"dflash_config/target_layer_ids": [5, 1, 3]})
    found = inspect(made.write(tmp_path / "head", head))
    assert "layer ids [6, 2, 4] are not in order" in str(found)
