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

TEXT = torch.tensor(random_tokens(20, seed=3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*FAMILIES, "phi"])
def test_what_comes_back_says_what_the_model_says(
    name: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied, untied, with a bias, with scales and soft caps: the model's own logits, and the input of its layer 0."""
    monkeypatch.setitem(FAMILIES, "phi", ("phi", {}))  # whose LM head has a bias
    target = Target(build(name, dtype))
    assert save_borrowed(tmp_path, target.head, target.config).keys() == {
        "head.safetensors",
        "config.json",
    }
    lent = load_borrowed(tmp_path)
    answer = target.model(input_ids=TEXT[None], use_cache=False, output_hidden_states=True)
    hidden = target.features(TEXT[None], (-1,))[0, :, 0]
    assert equal(lent.head.logits(hidden), answer.logits[0])
    assert equal(lent.head.embed(TEXT), answer.hidden_states[0][0]) or name in (
        "gpt2",
        "opt",
    )  # learned positions
    assert type(lent.head.embedding) is nn.Embedding and type(lent.head.output) is nn.Linear
    assert not any(
        weight.requires_grad for weight in [*lent.head.embedding.parameters(), lent.head.weight]
    )
    assert lent.config.to_dict() == {**target.config.to_dict(), "_name_or_path": str(tmp_path)}
    with safe_open(tmp_path / "head.safetensors", "pt") as file:
        expected = {"embedding", *(() if target.config.tie_word_embeddings else ("output",))}
        assert {*file.keys()} - {"bias"} == expected and ("bias" in file.keys()) == (name == "phi")  # noqa: SIM118
        assert file.get_tensor("embedding").dtype == dtype


def equal(got: Tensor, expected: Tensor) -> bool:
    """Bit for bit."""
    return got.dtype == expected.dtype and torch.equal(got, expected)


class Shifted(nn.Embedding):
    """An embedding that is more than its matrix."""

    def forward(self, tokens: Tensor) -> Tensor:
        """A row plus one."""
        return super().forward(tokens) + 1


def test_what_is_more_than_matrices_is_not_kept(tmp_path: Path) -> None:
    """A head with a transform of its own, on another device, in other numbers, or of a config that nobody knows."""
    target = Target(build("llama"))

    def kept(part: str, module: nn.Module, **config: Any) -> dict[str, str]:
        parts = {"embedding": target.head.embedding, "output": target.head.output, part: module}
        head = type(target.head)(**parts)
        return save_borrowed(
            tmp_path, head, target.config if not config else type("Config", (), config)()
        )

    own = target.head.embedding.weight
    assert kept("embedding", target.head.embedding)
    assert not kept("embedding", target.head.embedding, model_type="nobody_knows")
    for file in tmp_path.iterdir():
        file.unlink()
    shifted = Shifted(*own.shape)
    shifted.weight = own
    assert not kept("embedding", shifted)
    assert not kept("output", nn.Linear(32, 96, device="meta"))
    integers = nn.Linear(32, 96, bias=False)
    integers.weight = nn.Parameter(torch.ones(96, 32, dtype=torch.int8), requires_grad=False)
    assert not kept("output", integers)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("file", ["head.safetensors", "config.json"])
@pytest.mark.parametrize(
    "damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?")]
)
def test_a_store_looks_at_every_byte(
    damage: Callable[[Path], None], file: str, tmp_path: Path
) -> None:
    """When they are asked for, and only then; a store that has none says so."""
    target, text = Target(build("llama")), Example(TEXT, TEXT > 0)
    made = {"target": {}, "taps": [-1], "dtype": "float32"}
    assert FeatureStore.create(tmp_path, [text], made, [[[0]]], width=32).borrowed_folder() is None
    files = save_borrowed(tmp_path, target.head, target.config)
    assert (
        FeatureStore.create(
            tmp_path, [text], made, [[[0]]], width=32, borrowed=files
        ).borrowed_folder()
        == tmp_path
    )
    damage(tmp_path / file)
    store = FeatureStore(tmp_path, partial=True)
    with pytest.raises(Damaged, match=f"{file} is missing or damaged: .*--repair"):
        store.borrowed_folder()


def test_a_target_is_here_or_not(tmp_path: Path) -> None:
    """A folder, no folder, and ids that no cache holds; nothing is asked of a network."""
    assert is_local_model(str(tmp_path))
    for name in (str(tmp_path / "none"), "some/where/else", "nobody/has-this", "nor-this"):
        assert not is_local_model(name)
