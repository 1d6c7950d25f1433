"""The record sees faults: each makes the items differ that it touches, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.golden import access, record
from tests.golden.command_items import command_items, describe_help
from tests.golden.decoding_items import decoding_of
from tests.golden.file_items import LAYERS, exports_of, stores
from tests.golden.run_items import resumed_of, train_method
from tests.golden.training_items import training_of

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Fault:
    """A fault, the items of a group that are made with it, and those that are to differ then."""

    group: str
    plant: Callable[[pytest.MonkeyPatch], None]
    make: Callable[[Path], dict[str, Any]]
    differing: set[str]


def learn(folder: Path) -> dict[str, Any]:
    """Make the items of a method that the fault touches, and of one that it does not."""
    target = access.make_target()
    return {**training_of("eagle1", target), **training_of("medusa", target)}


def export(folder: Path) -> dict[str, Any]:
    """Make the items of a head that many engines read."""
    return exports_of("eagle3", access.make_target(num_hidden_layers=LAYERS), folder)


def run(folder: Path) -> dict[str, Any]:
    """Make the item of one run."""
    access.write_target(folder)
    return {"run of eagle1": train_method(folder, "eagle1", folder / "runs/eagle1")}


def resume(folder: Path) -> dict[str, Any]:
    """Make the items of a run that is killed and resumed."""
    access.write_target(folder)
    whole = train_method(folder, "draft_model", folder / "runs/draft_model")
    return {"run of draft_model": whole, **resumed_of(folder, "draft_model", whole)}


# one fault for each group of items, and one more where a group has several parts
FAULTS = {
    "scores of a tree": Fault(
        "decoding",
        access.plant_sharper_scores,
        partial(decoding_of, "eagle1"),
        {"eagle1, T=0, dynamic", "eagle1, default"},
    ),
    "floors of typical acceptance": Fault(
        "decoding",
        access.plant_lower_floors,
        partial(decoding_of, "medusa"),
        {f"medusa, typical, {budget}" for budget in ("chain", "dynamic", "fixed")},
    ),
    "a shifted target": Fault(
        "training",
        access.plant_shifted_target,
        learn,
        {"eagle1, losses", "eagle1, last terms", "eagle1, validation"},
    ),
    "swapped tensors": Fault(
        "files",
        partial(access.plant_swapped_tensors, engine="vllm"),
        export,
        {"eagle3 for vllm", "eagle3 read from vllm"},
    ),
    "a coarser float8": Fault(
        "files",
        access.plant_coarser_float8,
        stores,
        {"store of eagle1, float8"},
    ),
    "a learning rate": Fault("runs", access.plant_higher_rates, run, {"run of eagle1"}),
    "moments that are lost": Fault(
        "runs",
        access.plant_lost_moments,
        resume,
        {"draft_model, killed and resumed, as the whole run"},
    ),
    "a default": Fault("commands", access.plant_other_default, command_items, {"eagle.Budget"}),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen_where_it_is(
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The items that differ are those of the fault."""
    # the fault stays in the module that it was planted in until the test ends
    fault = FAULTS[name]
    fault.plant(monkeypatch)
    made = fault.make(tmp_path)
    # making a whole group takes minutes, and the other items do not meet the fault
    recorded = record.read(fault.group)
    before = {item: recorded[item] for item in made}
    assert record.differences(fault.group, before, made).keys() == fault.differing


def test_an_option_that_changes_is_seen() -> None:
    """Its name, its choices and its default count; what is said about it does not."""
    text = access.help_text("measure --tune") + access.help_text("prepare --only tokens")
    described = describe_help(text)
    assert describe_help(text.replace("default: bigram", "default: unigram")) != described
    assert describe_help(text.replace("{bigram,unigram}", "{bigram}")) != described
    assert describe_help(text.replace("--exhaustive", "--all")) != described
    assert describe_help(text.replace("the", "this")) == described
