"""A trained head guesses in vLLM as it does here; docs/export.md says how to run this."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.vllm_acceptance import FAULTS, Job, counts, here, questions, there
from eagle import Target

pytestmark = pytest.mark.engine
TINY = Path(__file__).parent.parent / "runs/tiny"


@pytest.fixture(scope="module")
def python() -> str:
    """The python of an environment that holds vLLM."""
    if "EAGLE_VLLM_PYTHON" not in os.environ:
        pytest.skip("no vLLM: set EAGLE_VLLM_PYTHON to the python of an environment that holds it, see docs/export.md")
    return os.environ["EAGLE_VLLM_PYTHON"]


@pytest.fixture(scope="module")
def target(python: str) -> Target:
    """The trained tiny target."""
    if not (TINY / "eagle1/head").is_dir():
        pytest.skip("no trained head in runs/tiny/eagle1/head: `make demo` trains one")
    return Target.load(TINY / "target", dtype="float32")


def job(target: Target, depth: int) -> Job:
    """Eight conversations of the held-out data, 64 new tokens each."""
    prompts = questions(target, TINY / "data/heldout.jsonl", 8)
    return Job(TINY / "target", TINY / "eagle1/head", prompts, depth, new_tokens=64)


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_vllm_accepts_what_this_decoder_accepts(depth: int, target: Target, python: str) -> None:
    """Tokens, drafts and acceptances at every place are equal in every single answer; the head is no idle one."""
    asked = job(target, depth)
    ours, (_, theirs) = here(asked, target), there(asked, python, target)
    assert theirs == ours
    assert sum(row["accepted"][0] for row in ours) > sum(row["drafts"] for row in ours) / 5


@pytest.mark.parametrize("fault", FAULTS)
def test_a_spoilt_export_is_seen_by_acceptance_alone(fault: str, target: Target, python: str) -> None:
    """The check can fail: vLLM loads the spoilt head and answers as before, with other counts."""
    asked = job(target, 3)
    ours, (_, theirs) = here(asked, target), there(asked, python, target, fault)
    assert [row["tokens"] for row in theirs] == [row["tokens"] for row in ours]
    assert [counts(row) for row in theirs] != [counts(row) for row in ours]
