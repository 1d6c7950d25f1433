"""Decoding, training and extraction on a simulated accelerator: the CPU's own results, and waits at named places alone.

The device is simulated by tests/simulated.py, in a process of its own; tests/simulated_runs.py names the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

# where the host may wait, and why
ONCE = ("reader.", "borrowed.", "read_modes.")  # when a target is first used: does it read trees?
FORWARD = "reader.read_texts"  # transformers looks for packed texts, once in a plain forward
STORED = "features._copy_to_host"  # features on their way to the disk; CUDA copies them while it computes
CYCLE = {
    "grown.read_walks",
    "verify.__call__",
    "verify.verify_rows",
}  # what the target chose, with trees of the device
EARLY = "grown.read_trees"  # the trees, where something on the host needs them before the target has read them
NEED_TREES = ("drawn", "lenient", "typical", "hybrid")
RANKED = "beam._rank"  # the likeliest tokens behind all that beams may come to
DRAFTED = "draft_model._drafted"  # the levels of a draft model's last draft
CHOICES = "lookahead.propose"  # the target's choices at all nodes of the last trees
TYPICAL = "verify.walk_typically"  # what is likely enough; the choice behind it is one more
DRAWN = {f"verify.{name}" for name in ("sample_tree", "sample_block", "walk_leniently", "pick")}
pytestmark = pytest.mark.slow
FAST = [
    *(
        "decode eagle3, greedy, grown",
        "decode eagle3, T=1, grown, batch",
        "decode medusa, T=1, grown, batch",
    ),
    "decode lookahead, T=1, grown, batch",
    "decode ngram, greedy, grown, batch, hybrid by paths",
    *(
        "train eagle1",
        "train eagle3.1",
        "train medusa",
        "train eagle1, planted",
        "decode planted, greedy, grown",
        "decode curious, greedy, grown",
        "search eagle3",
        "extract float32",
    ),
]


def run(names: Sequence[str]) -> dict[str, Any]:
    """What a process found in the runs of these names, or in all."""
    command = [sys.executable, "-m", "tests.simulated_runs", *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    root = Path(__file__).parent.parent
    done = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def waits(line: dict[str, Any]) -> dict[str, int]:
    """How often the host waited at each place; places within `to_host` are told by who called it."""
    counts: dict[str, int] = {}
    for kind, _, place, *caller, count in line["crossed"]:
        if kind != "upload":
            name = caller[0] if place == "device.to_host" else place
            counts[name] = counts.get(name, 0) + count
    return counts


def check_run(name: str, line: dict[str, Any]) -> None:
    """The results are the CPU's, and the host waited where it may, as often as it may."""
    kind, found = name.split()[0], waits(line)
    found = {
        place: count
        for place, count in found.items()
        if place == FORWARD or not place.startswith(ONCE)
    }
    assert line["difference"] <= (
        0 if kind in ("decode", "search") else 5e-2 if "bf16" in name else 2e-5
    )
    if kind == "extract":
        assert found.keys() == {FORWARD, STORED}
    elif (
        kind == "search"
    ):  # twice a forward at most, and what beams share is drafted behind once more
        assert found.keys() <= {EARLY, RANKED, DRAFTED}
        assert found[RANKED] == line["steps"] + 1
        assert max(found.values()) <= line["steps"] + 1
    elif kind == "train" and "own" not in name:  # of live features the thread that loads waits
        assert found.keys() <= ({FORWARD} if "live" in name else set())
    else:
        allowed = {
            *CYCLE,
            DRAFTED,
            CHOICES,
            *(DRAWN if "drawn" in name or "lenient" in name else ()),
        }
        allowed |= {TYPICAL} if "typical" in name else set()
        allowed |= {EARLY} if any(word in name for word in NEED_TREES) else set()
        assert found.keys() <= allowed | ({FORWARD} if "own" in name else set())
    if kind == "decode":
        check_cycles(name, line, found)


def check_cycles(name: str, line: dict[str, Any], found: dict[str, int]) -> None:
    """One wait a cycle, and one for each prompt; where trees are needed earlier, one more for all of them."""
    prompts = 3 if "batch" in name else 1
    one_by_one = any(
        drafter in name for drafter in ("unigram", "bigram")
    )  # tables draft for one text after the other
    assert found.get(EARLY, 0) <= (line["cycles"] if one_by_one else line["steps"])
    assert found.get(DRAFTED, 0) <= line["steps"] and found.get(CHOICES, 0) <= line["steps"]
    if TYPICAL in found:  # row by row, each twice
        assert found[TYPICAL] <= found["verify.__call__"] <= line["cycles"] + prompts
    elif not found.keys() & DRAWN:
        chosen = sum(found.get(place, 0) for place in CYCLE)
        assert line["steps"] < chosen <= line["steps"] + prompts


@pytest.fixture(scope="module")
def fast() -> dict[str, Any]:
    """One process's runs."""
    return run(FAST)


def test_the_simulation_sees_every_kind_of_fault(fast: dict[str, Any]) -> None:
    """What waits is written down, what a device refuses is refused, and nothing else is."""
    faults = {name: line for name, line in fast.items() if "kinds" in line}
    refused = {"a sum over both sides", "both sides in one", "rows picked by the host", "numpy"}
    assert {name for name, line in faults.items() if line["refused"]} == refused
    for name, line in faults.items():
        if name in refused:
            continue
        if name.startswith("nothing"):
            assert set(line["kinds"]) <= {"upload"}, name
        elif name == "a download nobody waits for":
            assert line["kinds"] == ["download"]
        else:
            assert "wait" in line["kinds"], name


@pytest.mark.parametrize(
    "name", [name for name in FAST if "planted" not in name and "curious" not in name]
)
def test_a_run_waits_at_named_places_alone(name: str, fast: dict[str, Any]) -> None:
    """And its results are the CPU's."""
    check_run(name, fast[name])


def test_planted_waits_are_seen(fast: dict[str, Any]) -> None:
    """The loss read in every step, a value of the features in every cycle, and trees before the target reads them."""
    training, decoding = fast["train eagle1, planted"], fast["decode planted, greedy, grown"]
    curious = fast["decode curious, greedy, grown"]
    assert waits(training) == {"train._advance": 3}
    assert (
        waits(decoding)["drafter.propose_row"] >= decoding["steps"] - 1
    )  # the last cycle drafts nothing
    assert waits(curious)[EARLY] >= curious["steps"] - 1
    for line in (training, decoding, curious):
        with pytest.raises(AssertionError):
            check_run(line["name"].replace("planted", ""), line)


@pytest.mark.long
def test_every_run_waits_at_named_places_alone() -> None:
    """Every drafter and kind of draft, every head and loss, both precisions, stored, live and own features."""
    found = {name: line for name, line in run([]).items() if "crossed" in line}
    found = {
        name: line
        for name, line in found.items()
        if "planted" not in name and "curious" not in name
    }
    assert len(found) > 80
    for name, line in found.items():
        check_run(name, line)
