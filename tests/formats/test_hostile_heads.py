"""Folders that were made to do harm: a clear error each time, nothing written, no memory taken, nothing run."""

from __future__ import annotations

import json
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle.formats.reading.foreign import inspect, read_head
from tests import foreign_heads as made
from tests.foreign_heads import refused, told

LONG = 100_000_000
FUZZ = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from([10**40, -1, 0])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
)
KEYS = sorted(
    {key for config, _ in made.LAYOUTS.values() for key in config}
    | {"settings", "shape", "weight_map", "bias"}
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A healthy head."""
    return made.write(tmp_path / "head", made.speculators())


# -- config.json ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@given(
    changed=st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=4),
    name=st.sampled_from([*made.LAYOUTS, "own"]),
)
@FUZZ
def test_any_config_is_read_or_refused(changed: dict[str, Any], name: str, tmp_path: Path) -> None:
    """Values of any kind in place of any keys, in the config and in its sections."""
    config, tensors = made.LAYOUTS[name] if name in made.LAYOUTS else made.own()
    nested = {key: {**value, **changed} for key, value in config.items() if isinstance(value, dict)}
    for spoilt in ({**config, **changed}, {**config, **nested}):
        made.write(tmp_path / "head", (config, tensors))
        (tmp_path / "head/config.json").write_text(
            json.dumps(spoilt)
        )  # with NaN and Infinity as Python writes them
        assert str(inspect(tmp_path / "head"))
        try:
            read_head(tmp_path / "head", taps=None if name[:3] in ("EAG", "own") else made.TAPS)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "is not JSON"),
        (b"\xff\xfe{}", "is not JSON"),
        (b"[" * 200_000, "is not JSON"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "is not JSON"),
        (b"[1, 2]", "holds list, expected a mapping"),
        (b'{"hidden_size": NaN}', "NaN is not a number"),
        (b'{"rms_norm_eps": 1e999}', "1e999 is not a number"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b'{"hidden_size": 16, "hidden_size": 32}', "stands twice"),
    ],
)
def test_what_is_no_config_is_refused(text: bytes, says: str, folder: Path) -> None:
    """Not text, too deep, not a number, not clear."""
    (folder / "config.json").write_bytes(text)
    assert says in told(folder)


def test_a_config_of_100_megabytes_is_not_read(folder: Path) -> None:
    """Nor is it held."""
    with (folder / "config.json").open("wb") as opened:
        opened.truncate(LONG)
    assert "expected at most 1,000,000" in in_little_memory(lambda: told(folder))


def in_little_memory(action: Callable[[], str], megabytes: int = 60) -> str:
    """What an action returns when the process may grow by so many megabytes and no further."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + megabytes * 10**6, hard))
    try:
        return action()
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


# -- safetensors ------------------------------------------------------------------------------------------------------


def entry(dtype: Any = "F32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    """One line of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def packed(header: Any, data: bytes = bytes(16), length: int | None = None) -> bytes:
    """A file with that header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "cut short"),
        (b"abc", "cut short"),
        (packed({}, length=2**63), "cut short"),
        (packed({"a": entry()}, length=10**6), "cut short"),
        (packed(b"not json", b""), "is not JSON"),
        (packed([1], b""), "expected a mapping"),
        (packed({"a": entry(shape=(2**39, 2**39, 2**39))}), "needs"),
        (packed({"a": entry(shape=(10**30,))}), "expected up to 8 sizes"),
        (packed({"a": entry(shape=(-2, -2))}), "expected up to 8 sizes"),
        (packed({"a": entry(shape=[1] * 1000)}), "expected up to 8 sizes"),
        (packed({"a": entry(shape="many")}), "expected up to 8 sizes"),
        (packed({"a": entry("F64")}), "needs 32 bytes, it has 16"),
        (packed({"a": entry("F3")}), "expected one of"),
        (packed({"a": entry(["F32"])}), "expected one of"),
        (packed({"a": entry(offsets=(0, 10**20))}), "expected two places"),
        (packed({"a": entry(offsets=(16, 0))}), "needs"),
        (packed({"a": entry(offsets=("0", "16"))}), "expected two places"),
        (packed({"a": entry(offsets=(0, 8, 16))}), "does not say"),
        (packed({"a": 3}), "does not say"),
        (packed({"a": entry(), "b": entry()}), "overlap"),
        (packed({"a": entry(offsets=(8, 24))}, bytes(24)), "overlap or leave gaps"),
        (packed({"a": entry()}, bytes(40)), "the file has 40"),
        (packed({"a": entry(offsets=(16, 32))}, bytes(16)), "overlap or leave gaps"),
    ],
)
def test_what_is_no_safetensors_file_is_refused(data: bytes, says: str, folder: Path) -> None:
    """Headers beyond the file, absurd shapes, other dtypes, parts that overlap."""
    (folder / "model.safetensors").write_bytes(data)
    assert says in told(folder)


@given(cut=st.floats(0, 0.9999))
@FUZZ
def test_a_file_that_is_cut_short_is_refused(cut: float, tmp_path: Path) -> None:
    """Wherever it ends."""
    folder = made.write(tmp_path / "head", made.eagle1())
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: int(len(data) * cut)])
    assert "cut short" in refused(folder) or "the file has" in refused(folder)


@given(places=st.lists(st.tuples(st.integers(0, 900), st.integers(0, 255)), min_size=1, max_size=5))
@FUZZ
def test_any_header_is_read_or_refused(places: list[tuple[int, int]], tmp_path: Path) -> None:
    """Bytes of it replaced."""
    folder = made.write(tmp_path / "head", made.eagle1())
    data = bytearray((folder / "model.safetensors").read_bytes())
    for place, byte in places:
        data[place] = byte
    (folder / "model.safetensors").write_bytes(data)
    assert str(inspect(folder))
    try:
        read_head(folder)
    except ValueError as error:
        assert str(error)


def test_absurd_sizes_take_no_memory(folder: Path) -> None:
    """A config with sizes that no tensors have, a file of holes, and a shape that only its header has."""
    config, tensors = made.speculators()
    block = {
        **config["transformer_layer_config"],
        "hidden_size": 10**6,
        "intermediate_size": 10**7,
        "vocab_size": 10**8,
    }
    made.write(
        folder, ({**config, "transformer_layer_config": block, "draft_vocab_size": 10**8}, tensors)
    )
    assert "expected [1000000, 3000000]" in in_little_memory(lambda: told(folder))
    huge = packed({"fc.weight": entry(shape=(10**5, 10**5), offsets=(0, 4 * 10**10))}, b"")
    with (folder / "model.safetensors").open("wb") as opened:
        opened.write(huge)
        opened.truncate(len(huge) + 4 * 10**10)
    assert "almost none are on the disk" in in_little_memory(lambda: told(folder))


ESCAPE = "\x1b]0;owned\x07"


def test_nothing_that_steers_a_terminal_is_printed(folder: Path) -> None:
    """Neither names of tensors nor keys and values of the config."""
    config, tensors = made.speculators()
    values = {ESCAPE: 1, "architectures": [ESCAPE], "dtype": ESCAPE, "draft_vocab_size": ESCAPE}
    rope = {"rope_type": ESCAPE, ESCAPE: 1.0}
    block = {**config["transformer_layer_config"], "hidden_act": ESCAPE, "rope_parameters": rope}
    made.write(folder, ({**config, **values, "transformer_layer_config": block}, tensors))
    (folder / "provenance.json").write_text(
        json.dumps({"target": {"weights": ESCAPE, "config": ESCAPE}})
    )
    target = made.write_target(folder.parent / "target")
    assert "\x1b" not in refused(folder) + str(inspect(folder, target))
    made.write(folder, (config, {**tensors, ESCAPE: torch.ones(1)}))
    assert "\x1b" not in told(folder) + str(inspect(folder))


# -- pickles ----------------------------------------------------------------------------------------------------------


class Code:
    """Runs when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def binary(folder: Path, write: Callable[[Path], None]) -> Path:
    """The folder with a .bin file in place of its weights."""
    (folder / "model.safetensors").unlink()
    write(folder / "pytorch_model.bin")
    return folder


def test_code_in_a_pickle_does_not_run(folder: Path, tmp_path: Path) -> None:
    """Neither in torch's archive nor in a bare pickle."""
    harm = tmp_path / "harm"
    binary(folder, lambda path: torch.save({"fc.weight": Code(harm)}, path))
    assert "weights_only" in told(folder) and "expected names and plain tensors" in told(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Code(harm)))
    assert "torch.save" in told(folder)
    assert not harm.exists()


@pytest.mark.parametrize(
    ("held", "says"),
    [
        ([1, 2], "it holds list"),
        ({1: torch.ones(2)}, "it holds dict"),
        ({"model": {"fc.weight": torch.ones(2)}}, "model is dict"),
        ({"fc.weight": torch.ones(2, 2).to_sparse()}, "plain tensor"),
        ({"fc.weight": torch.ones(1).expand(10**9)}, "does not lie whole"),
        ({"fc.weight": torch.ones(4, 3).T}, "does not lie whole"),
    ],
)
def test_a_pickle_of_anything_else_is_refused(held: Any, says: str, folder: Path) -> None:
    """Only names and plain tensors are taken, whatever torch's own words for the rest are in a version."""
    binary(folder, lambda path: torch.save(held, path))
    message = in_little_memory(lambda: told(folder))
    assert says in message and message.endswith(
        "expected names and plain tensors: save it again, or as safetensors"
    )


def rewritten(
    path: Path, change: Callable[[str, bytes], bytes], kind: int = zipfile.ZIP_STORED
) -> None:
    """The same archive with other parts."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", kind) as archive:
        for name, data in parts.items():
            archive.writestr(name, change(name, data))


@pytest.mark.slow
def test_an_archive_that_grows_is_not_unpacked(folder: Path) -> None:
    """A bomb of zeros, and a tensor that claims more than its storage holds."""

    def bomb(path: Path) -> None:
        torch.save({"fc.weight": torch.zeros(10)}, path)
        rewritten(
            path,
            lambda name, data: bytes(LONG) if name.endswith("data/0") else data,
            zipfile.ZIP_DEFLATED,
        )

    binary(folder, bomb)
    assert "compressed" in in_little_memory(lambda: told(folder))


def test_a_tensor_that_claims_more_than_there_is(folder: Path) -> None:
    """Its pickle says a size, its storage has another."""

    def claim(path: Path) -> None:
        torch.save(
            {"fc.weight": torch.zeros(250)}, path
        )  # 250 is one byte in the pickle, and 65,000 are two
        rewritten(
            path,
            lambda name, data: (
                data.replace(b"K\xfa", b"M\xe8\xfd") if name.endswith("data.pkl") else data
            ),
        )

    binary(folder, claim)
    assert "does not lie whole" in told(folder)
