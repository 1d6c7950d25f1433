"""The README of an exported head: it serves from anywhere, claims what is known, and says what was not run."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle.__main__ import main
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.export import export
from eagle.formats.foreign import import_head
from eagle.target.target import Target
from tests import foreign_heads as made
from tests.formats.test_export_verb import write_head, write_target

RUN = ("vllm", "openvino", "llamacpp")  # compared with this decoder in tests/test_engines.py
READ = ("sglang", "trtllm", "portable", "eagle")
ENGINES = (*RUN, *READ, "speculators")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and a head for it."""
    folder = tmp_path_factory.mktemp("TARGET")  # a name that commands hold too
    write_target(folder / "target", torch.float32)
    write_head(folder / "head", folder / "target", taps=(2, 4, 5), draft_vocab=30)
    return folder


def readme(work: Path, engine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What stands beside an export whose paths were all said relative to where the command ran."""
    monkeypatch.chdir(work)
    main(["export", "head", "--target", "target", "--to", engine, f"out/{engine}"])
    return (work / "out" / engine / "README.md").read_text()


@pytest.mark.parametrize("engine", ENGINES)
def test_its_commands_run_from_anywhere(engine: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Head and target are absolute, no placeholder is left, and it is said what to change after a move."""
    said = readme(work, engine, monkeypatch)
    assert str(work / "out" / engine) in said and str(work / "target") in said
    code = "\n".join(said.split("```")[1::2])
    assert not {"TARGET", "HEAD", "DEPTH", "NODES", "METHOD", "LAYERS"} & set(
        shlex.split(code.replace("'", " "), comments=True)
    )
    assert "where it lies now" in said


@pytest.mark.parametrize("engine", ENGINES)
def test_what_was_not_run_is_said(engine: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of SGLang, TensorRT-LLM and SafeAILab/EAGLE, and of the folder for all."""
    assert ("not run" in readme(work, engine, monkeypatch).lower()) == (engine not in RUN)


@pytest.mark.parametrize("engine", ["vllm", "speculators", "portable"])
def test_vllm_on_a_cpu(engine: str, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for its cache, the module that starts it, and the precision, which would be bf16."""
    said = readme(work, engine, monkeypatch)
    for part in ("VLLM_CPU_KVCACHE_SPACE=", "python -m vllm.entrypoints.openai.api_server --model ", "--dtype float32"):
        assert part in said, part


def test_nothing_is_claimed_of_an_imported_head(tmp_path: Path) -> None:
    """Nobody knows its template; a target that nobody named is a placeholder with an explanation."""
    folder = made.write(tmp_path / "foreign", made.eagle1())
    import_head(folder, tmp_path / "head")
    torch.manual_seed(0)
    config: dict[str, Any] = {**made.LLAMA, "num_hidden_layers": 2}
    target = Target(LlamaForCausalLM(LlamaConfig(**config)))
    export(load_head(tmp_path / "head").bind(target.head), target.config, "vllm", tmp_path / "out", tmp_path / "head")
    said = (tmp_path / "out/README.md").read_text()
    assert "for unknown" not in said and "vllm serve unknown" not in said
    assert "the target’s own" not in said and "given no arguments" not in said
    assert "imported" in said and "`TARGET`" in said and "vllm serve TARGET" in said


def test_a_recipe_that_does_not_speak_of_templates(work: Path, tmp_path: Path) -> None:
    """Nothing is claimed there either."""
    target = Target.load(work / "target", dtype="float32")
    head = load_head(work / "head")
    for recipe in ("target: {path: t}\n", "target: {path: t}\ndata: {train: x}\n", "target: t\ndata: [1]\ntrain:\n"):
        save_head(tmp_path / "head", head, recipe, {})
        export(
            load_head(tmp_path / "head").bind(target.head), target.config, "vllm", tmp_path / "out", tmp_path / "head"
        )
        said = (tmp_path / "out/README.md").read_text()
        assert "the target’s own" not in said and "Unknown" in said
