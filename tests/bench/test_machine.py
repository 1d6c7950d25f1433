"""Figures belong to a machine that is named by its processor and by how fast it multiplies."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from bench.machine import made_on, measure_peaks
from eval.result_files.results import device_name


def test_a_machine_has_a_name_and_peaks() -> None:
    """Of both dtypes, on one thread, which is not left set."""
    threads = torch.get_num_threads()
    about = made_on(rounds=3)
    assert min(about["fp32 GFLOP/s"], about["bf16 GFLOP/s"]) > 0
    assert (about["rounds"], about["threads"]) == (3, threads) and torch.get_num_threads() == threads
    assert measure_peaks(64).keys() == {"fp32", "bf16"}


@pytest.mark.skipif(not Path("/proc/cpuinfo").is_file(), reason="where the standard library's name is all there is")
def test_a_processor_is_named_by_its_model() -> None:
    """The architecture alone says nothing about speed."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    assert device_name("cpu") in (models or {platform.processor(), platform.machine()})
