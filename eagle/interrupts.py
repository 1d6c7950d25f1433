"""How a command ends at Ctrl-C. Nothing is imported that takes long, so that it holds from the start of a program."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

LOST_AFTER = 10.0  # seconds after which a Ctrl-C that did not end the program is sent again
STOPPED_BY_SIGINT = 130  # the exit status that shells give to Ctrl-C
MESSAGES = "EAGLE_MESSAGES"  # the folder in which each process that `eagle` launched leaves its last sentence
QUIET = "EAGLE_QUIET"  # set where nothing tells of progress


def leave_message(sentence: str) -> bool:
    """Leave the sentence that ends this process for this project's launcher, which prints equal sentences once.

    Returns:
        Whether it was left. It was not if no such launcher waits, or if the file cannot be written.
    """
    folder = os.environ.get(MESSAGES)
    if not folder:
        return False
    try:
        (Path(folder) / os.environ.get("RANK", "0")).write_text(sentence)
    except OSError:
        return False
    return True


@contextmanager
def interrupted_by_user(hint: Callable[[], str]) -> Iterator[None]:
    """Let Ctrl-C in the block end the program with `stopped; HINT` and status 130, and no traceback.

    Args:
        hint: Returns what the user can do next. Of nested blocks the hint of the inner one is printed.
    """
    received: list[int] = []
    try:
        with _note_interrupts(received):
            yield
    except (KeyboardInterrupt, Exception) as error:
        # after a Ctrl-C every error is taken for its effect, as an import may turn the interrupt into another error
        if not received and not isinstance(error, KeyboardInterrupt):
            raise
        # a launcher sends SIGINT once more, which must not interrupt the message
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # one of several processes prints it
        if os.environ.get("RANK", "0") == "0":
            sentence = f"stopped; {hint()}"
            leave_message(sentence)  # for the launcher, where there is one
            print(f"\n{sentence}", file=sys.stderr, flush=True)
        sys.exit(STOPPED_BY_SIGINT)


@contextmanager
def children_start_with_sigint_blocked() -> Iterator[None]:
    """Let processes that the block starts receive Ctrl-C only once `interrupted_by_user` handles it in them.

    A terminal sends it to all processes, and an interpreter that is still starting would print a traceback. A process
    inherits the signals that the thread which starts it has blocked, so the main thread blocks SIGINT. Another thread
    takes it meanwhile, and Python runs its handler in the main thread as ever.
    """
    ended = threading.Event()
    # a thread blocks what its creator has blocked, so it is created first
    threading.Thread(target=ended.wait, daemon=True).start()
    blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        ended.set()


@contextmanager
def _note_interrupts(received: list[int]) -> Iterator[None]:
    """Append to `received` at each Ctrl-C in the block, and send those again that did not end the program.

    Python raises KeyboardInterrupt wherever it happens to be. Raised in an import it may come out as another error, and
    raised in a `__del__` it is dropped.
    """
    handler = signal.getsignal(signal.SIGINT)
    # an outer block or the caller handles SIGINT, and only the main thread may set handlers
    if (
        handler is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    unraisable_hook = sys.unraisablehook
    timers: list[threading.Timer] = []

    def send_after(seconds: float) -> None:
        """Send this process another SIGINT after some seconds."""
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timer.start()
        timers.append(timer)

    def note(number: int, frame: FrameType | None) -> None:
        """Handle SIGINT: note it, and raise KeyboardInterrupt as Python does."""
        received.append(number)
        # an extension module that is being imported may swallow what is raised here, so it comes again
        send_after(LOST_AFTER)
        signal.default_int_handler(number, frame)

    def send_again(lost: sys.UnraisableHookArgs) -> None:
        """Send SIGINT again if a KeyboardInterrupt was dropped; leave other errors to the hook from before."""
        # Python drops what is raised in a `__del__`, and calls this hook: it comes again once that has returned
        if issubclass(lost.exc_type, KeyboardInterrupt):
            send_after(0.01)
        else:
            unraisable_hook(lost)

    signal.signal(signal.SIGINT, note)
    sys.unraisablehook = send_again
    try:
        # a launcher has let this process start with SIGINT blocked: one that came meanwhile is handled here
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGINT, handler)
        sys.unraisablehook = unraisable_hook
