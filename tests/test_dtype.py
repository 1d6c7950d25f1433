"""The dtype that `auto` stands for follows from the processor, not from a race of timings."""

from __future__ import annotations

import pytest
import torch

from eagle.device import cpu_capabilities, fastest_dtype, multiplies_bf16


@pytest.mark.parametrize(
    ("capabilities", "native"),
    [
        # with AVX-512 alone, bf16 is converted to fp32 first
        ({"avx2": True, "avx512_bw": True, "avx512_vnni": True, "avx512_bf16": False}, False),
        ({"avx512_bf16": True}, True),
        ({"amx_bf16": True, "amx_tile": True}, True),
        ({"neon": True, "bf16": True}, True),
        ({"neon": True}, False),
        ({}, False),
    ],
)
def test_only_processors_that_multiply_bf16_get_it(
    capabilities: dict[str, bool], native: bool
) -> None:
    """By their instructions alone."""
    assert multiplies_bf16(capabilities) is native


def test_no_clock_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six processes on a busy machine choose alike; what torch's kernels may not use does not count."""
    # a timing would differ between processes of one run
    monkeypatch.setattr("time.perf_counter", lambda: pytest.fail("timed"))
    monkeypatch.setattr("timeit.default_timer", lambda: pytest.fail("timed"))
    expected = torch.bfloat16 if multiplies_bf16(cpu_capabilities()) else torch.float32
    assert {fastest_dtype("cpu") for _ in range(6)} == {expected}
