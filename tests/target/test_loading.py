"""A model comes from disk whole: what is missing is not made up, and what is left over is not dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle import Target, generate, load_drafter
from eagle.drafters import DRAFTERS, settings_of
from eagle.drafters.draft_model import DraftModel, DraftModelSettings
from eagle.drafters.none import NoDrafter
from eagle.formats.export import EXPORTERS, export
from eagle.target.loading import load_model
from tests.families import FAMILIES, OTHER_MEANS, build, own_answer, random_tokens


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Rewrite a folder's weights with tensors more, or less where None."""
    weights = {**load_file(folder / "model.safetensors"), **tensors}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A llama on disk."""
    build("llama").save_pretrained(tmp_path)
    return tmp_path


MISSING = {"model.layers.1.mlp.up_proj.weight": None}
UNKNOWN = {"fc.weight": torch.ones(2, 2), "d2t": torch.ones(3)}


@pytest.mark.quick("tensors4-holds weights of other sizes than its config.json says")
@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            MISSING,
            r"no whole llama model: missing weights .*up_proj.weight\. Missing weights .* `eagle import`",
        ),
        (
            UNKNOWN,
            r"no whole llama model: unknown weights d2t, fc.weight\. Missing weights .* `eagle import`",
        ),
        (
            {**MISSING, **UNKNOWN},
            r"missing weights model.layers.1.mlp.up_proj.weight; unknown weights d2t, fc.weight",
        ),
        (
            {f"x{i}": torch.ones(1) for i in range(6)},
            r"unknown weights x0, x1, x2, x3 and 2 more\.",
        ),
        (
            {"model.norm.weight": torch.ones(7)},
            r"holds weights of other sizes than its config.json says",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(folder: Path, tensors: Any, message: str) -> None:
    """By every way in: as a target, as a draft model, and as what a draft model starts from."""
    target = Target(build("llama"))
    change(folder, **tensors)
    loads = (
        lambda: Target.load(folder, dtype="float32"),
        lambda: load_drafter(folder, target),
        lambda: DraftModel.for_target(DraftModelSettings(model=str(folder)), target.config),
    )
    for load in loads:
        with pytest.raises(ValueError, match=message):
            load()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.rotary_emb.inv_freq",
        "mtp.layers.0.norm.weight",
    ],
)
def test_what_a_model_computes_or_never_runs_may_lie_beside_its_weights(
    folder: Path, name: str
) -> None:
    """Older releases saved such tensors."""
    change(folder, **{name: torch.ones(4)})
    prompt = random_tokens(9, seed=1)
    target = Target.load(folder, dtype="float32", device="cpu")
    answer = generate(target, NoDrafter(), prompt, max_new_tokens=8, stop=[]).tokens
    assert answer == own_answer(build("llama"), prompt, 8)


def test_layers_behind_the_last_one_need_a_config_that_names_them(folder: Path) -> None:
    """Layers that predict further tokens are left out; layers that a config forgot are not."""
    change(folder, **{"model.layers.4.input_layernorm.weight": torch.ones(32)})
    with pytest.raises(ValueError, match=r"unknown weights model.layers.4.input_layernorm.weight"):
        load_model(folder, torch.float32)
    text = (
        (folder / "config.json")
        .read_text()
        .replace('"num_hidden_layers"', '"num_nextn_predict_layers": 1,\n"num_hidden_layers"')
    )
    (folder / "config.json").write_text(text)
    assert load_model(folder, torch.float32).config.num_hidden_layers == 4


@pytest.mark.parametrize("name", [*FAMILIES, *OTHER_MEANS])
def test_every_family_comes_back_whole(name: str, tmp_path: Path) -> None:
    """What save_pretrained wrote is never called broken: tied weights, fused experts, buffers."""
    model = build(name)
    model.save_pretrained(tmp_path)
    text = torch.tensor([random_tokens(9, seed=1)])
    with torch.no_grad():
        assert torch.equal(load_model(tmp_path, torch.float32)(text).logits, model(text).logits)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("engine", sorted(set(EXPORTERS) - {"transformers"}))
def test_an_exported_head_is_no_draft_model(engine: str, kind: str, tmp_path: Path) -> None:
    """Its config says llama; the weights are a head's, and the refusal says how such a folder comes in."""
    target, settings = Target(build("llama")), settings_of({"kind": kind}, "test")
    head = DRAFTERS[kind].for_target(settings, target.config, target.head, supervised=())
    try:
        export(head.bind(target.head), target.config, engine, tmp_path / "out")
    except ValueError as error:
        pytest.skip(str(error))
    with pytest.raises(ValueError, match="eagle import"):
        load_drafter(tmp_path / "out", target)
