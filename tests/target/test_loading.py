"""A model comes from disk whole: what is missing is not made up, and what is left over is not dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle import Target, load_drafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.none import NoDrafter
from eagle.formats.export import EXPORTERS, export
from eagle.target.loading import load_model
from tests.families import FAMILIES, OTHER_MEANS, build, own_answer, random_tokens
from tests.target.decoded import decode


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Add tensors to a folder's weights; None removes one."""
    weights = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a llama on disk."""
    build("llama").save_pretrained(tmp_path)
    return tmp_path


def test_random_models_are_the_same_again() -> None:
    """Whatever was drawn before, also where vectors start from random numbers."""
    first, second = (build("qwen3_next").state_dict() for _ in range(2))
    torch.testing.assert_close(first, second, rtol=0, atol=0)


MISSING = {"model.layers.1.mlp.up_proj.weight": None}
UNKNOWN = {"fc.weight": torch.ones(2, 2), "d2t": torch.ones(3)}


@pytest.mark.quick("tensors2-*")
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({**MISSING, **UNKNOWN}, "missing weights .*up_proj.weight; unknown weights d2t, fc"),
        ({f"x{i}": torch.ones(1) for i in range(6)}, "x0, x1, x2, x3 and 2 more"),
        ({"model.norm.weight": torch.ones(7)}, "other sizes than its config.json says"),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, tensors: Any, message: str) -> None:
    """By every way in: as a target, as a draft model, and as what a draft model starts from."""
    target = Target(build("llama"))
    # the file is damaged after the target was made of a whole one
    change(folder, **tensors)

    with pytest.raises(ValueError, match=message):
        Target.load(folder, dtype="float32")
    with pytest.raises(ValueError, match=message):
        load_drafter(folder, target)
    with pytest.raises(ValueError, match=message):
        DraftModel.for_target(DraftModelSettings(model=str(folder)), target.config)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.rotary_emb.inv_freq", "mtp.layers.0.norm.weight"]
)
def test_what_a_model_computes_or_never_runs_may_be_among_its_weights(
    folder: Path, name: str
) -> None:
    """Older releases saved such tensors."""
    change(folder, **{name: torch.ones(4)})
    target = Target.load(folder, dtype="float32", device="cpu")
    prompt = random_tokens(9, seed=1)
    assert decode(target, NoDrafter(), prompt, 8) == own_answer(build("llama"), prompt, 8)


def test_layers_after_the_last_one_need_a_config_that_names_them(folder: Path) -> None:
    """Layers that predict further tokens are left out; layers that a config forgot are not."""
    change(folder, **{"model.layers.4.input_layernorm.weight": torch.ones(32)})

    with pytest.raises(ValueError, match=r"unknown weights model\.layers\.4"):
        load_model(folder, torch.float32)

    config = json.loads((folder / "config.json").read_text())
    # as DeepSeek-V3 and its relatives say
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config))

    assert load_model(folder, torch.float32).config.num_hidden_layers == 4


@torch.no_grad()
@pytest.mark.parametrize("name", [*FAMILIES, *OTHER_MEANS])
def test_every_family_comes_back_whole(name: str, tmp_path: Path) -> None:
    """What save_pretrained wrote is never called broken: tied weights, fused experts, buffers."""
    model = build(name)
    model.save_pretrained(tmp_path)
    tokens = torch.tensor([random_tokens(9, seed=1)])
    loaded = load_model(tmp_path, torch.float32)
    # bit for bit: loading computes nothing
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("engine", sorted(set(EXPORTERS) - {"transformers"}))
def test_an_exported_head_is_no_draft_model(engine: str, kind: str, tmp_path: Path) -> None:
    """Its config says llama; the weights are a head's, and the refusal says how such a folder comes in."""
    target = Target(build("llama"))
    settings = settings_of({"kind": kind}, "test")
    head = DRAFTERS[kind].for_target(
        settings,
        target.config,
        target.head,
        supervised=(),
    )

    try:
        export(head.bind(target.head), target.config, engine, tmp_path / "out")
    except ValueError as error:
        # not every engine takes every head
        pytest.skip(str(error))

    with pytest.raises(ValueError, match="eagle import"):
        load_drafter(tmp_path / "out", target)
