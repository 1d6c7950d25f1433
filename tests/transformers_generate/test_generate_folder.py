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
def folder(
    repeating_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """Return an untrained head's folder with the file that transformers runs."""
    # transformers copies the file there
    modules = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    monkeypatch.setattr(modules, str(tmp_path / "modules"))
    head = Eagle1.for_target(
        Eagle1.Settings(),
        repeating_target.config,
        repeating_target.head,
    )
    save_head(tmp_path / "first/head", head, "", {})
    write_custom_generate(tmp_path / "first/head")
    return tmp_path / "first/head"


@pytest.fixture
def model(repeating_target: Target) -> Any:
    """Return a model that no other test has decoded with."""
    # what a model holds would reach other tests
    return copy.deepcopy(repeating_target.model)


@pytest.fixture
def prompt(repeating_target: Target) -> torch.Tensor:
    """Return a question."""
    return torch.tensor([repeating_target.chat("What do you know about otters?")])


def test_a_folder_decodes_with_its_head(
    folder: Path,
    model: Any,
    prompt: torch.Tensor,
    repeating_target: Target,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tokens, stop strings and streamers are the stock ones; the head is loaded once."""
    stock = model.generate(prompt, **OPTIONS)
    with_folder = {**OPTIONS, "custom_generate": str(folder)}
    assert torch.equal(model.generate(prompt, **with_folder), stock)
    # the prompt may come by its keyword, with a mask
    mask = torch.ones_like(prompt)
    assert torch.equal(
        model.generate(
            inputs=prompt,
            attention_mask=mask,
            **with_folder,
        ),
        stock,
    )
    # what a model holds for later calls: one callable for this folder, one drafter
    (served,) = held_by(model).callables.values()
    drafter = held_by(model).drafters[served]
    assert isinstance(drafter, Eagle1)
    assert len(eagle.transformers.last_traces(model)[0].tokens) == 24

    tokenizer = repeating_target.tokenizer
    # stop strings and streamers, which end the answer early
    answer = tokenizer.decode(stock[0, prompt.shape[1] :])
    strings = {"stop_strings": answer[9:14], "tokenizer": tokenizer}
    printed = []
    for options in (OPTIONS, with_folder):
        streamer = TextStreamer(tokenizer)
        tokens = model.generate(
            prompt,
            **options,
            **strings,
            streamer=streamer,
        ).tolist()
        printed.append((tokens, capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert len(printed[0][0][0]) < stock.shape[1]
    assert held_by(model).drafters[served] is drafter


def test_a_seed_and_a_new_head_take_effect(
    folder: Path,
    model: Any,
    prompt: torch.Tensor,
) -> None:
    """A seed repeats samples and keeps the head; a head that was written again is loaded again."""
    with_folder = {
        **OPTIONS,
        "custom_generate": str(folder),
        "do_sample": True,
        "seed": 4,
    }
    first = model.generate(prompt, **with_folder)
    (served,) = held_by(model).callables.values()
    drafter = held_by(model).drafters[served]
    assert torch.equal(model.generate(prompt, **with_folder), first)
    assert served.seed == 4
    assert held_by(model).drafters[served] is drafter

    save_head(folder, load_head(folder), "again", {})
    write_custom_generate(folder)
    model.generate(prompt, **with_folder)
    assert served not in held_by(model).callables.values()


def test_two_heads_of_one_name_and_a_folder_that_moves(
    folder: Path,
    model: Any,
    prompt: torch.Tensor,
) -> None:
    """transformers copies the file and forgets where it lay, and both files are the same."""
    # both folders are called head
    other = folder.parent.parent / "second/head"
    shutil.copytree(folder, other)
    for path in (folder, other):
        model.generate(prompt, custom_generate=str(path), **OPTIONS)
        (served,) = held_by(model).callables.values()
        assert served.drafter == str(path)
    moved = folder.rename(folder.with_name("elsewhere"))
    model.generate(prompt, custom_generate=str(moved), **OPTIONS)
    with pytest.raises(ValueError, match="custom_generate is None"):
        eagle.transformers.generate_from_folder(model, prompt)


def test_a_missing_package_is_named(
    folder: Path,
    model: Any,
    prompt: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its name on PyPI is not that of its import."""
    # as if the package were not installed
    monkeypatch.setitem(sys.modules, "eagle.transformers", None)
    monkeypatch.setitem(sys.modules, "eagle", None)
    with pytest.raises(ImportError, match="`pip install --upgrade eagle-heads`"):
        model.generate(prompt, custom_generate=str(folder), **OPTIONS)


def test_a_folder_without_a_head_is_refused(tmp_path: Path) -> None:
    """No file is written there."""
    with pytest.raises(ValueError, match="no folder at"):
        write_custom_generate(tmp_path / "nothing")
