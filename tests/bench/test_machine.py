"""Figures belong to a machine that is named by its processor and by how fast it multiplies."""

from __future__ import annotations

import platform
from itertools import count
from pathlib import Path

import pytest
import torch

from bench import machine
from bench.machine import measure_peak
from eval.result_files.results import device_name


@pytest.mark.parametrize(("seconds", "flops"), [(1.0, 8192), (0.01, 524288), (1e-6, 524288)])
def test_a_peak_is_the_operations_of_a_product_by_its_time(
    seconds: float, flops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that is slow with a dtype is measured by a small product alone.

    The clock goes on by so much whenever it is read. A product of width 64 has 524,288 operations, one of 16 has 8,192.
    """
    ticks = count()
    monkeypatch.setattr(machine, "clock", lambda device: next(ticks) * seconds)
    assert measure_peak(torch.bfloat16, size=64) == pytest.approx(flops / seconds)


def test_results_say_the_machine_that_they_were_made_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name and peaks, beside what was measured; the threads are those of the measurement."""
    monkeypatch.setattr(
        machine, "measure_peak", lambda dtype: 43.2e9 if dtype == torch.float32 else 0.21e9
    )
    threads = torch.get_num_threads()
    about = machine.made_on(rounds=3)
    assert (about["fp32 GFLOP/s"], about["bf16 GFLOP/s"]) == (43, 0.21)
    assert (about["rounds"], about["cpu"], about["threads"]) == (3, device_name("cpu"), threads)
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(
    not Path("/proc/cpuinfo").is_file(), reason="where the standard library's name is all there is"
)
def test_a_processor_is_named_by_its_model() -> None:
    """The architecture alone says nothing about speed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    assert device_name("cpu") in (models or {platform.processor(), platform.machine()})
