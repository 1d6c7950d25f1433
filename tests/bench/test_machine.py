"""Figures belong to a machine that is named by its processor and by how fast it multiplies."""

from __future__ import annotations

import platform
from itertools import count
from pathlib import Path

import pytest
import torch

from bench import machine
from bench.machine import measure_peaks
from eval.result_files.results import device_name


@pytest.mark.parametrize(("seconds", "peak"), [(1.0, 8.2e-06), (0.01, 0.052), (0.0003, 1.7), (1e-6, 524)])
def test_a_peak_is_the_operations_of_a_product_by_its_time(seconds: float, peak: float) -> None:
    """Of both dtypes, on one thread, which is not left set; a processor that is slow with one has a peak all the same.

    524,288 operations by a clock that goes on by so much whenever it is read. Where they would take longer than
    `MAX_SECONDS`, by what a product of a quarter of the width took, these 8,192 count.
    """
    threads, ticks = torch.get_num_threads(), count()
    assert measure_peaks(64, timer=lambda: next(ticks) * seconds) == {"fp32": peak, "bf16": peak}
    assert torch.get_num_threads() == threads


def test_results_say_the_machine_that_they_were_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and peaks, beside what was measured."""
    monkeypatch.setattr(machine, "measure_peaks", lambda: {"fp32": 43, "bf16": 0.2})
    about = machine.made_on(rounds=3)
    assert (about["fp32 GFLOP/s"], about["bf16 GFLOP/s"]) == (43, 0.2)
    assert (about["rounds"], about["cpu"], about["threads"]) == (3, device_name("cpu"), torch.get_num_threads())


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="where the standard library's name is all there is")
def test_a_processor_is_named_by_its_model() -> None:
    """The architecture alone says nothing about speed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    assert device_name("cpu") in (models or {platform.processor(), platform.machine()})
