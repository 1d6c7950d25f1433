"""Many streams at a time, each of which waits for a server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import TypeVar

Item = TypeVar("Item")


def merge(streams: Iterable[Iterator[Item]]) -> Iterator[Item]:
    """Yield the items of all streams as they come, each stream in a thread of its own; raise the first exception.

    A stream that waits never holds up the end of the program, as by Ctrl-C: its connection closes with the program.
    """
    stopped = Event()
    items: SimpleQueue[tuple[Item] | BaseException | None] = SimpleQueue()

    def run(stream: Iterator[Item]) -> None:
        try:
            for item in stream:
                items.put((item,))
                if stopped.is_set():
                    break
            items.put(None)
        except BaseException as error:
            items.put(error)

    threads = [Thread(target=run, args=(stream,), daemon=True) for stream in streams]
    for thread in threads:
        thread.start()
    try:
        running = len(threads)
        while running:
            item = items.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item[0]
    finally:
        stopped.set()
