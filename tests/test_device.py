"""The number of threads is the one that is fastest, whatever it is fastest at."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from eagle.device import ThreadsOfLongWork, choose_threads

pytestmark = pytest.mark.usefixtures("same_threads")


class Work:
    """Work that takes so long on so many threads, by a clock of its own."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds = seconds
        self.time = 0.0

    def forward(self) -> None:
        """Do the work, which takes the time that is known for this number of threads."""
        self.time += self.seconds(torch.get_num_threads())

    def clock(self) -> float:
        """Return the seconds that all work has taken."""
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
    most: int,
    seconds: Callable[[int], float],
    expected: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of work whose time is known for each number; no more threads than torch had; a line tells of it."""
    torch.set_num_threads(most)
    # a clock that only work moves: no machine is timed
    work = Work(seconds)
    assert choose_threads(work.forward, 0.1, work.clock) == expected
    assert torch.get_num_threads() == expected
    told = f"threads: {expected} of {most}, by timing" if most > 1 else ""
    assert capsys.readouterr().err.startswith(told)


def test_long_work_is_timed_again_when_other_jobs_have_gone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Begun beside another job, it takes more threads once that has ended; a minute passes between two timings."""
    torch.set_num_threads(2)
    busy = {"beside": True}
    work = Work(lambda count: 0.01 * count if busy["beside"] else 0.01 / count)
    load = {"now": 2.0}
    # begun while another job runs: one thread is the fastest
    threads = ThreadsOfLongWork(work.forward, work.clock, lambda: load["now"])
    assert threads.settle() == 1
    busy["beside"] = False
    assert threads.settle() == 1  # within the minute
    work.time += 60
    assert threads.settle() == 2 and torch.get_num_threads() == 2
    busy["beside"] = True
    work.time += 600
    assert threads.settle() == 2  # nothing says that anything has changed
    load["now"] = 3.0
    assert threads.settle() == 1
    busy["beside"] = False
    work.time += 60
    load["now"] = float("nan")  # a system that does not tell
    assert threads.settle() == 2
    told = capsys.readouterr().err.splitlines()
    assert told == [f"threads: {best} of 2, by timing" for best in (1, 2, 1, 2)]


def test_measurements_keep_their_threads_and_learn_of_faster_ones() -> None:
    """A number was chosen just now; a minute later another is faster, which is told and not set."""
    torch.set_num_threads(1)
    busy = {"beside": True}
    work = Work(lambda count: 0.01 * count if busy["beside"] else 0.01 / count)
    load = {"now": 2.0}
    threads = ThreadsOfLongWork(
        work.forward,
        work.clock,
        lambda: load["now"],
        most=2,
    )
    # the other job ends, which nobody is told
    busy["beside"] = False
    assert threads.faster() is None  # within the minute
    work.time += 60
    assert threads.faster() == 2 and torch.get_num_threads() == 1
    work.time += 60
    assert threads.faster() is None  # nothing says that anything has changed
    load["now"] = 3.0
    busy["beside"] = True
    # the number that is set is the fastest
    assert threads.faster() is None
    assert torch.get_num_threads() == 1


def test_one_thread_is_not_timed() -> None:
    """There is nothing to choose."""
    torch.set_num_threads(1)
    assert choose_threads(lambda: pytest.fail("timed")) == 1
    assert ThreadsOfLongWork(lambda: pytest.fail("timed")).settle() == 1
    assert ThreadsOfLongWork(lambda: pytest.fail("timed"), most=1).faster() is None
