"""Stop after the current step on Ctrl-C or a scheduler's SIGTERM."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class StopOnSignal:
    """Within the block, the first signal sets ``asked``; a second one raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, object] = {}

    def __call__(self) -> bool:
        return self.asked

    def __enter__(self) -> StopOnSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
