"""How many rows a CPU may multiply with a matrix at once before it sums in another order.

On processors that multiply in bf16, oneDNN splits the sums of some products of more than 32 rows. It does not tell
for which sizes, so each is tried once.
"""

# N rows, D width, V columns of the product

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor

# numbers of rows that are tried as limits; the tiles of kernels are no smaller than the last
LIMITS = (32, 16, 8)
# numbers of rows to try below and above the limits: kernels change at multiples of their tiles, and at one row more
FEW = (3, 17, 31)
MANY = (33, 64, 65, 128, 400)
# the limits that were found, by the sizes, dtype, layout and number of threads that decide the kernel
FOUND: dict[Hashable, int | None] = {}


def find_row_limit(
    key: Hashable, read: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype
) -> int | None:
    """Return the most rows (tokens) for which `read` gives each the same bits as in a pair; None for any number.

    A kernel of another number of rows may sum in another order, and so round differently.

    Args:
        key: sizes, dtype and layout of the matrix, which decide the kernel together with the number of threads.
        read: multiplies rows [N, D] with a matrix on a CPU, and returns [N, V].
        width: D.
        dtype: of the rows.
    """
    key = (key, torch.get_num_threads())
    if key not in FOUND:
        FOUND[key] = _try_rows(read, width, dtype)
    return FOUND[key]


@torch.inference_mode()
def _try_rows(read: Callable[[Tensor], Tensor], width: int, dtype: torch.dtype) -> int | None:
    """Find out by products of random rows how many may be read at once with the same bits; None for any number.

    Args:
        read: multiplies N rows [N, D] with a matrix.
        width: D.
        dtype: of the rows.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(MANY[-1], width, generator=generator).to(dtype)

    def read_by(size: int, count: int) -> Tensor:
        """Return the products of the first `count` rows, read `size` rows at a time."""
        return torch.cat([read(tile) for tile in rows[:count].split(size)])

    # all rows are compared, as another order of sums changes only one number in a thousand
    pairs = read_by(2, LIMITS[0])
    most = 2  # if no limit has the bits of pairs
    for limit in LIMITS:
        sizes = [limit, *(size for size in FEW if size < limit)]
        if all(torch.equal(read(rows[:size]), pairs[:size]) for size in sizes):
            most = limit
            break
    # kernels of more rows may sum in the same order, too: then there is no limit
    expected = read_by(most, len(rows))
    if most == LIMITS[0] and all(torch.equal(read(rows[:size]), expected[:size]) for size in MANY):
        return None
    return most
