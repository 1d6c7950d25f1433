"""What a head borrows comes back from disk as the target has it, or is not kept at all."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from eagle import Target
from eagle.core.examples import Example
from eagle.data.store import Damaged, FeatureStore
from eagle.target.borrowed import is_local_model, load_borrowed, save_borrowed
from tests.families import FAMILIES, build, random_tokens

TOKENS = torch.tensor(random_tokens(20, seed=3))
LEARNED_POSITIONS = ("gpt2", "opt")  # which a layer's input has, and an embedding has not


def assert_same(got: Tensor, expected: Tensor) -> None:
    """Compare bit for bit, and the dtype too."""
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, "phi"])
def test_what_comes_back_says_what_the_model_says(
    name: str,
    dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tied, untied, with a bias, with scales and soft caps: the model's own logits, and the input of its layer 0."""
    monkeypatch.setitem(FAMILIES, "phi", ("phi", {}))  # whose LM head has a bias
    target = Target(build(name, dtype))
    files = save_borrowed(tmp_path, target.head, target.config)

    assert files.keys() == {"head.safetensors", "config.json"}

    loaded = load_borrowed(tmp_path)
    hidden = target.features(TOKENS[None], (-1,))[0, :, 0]
    output = target.model(
        input_ids=TOKENS[None],
        use_cache=False,
        output_hidden_states=True,
    )

    for head in (target.head, loaded.head):
        # the model's own forward is the oracle
        assert_same(head.logits(hidden), output.logits[0])
        if name not in LEARNED_POSITIONS:
            assert_same(head.embed(TOKENS), output.hidden_states[0][0])

    # stock modules, whatever the target's are
    assert type(loaded.head.embedding) is nn.Embedding
    assert type(loaded.head.output) is nn.Linear
    assert not loaded.head.embedding.weight.requires_grad
    assert not loaded.head.weight.requires_grad
    assert loaded.config.to_dict() == {**target.config.to_dict(), "_name_or_path": str(tmp_path)}

    with safe_open(tmp_path / "head.safetensors", "pt") as file:
        tensors = {*file.keys()}
        assert file.get_tensor("embedding").dtype == dtype

    # a tied matrix is written once
    expected = {"embedding"} if target.config.tie_word_embeddings else {"embedding", "output"}

    assert tensors == expected | ({"bias"} if name == "phi" else set())


class Shifted(nn.Embedding):
    """An embedding that is more than its matrix."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a row plus one."""
        return super().forward(tokens) + 1


def make_integers() -> nn.Linear:
    """Return an LM head in int8."""
    linear = nn.Linear(32, 96, bias=False)
    linear.weight = nn.Parameter(torch.ones(96, 32, dtype=torch.int8), requires_grad=False)
    return linear


@pytest.mark.parametrize(
    "parts",
    [
        {"embedding": Shifted(96, 32)},
        {"output": nn.Linear(32, 96, device="meta")},
        {"output": make_integers()},
    ],
    ids=["a transform", "another device", "other numbers"],
)
def test_what_is_more_than_matrices_is_not_kept(parts: dict[str, Any], tmp_path: Path) -> None:
    """A part with a transform of its own, on another device, or in other numbers."""
    target = Target(build("llama"))
    own = {"embedding": target.head.embedding, "output": target.head.output}
    head = type(target.head)(**own | parts)
    assert not save_borrowed(tmp_path, head, target.config)
    assert not list(tmp_path.iterdir())


def test_a_config_of_an_unknown_type_is_not_kept(tmp_path: Path) -> None:
    """Nobody could read it again."""
    unknown: Any = type("Config", (), {"model_type": "nobody_knows"})()
    assert not save_borrowed(tmp_path, Target(build("llama")).head, unknown)


def spoil(path: Path) -> None:
    """Change the last byte of a file."""
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.parametrize(
    ("file", "damage"), [("head.safetensors", spoil), ("config.json", Path.unlink)]
)
def test_a_store_looks_at_every_byte(
    file: str,
    damage: Callable[[Path], None],
    tmp_path: Path,
) -> None:
    """When they are asked for, and only then; a store that has none says so."""
    target = Target(build("llama"))
    examples = [Example(TOKENS, TOKENS > 0)]
    made = {"target": {}, "taps": [-1], "dtype": "float32"}
    parts = [[[0]]]
    store = FeatureStore.create(tmp_path, examples, made, parts, width=32)

    assert store.borrowed_folder() is None

    files = save_borrowed(tmp_path, target.head, target.config)
    store = FeatureStore.create(
        tmp_path,
        examples,
        made,
        parts,
        width=32,
        borrowed=files,
    )

    assert store.borrowed_folder() == tmp_path

    # after the store has written down each file's hash
    damage(tmp_path / file)
    store = FeatureStore(tmp_path, partial=True)

    with pytest.raises(Damaged, match=f"{file} is missing or damaged: .*--repair"):
        store.borrowed_folder()


def test_a_target_is_here_or_not(tmp_path: Path) -> None:
    """A folder, no folder, and ids that no cache holds; nothing is asked of a network."""
    assert is_local_model(str(tmp_path))
    # the last two look like ids of a hub
    for name in (str(tmp_path / "none"), "some/where/else", "nobody/has-this", "nor-this"):
        assert not is_local_model(name)
