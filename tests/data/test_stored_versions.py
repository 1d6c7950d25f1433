"""Stores of every version and of any size are read."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle import Target
from eagle.core.examples import Example
from eagle.data.features import extract
from eagle.data.store import VERSION, Damaged, FeatureStore
from tests.families import VOCAB_SIZE

IDENTITY = {
    "target": {"weights": "w", "dtype": "float32"},
    "taps": [0, 3, -1],
    "inputs": [0, 3],
    "dtype": "float8",
}


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Three random texts, partly supervised."""
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in (33, 20, 9)]
    return [Example(text, torch.rand(len(text), generator=generator) < 0.5) for text in texts]


def write_old_store(folder: Path, examples: list[Example], states: list[Tensor]) -> dict[str, Any]:
    """A store of the first version, by hand: the float8 states of every tap and token, in two shards."""
    plan = [[0, 2], [1]]
    lengths = [len(example.tokens) for example in examples]
    folder.mkdir()
    tensors = {
        "tokens": torch.cat([example.tokens.int() for example in examples]),
        "loss_mask": torch.cat([example.loss_mask for example in examples]),
        "lengths": torch.tensor(lengths),
        "order": torch.tensor([0, 2, 1]),
        "batch_sizes": torch.tensor([1, 1, 1]),
        "shard_batches": torch.tensor([2, 1]),
    }
    save_file(tensors, folder / "examples.safetensors")
    identity = {key: value for key, value in IDENTITY.items() if key != "inputs"}
    digest = hashlib.sha256((folder / "examples.safetensors").read_bytes()).hexdigest()
    content = {
        "identity": identity,
        "examples": {"count": len(lengths), "tokens": sum(lengths), "sha256": digest},
        "shard_tokens": [sum(lengths[number] for number in shard) for shard in plan],
    }
    fingerprint = hashlib.sha256(
        json.dumps([*content.values()], sort_keys=True).encode()
    ).hexdigest()
    (folder / "index.json").write_text(
        json.dumps(content | {"made": {"width": 32, "precision": "float32"}})
    )
    for shard, numbers in enumerate(plan):
        rows = torch.cat([states[number] for number in numbers])
        scales = rows.abs().amax(-1) / 448
        parts = (
            (rows / scales[..., None]).to(torch.float8_e4m3fn).view(torch.uint8),
            scales.view(torch.uint8),
        )
        end = parts[0].numel()
        header = {
            "__metadata__": {"store": fingerprint, "shard": str(shard)},
            "features": {"dtype": "F8_E4M3", "shape": list(rows.shape), "data_offsets": [0, end]},
            "scales": {
                "dtype": "F32",
                "shape": list(scales.shape),
                "data_offsets": [end, end + scales.nbytes],
            },
        }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        data = (
            len(text).to_bytes(8, "little")
            + text
            + b"".join(part.numpy().tobytes() for part in parts)
        )
        path = folder / f"shard-{shard:05d}.safetensors"
        path.write_bytes(data)
        path.with_name(f"{path.name}.sha256").write_text(
            f"{hashlib.sha256(data).hexdigest()}  {path.name}\n"
        )
    return identity


def test_a_store_of_the_first_version_is_read_and_mended(
    examples: list[Example], target: Target, tmp_path: Path
) -> None:
    """It serves every reader, as each of its taps has all tokens; a repair writes the same bytes again."""
    states = [target.features(example.tokens[None], (0, 3, -1))[0] for example in examples]
    identity = write_old_store(tmp_path / "old", examples, states)
    for inputs in ([0, 3], [0, 3, -1]):
        store = FeatureStore(tmp_path / "old", {**identity, "inputs": inputs})
        for example, text, expected in zip(store.read([0, 1, 2]), examples, states, strict=True):
            assert torch.equal(example.tokens, text.tokens) and torch.equal(
                example.loss_mask, text.loss_mask
            )
            torch.testing.assert_close(example.features, expected.bfloat16(), rtol=0.07, atol=0.02)
    assert [fault for _, fault in store.faults(read=True)] == [None, None]
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    store.discard([1])
    list(extract(target, store, [1]))
    assert before == {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}


def test_a_store_of_a_later_version_is_refused(examples: list[Example], tmp_path: Path) -> None:
    """It is not damaged: nothing must repair it."""
    FeatureStore.create(tmp_path, examples, IDENTITY, [[[0], [1], [2]]], width=32)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["version"] == VERSION
    (tmp_path / "index.json").write_text(
        json.dumps({**index, "version": VERSION + 1, "identity": "in another way"})
    )
    with pytest.raises(
        ValueError, match=rf"version {VERSION + 1}, this program reads 1 to {VERSION}"
    ) as refused:
        FeatureStore(tmp_path, partial=True)
    assert not isinstance(refused.value, Damaged)


@pytest.mark.slow
def test_opening_a_store_takes_a_few_bytes_an_example(tmp_path: Path) -> None:
    """Of 300,000 examples of 40 tokens: tokens stay on the disk, and numbers are no lists."""
    count, length = 300_000, 40
    plan = [[[number] for number in range(start, start + 1000)] for start in range(0, count, 1000)]
    text = Example(torch.arange(length), torch.arange(length) > 30)
    small = FeatureStore.create(tmp_path / "small", [text] * 1000, IDENTITY, plan[:1], width=2)
    tensors = load_file(tmp_path / "small/examples.safetensors")
    for name in ("tokens", "loss_mask", "lengths", "read", "taught", "shared", "batch_sizes"):
        tensors[name] = tensors[name].repeat(count // 1000)
    tensors |= {"order": torch.arange(count), "shard_batches": torch.full((count // 1000,), 1000)}
    save_file(tensors, tmp_path / "examples.safetensors")
    index = {**small.index, "shard_tokens": [1000 * length] * (count // 1000)}
    digest = hashlib.sha256((tmp_path / "examples.safetensors").read_bytes()).hexdigest()
    index["examples"] = {"count": count, "tokens": count * length, "sha256": digest}
    (tmp_path / "index.json").write_text(json.dumps(index))
    del tensors
    before = anonymous_bytes()
    store = FeatureStore(tmp_path, partial=True)
    assert len(store.plan) == count // 1000 and store.text(count - 1)[0].equal(text.tokens)
    grown = anonymous_bytes() - before
    assert grown < 40 * count + 2e6, grown / count


def anonymous_bytes() -> int:
    """The memory of this process that no file backs, without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
