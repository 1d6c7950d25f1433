"""The checks of methods hold on an accelerator, which is simulated in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.documents import ROOT

PROGRAM = """
import json, sys
import torch
from tests import simulated
from tests.simulated_runs import attend_densely, block_spans, spans
from eagle.conformance.checks import run_checks

torch.set_num_threads(1)
device = simulated.install()
for module in (spans, block_spans):
    module.compile_flex = lambda: attend_densely  # whose kernels no simulation has
outcomes = list(run_checks(sys.argv[1], fast=True, device=device))
print(json.dumps({outcome.about: outcome.fault for outcome in outcomes}))
"""


# one method without weights, and one of each large family
@pytest.mark.slow
@pytest.mark.not_long("ngram")
@pytest.mark.parametrize("kind", ["ngram", "eagle1", "medusa", "dflash"])
def test_a_method_holds_on_a_device(kind: str) -> None:
    """A tensor left on the host is refused in an operation with one on the device."""
    command = [sys.executable, "-c", PROGRAM, kind]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    faults = json.loads(done.stdout.splitlines()[-1])
    # the fast checks of a drafter without weights
    assert len(faults) > 15
    assert {about: fault for about, fault in faults.items() if fault is not None} == {}
