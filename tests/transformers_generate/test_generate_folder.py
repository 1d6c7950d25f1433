"""A head's folder that `model.generate(custom_generate=FOLDER, trust_remote_code=True)` decodes with."""

from __future__ import annotations

import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TextStreamer

import eagle.transformers
from eagle import Target
from eagle.drafters.recurrent.eagle1 import Eagle1
from eagle.formats.checkpoint import load_head, save_head
from eagle.transformers import write_custom_generate
from eagle.transformers.held_targets import held_by

OPTIONS: dict[str, Any] = {
    "max_new_tokens": 24,
    "do_sample": False,
    "pad_token_id": 0,
    "trust_remote_code": True,
}


@pytest.fixture
def folder(repeating_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An untrained head with the file beside it; transformers copies such files to a folder of the test."""
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    head = Eagle1.for_target(Eagle1.Settings(), repeating_target.config, repeating_target.head)
    save_head(tmp_path / "first/head", head, "", {})
    write_custom_generate(tmp_path / "first/head")
    return tmp_path / "first/head"


@pytest.fixture
def model(repeating_target: Target) -> Any:
    """A model that no other test has decoded with."""
    return copy.deepcopy(repeating_target.model)


@pytest.fixture
def prompt(repeating_target: Target) -> torch.Tensor:
    """A question."""
    return torch.tensor([repeating_target.chat("What do you know about otters?")])


def test_a_folder_decodes_with_its_head(
    folder: Path,
    model: Any,
    prompt: torch.Tensor,
    repeating_target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The stock tokens, stop strings and streamers; the head is loaded once, and anew where it was written anew."""
    stock = model.generate(prompt, **OPTIONS)
    named = {"custom_generate": str(folder), **OPTIONS}
    assert torch.equal(model.generate(prompt, **named), stock)
    assert torch.equal(
        model.generate(inputs=prompt, attention_mask=torch.ones_like(prompt), **named), stock
    )
    (served,) = held_by(model).callables.values()
    drafter = held_by(model).drafters[served]
    assert (
        isinstance(drafter, Eagle1) and len(eagle.transformers.last_traces(model)[0].tokens) == 24
    )
    tokenizer = repeating_target.tokenizer
    strings = {
        "stop_strings": tokenizer.decode(stock[0, prompt.shape[1] :])[9:14],
        "tokenizer": tokenizer,
    }
    printed = []
    for more in (OPTIONS, named):
        tokens = model.generate(prompt, **more, **strings, streamer=TextStreamer(tokenizer))
        printed.append((tokens.tolist(), capsys.readouterr().out))
    assert printed[0] == printed[1] and len(printed[0][0][0]) < stock.shape[1]
    assert held_by(model).drafters[served] is drafter
    drawn = {**named, "do_sample": True, "seed": 4}
    assert torch.equal(model.generate(prompt, **drawn), model.generate(prompt, **drawn))
    assert held_by(model).drafters[served] is drafter and served.seed == 4
    save_head(folder, load_head(folder), "again", {})
    write_custom_generate(folder)
    model.generate(prompt, **named)
    assert served not in held_by(model).callables.values() and served.seed == 4


def test_two_heads_of_one_name_and_a_folder_that_moves(
    folder: Path, model: Any, prompt: torch.Tensor
) -> None:
    """transformers copies the file and forgets where it lay, and both files are the same."""
    other = folder.parent.parent / "second/head"
    shutil.copytree(folder, other)
    for place in (folder, other):
        model.generate(prompt, custom_generate=str(place), **OPTIONS)
        (served,) = held_by(model).callables.values()
        assert served.drafter == str(place)
    folder.rename(folder.with_name("elsewhere"))
    model.generate(prompt, custom_generate=str(folder.with_name("elsewhere")), **OPTIONS)
    with pytest.raises(ValueError, match="custom_generate is None, expected the folder"):
        eagle.transformers.generate_from_folder(model, prompt)


def test_the_code_of_a_folder_runs_only_where_it_is_trusted(
    folder: Path, model: Any, prompt: torch.Tensor
) -> None:
    """transformers asks for it."""
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(
            prompt, custom_generate=str(folder), **{**OPTIONS, "trust_remote_code": False}
        )


def test_what_is_missing_is_said(
    folder: Path, model: Any, prompt: torch.Tensor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The package where it is not installed, under its own name; and a head where there is none."""
    monkeypatch.setitem(sys.modules, "eagle.transformers", None)
    monkeypatch.setitem(sys.modules, "eagle", None)
    with pytest.raises(ImportError, match="`pip install --upgrade eagle-heads`"):
        model.generate(prompt, custom_generate=str(folder), **OPTIONS)
    with pytest.raises(ValueError, match="no folder at"):
        write_custom_generate(tmp_path / "nothing")
