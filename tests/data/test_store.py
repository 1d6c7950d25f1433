"""The feature store: whole or not at all, whatever happens to the process, the disk or the files."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle import Target
from eagle.core.examples import Example
from eagle.data.features import LiveFeatures, check_room, extract
from eagle.data.shards import make_batches, plan_shards
from eagle.data.store import Damaged, FeatureStore
from eagle.data.stored_rows import DTYPES, pack_features, slots_of, unpack_features

IDENTITY = {
    "target": {"weights": "w", "dtype": "float32"},
    "tokenizer": "t",
    "taps": [0, 3, -1],
    "inputs": [0, 3],
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def examples(tiny_target: Target) -> list[Example]:
    """Random texts of many lengths, partly supervised."""
    generator = torch.Generator().manual_seed(3)
    lengths = [int(length) for length in torch.randint(20, 120, (48,), generator=generator)]
    texts = [
        torch.randint(10, tiny_target.vocab_size, (length,), generator=generator)
        for length in lengths
    ]
    return [Example(text, torch.rand(len(text), generator=generator) < 0.5) for text in texts]


def create_store(folder: Path, examples: list[Example], **identity: object) -> FeatureStore:
    """A store of about two dozen shards, without features yet."""
    plan = plan_shards([len(example.tokens) for example in examples], 1, 90)
    return FeatureStore.create(
        folder, examples, {**IDENTITY, **identity}, plan, width=128, precision="float32"
    )


def fill(folder: Path, target: Target) -> None:
    """What a run does: everything that is not there yet."""
    store = FeatureStore(folder, partial=True)
    for _ in extract(target, store, sorted(store.absent)):
        pass


@pytest.fixture(scope="module")
def whole(
    tmp_path_factory: pytest.TempPathFactory, examples: list[Example], tiny_target: Target
) -> Path:
    """An uninterrupted store; tests that damage it work on a copy."""
    folder = tmp_path_factory.mktemp("store")
    create_store(folder, examples)
    fill(folder, tiny_target)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a store."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def child(work: Callable[[], None]) -> int:
    """A forked process that does the work: it starts at once, with everything loaded."""
    if pid := os.fork():
        return pid
    try:
        work()
        os._exit(0)
    except BaseException as error:
        os.write(2, repr(error).encode())
        os._exit(1)


def copy_store(whole: Path, tmp_path: Path) -> Path:
    """A store of one's own to damage."""
    subprocess.run(["cp", "-r", str(whole), str(tmp_path / "copy")], check=True)
    return tmp_path / "copy"


@pytest.mark.slow
def test_a_store_gives_back_what_went_in(
    whole: Path, examples: list[Example], tiny_target: Target
) -> None:
    """Tokens, masks and features, in the data's order, whatever order they were computed in."""
    store = FeatureStore(whole, IDENTITY)
    assert len(store) == len(examples) and len(store.plan) >= 20
    for got, example in zip(store.read(range(len(store))), examples, strict=True):
        assert torch.equal(got.tokens, example.tokens) and torch.equal(
            got.loss_mask, example.loss_mask
        )
        states = tiny_target.model(example.tokens[None], output_hidden_states=True).hidden_states
        for column, (tap, slots) in enumerate([(0, "read"), (3, "read"), (-1, "taught")]):
            kept = slots_of(example.loss_mask, slots)
            assert torch.equal(got.features[kept, column], states[tap][0, kept])
            assert int(got.features[:, column].isfinite().all(-1).sum()) == len(kept)


def test_others_can_read_and_check_the_shards(whole: Path) -> None:
    """The files are plain safetensors, and `sha256sum` reads the checksums."""
    store = FeatureStore(whole)
    tensors = load_file(store.path(0))
    masks = [store.text(number)[1] for batch in store.plan[0] for number in batch]
    read, taught = (
        sum(len(slots_of(mask, slots)) for mask in masks) for slots in ("read", "taught")
    )
    assert tensors["features"].shape == (read, 2, 128) and tensors["taught_features"].shape == (
        taught,
        1,
        128,
    )
    assert taught < read <= store.index["shard_tokens"][0]
    check = subprocess.run("cat *.sha256 | sha256sum --check --status", shell=True, cwd=whole)
    assert check.returncode == 0


@pytest.mark.quick("float32")
@pytest.mark.parametrize("dtype", DTYPES)
def test_live_features_are_those_of_a_store(
    dtype: str, examples: list[Example], tiny_target: Target, tmp_path: Path
) -> None:
    """Training cannot tell them apart, whatever precision they are kept in."""
    create_store(tmp_path, examples[:6], dtype=dtype)
    fill(tmp_path, tiny_target)
    stored, live = (
        FeatureStore(tmp_path),
        LiveFeatures(tiny_target, examples[:6], {**IDENTITY, "dtype": dtype}),
    )
    assert len(stored) == len(live) and stored.taps == live.taps
    for one, other in zip(stored.read([4, 0, 2]), live.read([4, 0, 2]), strict=True):
        assert one.features.dtype == other.features.dtype
        assert torch.equal(one.features.nan_to_num(9.0), other.features.nan_to_num(9.0))
        assert torch.equal(one.tokens, other.tokens)


def test_float8_is_within_its_rounding() -> None:
    """Every number is off by at most half a step of three mantissa bits, also beside one far larger; zeros stay."""
    features = (
        torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(0))
        * 10.0 ** torch.arange(-3, 0)[:, None]
    )
    features[:, :, 5] *= 500
    features[0] = 0
    values, scales = pack_features(features, "float8")
    error = (unpack_features(values, scales).float() - features).abs()
    smallest = features.abs().amax(-1, keepdim=True) / 448 * 2**-6  # below it steps are equal
    assert values.dtype == torch.float8_e4m3fn and scales.shape == (50, 3)
    assert (error <= torch.maximum(features.abs(), smallest) * (2**-4 + 2**-8)).all()
    assert not error[0].any()


@pytest.mark.slow
def test_twenty_kills_leave_no_trace(
    whole: Path, examples: list[Example], tiny_target: Target, tmp_path: Path
) -> None:
    """Killed at any moment and run again: the same bytes, and nothing that was whole is written twice."""
    store, chance = create_store(tmp_path, examples), random.Random(5)
    written: dict[str, int] = {}
    inside = kills = 0
    while kills < 20:
        pid = child(lambda: fill(tmp_path, tiny_target))
        wanted = kills * len(store.plan) // 20  # from the first shard to the last
        while len(list(tmp_path.glob("*.sha256"))) < wanted or not list(tmp_path.glob("*.part")):
            time.sleep(0.0005)
        time.sleep(chance.random() * 0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        kills += 1
        parts = [path for path in tmp_path.glob("*.part") if path.stat().st_size]
        inside += bool(parts)
        assert len(parts) <= 2  # one shard, or the next one begun while a checksum is written
        now = {
            path.name: (tmp_path / path.stem).stat().st_mtime_ns
            for path in tmp_path.glob("*.sha256")
        }
        assert all(now[name] == when for name, when in written.items())
        written = now
        for part in tmp_path.glob("*.part"):  # as the command does once it has the lock
            part.unlink()
    assert len(written) >= 0.8 * len(store.plan) >= 16 and inside >= 5
    fill(tmp_path, tiny_target)
    assert contents(tmp_path) == contents(whole)


def flip(path: Path) -> None:
    """One bit of one byte, far inside."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": (flip, "not those that were written"),
    "truncated": (lambda path: path.write_bytes(path.read_bytes()[:-5]), "truncated"),
    "missing": (Path.unlink, "missing"),
    "header": (
        lambda path: path.write_bytes(path.read_bytes().replace(b"features", b"futures_", 1)),
        "start",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_mended(
    damage: str, whole: Path, tiny_target: Target, tmp_path: Path
) -> None:
    """A broken shard is named, the others serve, and a repair computes that one alone."""
    folder = copy_store(whole, tmp_path)
    do, named = DAMAGES[damage]
    do(FeatureStore(folder).path(3))
    store = FeatureStore(folder, partial=True)
    store.serve_all_but({shard: fault for shard, fault in store.faults(read=True) if fault})
    assert (
        list(store.absent) == [3]
        and named in store.absent[3]
        and "shard-00003" in store.describe_absent()
    )
    numbers = {number for batch in store.plan[3] for number in batch}
    assert list(map(store.number, range(len(store)))) == sorted(set(range(48)) - numbers)
    assert len(store.read(range(len(store)))) == len(store) > 0
    if damage != "flipped":  # which only reading every byte shows
        with pytest.raises(ValueError, match=r"1 of \d+ shards .* shard-00003"):
            FeatureStore(folder)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("shard*")}
    store.discard([3])
    fill(folder, tiny_target)
    assert contents(folder) == contents(whole)
    changed = {
        path.name
        for path in folder.glob("shard*")
        if path.stat().st_mtime_ns != before.get(path.name)
    }
    assert changed == {"shard-00003.safetensors", "shard-00003.safetensors.sha256"}


def test_a_flipped_byte_is_seen_as_it_is_first_read(whole: Path, tmp_path: Path) -> None:
    """In what training reads, without `--verify`; a shard that was right before is read again once it has changed."""
    folder = Path(shutil.copytree(whole, tmp_path / "store"))
    FeatureStore(folder).read(range(48))
    shard = FeatureStore(folder).path(7)
    flip(shard)
    store = FeatureStore(folder)  # whole by its headers and sizes
    damaged = {int(place) for place in (store.shards == 7).nonzero()[:, 0]}
    assert damaged and len(damaged) < len(store)
    for place in range(len(store)):
        if place in damaged:
            with pytest.raises(
                Damaged, match=r"shard-00007.* not those that were written.* --repair"
            ):
                store.read([place])
        else:
            store.read([place])


def test_a_shard_that_was_right_is_not_read_whole_again(whole: Path, tmp_path: Path) -> None:
    """A second run opens it and reads its rows alone: shown by a change that leaves size and time as they were."""
    folder = Path(shutil.copytree(whole, tmp_path / "store"))
    FeatureStore(folder).read(range(48))
    shard = FeatureStore(folder).path(0)
    state = shard.stat()
    flip(shard)
    os.utime(shard, ns=(state.st_atime_ns, state.st_mtime_ns))
    FeatureStore(folder).read(range(48))
    assert [fault for _, fault in FeatureStore(folder).faults(read=True) if fault]


@pytest.mark.slow
def test_a_shard_of_another_store_is_seen(
    whole: Path, examples: list[Example], tiny_target: Target, tmp_path: Path
) -> None:
    """Equal size and a checksum that fits are not enough."""
    other, folder = tmp_path / "other", copy_store(whole, tmp_path)
    create_store(other, examples, tokenizer="another")
    fill(other, tiny_target)
    for name in ("shard-00002.safetensors", "shard-00002.safetensors.sha256"):
        (folder / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ValueError, match=r"shard-00002.*another store"):
        FeatureStore(folder)


@pytest.mark.parametrize("file", ["examples.safetensors", "index.json"])
def test_damaged_examples_are_seen(file: str, whole: Path, tmp_path: Path) -> None:
    """The tokens have a checksum too, and a broken index says what to do."""
    folder = copy_store(whole, tmp_path)
    path = folder / file
    path.write_bytes(path.read_bytes()[:-9] + b"\0" * 9)
    with pytest.raises(Damaged, match=f"{file}.*--repair"):
        FeatureStore(folder)


@pytest.mark.parametrize(
    "text", [b"", b"\n", b"\xff\xfe", b"0" * 64, b"0" * 9 + b"  shard-00003.safetensors\n"]
)
def test_a_damaged_checksum_is_seen(text: bytes, whole: Path, tmp_path: Path) -> None:
    """By every reader, which names the file."""
    folder = copy_store(whole, tmp_path)
    (folder / "shard-00003.safetensors.sha256").write_bytes(text)
    with pytest.raises(
        ValueError, match=r"1 of \d+ shards .*shard-00003\.safetensors\.sha256 is damaged"
    ):
        FeatureStore(folder)
    found = [fault for _, fault in FeatureStore(folder, partial=True).faults(read=True) if fault]
    assert found == ["shard-00003.safetensors.sha256 is damaged"]


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "3", "{}", '{"identity": null}', '{"identity": {"dtype": []}}']
)
def test_an_index_that_is_none_is_damaged(text: str, whole: Path, tmp_path: Path) -> None:
    """Whatever JSON it is."""
    folder = copy_store(whole, tmp_path)
    (folder / "index.json").write_text(text)
    with pytest.raises(Damaged, match=r"index\.json is damaged .*--repair"):
        FeatureStore(folder)


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("identity", "dtype"), "int4"),
        (("identity", "taps"), ["0"]),
        (("made", "width"), None),
        (("identity", "inputs"), [None]),
        (("shard_tokens",), [1, 2, 3]),
        (("examples",), {}),
    ],
)
def test_an_index_with_a_wrong_value_is_damaged(
    keys: tuple[str, ...], value: object, whole: Path, tmp_path: Path
) -> None:
    """Where a reader would fall over it."""
    folder = copy_store(whole, tmp_path)
    index = json.loads((folder / "index.json").read_text())
    owner = index
    for key in keys[:-1]:
        owner = owner[key]
    owner[keys[-1]] = value
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(Damaged, match=r"index\.json is .*--repair"):
        FeatureStore(folder)


@pytest.mark.slow
def test_a_full_disk_is_said_and_survived(
    whole: Path,
    examples: list[Example],
    tiny_target: Target,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What was written stays, nothing half is left, and the next run completes the store."""
    store = create_store(tmp_path, examples)
    sizes = [
        len(data)
        for name, data in contents(whole).items()
        if name.startswith("shard") and len(data) > 1000
    ]
    limit = sorted(sizes)[len(sizes) // 2]

    def fill_limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        fill(tmp_path, tiny_target)

    _, status = os.waitpid(child(fill_limited), 0)
    err = capfd.readouterr().err
    assert (
        status
        and "the disk refused" in err
        and "still to come" in err
        and "same command again" in err
    )
    assert not list(tmp_path.glob("*.part"))
    fill(tmp_path, tiny_target)
    assert store.plan and contents(tmp_path) == contents(whole)


def test_too_little_room_is_said_before_any_work(examples: list[Example], tmp_path: Path) -> None:
    """A store that cannot fit is refused when it is begun, with what else one can do."""
    store = create_store(tmp_path, examples)
    for places in store.places.values():
        places.totals = [10**14] * len(store.plan)
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
    store, usage = create_store(tmp_path, examples), shutil.disk_usage(tmp_path)

    def disk_usage(folder: object) -> object:
        is_full = len(list(tmp_path.glob("*.sha256"))) > 5
        return usage._replace(free=0 if is_full else 10**9)

    with monkeypatch.context() as patched:
        patched.setattr("eagle.data.features.shutil.disk_usage", disk_usage)
        with pytest.raises(ValueError, match=r"too little room .*same command again"):
            fill(tmp_path, tiny_target)
    assert 5 < len(list(tmp_path.glob("*.sha256"))) < 12 < len(store.plan) and not list(
        tmp_path.glob("*.part")
    )
    fill(tmp_path, tiny_target)
    assert contents(tmp_path) == contents(whole)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3])
def test_any_number_of_processes_makes_the_same_store(
    count: int, whole: Path, examples: list[Example], tiny_target: Target, tmp_path: Path
) -> None:
    """Shards are dealt out, and their bytes do not depend on who computed them."""
    shards = sorted(create_store(tmp_path, examples).absent)

    def share(index: int) -> Callable[[], None]:
        return lambda: (
            list(extract(tiny_target, FeatureStore(tmp_path, partial=True), shards[index::count]))
            and None
        )

    assert not any(os.waitpid(pid, 0)[1] for pid in [child(share(index)) for index in range(count)])
    assert contents(tmp_path) == contents(whole)


@pytest.mark.slow
def test_a_second_extraction_of_the_same_shards_spoils_nothing(
    whole: Path, examples: list[Example], tiny_target: Target, tmp_path: Path
) -> None:
    """Two that do not know of each other, the second from start to end while the first is within a shard."""
    store = create_store(tmp_path, examples)
    first = extract(tiny_target, store, sorted(store.absent))
    next(first)
    fill(tmp_path, tiny_target)
    for _ in first:
        pass
    assert contents(tmp_path) == contents(whole)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokenizer": "u"}, "tokenizer: the store has 't', this run needs 'u'"),
        (
            {"target": {"weights": "v", "dtype": "float32"}},
            "target.weights: the store has 'w', this run needs 'v' as the fingerprint of the target's weights",
        ),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"taps": [0, 4, -1]}, "taps"),
        ({"inputs": [0, -1]}, "inputs: the store has [0, 3], this run needs [0, -1]"),
    ],
)
def test_another_identity_is_refused_by_name(
    change: dict[str, object], named: str, whole: Path
) -> None:
    """Every difference is told; nothing is read from a store that was made by something else."""
    with pytest.raises(ValueError, match="not those that this run needs") as refused:
        FeatureStore(whole, {**IDENTITY, **change})
    assert named in str(refused.value)


@pytest.mark.slow
def test_a_store_that_says_auto_is_read(
    examples: list[Example], tiny_target: Target, tmp_path: Path
) -> None:
    """As those did that were made before; beside it they say what it was."""
    create_store(tmp_path, examples, target={"weights": "w", "dtype": "auto"})
    fill(tmp_path, tiny_target)
    assert FeatureStore(tmp_path, IDENTITY).identity["target"]["dtype"] == "float32"
    FeatureStore(tmp_path, {**IDENTITY, "target": {"weights": "w", "dtype": "auto"}})
    with pytest.raises(
        ValueError, match=r"target\.dtype: the store has 'float32', this run needs 'bfloat16'"
    ):
        FeatureStore(tmp_path, {**IDENTITY, "target": {"weights": "w", "dtype": "bfloat16"}})


def test_fewer_taps_than_stored_are_served(whole: Path) -> None:
    """One store serves several methods."""
    assert FeatureStore(whole, {**IDENTITY, "taps": [3], "inputs": [3]}).taps == (0, 3, -1)


def test_states_that_are_not_finite_are_refused(
    examples: list[Example], tiny_target: Target, tmp_path: Path
) -> None:
    """An overflow in the target ends the extraction instead of poisoning the training."""
    create_store(tmp_path, examples)
    weight = tiny_target.model.get_input_embeddings().weight.data
    kept = weight[11:40].clone()
    weight[11:40] = float("inf")
    try:
        with pytest.raises(ValueError, match=r"not finite.*target\.dtype"):
            fill(tmp_path, tiny_target)
    finally:
        weight[11:40] = kept


def test_batches_waste_little() -> None:
    """Texts of like length stand side by side, each exactly once, the longest first."""
    chance = random.Random(1)
    lengths = [int(chance.lognormvariate(5, 1)) + 1 for _ in range(2000)]
    batches = make_batches(lengths, 4096)
    assert sorted(number for batch in batches for number in batch) == list(range(len(lengths)))
    assert all(len(batch) == 1 or len(batch) * lengths[batch[0]] <= 4096 for batch in batches)
    assert all(lengths[batch[0]] == max(lengths[number] for number in batch) for batch in batches)
    assert 1 - sum(lengths) / sum(len(batch) * lengths[batch[0]] for batch in batches) < 0.02
    assert lengths[batches[0][0]] == max(lengths)


def test_the_index_says_what_made_it(whole: Path) -> None:
    """A person can read it."""
    index = json.loads((whole / "index.json").read_text())
    assert index["identity"] == IDENTITY and index["made"]["precision"] == "float32"
    assert index["examples"]["count"] == 48
