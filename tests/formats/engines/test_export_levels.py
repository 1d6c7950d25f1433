"""Heads that guess several tokens from one state, in the layouts of vLLM and of their authors' code."""

# H hidden, V vocabulary

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn
from transformers import GemmaConfig, LlamaConfig

from eagle.formats.export import EXPORTERS, export
from eagle.formats.reading.foreign import inspect, read_head
from tests import foreign_heads as made
from tests.formats.every_layout import falcon, hydra, medusa, speculator
from tests.formats.make_heads import assert_equal, borrow_from, random_head

H = made.H
V = made.V
LEVELS = 3
INNER = 8
TARGET = LlamaConfig(**{**made.LLAMA, "num_hidden_layers": made.LAYERS}, name_or_path="some/target")
SPECULATOR = {"kind": "mlp_speculator", "inner_dim": INNER}
HEADS: dict[str, dict[str, Any]] = {
    "medusa": {"kind": "medusa", "layers": 2},
    "medusa with the target's LM head": {"kind": "medusa", "lm_head": "target"},
    "falcon": {"kind": "falcon", "k": 3, "levels": 8},
    "hydra": {"kind": "hydra", "layers": 3},
    "hydra with a prefix": {"kind": "hydra", "prefix": True, "layers": 3},
    "speculator": SPECULATOR,
    "tied speculator": {**SPECULATOR, "tie_weights": True, "scale_input": True},
    "speculator of the target's width": {"kind": "mlp_speculator", "levels": 6},
}
READERS = {
    "falcon": ("falcon",),
    "hydra": ("hydra",),
    "medusa": ("vllm", "medusa"),
    "mlp_speculator": ("fms",),
}
# engine, head, the file, and a head in that layout as its authors write it
LAYOUTS = [
    ("vllm", "medusa", "model.safetensors", medusa("vLLM")),
    ("medusa", "medusa", "medusa_lm_head.pt", medusa("FasterDecoding/Medusa")),
    ("fms", "speculator", "model.safetensors", speculator("speculator.")),
    ("fms", "tied speculator", "model.safetensors", speculator("speculator.", tied=True)),
    ("falcon", "falcon", "pytorch_model.bin", falcon()),
    ("hydra", "hydra", "hydra_lm_head.pt", hydra(prefix=False)),
    ("hydra", "hydra with a prefix", "hydra_lm_head.pt", hydra()),
]
# keys that an export does not take over: counts that published configs get wrong, names of targets and libraries
OTHER_KEYS = {
    "medusa_num_heads",
    "medusa_num_layers",
    "base_model_name_or_path",
    "transformers_version",
    "use_cache",
}
# and tensors that the authors' code never reads
UNREAD = ("inv_freq", "prefix_embeding_layer.embed_tokens.weight", "input_embed_fn.weight")


def head_of(name: str, config: Any = TARGET) -> Any:
    """Return a random head, bound to the target's embedding and LM head."""
    head = random_head({"levels": LEVELS, **HEADS[name]}, borrow_from(config))
    if head.settings.kind == "hydra":
        # the authors' code runs the second block of a level again and again
        for _, second, *others in head.blocks:
            for block in others:
                block.load_state_dict(second.state_dict())
    return head


def share_blocks(head: Any) -> None:
    """Give the later blocks of Medusa's levels the first one's weights: FasterDecoding's code has one."""
    for level in head.blocks:
        level[1].load_state_dict(level[0].state_dict())


@pytest.mark.parametrize(("engine", "name", "file", "theirs"), LAYOUTS)
def test_names_shapes_and_keys(
    engine: str,
    name: str,
    file: str,
    theirs: made.Head,
) -> None:
    """As the heads of the authors have them, but for what their code does not read."""
    head = head_of(name)
    if engine == "medusa":
        share_blocks(head)
    layout = EXPORTERS[engine](head, TARGET)
    config, tensors = theirs
    # the authors' heads are the oracle: they were written by hand
    shapes = {key: tensor.shape for key, tensor in tensors.items() if not key.endswith(UNREAD)}

    assert {key: tensor.shape for key, tensor in layout.tensors.items()} == shapes
    assert {tensor.dtype for tensor in layout.tensors.values()} == {torch.float32}
    assert layout.file == file
    assert layout.config["torch_dtype"] == "float32"
    for key in config.keys() - OTHER_KEYS:
        assert layout.config[key] == config[key], key


def test_one_level_shares_nothing() -> None:
    """Whatever its settings say."""
    head = random_head({**SPECULATOR, "levels": 1, "tie_weights": True}, borrow_from(TARGET))
    assert not EXPORTERS["fms"](head, TARGET).config["tie_weights"]


@pytest.mark.parametrize("name", HEADS)
def test_an_export_comes_back_as_it_was(name: str, tmp_path: Path) -> None:
    """Bit by bit, through the files, in whosever names; and nothing is wrong with it."""
    target = made.write_target(tmp_path / "target")
    head = head_of(name)
    for engine in READERS[head.settings.kind]:
        if name == "medusa" and engine == "medusa":
            share_blocks(head)
        export(head, TARGET, engine, tmp_path / engine)
        found = inspect(tmp_path / engine, target)
        assert not found.fatal, found
        assert "unknown keys" not in str(found)
        loaded = read_head(tmp_path / engine, target)
        assert loaded.settings.kind == head.settings.kind
        assert loaded.network == head.network
        assert_equal(loaded.state_dict(), head.state_dict())


def test_vllm_gets_a_copy_of_the_targets_lm_head() -> None:
    """One for all levels, where the head borrows it."""
    layout = EXPORTERS["vllm"](head_of("medusa with the target's LM head"), TARGET)
    # the seed of the LM head that `borrow_from` gives
    assert torch.equal(layout.tensors["lm_heads.0.weight"], made.drawn(V, H, seed=8))
    assert "lm_heads.1.weight" not in layout.tensors
    assert layout.config["original_lm_head"]

    # vLLM takes any other key with these words for one of the two
    counts = [key for key in layout.config if "num" in key and ("heads" in key or "layers" in key)]
    assert counts == ["medusa_num_heads", "medusa_num_layers"]


@pytest.mark.parametrize("name", ["medusa", "falcon", "hydra", "speculator"])
def test_engines_that_cannot_serve_it_say_what_can(name: str) -> None:
    """By the method's name."""
    head = head_of(name)
    kind = head.settings.kind
    readers = r" or ".join(rf"{reader}(?: \(up to [\d.]+\))?" for reader in READERS[kind])
    for engine in EXPORTERS.keys() - {"transformers", *READERS[kind]}:
        with pytest.raises(ValueError, match=f"{engine}: no layout for '{kind}'.*to {readers} "):
            EXPORTERS[engine](head, TARGET)


def test_no_exporter_has_a_layout_for_blockwise_heads() -> None:
    """Nobody published any."""
    head = random_head({"kind": "blockwise"}, borrow_from(TARGET))
    for engine in EXPORTERS.keys() - {"transformers"}:
        words = f"{engine}: no layout for 'blockwise': no exporter has one"
        with pytest.raises(ValueError, match=words):
            EXPORTERS[engine](head, TARGET)


@pytest.mark.parametrize(
    ("engine", "name", "words"),
    [
        ("medusa", "medusa", r"blocks\.0\.1\.weight differs from block 0.*drafter\.layers=1"),
        ("vllm", "speculator", r"no layout for 'mlp_speculator': vLLM 0\.9\.2 was the last"),
        ("trtllm", "medusa", r".*trtllm-build.*--to medusa"),
    ],
)
def test_refusals_name_what_stands_in_the_way(
    engine: str,
    name: str,
    words: str,
) -> None:
    """What the published code has once, and what only older versions read."""
    with pytest.raises(ValueError, match=f"{engine}: {words}"):
        EXPORTERS[engine](head_of(name), TARGET)


def test_targets_that_a_layout_cannot_have() -> None:
    """A family that the published code does not load, and a bias that vLLM would drop."""
    gemma = GemmaConfig(**{**made.LLAMA, "model_type": "gemma"})
    with pytest.raises(ValueError, match="medusa: the target is a gemma"):
        EXPORTERS["medusa"](head_of("medusa", gemma), gemma)

    head = head_of("medusa with the target's LM head")
    head.target_head.output.bias = nn.Parameter(torch.ones(V))
    words = r"vllm: the target's LM head has a bias.*drafter\.lm_head=own"
    with pytest.raises(ValueError, match=words):
        EXPORTERS["vllm"](head, TARGET)


def test_rotary_scaling_does_not_matter_to_heads_without_attention() -> None:
    """A target whose scaling no engine applies in a head."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "factor": 2.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0] * 4,
        "long_factor": [2.0] * 4,
    }
    target = LlamaConfig(**{**made.LLAMA, "rope_parameters": rope, "rope_scaling": None})
    assert EXPORTERS["vllm"](head_of("medusa", target), target).tensors


def test_the_readme_says_no_longer_chain_than_the_head_guesses(tmp_path: Path) -> None:
    """A head of two levels, where three are usual."""
    head = random_head({"kind": "medusa", "levels": 2}, borrow_from(TARGET))
    export(head, TARGET, "vllm", tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        # without which older transformers fail
        assert file.metadata() == {"format": "pt"}
    readme = (tmp_path / "README.md").read_text()

    assert '"method": "medusa"' in readme
    assert '"num_speculative_tokens": 2' in readme
    assert "2 tokens: as many" in readme
    assert json.loads((tmp_path / "config.json").read_text())["medusa_num_heads"] == 2
