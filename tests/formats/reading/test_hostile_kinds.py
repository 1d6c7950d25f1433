"""Any kind of head in any layout, with any values in its config and any tensors: a sentence, and no other error."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagle.drafters import DRAFTERS
from eagle.formats.checkpoint import load_head, save_head
from eagle.formats.reading.foreign import inspect, read_head
from eagle.formats.reading.target_files import TargetFiles
from tests import foreign_heads as made
from tests.formats.every_layout import EVERY
from tests.formats.make_heads import change_head, make_head, make_target
from tests.registry import TRAINED

HEADS = [name for name in TRAINED if DRAFTERS[name].stored_as == "head"]
NUMBERS = [3, 0, -1, 1, 7, 2**31 - 1, 2**31, 10**40, 1e30, 1e-30, -0.5]
WORDS = ["", "x", "nan", "gelu", "yarn", "longrope"]
SECTIONS: list[Any] = [
    [],
    {},
    [1],
    [-1],
    [10**6],
    [1.5],
    ["x"],
    {"a": 1},
    ["sliding_attention"],
    ["full_attention", "x"],
    {"rope_type": "yarn"},
    {"rope_type": "llama3", "factor": 2},
    {"rope_type": "longrope", "factor": 2},
    {"rope_type": "yarn", "rope_theta": -1, "factor": 0},
    {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2},
    {"type": "linear", "factor": "x"},
]
# what configs hold, and what nobody would write
VALUES = (
    st.sampled_from([*NUMBERS, *WORDS, *SECTIONS, None, True, False])
    | st.floats()
    | st.text(max_size=8)
)
DAMAGE: dict[str, Callable[[Tensor], Tensor] | None] = {
    "missing": None,
    "whole numbers": torch.Tensor.long,
    "yes and no": torch.Tensor.bool,
    "eight bits": lambda tensor: tensor.float().to(torch.float8_e4m3fn),
    "doubles": torch.Tensor.double,
    "one number": lambda _: torch.tensor(1.0),
    "nothing": lambda _: torch.zeros(0),
    "one row": lambda tensor: tensor[:1].clone(),
    "twice": lambda tensor: torch.cat([tensor, tensor]),
    "deeper": lambda tensor: tensor[None].clone(),
    "no numbers": lambda tensor: torch.full(tensor.shape, torch.nan),
}
FUZZ = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def list_keys(config: dict[str, Any]) -> list[str]:
    """Return the keys of a config and of its sections, those as `section/key`."""
    keys = list(config)
    for section, values in config.items():
        if isinstance(values, dict):
            keys += [f"{section}/{key}" for key in values]
    return keys


KEYS = set().union(*[list_keys(config) for config, _ in EVERY.values()])


def draw_damage(data: st.DataObject, head: made.Head) -> made.Head:
    """Return a head with up to three other values in its config, and perhaps another tensor."""
    config = copy.deepcopy(head[0])
    # those of other layouts too
    keys = st.sampled_from(sorted({*KEYS, *list_keys(config)}))
    for key, value in data.draw(st.lists(st.tuples(keys, VALUES), max_size=3)):
        section, _, name = key.rpartition("/")
        values = config.get(section) if section else config
        # the head may have no such section, or a value drawn before in place of it
        if isinstance(values, dict):
            values[name] = copy.deepcopy(value)
    head = (config, head[1])
    damage = data.draw(st.none() | st.sampled_from(sorted(DAMAGE)))
    if damage is not None:
        name = data.draw(st.sampled_from(sorted(head[1])))
        head = change_head(head, {name: DAMAGE[damage]})
    return head


def check_head(
    head: made.Head,
    folder: Path,
    target: str | None,
) -> Path:
    """Assert that `inspect` describes a head, and that an import does its work or says why not."""
    made.write(folder, head)
    assert str(inspect(folder, target))
    try:
        read_head(folder, target)
    except ValueError as error:
        assert str(error)
    return folder


# what drawn cases or users found; the exception that was raised instead of a sentence
FOUND: list[tuple[str, dict[str, Any]]] = [
    # StrictDataclassClassValidationError of width 16, and of a rotary embedding
    ("block: DSpark", {"num_attention_heads": 3}),
    ("block: Domino", {"head_dim": 7}),
    ("block: Domino, shifted", {"hidden_size": 3}),
    # TypeError of finfo
    ("block: DeepSpec", {"lm_head.weight": DAMAGE["whole numbers"]}),
    ("speculators EAGLE-3.1", {"embed_tokens.weight": DAMAGE["yes and no"]}),
    # IndexError
    ("ModelOpt", {"layers.0.input_layernorm.weight": DAMAGE["one number"]}),
    # RuntimeError: no promotion of float8
    ("block: DeepSeek, whole", {"lm_head.weight": DAMAGE["eight bits"]}),
    ("block: DeepSeek, whole", {"model.layers.3.embed_tokens.weight": DAMAGE["eight bits"]}),
    # the same, and RuntimeError of sizes, for a tensor that has no name here
    ("Falcon", {"lstm.bias_hh_l0": DAMAGE["eight bits"]}),
    ("Falcon", {"lstm.bias_hh_l1": DAMAGE["twice"]}),
    # NotImplementedError of isfinite
    ("speculators trainer", {"t2d": DAMAGE["eight bits"]}),
]


@pytest.mark.parametrize(("name", "changes"), FOUND)
def test_what_was_found_stays_mended(
    name: str,
    changes: dict[str, Any],
    tmp_path: Path,
) -> None:
    """With and without a target beside it."""
    head = change_head(EVERY[name], changes)
    for target in (None, made.write_target(tmp_path / "target")):
        check_head(head, tmp_path / "head", target)


@pytest.mark.slow
@given(
    data=st.data(),
    name=st.sampled_from(sorted(EVERY)),
    has_target=st.booleans(),
)
@settings(FUZZ, max_examples=200)
def test_any_head_of_any_kind_is_read_or_refused(
    data: st.DataObject,
    name: str,
    has_target: bool,
    tmp_path: Path,
) -> None:
    """With and without a target beside it."""
    target = made.write_target(tmp_path / "target") if has_target else None
    check_head(draw_damage(data, EVERY[name]), tmp_path / "head", target)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> dict[str, made.Head]:
    """A head of this project of each kind, as it is saved."""
    folder = tmp_path_factory.mktemp("own")
    target = make_target(**{**made.LLAMA, "num_hidden_layers": made.LAYERS})
    heads = {}
    for kind in HEADS:
        head = make_head({"kind": kind}, target)
        save_head(folder / kind, head, "target: {path: x}\n", {})
        config = json.loads((folder / kind / "config.json").read_text())
        heads[kind] = (config, dict(head.state_dict()))
    return heads


@pytest.mark.slow
@given(data=st.data(), kind=st.sampled_from(HEADS))
@settings(FUZZ, max_examples=40)
def test_any_head_of_this_project_is_loaded_or_refused(
    data: st.DataObject,
    kind: str,
    own: dict[str, made.Head],
    tmp_path: Path,
) -> None:
    """By `load_head`, from which `load_drafter` and every command take it, and by `inspect`."""
    folder = check_head(draw_damage(data, own[kind]), tmp_path / "head", None)
    try:
        load_head(folder)
    except ValueError as error:
        assert str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "key"),
    [
        ("eagle1", "shape/num_hidden_layers"),
        ("medusa", "settings/levels"),
    ],
)
def test_counts_that_would_take_all_memory_are_refused(
    kind: str,
    key: str,
    own: dict[str, made.Head],
    tmp_path: Path,
) -> None:
    """Before so many blocks are made; 2**31 of them stopped the machine."""
    folder = made.write(tmp_path / "head", change_head(own[kind], {key: 20_000}))
    with pytest.raises(ValueError, match="more than 4,000 weight tensors"):
        load_head(folder)
    assert "more than 4,000 weight tensors" in str(inspect(folder))


def test_sizes_are_compared_before_memory_is_taken(
    own: dict[str, made.Head], tmp_path: Path
) -> None:
    """Where a system grants more memory than it has, a matrix of 128 GB would take all of it."""
    head = change_head(own["eagle1"], {"shape/intermediate_size": 2**31 - 1})
    words = r"is not this head: .* is \[\d+, \d+\], expected \[.*2147483647"
    with pytest.raises(ValueError, match=words):
        load_head(made.write(tmp_path / "head", head))


@given(changes=st.dictionaries(st.sampled_from(sorted(made.LLAMA)), VALUES, max_size=3))
@settings(FUZZ, max_examples=40)
def test_any_target_is_read_or_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    """Its files are looked at before anything is loaded."""
    path = made.write_target(tmp_path / "target", **changes)
    try:
        assert TargetFiles.read(path).layers > 0
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("block: z-lab", "block_size"),
        ("block: speculators", "block_size"),
        ("Falcon", "k_mask"),
    ],
)
def test_slots_that_would_take_all_memory_are_refused(
    name: str,
    key: str,
    tmp_path: Path,
) -> None:
    """No tensor has their number: 10^9 of them were `nothing is wrong`, and 64 GB at the first draft."""
    folder = made.write(tmp_path / "head", change_head(EVERY[name], {key: 10**9}))
    found = inspect(folder)
    assert found.fatal
    assert "less than or equal to 1024" in str(found)
    with pytest.raises(ValueError, match="1024"):
        read_head(folder)
