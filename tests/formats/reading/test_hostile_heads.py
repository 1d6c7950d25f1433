"""Files that were made to do harm: a clear error each time, nothing written, no memory taken, nothing run."""

from __future__ import annotations

import json
import pickle
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle.formats.reading.files import check_not_hollow
from eagle.formats.reading.foreign import inspect, read_head
from tests import foreign_heads as made
from tests.foreign_heads import refused, told
from tests.formats.hostile_place import Code, in_little_memory

LONG = 100_000_000
FUZZ = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy head."""
    return made.write(tmp_path / "head", made.speculators())


# -- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not JSON"),
        (b"[1, 2]", "holds list, expected a mapping"),
        (b'{"hidden_size": NaN}', "NaN is not a number"),
        (b'{"rms_norm_eps": 1e999}', "1e999 is not a number"),
        # more digits than Python converts
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"hidden_size": 16, "hidden_size": 32}', "stands twice"),
    ],
)
def test_what_is_no_config_is_refused(
    text: bytes,
    words: str,
    folder: Path,
) -> None:
    """Not text, too deep, not a number, not clear."""
    (folder / "config.json").write_bytes(text)
    assert words in told(folder)


def test_a_config_of_100_megabytes_is_not_read(folder: Path) -> None:
    """A file of holes, which has that size and takes no room."""
    with (folder / "config.json").open("wb") as file:
        file.truncate(LONG)
    assert "expected at most 1,000,000" in in_little_memory(lambda: told(folder))


# -- safetensors ------------------------------------------------------------------------------------------------------


def entry(
    dtype: Any = "F32",
    shape: Any = (2, 2),
    offsets: Any = (0, 16),
) -> dict[str, Any]:
    """Return a header with one tensor."""
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def pack_file(
    header: Any,
    data: bytes = bytes(16),
    length: int | None = None,
) -> bytes:
    """Return a file with a header, which may claim another length than it has."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    if length is None:
        length = len(text)
    return struct.pack("<Q", length) + text + data


TWO_TENSORS = {**entry(), "b": entry()["a"]}
NO_FILES: list[tuple[bytes, str]] = [
    (b"", "cut short"),
    (b"abc", "cut short"),
    (pack_file({}, length=2**63), "cut short"),
    (pack_file(entry(), length=10**6), "cut short"),
    (pack_file(b"not json"), "is not JSON"),
    (pack_file([1]), "expected a mapping"),
    (pack_file(entry(shape=(2**39, 2**39, 2**39))), "needs"),
    (pack_file(entry(shape=(10**30,))), "expected up to 8 sizes"),
    (pack_file(entry(shape=(-2, -2))), "expected up to 8 sizes"),
    (pack_file(entry(shape=[1] * 1000)), "expected up to 8 sizes"),
    (pack_file(entry(shape="many")), "expected up to 8 sizes"),
    (pack_file(entry("F64")), "needs 32 bytes, it has 16"),
    (pack_file(entry("F3")), "expected one of"),
    (pack_file(entry(["F32"])), "expected one of"),
    (pack_file(entry(offsets=(0, 10**20))), "expected two places"),
    (pack_file(entry(offsets=(16, 0))), "needs"),
    (pack_file(entry(offsets=("0", "16"))), "expected two places"),
    (pack_file(entry(offsets=(0, 8, 16))), "does not say"),
    (pack_file({"a": 3}), "does not say"),
    (pack_file(TWO_TENSORS), "overlap"),
    (pack_file(entry(offsets=(8, 24)), bytes(24)), "overlap or leave gaps"),
    (pack_file(entry(), bytes(40)), "the file has 40"),
]


@pytest.mark.parametrize(("data", "words"), NO_FILES)
def test_what_is_no_safetensors_file_is_refused(
    data: bytes,
    words: str,
    folder: Path,
) -> None:
    """Headers longer than the file, absurd shapes, other dtypes, tensors that overlap."""
    (folder / "model.safetensors").write_bytes(data)
    assert words in told(folder)


@given(cut=st.floats(0, 0.9999))
@FUZZ
def test_a_file_that_is_cut_short_is_refused(cut: float, tmp_path: Path) -> None:
    """Wherever it ends."""
    folder = made.write(tmp_path / "head", made.eagle1())
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: int(len(data) * cut)])
    message = refused(folder)

    assert "cut short" in message or "the file has" in message


BYTES = st.tuples(st.integers(0, 900), st.integers(0, 255))


@given(changes=st.lists(BYTES, min_size=1, max_size=5))
@FUZZ
def test_any_header_is_read_or_refused(changes: list[tuple[int, int]], tmp_path: Path) -> None:
    """With some bytes of it replaced."""
    folder = made.write(tmp_path / "head", made.eagle1())
    data = bytearray((folder / "model.safetensors").read_bytes())
    for index, byte in changes:
        data[index] = byte
    (folder / "model.safetensors").write_bytes(data)

    assert str(inspect(folder))

    try:
        read_head(folder)
    except ValueError as error:
        assert str(error)


def test_absurd_sizes_take_no_memory(folder: Path) -> None:
    """A config with sizes that no tensors have, a file of holes, and a shape that only its header has."""
    config, tensors = made.speculators()
    sizes = {
        "hidden_size": 10**6,
        "intermediate_size": 10**7,
        "vocab_size": 10**8,
    }
    block = {**config["transformer_layer_config"], **sizes}
    # no tensor is as large, so that sizes must be compared first
    config |= {"transformer_layer_config": block, "draft_vocab_size": 10**8}
    made.write(folder, (config, tensors))

    assert "expected [1000000, 3000000]" in in_little_memory(lambda: told(folder))

    num_bytes = 4 * 10**10
    header = entry(shape=(10**5, 10**5), offsets=(0, num_bytes))["a"]
    # a header that fits the file, whose bytes are a hole
    huge = pack_file({"fc.weight": header}, data=b"")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(huge)
        file.truncate(len(huge) + num_bytes)

    assert "almost none are on the disk" in in_little_memory(lambda: told(folder))


def test_a_file_that_is_compressed_on_the_disk_is_read(tmp_path: Path) -> None:
    """To a quarter of its bytes, as some file systems do."""
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.write(b"x" * 2**16)
        file.truncate(2**18)
    check_not_hollow(path, path)


ESCAPE = "\x1b]0;owned\x07"


def test_nothing_that_steers_a_terminal_is_printed(folder: Path) -> None:
    """Neither names of tensors nor keys and values of the config."""
    config, tensors = made.speculators()
    # keys and values of every sort that a message may quote
    values = {
        ESCAPE: 1,
        "architectures": [ESCAPE],
        "dtype": ESCAPE,
        "draft_vocab_size": ESCAPE,
    }
    rope = {"rope_type": ESCAPE, ESCAPE: 1.0}
    block = {
        **config["transformer_layer_config"],
        "hidden_act": ESCAPE,
        "rope_parameters": rope,
    }
    spoilt = {**config, **values, "transformer_layer_config": block}
    made.write(folder, (spoilt, tensors))
    record = {"target": {"weights": ESCAPE, "config": ESCAPE}}
    (folder / "provenance.json").write_text(json.dumps(record))
    target = made.write_target(folder.parent / "target")

    assert "\x1b" not in refused(folder)
    assert "\x1b" not in str(inspect(folder, target))

    made.write(folder, (config, {**tensors, ESCAPE: torch.ones(1)}))
    assert "\x1b" not in told(folder)
    assert "\x1b" not in str(inspect(folder))


# -- pickles ----------------------------------------------------------------------------------------------------------


def save_binary(folder: Path, weights: Any) -> Path:
    """Write a .bin file in place of the weights, and return its path."""
    (folder / "model.safetensors").unlink()
    path = folder / "pytorch_model.bin"
    torch.save(weights, path)
    return path


def test_code_in_a_pickle_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Neither in torch's archive nor in a bare pickle."""
    marker = tmp_path / "marker"
    path = save_binary(folder, {"fc.weight": Code(marker)})
    message = told(folder)
    assert "weights_only" in message
    assert "expected names and plain tensors" in message

    path.write_bytes(pickle.dumps(Code(marker)))
    assert "torch.save" in told(folder)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1, 2], "it holds list"),
        ({1: torch.ones(2)}, "it holds dict"),
        ({"model": {"fc.weight": torch.ones(2)}}, "model is dict"),
        ({"fc.weight": torch.ones(2, 2).to_sparse()}, "plain tensor"),
        ({"fc.weight": torch.ones(1).expand(10**9)}, "does not lie whole"),
        ({"fc.weight": torch.ones(4, 3).T}, "does not lie whole"),
    ],
)
def test_a_pickle_of_anything_else_is_refused(
    weights: Any,
    words: str,
    folder: Path,
) -> None:
    """Only names and plain tensors are taken, whatever torch's own words for the rest are in a version."""
    save_binary(folder, weights)
    message = in_little_memory(lambda: told(folder))
    assert words in message
    assert message.endswith("plain tensors: save it again, or as safetensors")


def rewrite_archive(
    path: Path,
    change: Callable[[str, bytes], bytes],
    compression: int = zipfile.ZIP_STORED,
) -> None:
    """Replace the parts of an archive, each by what a function makes of its name and bytes."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in parts.items():
            archive.writestr(name, change(name, data))


@pytest.mark.slow
def test_an_archive_that_grows_is_not_unpacked(folder: Path) -> None:
    """A bomb of zeros in place of a tensor's storage."""

    def grow(name: str, data: bytes) -> bytes:
        return bytes(LONG) if name.endswith("data/0") else data

    path = save_binary(folder, {"fc.weight": torch.zeros(10)})
    rewrite_archive(path, grow, zipfile.ZIP_DEFLATED)
    assert "compressed" in in_little_memory(lambda: told(folder))


def test_a_tensor_that_claims_more_than_its_storage_is_refused(folder: Path) -> None:
    """Its pickle says 65,000 numbers, its storage has 250."""

    def claim(name: str, data: bytes) -> bytes:
        # 250 is one byte in the pickle, and 65,000 are two
        return data.replace(b"K\xfa", b"M\xe8\xfd") if name.endswith("data.pkl") else data

    path = save_binary(folder, {"fc.weight": torch.zeros(250)})
    rewrite_archive(path, claim)
    assert "does not lie whole" in told(folder)
