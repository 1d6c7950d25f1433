"""The feature store is whole or refused, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle import Target
from eagle.core.examples import Example
from eagle.data.features import check_room, extract
from eagle.data.shards import make_batches, plan_shards
from eagle.data.store import Damaged, FeatureStore
from eagle.data.stored_rows import slots_of

IDENTITY = {
    "target": {"weights": "w", "dtype": "float32"},
    "tokenizer": "t",
    "taps": [0, 3, -1],
    "inputs": [0, 3],
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def examples(tiny_target: Target) -> list[Example]:
    """Random sequences of many lengths, partly supervised."""
    # lengths differ, so that shards have different sizes
    generator = torch.Generator().manual_seed(3)
    made = []
    for length in torch.randint(
        20,
        120,
        (48,),
        generator=generator,
    ).tolist():
        tokens = torch.randint(
            10,
            tiny_target.vocab_size,
            (length,),
            generator=generator,
        )
        made.append(Example(tokens, torch.rand(length, generator=generator) < 0.5))
    return made


def create_store(folder: Path, examples: list[Example], **identity: Any) -> FeatureStore:
    """Create a store of about two dozen shards, without features yet."""
    # a limit of 90 tokens makes nearly every batch a shard
    plan = plan_shards(
        [len(example.tokens) for example in examples],
        1,
        90,
    )
    identity = {**IDENTITY, **identity}
    return FeatureStore.create(
        folder,
        examples,
        identity,
        plan,
        width=128,
        precision="float32",
    )


def fill(folder: Path, target: Target) -> None:
    """Compute all features that are not there yet, as a run does."""
    store = FeatureStore(folder, partial=True)
    for _ in extract(target, store, sorted(store.absent)):
        pass


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory,
    examples: list[Example],
    tiny_target: Target,
) -> Path:
    """An uninterrupted store; tests that damage it work on a copy."""
    folder = tmp_path_factory.mktemp("store")
    create_store(folder, examples)
    fill(folder, tiny_target)
    return folder


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    """A store to damage."""
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def read_times(folder: Path, pattern: str = "shard*") -> dict[str, int]:
    """Return when files of a store were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(pattern)}


@pytest.mark.slow
def test_a_store_gives_back_what_went_in(
    whole: Path,
    examples: list[Example],
    tiny_target: Target,
) -> None:
    """Tokens, masks and the model's own hidden states, in the data's order, whatever order they were computed in."""
    store = FeatureStore(whole, IDENTITY)
    assert len(store) == len(examples)
    assert len(store.plan) >= 20
    for got, example in zip(
        store.read(range(len(store))),
        examples,
        strict=True,
    ):
        assert torch.equal(got.tokens, example.tokens)
        assert torch.equal(got.loss_mask, example.loss_mask)
        output = tiny_target.model(example.tokens[None], output_hidden_states=True)
        for column, (tap, kind) in enumerate([(0, "read"), (3, "read"), (-1, "taught")]):
            kept = slots_of(example.loss_mask, kind)
            column_features = got.features[:, column]
            assert torch.equal(column_features[kept], output.hidden_states[tap][0, kept])
            # the others are NaN
            assert int(column_features.isfinite().all(-1).sum()) == len(kept)


def test_others_can_read_and_check_the_shards(whole: Path) -> None:
    """The files are plain safetensors, and `sha256sum` reads the checksums."""
    store = FeatureStore(whole)
    tensors = load_file(store.path(0))
    sizes = {"read": 0, "taught": 0}
    for batch in store.plan[0]:
        for number in batch:
            for kind in sizes:
                sizes[kind] += len(slots_of(store.stored_tokens(number)[1], kind))
    assert tensors["features"].shape == (sizes["read"], 2, 128)
    assert tensors["taught_features"].shape == (sizes["taught"], 1, 128)
    assert sizes["taught"] < sizes["read"] <= store.index["shard_tokens"][0]
    # another tool reads the checksums
    check = subprocess.run(
        "cat *.sha256 | sha256sum --check --status",
        shell=True,
        cwd=whole,
    )
    assert check.returncode == 0


def flip_bit(path: Path) -> None:
    """Change a bit of one byte, far inside."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def rename_tensor(path: Path) -> None:
    """Change a name in the header."""
    path.write_bytes(
        path.read_bytes().replace(
            b"features",
            b"futures_",
            1,
        )
    )


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "flipped": (flip_bit, "not those that were written"),
    "truncated": (lambda path: os.truncate(path, path.stat().st_size - 5), "truncated"),
    "missing": (Path.unlink, "missing"),
    "header": (rename_tensor, "start"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_mended(
    damage: str,
    copy: Path,
    whole: Path,
    tiny_target: Target,
) -> None:
    """A broken shard is named, the others serve, and a repair computes that one alone."""
    apply_damage, reason = DAMAGES[damage]
    apply_damage(FeatureStore(copy).path(3))
    store = FeatureStore(copy, partial=True)
    # as training does with a damaged store, if it may
    store.serve_all_but({shard: fault for shard, fault in store.faults(read=True) if fault})
    assert list(store.absent) == [3]
    assert reason in store.absent[3]
    assert "shard-00003" in store.describe_absent()
    lost = {number for batch in store.plan[3] for number in batch}
    numbers = [store.number(index) for index in range(len(store))]
    assert numbers == sorted(set(range(48)) - lost)
    served = store.read(range(len(store)))
    assert len(served) == len(store) > 0
    for index, example in enumerate(served):
        assert torch.equal(store.tokens_and_mask(index)[0], example.tokens)
    # a flipped bit is seen only by reading every byte
    if damage != "flipped":
        with pytest.raises(ValueError, match=r"1 of \d+ shards .* shard-00003"):
            FeatureStore(copy)
    before = read_times(copy).items()
    store.discard([3])
    fill(copy, tiny_target)
    assert read_files(copy) == read_files(whole)
    changed = {name for name, _ in read_times(copy).items() - before}
    assert changed == {"shard-00003.safetensors", "shard-00003.safetensors.sha256"}


def test_a_flipped_bit_is_seen_as_it_is_first_read(copy: Path) -> None:
    """Training sees it without `--verify`, also in a shard that was right before."""
    FeatureStore(copy).read(range(48))
    flip_bit(FeatureStore(copy).path(7))
    # the store is whole by its headers and sizes
    store = FeatureStore(copy)
    damaged = (store.shards == 7).nonzero()[:, 0].tolist()
    assert 0 < len(damaged) < len(store)
    store.read([index for index in range(len(store)) if index not in damaged])
    for index in damaged:
        with pytest.raises(Damaged, match=r"shard-00007.* not those that were written.* --repair"):
            store.read([index])


def test_a_shard_that_was_right_is_not_read_whole_again(copy: Path) -> None:
    """A second run opens it and reads its rows alone, as a change shows that leaves size and time alone."""
    FeatureStore(copy).read(range(48))
    shard = FeatureStore(copy).path(0)
    state = shard.stat()
    flip_bit(shard)
    os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns))
    FeatureStore(copy).read(range(48))
    assert any(fault for _, fault in FeatureStore(copy).faults(read=True))


@pytest.mark.slow
def test_a_shard_of_another_store_is_seen(
    copy: Path,
    examples: list[Example],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Equal size and a checksum that fits are not enough."""
    other = tmp_path / "other"
    create_store(other, examples, tokenizer="another")
    fill(other, tiny_target)
    # the shard comes with its own checksum, which fits
    for path in other.glob("shard-00002.*"):
        shutil.copy(path, copy)
    with pytest.raises(ValueError, match=r"shard-00002.*another store"):
        FeatureStore(copy)


@pytest.mark.parametrize("file", ["examples.safetensors", "index.json"])
def test_damaged_examples_are_seen(file: str, copy: Path) -> None:
    """The tokens have a checksum too, and a broken index says what to do."""
    path = copy / file
    path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    with pytest.raises(Damaged, match=f"{file}.*--repair"):
        FeatureStore(copy)


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"0" * 9 + b"  shard-00003.safetensors\n"])
def test_a_damaged_checksum_is_seen(text: bytes, copy: Path) -> None:
    """Every reader names the file."""
    name = "shard-00003.safetensors.sha256"
    (copy / name).write_bytes(text)
    with pytest.raises(ValueError, match=rf"1 of \d+ shards .*{name} is damaged"):
        FeatureStore(copy)
    faults = [fault for _, fault in FeatureStore(copy, partial=True).faults(read=True) if fault]
    assert faults == [f"{name} is damaged"]


@pytest.mark.parametrize("text", ["", "null", "[]", "{}", '{"identity": {"dtype": []}}'])
def test_an_index_of_another_shape_is_damaged(text: str, copy: Path) -> None:
    """It may be any JSON."""
    (copy / "index.json").write_text(text)
    with pytest.raises(Damaged, match=r"index\.json is damaged .*--repair"):
        FeatureStore(copy)


@pytest.mark.parametrize(
    ("section", "value"),
    [
        ("identity", {**IDENTITY, "dtype": "int4"}),
        ("identity", {**IDENTITY, "taps": ["0"]}),
        ("identity", {**IDENTITY, "inputs": [None]}),
        ("made", {"width": None}),
        ("shard_tokens", [1, 2, 3]),
        ("examples", {}),
    ],
)
def test_an_index_with_a_wrong_value_is_damaged(
    section: str,
    value: Any,
    copy: Path,
) -> None:
    """It is refused where a reader would fall over it."""
    index = json.loads((copy / "index.json").read_text())
    index[section] = value
    (copy / "index.json").write_text(json.dumps(index))
    with pytest.raises(Damaged, match=r"index\.json is .*--repair"):
        FeatureStore(copy)


def test_too_little_room_is_reported_before_any_work(
    examples: list[Example], tmp_path: Path
) -> None:
    """A store that cannot fit is refused when it is begun, with what else one can do."""
    store = create_store(tmp_path, examples)
    # no real store is that large
    for rows in store.places.values():
        rows.totals = [10**14] * len(store.plan)
    with pytest.raises(ValueError, match=r"too little room .* TB are still to come .*float6"):
        check_room(store)


def test_a_disk_that_fills_up_is_seen_before_each_shard(
    whole: Path,
    examples: list[Example],
    tiny_target: Target,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whole shards stay, the next one is not begun, and the same command goes on once there is room."""
    create_store(tmp_path, examples)
    usage = shutil.disk_usage(tmp_path)

    def disk_usage(_: Any) -> Any:
        # the disk fills up after the sixth shard
        is_full = len(list(tmp_path.glob("*.sha256"))) > 5
        return usage._replace(free=0 if is_full else 10**9)

    with monkeypatch.context() as patched:
        patched.setattr("eagle.data.features.shutil.disk_usage", disk_usage)
        with pytest.raises(ValueError, match=r"too little room .*same command again"):
            fill(tmp_path, tiny_target)
    assert 5 < len(list(tmp_path.glob("*.sha256"))) < 12
    assert not list(tmp_path.glob("*.part"))
    fill(tmp_path, tiny_target)
    assert read_files(tmp_path) == read_files(whole)


@pytest.mark.slow
def test_a_second_extraction_of_the_same_shards_spoils_nothing(
    whole: Path,
    examples: list[Example],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """The second does not know of the first, and runs from start to end while that is within a shard."""
    store = create_store(tmp_path, examples)
    first = extract(tiny_target, store, sorted(store.absent))
    next(first)
    fill(tmp_path, tiny_target)
    for _ in first:
        pass
    assert read_files(tmp_path) == read_files(whole)


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"tokenizer": "u"}, "tokenizer: the store has 't', this run needs 'u'"),
        (
            {"target": {"weights": "v", "dtype": "float32"}},
            "target.weights: the store has 'w', this run needs 'v' as the fingerprint",
        ),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"taps": [0, 4, -1]}, "taps"),
        ({"inputs": [0, -1]}, "inputs: the store has [0, 3], this run needs [0, -1]"),
    ],
)
def test_another_identity_is_refused_by_name(
    change: dict[str, Any],
    difference: str,
    whole: Path,
) -> None:
    """Nothing is read from a store that was made by something else."""
    with pytest.raises(ValueError, match="not those that this run needs") as refused:
        FeatureStore(whole, {**IDENTITY, **change})
    assert difference in str(refused.value)


def test_fewer_taps_than_stored_are_served(whole: Path) -> None:
    """One store serves several methods."""
    assert FeatureStore(
        whole,
        {
            **IDENTITY,
            "taps": [3],
            "inputs": [3],
        },
    ).taps == (0, 3, -1)


@pytest.mark.slow
def test_a_store_that_says_auto_is_read(
    examples: list[Example],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """Older stores did; the precision that they hold as well says what it was."""
    auto = {"weights": "w", "dtype": "auto"}
    create_store(tmp_path, examples, target=auto)
    fill(tmp_path, tiny_target)
    assert FeatureStore(tmp_path, IDENTITY).identity["target"]["dtype"] == "float32"
    FeatureStore(tmp_path, {**IDENTITY, "target": auto})
    message = r"target\.dtype: the store has 'float32', this run needs 'bfloat16'"
    with pytest.raises(ValueError, match=message):
        FeatureStore(tmp_path, {**IDENTITY, "target": {**auto, "dtype": "bfloat16"}})


def test_states_that_are_not_finite_are_refused(
    examples: list[Example],
    tiny_target: Target,
    tmp_path: Path,
) -> None:
    """An overflow in the target ends the extraction instead of poisoning the training."""
    create_store(tmp_path, examples)
    weight = tiny_target.model.get_input_embeddings().weight.data
    kept = weight[11:40].clone()
    # every example has a token of these
    weight[11:40] = float("inf")
    try:
        with pytest.raises(ValueError, match=r"not finite.*target\.dtype"):
            fill(tmp_path, tiny_target)
    finally:
        weight[11:40] = kept


def test_batches_waste_little() -> None:
    """Sequences of like length share a batch, each exactly once, the longest first."""
    chance = random.Random(1)
    lengths = [int(chance.lognormvariate(5, 1)) + 1 for _ in range(2000)]
    batches = make_batches(lengths, 4096)
    assert sorted(chain.from_iterable(batches)) == list(range(2000))
    padded = 0
    for batch in batches:
        longest = max(lengths[number] for number in batch)
        assert lengths[batch[0]] == longest
        assert len(batch) == 1 or len(batch) * longest <= 4096
        padded += len(batch) * longest
    # at most 2% of the slots are padding
    assert sum(lengths) > 0.98 * padded
    assert lengths[batches[0][0]] == max(lengths)
