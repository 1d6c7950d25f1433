"""A draft model leaves as transformers' own folder, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.export import EXPORTERS, export


def made(kind: str, target: Target, **settings: Any) -> Any:
    """A head or a draft model that nobody has trained."""
    settings = settings_of({"kind": kind, **settings}, "test")
    return DRAFTERS[kind].for_target(settings, target.config, target.head, supervised=())


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_the_same_model(tied: bool, tiny_target: Target, tmp_path: Path) -> None:
    """Bit-equal logits, tied embeddings too."""
    draft = made("draft_model", tiny_target)
    if tied:
        draft.model.config.tie_word_embeddings = True
        draft.model.lm_head.weight = draft.model.model.embed_tokens.weight
    export(draft, tiny_target.config, "transformers", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokens = torch.randint(tiny_target.vocab_size, (2, 9))
    with torch.no_grad():
        assert torch.equal(
            again(input_ids=tokens).logits, draft.eval().model(input_ids=tokens).logits
        )
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    assert '"method": "draft_model"' in (tmp_path / "out/README.md").read_text()


@pytest.mark.parametrize("engine", sorted(set(EXPORTERS) - {"transformers"}))
def test_no_layout_of_a_head_holds_a_draft_model(engine: str, tiny_target: Target) -> None:
    """The message says which exporter does."""
    with pytest.raises(
        ValueError, match=rf"{engine}: no layout for 'draft_model'.*export to transformers"
    ):
        EXPORTERS[engine](made("draft_model", tiny_target), tiny_target.config)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3", "hass"])
def test_a_head_is_no_model(kind: str, tiny_target: Target) -> None:
    """It cannot go without the target."""
    with pytest.raises(ValueError, match=f"transformers: '{kind}' is a head"):
        EXPORTERS["transformers"](made(kind, tiny_target), tiny_target.config)
