"""The number of threads is the one that is fastest, whatever it is fastest at."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from eagle.device import choose_threads


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Leaves torch as it was."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


class Work:
    """Work that takes so long on so many threads, by a clock of its own."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.time = seconds, 0.0

    def forward(self) -> None:
        """What is timed."""
        self.time += self.seconds(torch.get_num_threads())

    def clock(self) -> float:
        """The seconds that all work has taken."""
        return self.time


@pytest.mark.parametrize(
    ("most", "seconds", "expected"),
    [
        (4, lambda count: 0.012 / count, 4),  # an idle machine
        (4, lambda count: 0.002 * count, 1),  # a busy one: threads wait for one another
        (4, lambda count: 0.004 + 0.004 * abs(count - 2), 2),
        (3, lambda count: 0.012 / count, 3),  # no power of two
        (4, lambda count: 0.004, 1),  # more have to be clearly faster
        (1, lambda count: 0.004, 1),
    ],
)
def test_the_fastest_number_of_threads_is_chosen(
    most: int, seconds: Callable[[int], float], expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of work whose time is known for each number; no more threads than torch had; a line tells of it."""
    torch.set_num_threads(most)
    work = Work(seconds)
    assert choose_threads(work.forward, 0.1, work.clock) == expected
    assert torch.get_num_threads() == expected
    assert capsys.readouterr().err.startswith(f"threads: {expected} of {most}, by timing" if most > 1 else "")


def test_one_thread_is_not_timed() -> None:
    """There is nothing to choose."""
    torch.set_num_threads(1)
    assert choose_threads(lambda: pytest.fail("timed")) == 1
