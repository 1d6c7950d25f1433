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
    """Three random sequences, partly supervised."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in (33, 20, 9):
        tokens = torch.randint(
            5,
            VOCAB_SIZE,
            (length,),
            generator=generator,
        )
        made.append(Example(tokens, torch.rand(length, generator=generator) < 0.5))
    return made


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_old_store(
    folder: Path,
    examples: list[Example],
    states: list[Tensor],
) -> dict[str, Any]:
    """Write a store of the first version by hand, and return its identity.

    It holds the float8 states of every tap and token, in two shards.
    """
    plan = [[0, 2], [1]]
    # the layout of the first version, as its writer left it
    lengths = [len(example.tokens) for example in examples]
    tensors = {
        "tokens": torch.cat([example.tokens.int() for example in examples]),
        "loss_mask": torch.cat([example.loss_mask for example in examples]),
        "lengths": torch.tensor(lengths),
        "order": torch.tensor([0, 2, 1]),
        "batch_sizes": torch.tensor([1, 1, 1]),
        "shard_batches": torch.tensor([2, 1]),
    }
    folder.mkdir()
    save_file(tensors, folder / "examples.safetensors")
    digest = hash_file(folder / "examples.safetensors")
    # the first version had one kind of tap only
    identity = {key: value for key, value in IDENTITY.items() if key != "inputs"}
    index = {
        "identity": identity,
        "examples": {
            "count": len(lengths),
            "tokens": sum(lengths),
            "sha256": digest,
        },
        "shard_tokens": [33 + 9, 20],
    }
    # each shard names the index that it was written for
    text = json.dumps(list(index.values()), sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()
    index["made"] = {"width": 32, "precision": "float32"}
    (folder / "index.json").write_text(json.dumps(index))
    for shard, numbers in enumerate(plan):
        rows = torch.cat([states[number] for number in numbers])
        # 448 is the largest number of E4M3
        scales = rows.abs().amax(-1) / 448
        values = (rows / scales[..., None]).to(torch.float8_e4m3fn)
        write_old_shard(folder / f"shard-{shard:05d}.safetensors", fingerprint, values, scales)
    return identity


def write_old_shard(
    path: Path,
    fingerprint: str,
    values: Tensor,
    scales: Tensor,
) -> None:
    """Write a shard byte by byte, as safetensors itself would order its tensors otherwise."""
    middle = values.nbytes
    end = middle + scales.nbytes
    header = {
        "__metadata__": {"store": fingerprint, "shard": str(int(path.stem[-5:]))},
        "features": {
            "dtype": "F8_E4M3",
            "shape": [*values.shape],
            "data_offsets": [0, middle],
        },
        "scales": {
            "dtype": "F32",
            "shape": [*scales.shape],
            "data_offsets": [middle, end],
        },
    }
    text = json.dumps(header).encode()
    # safetensors pads its header to 8 bytes
    text += b" " * (-len(text) % 8)
    data = values.view(torch.uint8).numpy().tobytes() + scales.numpy().tobytes()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    checksum = path.with_name(f"{path.name}.sha256")
    checksum.write_text(f"{hash_file(path)}  {path.name}\n")


def test_a_store_of_the_first_version_is_read_and_mended(
    examples: list[Example],
    target: Target,
    tmp_path: Path,
) -> None:
    """It serves every reader, as each of its taps has all tokens; a repair writes the same bytes again."""
    folder = tmp_path / "old"
    states = [target.features(example.tokens[None], (0, 3, -1))[0] for example in examples]
    identity = write_old_store(folder, examples, states)
    for inputs in ([0, 3], [0, 3, -1]):
        store = FeatureStore(folder, {**identity, "inputs": inputs})
        for got, example, expected in zip(
            store.read([0, 1, 2]),
            examples,
            states,
            strict=True,
        ):
            assert torch.equal(got.tokens, example.tokens)
            assert torch.equal(got.loss_mask, example.loss_mask)
            # float8 has three bits of mantissa
            torch.testing.assert_close(
                got.features,
                expected.bfloat16(),
                rtol=0.07,
                atol=0.02,
            )
    assert [fault for _, fault in store.faults(read=True)] == [None, None]
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    # a repair keeps the version of the store
    store.discard([1])
    list(extract(target, store, [1]))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_store_of_a_later_version_is_refused(examples: list[Example], tmp_path: Path) -> None:
    """It is not damaged: nothing must repair it."""
    FeatureStore.create(
        tmp_path,
        examples,
        IDENTITY,
        [[[0], [1], [2]]],
        width=32,
    )
    index = json.loads((tmp_path / "index.json").read_text())
    assert index["version"] == VERSION
    later = {
        **index,
        "version": VERSION + 1,
        "identity": "in another way",
    }
    (tmp_path / "index.json").write_text(json.dumps(later))
    message = rf"version {VERSION + 1}, this program reads 1 to {VERSION}"
    with pytest.raises(ValueError, match=message) as refused:
        FeatureStore(tmp_path, partial=True)
    assert not isinstance(refused.value, Damaged)


@pytest.mark.slow
def test_opening_a_store_takes_a_few_bytes_an_example(tmp_path: Path) -> None:
    """Of 300,000 examples of 40 tokens, tokens stay on the disk, and numbers are no lists."""
    num_shards = 300
    count = 1000 * num_shards
    length = 40
    example = Example(torch.arange(length), torch.arange(length) > 30)
    plan = [[[number] for number in range(1000)]]
    small = FeatureStore.create(
        tmp_path / "small",
        [example] * 1000,
        IDENTITY,
        plan,
        width=2,
    )
    # the large store is the small one repeated, as writing it would take minutes
    tensors = load_file(tmp_path / "small/examples.safetensors")
    for name in ("tokens", "loss_mask", "lengths", "read", "taught", "shared", "batch_sizes"):
        tensors[name] = tensors[name].repeat(num_shards)
    tensors["order"] = torch.arange(count)
    tensors["shard_batches"] = torch.full((num_shards,), 1000)
    save_file(tensors, tmp_path / "examples.safetensors")
    del tensors
    digest = hash_file(tmp_path / "examples.safetensors")
    numbers = {
        "count": count,
        "tokens": count * length,
        "sha256": digest,
    }
    index = {
        **small.index,
        "shard_tokens": [1000 * length] * num_shards,
        "examples": numbers,
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    before = measure_memory()
    store = FeatureStore(tmp_path, partial=True)
    assert len(store.plan) == num_shards
    assert torch.equal(store.stored_tokens(count - 1)[0], example.tokens)
    # a list of numbers takes 36 bytes an entry, a tensor 8
    assert measure_memory() - before < 40 * count + 2e6


def measure_memory() -> int:
    """Return the memory of this process that no file backs, without what its allocator keeps for later."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
