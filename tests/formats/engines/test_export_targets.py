"""Exports of what is no plain head for a plain target: draft models, targets that see, targets in another precision."""

# V vocabulary

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eagle import Target, load_drafter
from eagle.__main__ import main
from eagle.formats.checkpoint import save_head
from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import read_head
from eagle.formats.reading.target_files import embedding_dtype
from tests.formats.make_heads import make_head, make_target, write_target
from tests.vision_families import build

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fastest", [torch.float32, torch.bfloat16])
def test_an_exported_embedding_is_that_of_the_checkpoint(
    stored: torch.dtype,
    fastest: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit by bit, also where the other precision is the faster one on this machine."""
    target = write_target(tmp_path / "target", stored)
    assert embedding_dtype(str(tmp_path / "target")) == stored
    save_head(
        tmp_path / "head",
        make_head({"kind": "eagle3"}, make_target()),
        "",
        {},
    )
    # the machine decides in which precision a target computes
    monkeypatch.setattr("eagle.target.target.fastest_dtype", lambda device: fastest)
    options = ["--target", str(tmp_path / "target"), "--to", "eagle"]
    main(["export", str(tmp_path / "head"), *options, str(tmp_path / "out")])
    written = load_file(tmp_path / "out/model.safetensors")["embed_tokens.weight"]

    assert torch.equal(written, target.model.get_input_embeddings().weight.float())


@pytest.fixture(scope="module")
def target() -> Target:
    """A random target."""
    return make_target()


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_same_draft_model(
    tied: bool,
    target: Target,
    tmp_path: Path,
) -> None:
    """Bit-equal logits, tied embeddings too."""
    draft = make_head({"kind": "draft_model"}, target)
    if tied:
        # as targets with tied embeddings make them
        draft.model.config.tie_word_embeddings = True
        draft.model.lm_head.weight = draft.model.model.embed_tokens.weight
    export(draft, target.config, "transformers", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(target.vocab_size, (2, 9))
    with torch.no_grad():
        expected = draft.eval().model(input_ids=tokens).logits
        assert torch.equal(loaded(input_ids=tokens).logits, expected)

    assert (loaded.lm_head.weight is loaded.model.embed_tokens.weight) == tied
    assert '"method": "draft_model"' in (tmp_path / "out/README.md").read_text()


def test_heads_and_draft_models_take_no_layout_of_the_other(target: Target) -> None:
    """A draft model is a model of its own, and a head cannot go without the target."""
    draft = make_head({"kind": "draft_model"}, target)
    for engine in EXPORTERS.keys() - {"transformers"}:
        words = f"{engine}: no layout for 'draft_model'.*export to transformers"
        with pytest.raises(ValueError, match=words):
            EXPORTERS[engine](draft, target.config)
    head = make_head({"kind": "eagle1"}, target)
    with pytest.raises(ValueError, match="transformers: 'eagle1' is a head"):
        EXPORTERS["transformers"](head, target.config)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen2_5_vl", {"kind": "eagle3"}),
        ("gemma3", {"kind": "eagle1", "fc_bias": False}),
        ("gemma3", {"kind": "eagle3"}),
    ],
)
def test_a_folder_for_vllm_has_the_text_models_sizes(
    name: str,
    settings: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A target that sees: nothing of its eyes or three-dimensional positions; the head comes back as it was."""
    target_dir = tmp_path / "target"
    build(name).save_pretrained(target_dir)
    target = Target.load(target_dir, dtype="float32", images=True)
    torch.manual_seed(0)
    head = make_head(settings, target, range(96))
    save_head(tmp_path / "head", head, "", {})
    out = tmp_path / "vllm"
    export(
        head.bind(target.head),
        target.config,
        "vllm",
        out=out,
        head=tmp_path / "head",
    )
    config = json.loads((out / "config.json").read_text())

    assert {key: config[key] for key in SIZES} == SIZES
    assert config["rope_scaling"] is None
    assert not [key for key in config if "vision" in key or "image" in key]

    # the verbs find nothing wrong with it, and read it again
    main(["inspect", str(out), "--target", str(target_dir)])
    assert "FATAL" not in capsys.readouterr().out

    main(["import", str(out), str(tmp_path / "again"), "--target", str(target_dir)])
    loaded: Any = load_drafter(tmp_path / "again", target)
    # a scaled embedding went into `fc` and comes out of it again, which rounds
    torch.testing.assert_close(
        loaded.state_dict(),
        head.state_dict(),
        rtol=1e-6,
        atol=1e-9,
    )


def test_the_factor_on_an_embedding_is_taken_out_in_fp32(tmp_path: Path) -> None:
    """Of weights in bf16, too: quotients rounded to bf16 would be other weights."""
    build("gemma3").save_pretrained(tmp_path / "target")
    target = Target.load(tmp_path / "target", dtype="float32")
    head = make_head({"kind": "eagle1", "fc_bias": False}, target).bind(target.head)
    save_head(tmp_path / "head", head, "", {})
    export(
        head,
        target.config,
        "vllm",
        out=tmp_path / "out",
        head=tmp_path / "head",
    )
    # as a trainer in bf16 would have written it
    file = tmp_path / "out" / "model.safetensors"
    stored = {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
    save_file(stored, file, metadata={"format": "pt"})

    imported = read_head(tmp_path / "out", str(tmp_path / "target"))
    embedding, state = stored["fc.weight"].float().chunk(2, dim=1)
    expected = torch.cat([embedding / target.head.scale, state], dim=1)
    assert imported.state_dict()["fc.weight"].equal(expected)
