"""Any kind of head in any layout, with any values in its config and any tensors: a sentence, and no other error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle import Target
from eagle.drafters import DRAFTERS, settings_of
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.reading.foreign import inspect, read_head
from eagle.formats.reading.target_files import TargetFiles
from tests import foreign_heads as made
from tests.formats.every_layout import EVERY
from tests.registry import TRAINED

HEADS = [name for name in TRAINED if DRAFTERS[name].stored_as == "head"]
ROPES = [
    {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 2},
    {"rope_type": "longrope", "factor": 2},
    {"rope_type": "yarn", "rope_theta": -1, "factor": 0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2},
    {"type": "linear", "factor": "x"},
]
VALUES: list[Any] = [
    *(3, 0, -1, 1, 7, 2**31 - 1, 2**31, 10**40, 1e30, 1e-30, -0.5, None, True, False),
    *(
        "",
        "x",
        "nan",
        "gelu",
        "yarn",
        "longrope",
        [],
        {},
        [1],
        [-1],
        [10**6],
        [1.5],
        ["x"],
        {"a": 1},
    ),
    *(["sliding_attention"], ["full_attention", "x"], *ROPES),
]
WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "whole numbers": lambda tensor: tensor.long(),
    "yes and no": lambda tensor: tensor.bool(),
    "eight bits": lambda tensor: tensor.float().to(torch.float8_e4m3fn),
    "doubles": lambda tensor: tensor.double(),
    "one number": lambda tensor: torch.tensor(1.0),
    "nothing": lambda tensor: torch.zeros(0),
    "turned": lambda tensor: tensor.T.contiguous() if tensor.ndim == 2 else tensor[None].clone(),
    "one row": lambda tensor: tensor[:1].clone(),
    "twice": lambda tensor: torch.cat([tensor, tensor]),
    "deeper": lambda tensor: tensor[None].clone(),
    "no numbers": lambda tensor: torch.full(tensor.shape, torch.nan),
}


def sections(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A config and its parts."""
    return [config, *(value for value in config.values() if isinstance(value, dict))]


KEYS = sorted(
    {key for config, _ in EVERY.values() for section in sections(config) for key in section}
)
CHANGES = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(KEYS), st.sampled_from(VALUES)),
    min_size=1,
    max_size=3,
)
TENSORS = st.none() | st.tuples(st.integers(0, 60), st.sampled_from([*WRONG, "gone", "renamed"]))
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def spoil(
    head: made.Head, changes: list[tuple[int, str, Any]], wrong: tuple[int, str] | None
) -> made.Head:
    """A head with other values in its config or the parts of it, and with one tensor of another sort."""
    config, tensors = json.loads(json.dumps(head[0])), dict(head[1])
    for part, key, value in changes:
        places = sections(config)
        places[part % len(places)][key] = json.loads(json.dumps(value))
    if wrong is not None:
        place, sort = wrong
        name = sorted(tensors)[place % len(tensors)]
        tensor = tensors.pop(name)
        if sort in WRONG:
            tensors[name] = WRONG[sort](tensor)
        elif sort == "renamed":
            tensors[f"model.{name}"] = tensor
    return config, tensors


def check_head(head: made.Head, folder: Path, target: str | None) -> None:
    """`inspect` describes it, and an import does its work or says why not."""
    path = made.write(folder / "head", head)
    for weights in set(path.glob("*.safetensors")) - {path / "model.safetensors"}:
        weights.unlink()
    assert str(inspect(path, target))
    try:
        read_head(path, target)
    except ValueError as error:
        assert str(error)


PINNED = [  # what drawn cases or users found: layout, changes of the config, of a tensor
    (
        "block: DSpark",
        [(0, "num_attention_heads", 3)],
        None,
    ),  # StrictDataclassClassValidationError of width 16
    ("block: Domino", [(0, "head_dim", 7)], None),  # the same of a rotary embedding
    ("block: Domino, shifted", [(0, "hidden_size", 3)], None),
    (
        "block: DeepSpec",
        [],
        ("lm_head.weight", "whole numbers"),
    ),  # TypeError of finfo, with a target
    ("speculators EAGLE-3.1", [], ("embed_tokens.weight", "yes and no")),
    ("ModelOpt", [], ("layers.0.input_layernorm.weight", "one number")),  # IndexError
    (
        "block: DeepSeek, whole",
        [],
        ("lm_head.weight", "eight bits"),
    ),  # RuntimeError: no promotion of float8
    ("block: DeepSeek, whole", [], ("model.layers.3.embed_tokens.weight", "eight bits")),
    ("speculators trainer", [], ("t2d", "eight bits")),  # NotImplementedError of isfinite
]


@pytest.mark.parametrize(("name", "changes", "wrong"), PINNED)
def test_what_was_found_stays_mended(
    name: str, changes: list[tuple[int, str, Any]], wrong: tuple[str, str] | None, tmp_path: Path
) -> None:
    """Each of them raised something else than a sentence once."""
    place = None if wrong is None else (sorted(EVERY[name][1]).index(wrong[0]), wrong[1])
    head = spoil(EVERY[name], changes, place)
    for target in (None, made.write_target(tmp_path / "target")):
        check_head(head, tmp_path, target)


@pytest.mark.slow
@given(name=st.sampled_from(sorted(EVERY)), changes=CHANGES, wrong=TENSORS, beside=st.booleans())
@settings(FUZZ, max_examples=60)
def test_any_head_of_any_kind_is_read_or_refused(
    name: str,
    changes: list[tuple[int, str, Any]],
    wrong: tuple[int, str] | None,
    beside: bool,
    tmp_path: Path,
) -> None:
    """With and without a target beside it."""
    check_head(
        spoil(EVERY[name], changes, wrong),
        tmp_path,
        made.write_target(tmp_path / "t") if beside else None,
    )


@pytest.mark.slow
@given(name=st.sampled_from(sorted(EVERY)), changes=CHANGES, wrong=TENSORS, beside=st.booleans())
@settings(FUZZ, max_examples=300)
def test_many_heads_of_any_kind_are_read_or_refused(
    name: str,
    changes: list[tuple[int, str, Any]],
    wrong: tuple[int, str] | None,
    beside: bool,
    tmp_path: Path,
) -> None:
    """More of them than fit beside everything fast."""
    check_head(
        spoil(EVERY[name], changes, wrong),
        tmp_path,
        made.write_target(tmp_path / "t") if beside else None,
    )


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, made.Head]:
    """A head of this project of each kind, as it is saved."""
    torch.manual_seed(0)
    config: dict[str, Any] = {**made.LLAMA, "num_hidden_layers": made.LAYERS}
    target, heads = Target(LlamaForCausalLM(LlamaConfig(**config))), {}
    for kind in HEADS:
        method = DRAFTERS[kind]
        weights = {"weights": target.tensor} if method.reads.weights else {}
        supervised = [torch.arange(40)]
        head = method.for_target(
            settings_of({"kind": kind}, "test"), target.config, target.head, supervised, **weights
        )
        folder = tmp_path_factory.mktemp("own")
        save_head(folder / kind, head, "target: {path: x}\n", {})
        heads[kind] = (
            json.loads((folder / kind / "config.json").read_text()),
            dict(head.state_dict()),
        )
    return heads


@pytest.mark.slow
@given(data=st.data(), kind=st.sampled_from(HEADS), wrong=TENSORS)
@settings(FUZZ, max_examples=40)
def test_any_head_of_this_project_is_loaded_or_refused(
    data: st.DataObject,
    kind: str,
    wrong: tuple[int, str] | None,
    own: dict[str, made.Head],
    tmp_path: Path,
) -> None:
    """By `load_head`, from which `load_drafter` and every verb take it, and by `inspect`."""
    keys = sorted({key for section in sections(own[kind][0]) for key in section})
    changes = data.draw(
        st.lists(
            st.tuples(st.integers(0, 4), st.sampled_from(keys), st.sampled_from(VALUES)), max_size=2
        )
    )
    check_head(spoil(own[kind], changes, wrong), tmp_path, None)
    try:
        load_head(tmp_path / "head")
    except ValueError as error:
        assert str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part", "key"),
    [
        ("eagle1", "shape", "num_hidden_layers"),
        ("medusa", "settings", "levels"),
        ("medusa", "settings", "layers"),
    ],
)
def test_counts_that_would_take_all_memory_are_refused(
    kind: str, part: str, key: str, own: dict[str, made.Head], tmp_path: Path
) -> None:
    """Before so many blocks are made; 2**31 of them stopped the machine."""
    config, tensors = json.loads(json.dumps(own[kind][0])), own[kind][1]
    config[part][key] = 20_000
    folder = made.write(tmp_path / "head", (config, tensors))
    with pytest.raises(ValueError, match="more than 4,000 weight tensors"):
        load_head(folder)
    assert "more than 4,000 weight tensors" in str(inspect(folder))


def test_sizes_are_compared_before_memory_is_taken(
    own: dict[str, made.Head], tmp_path: Path
) -> None:
    """Where a system grants more memory than it has, a matrix of 128 GB would take all of it."""
    config, tensors = json.loads(json.dumps(own["eagle1"][0])), own["eagle1"][1]
    config["shape"]["intermediate_size"] = 2**31 - 1
    with pytest.raises(
        ValueError, match=r"is not this head: .* is \[\d+, \d+\], expected \[.*2147483647"
    ):
        load_head(made.write(tmp_path / "head", (config, tensors)))


@given(changes=CHANGES)
@settings(FUZZ, max_examples=40)
def test_any_target_is_read_or_refused(changes: list[tuple[int, str, Any]], tmp_path: Path) -> None:
    """Its files are looked at before anything is loaded."""
    path = made.write_target(tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text())
    for _, key, value in changes:
        config[key] = value
    (tmp_path / "target/config.json").write_text(json.dumps(config))
    try:
        assert TargetFiles.read(path).layers > 0
    except ValueError as error:
        assert str(error)


COUNTED = [
    (name, key)
    for name, (config, _) in EVERY.items()
    for key in ("block_size", "k_mask")
    if key in config
]


@pytest.mark.parametrize(("name", "key"), COUNTED)
def test_slots_that_would_take_all_memory_are_refused(name: str, key: str, tmp_path: Path) -> None:
    """No tensor has their number: 10^9 of them were `nothing is wrong`, and 64 GB at the first draft."""
    config, tensors = json.loads(json.dumps(EVERY[name][0])), EVERY[name][1]
    config[key] = 10**9
    folder = made.write(tmp_path / "head", (config, tensors))
    assert inspect(folder).fatal and "less than or equal to 1024" in str(inspect(folder))
    with pytest.raises(ValueError, match="1024"):
        read_head(folder)
