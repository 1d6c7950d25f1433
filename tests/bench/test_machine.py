"""Figures name the machine they were made on, and how fast it multiplies."""

from __future__ import annotations

import platform
from itertools import count
from pathlib import Path

import pytest
import torch

from bench import machine
from bench.machine import measure_peak
from eval.result_files.results import device_name


# a product of width 64 has 524,288 operations, one of width 16 has 8,192
@pytest.mark.parametrize(("seconds", "flops"), [(1.0, 8192), (0.01, 524288), (1e-6, 524288)])
def test_a_peak_is_the_operations_of_a_product_by_its_time(
    seconds: float,
    flops: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A processor that is slow with a dtype is measured by a small product alone."""
    ticks = count()
    # the clock goes on by so much whenever it is read
    monkeypatch.setattr(
        machine,
        "clock_of",
        lambda device: lambda: next(ticks) * seconds,
    )
    assert measure_peak(torch.bfloat16, size=64) == pytest.approx(flops / seconds)


def test_results_describe_their_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name, threads and peaks stand beside what the caller says."""
    peaks = {torch.float32: 43.2e9, torch.bfloat16: 0.21e9}
    monkeypatch.setattr(
        machine,
        "measure_peak",
        peaks.__getitem__,
    )
    threads = torch.get_num_threads()
    about = machine.made_on(rounds=3)
    assert about["fp32 GFLOP/s"] == 43
    assert about["bf16 GFLOP/s"] == 0.21
    assert about["rounds"] == 3
    assert about["cpu"] == device_name("cpu")
    assert about["threads"] == threads == torch.get_num_threads()


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="needs /proc/cpuinfo")
def test_a_processor_is_named_by_its_model() -> None:
    """The architecture alone says nothing about speed."""
    models = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            models.add(line.partition(":")[2].strip())
    # some kernels name no model
    assert device_name("cpu") in (models or {platform.processor(), platform.machine()})
