"""Products are read in numbers of rows that have the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from eagle.target.bits.invariant import fix_rows, in_fixed_rows
from eagle.target.bits.row_limits import find_row_limit

WIDTH = 24


def changing_after(most: int) -> Callable[[Tensor], Tensor]:
    """Return a product that sums in another order when it has more rows than that."""
    weight = torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()

    def read(rows: Tensor) -> Tensor:
        if len(rows) <= most:
            return rows @ weight.T
        left, right = rows.split(WIDTH // 2, 1)
        left_weight, right_weight = weight.split(WIDTH // 2, 1)
        return left @ left_weight.T + right @ right_weight.T

    return read


@pytest.mark.parametrize(
    ("most", "expected"), [(1000, None), (399, 32), (32, 32), (31, 16), (16, 16), (9, 8), (3, 2)]
)
def test_the_limit_is_where_bits_change(most: int, expected: int | None) -> None:
    """At a number of rows below which nothing changes; None where nothing changes."""
    key = ("test", most)
    assert find_row_limit(key, changing_after(most), WIDTH, torch.bfloat16) == expected


def test_a_limit_is_found_once() -> None:
    """For each kernel: later targets of the same sizes are loaded faster."""
    calls = []

    def read(rows: Tensor) -> Tensor:
        calls.append(len(rows))
        return rows

    assert find_row_limit("once", read, WIDTH, torch.bfloat16) is None
    count = len(calls)
    assert find_row_limit("once", read, WIDTH, torch.bfloat16) is None
    assert len(calls) == count


def test_more_rows_are_read_in_turn() -> None:
    """The last one by itself is read as two."""
    numbers: list[int] = []

    def double(rows: Tensor) -> Tensor:
        numbers.append(len(rows))
        return rows * 2

    x = torch.randn(5, 13, 4)
    assert torch.equal(in_fixed_rows(double, x, most=32), x * 2)
    assert numbers == [32, 32, 2]


def test_a_layer_has_the_same_bits_in_any_number_of_rows() -> None:
    """Of sizes for which kernels were seen to change."""
    layer = nn.Linear(576, 192, bias=False, dtype=torch.bfloat16)
    holder = nn.Sequential(layer)
    fix_rows(holder)
    with torch.inference_mode():
        rows = torch.randn(200, 576).bfloat16()
        pairs = torch.cat([holder(pair) for pair in rows.split(2)])
        for count in (1, 31, 33, 64, 200):
            assert torch.equal(holder(rows[:count]), pairs[:count])
