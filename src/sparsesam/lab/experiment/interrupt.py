"""Stop after the current step on Ctrl-C or a scheduler's SIGTERM."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """A function that says whether a signal came within the block; a second one raises KeyboardInterrupt."""
    numbers: list[int] = []

    def ask(number: int, frame: FrameType | None) -> None:
        if numbers:
            raise KeyboardInterrupt
        numbers.append(number)

    is_main = threading.current_thread() is threading.main_thread()  # only there are signals received
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield lambda: bool(numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
