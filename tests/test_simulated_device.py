"""On a simulated accelerator, decoding, training and extraction give the CPU's results and wait at known places only.

tests/simulated.py simulates the device, in a process of its own. tests/simulated_runs.py names the runs. The table of
docs/measurements/decoding-speed.md lists the waits that are checked here.
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

pytestmark = pytest.mark.slow
# where the host may wait. First when a target is used for the first time: does it read trees?
ONCE = ("reader.", "borrowed.", "read_modes.")
# transformers looks for packed texts, once in a plain forward
FORWARD = "reader.read_sequences"
# features on their way to the disk; CUDA copies them while it computes
STORED = "features._copy_to_host"
# what the target chose, with trees that were on the device until then
CYCLE = {"grown.read_walks", "verify.__call__", "verify.verify_rows"}
# the trees, where something on the host needs them before the target has read them
EARLY = "grown.read_trees"
NEED_TREES = ("drawn", "lenient", "typical", "hybrid")
# the likeliest tokens after all that beams may come to
RANKED = "beam._best_tokens"
# the levels of a draft model's last draft
DRAFTED = "draft_model._drafted"
# the target's choices at all nodes of the last trees
CHOICES = "lookahead.propose"
# the target's likeliest tokens after all that it has read
LEARNED = "recycling.learn"
# which tokens are likely enough; the choice after it is one more wait
TYPICAL = "verify.walk_typically"
DRAWN = {f"verify.{name}" for name in ("sample_tree", "sample_block", "walk_leniently", "pick")}
PLANTED = ["train eagle1, planted", "decode curious, greedy, grown"]
FAST = [
    "decode eagle3, greedy, grown",
    "decode eagle3, T=1, grown, batch",
    "decode medusa, T=1, grown, batch",
    "decode lookahead, T=1, grown, batch",
    "decode recycling, T=1, grown, batch",
    "decode ngram, greedy, grown, batch, hybrid by paths",
    "train eagle1",
    "train eagle3.1",
    "search eagle3",
    "extract float32",
]


def run(names: Sequence[str]) -> dict[str, Any]:
    """Return the line of each fault and of each run with one of these names (of all without names)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulated_runs", *names],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line for line in lines}


def count_waits(line: dict[str, Any]) -> dict[str, int]:
    """Return how often the host waited at each place; `to_host` counts for the function that called it."""
    counts: dict[str, int] = {}
    for kind, _, place, *caller, count in line["crossed"]:
        if kind != "upload":
            name = caller[0] if place == "device.to_host" else place
            counts[name] = counts.get(name, 0) + count
    return counts


def check_run(name: str, line: dict[str, Any]) -> None:
    """Check that the results are the CPU's, and that the host waited where it may, as often as it may."""
    kind = name.split()[0]
    waits = {
        place: count
        for place, count in count_waits(line).items()
        if place == FORWARD or not place.startswith(ONCE)
    }
    # decoding runs the CPU's kernels bit for bit; training has dense attention in place of flex
    exact = kind in ("decode", "search")
    rounding = 5e-2 if "bf16" in name else 2e-5
    assert line["difference"] <= (0 if exact else rounding)
    if kind == "extract":
        assert waits.keys() == {FORWARD, STORED}
    elif kind == "search":
        # one ranking a forward, and one more draft after what the beams share
        assert waits.keys() <= {EARLY, RANKED, DRAFTED}
        assert waits[RANKED] == line["steps"] + 1
        assert max(waits.values()) <= line["steps"] + 1
    elif kind == "train" and "own" not in name:
        # with live features the thread that loads them waits
        assert waits.keys() <= ({FORWARD} if "live" in name else set())
    else:
        assert waits.keys() <= allowed_places(name)
    if kind == "decode":
        check_cycles(name, line, waits)


def allowed_places(name: str) -> set[str]:
    """Return where the host may wait in a run that decodes."""
    allowed = {*CYCLE, DRAFTED, CHOICES, LEARNED}
    if "drawn" in name or "lenient" in name:
        allowed |= DRAWN
    if "typical" in name:
        allowed.add(TYPICAL)
    if any(word in name for word in NEED_TREES):
        allowed.add(EARLY)
    if "own" in name:
        allowed.add(FORWARD)
    return allowed


def check_cycles(name: str, line: dict[str, Any], waits: dict[str, int]) -> None:
    """Check for one wait a cycle and one a prompt; where trees are needed earlier, for one more in each cycle."""
    prompts = 3 if "batch" in name else 1
    steps = line["steps"]
    # tables of counts draft for one text after the other
    one_by_one = "unigram" in name or "bigram" in name
    assert waits.get(EARLY, 0) <= (line["cycles"] if one_by_one else steps)
    assert waits.get(DRAFTED, 0) <= steps
    assert waits.get(CHOICES, 0) <= steps
    assert waits.get(LEARNED, 0) <= steps
    if TYPICAL in waits:  # row by row, each twice
        assert waits[TYPICAL] <= waits["verify.__call__"] <= line["cycles"] + prompts
    elif not waits.keys() & DRAWN:
        chosen = sum(waits.get(place, 0) for place in CYCLE)
        assert steps < chosen <= steps + prompts


@pytest.fixture(scope="module")
def fast() -> dict[str, Any]:
    """Return the lines of one process that does the short runs."""
    return run([*FAST, *PLANTED])


def test_the_simulation_sees_every_kind_of_fault(fast: dict[str, Any]) -> None:
    """What waits is recorded, what a device refuses is refused, and nothing else is."""
    refused = {"a sum over both sides", "both sides in one", "numpy"}
    faults = {name: line for name, line in fast.items() if "kinds" in line}
    assert {name for name, line in faults.items() if line["refused"]} == refused
    for name in faults.keys() - refused:
        kinds = faults[name]["kinds"]
        if name.startswith("nothing"):
            assert set(kinds) <= {"upload"}, name
        elif name == "a download nobody waits for":
            assert kinds == ["download"]
        else:
            assert "wait" in kinds, name


@pytest.mark.parametrize("name", FAST)
def test_a_run_waits_at_named_places_alone(name: str, fast: dict[str, Any]) -> None:
    """Its results are the CPU's, too."""
    check_run(name, fast[name])


def test_planted_waits_are_seen(fast: dict[str, Any]) -> None:
    """The loss is read in every training step, and trees are read before the target has read them."""
    training, curious = [fast[name] for name in PLANTED]
    assert count_waits(training) == {"train._advance": 3}
    # the last cycle drafts nothing
    assert count_waits(curious)[EARLY] >= curious["steps"] - 1
    for line in (training, curious):
        with pytest.raises(AssertionError):
            check_run(line["name"], line)


@pytest.mark.long
def test_every_run_waits_at_named_places_alone() -> None:
    """Every drafter and kind of draft, every head and loss, both precisions, stored, live and own features."""
    lines = run([])
    names = [name for name in lines if "crossed" in lines[name] and name not in PLANTED]
    assert len(names) > 80
    for name in names:
        check_run(name, lines[name])
