"""Targets from GGUF files: what transformers itself reads from the same file, in every stage; bad files in words."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from eagle import Target, generate, load_drafter
from eagle.data.identity import target_identity
from eagle.disk import sha256
from eagle.formats.reading.target_files import LM_HEADS, TargetFiles
from eagle.recipe import TargetSection
from eagle.target.borrowed import target_config
from eagle.target.gguf import model_folder
from tests.gguf_files import LAYERS, WIDTH, write_gguf

gguf = pytest.importorskip("gguf", reason="pip install gguf")


@pytest.fixture(params=["F32", "Q8_0", "Q4_1"], scope="module")
def gguf_file(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A GGUF file of each kind."""
    path = tmp_path_factory.mktemp("gguf") / f"tiny-{request.param}.gguf"
    yield write_gguf(path, request.param)


def load_stock(path: Path, dtype: torch.dtype) -> Any:
    """Return the model as transformers reads it from the file: the independent truth."""
    options = {}
    if hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype, **options
    )


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_weights_and_answers_are_those_of_transformers(gguf_file: Path, dtype: torch.dtype) -> None:
    """Weights are dequantised once in float32 and then rounded, as transformers rounds them."""
    stock = load_stock(gguf_file, dtype)
    target = Target.load(gguf_file, dtype=dtype, packed=False)
    ours = dict(target.model.named_parameters())
    for name, weight in stock.named_parameters():
        assert torch.equal(ours[name], weight), name

    tokenizer = AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)
    assert tokenizer("the end<|end|>").input_ids == target.tokenizer("the end<|end|>").input_ids
    prompt = target.chat([{"role": "user", "content": "the sea"}])
    if dtype == torch.float32:
        inputs = torch.tensor([prompt])
        expected = stock.generate(inputs, max_new_tokens=20, do_sample=False)[0, len(prompt) :]
        answer = generate(
            target,
            load_drafter("ngram", target),
            prompt,
            max_new_tokens=20,
        )
        assert answer.tokens == expected.tolist()


def test_every_stage_reads_the_unpacked_folder(gguf_file: Path) -> None:
    """Config, tensors for exports and the identity come from the file; exports name the file itself."""
    name = str(gguf_file)
    stock = load_stock(gguf_file, torch.float32)
    files = TargetFiles.read(name)
    head = files.matrix(LM_HEADS)
    assert head is not None
    assert torch.equal(head, stock.lm_head.weight)
    assert (files.layers, files.width) == (LAYERS, WIDTH)
    assert target_config(name).name_or_path == name
    assert Target.load(name).model.config.name_or_path == name
    identity = target_identity(TargetSection(path=name))
    assert identity["weights"] == sha256(gguf_file)[:16]


def test_a_file_is_unpacked_once_and_anew_when_it_changes(tmp_path: Path) -> None:
    """The folder is found by the file's checksum, so that a copy shares it and another file does not."""
    first = write_gguf(tmp_path / "a.gguf")
    copy = tmp_path / "b.gguf"
    copy.write_bytes(first.read_bytes())
    folder = model_folder(first)
    assert model_folder(copy) == folder
    write_gguf(copy, "Q8_0")
    os.utime(copy, ns=(1, 1))
    assert model_folder(copy) != folder


def cut(path: Path) -> None:
    """Cut a file off, as an interrupted download leaves it."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def rename_architecture(path: Path) -> None:
    """Give a file an architecture that nobody knows."""
    path.write_bytes(path.read_bytes().replace(b"llama", b"lamma"))


BAD_FILES = {
    "absent": (lambda path: path.unlink(), "no GGUF file"),
    "html": (lambda path: path.write_text("<html>"), "first bytes"),
    "empty": (lambda path: path.write_bytes(b""), "first bytes"),
    "cut": (cut, "cannot be read"),
    "header alone": (lambda path: path.write_bytes(b"GGUF"), "cannot be read"),
    "unknown architecture": (rename_architecture, "lamma"),
    "missing tensor": (
        lambda path: write_gguf(path, leave_out="blk.1.ffn_up.weight"),
        "missing weights",
    ),
}


@pytest.mark.parametrize("fault", BAD_FILES)
def test_bad_files_are_refused_in_words(fault: str, tmp_path: Path) -> None:
    """Each is named with what is wrong, and leaves no folder that looks complete."""
    spoil, keyword = BAD_FILES[fault]
    path = write_gguf(tmp_path / "model.gguf")
    spoil(path)
    with pytest.raises(ValueError, match=keyword) as caught:
        Target.load(path)
    assert "model.gguf" in str(caught.value)


def test_shards_and_folders_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """A shard names the tool that merges it; a folder of GGUF files names one of them."""
    with pytest.raises(ValueError, match="--merge"):
        Target.load(tmp_path / "model-00001-of-00003.gguf")
    write_gguf(tmp_path / "model.gguf")
    with pytest.raises(ValueError, match=r"model\.gguf"):
        Target.load(tmp_path)


def test_a_full_disk_is_said_before_it_is_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The float32 weights are larger than the file: what they take is compared with what is free."""
    path = write_gguf(tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes() + b"\0")  # a file of its own, not unpacked by another test
    monkeypatch.setattr("eagle.target.gguf.shutil.disk_usage", lambda _: _Usage())
    with pytest.raises(ValueError, match="GB left"):
        Target.load(path)


class _Usage:
    """What a full disk tells of itself."""

    free = 0


def test_the_origin_is_written(gguf_file: Path) -> None:
    """The folder says which file it was made from."""
    origin = json.loads((Path(model_folder(gguf_file)) / "gguf.json").read_text())
    assert origin == {"file": gguf_file.name, "sha256": sha256(gguf_file)}


def test_a_model_that_transformers_unpacked_itself_is_served(gguf_file: Path) -> None:
    """Without kernels for packed weights transformers dequantises them, and still calls the model quantised."""
    stock = AutoModelForCausalLM.from_pretrained(
        gguf_file.parent, gguf_file=gguf_file.name, dtype=torch.float32
    )
    target = Target(stock)
    prompt = [10, 20, 30, 10, 20]
    expected = stock.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    trace = generate(
        target,
        load_drafter("ngram", target),
        prompt,
        max_new_tokens=12,
    )
    assert trace.tokens == expected[0, len(prompt) :].tolist()
