"""Many tasks at a time, each of which waits for a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def run_in_threads(tasks: Iterator[Task], work: Callable[[Task], Result], count: int) -> Iterator[tuple[Task, Result]]:
    """Each task with its result, as they end; the first exception of a task is raised here.

    A task under way never holds up the end of the program, as by Ctrl-C: its connection closes with the program.
    """
    lock, stopped = Lock(), Event()
    outcomes: SimpleQueue[tuple[Task, Result] | BaseException | None] = SimpleQueue()

    def run() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    task = next(tasks)
                outcomes.put((task, work(task)))
        except StopIteration:
            outcomes.put(None)
        except BaseException as error:
            outcomes.put(error)

    for _ in range(count):
        Thread(target=run, daemon=True).start()
    try:
        while count:
            outcome = outcomes.get()
            if isinstance(outcome, BaseException):
                raise outcome
            count -= outcome is None
            if outcome is not None:
                yield outcome
    finally:
        stopped.set()
