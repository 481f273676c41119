"""What a run changes in its process, and how it learns that it must stop or that another rank's process has ended."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from sparsesam.lab.experiment.errors import LostRankError, RunError

if TYPE_CHECKING:
    from lightning_fabric import Fabric


@contextmanager
def torch_settings(threads: int | None, *, tf32: bool = False) -> Iterator[None]:
    """Use this many threads; ``tf32`` lets products of float32 matrices use TF32. Otherwise the caller's choices stay.

    The global generators are restored too.
    """
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(threads or before[0])
    torch.set_float32_matmul_precision("high" if tf32 else before[1])
    try:
        with torch.random.fork_rng():
            yield
    finally:
        torch.set_num_threads(before[0])
        torch.set_float32_matmul_precision(before[1])


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or a scheduler's SIGTERM was received, to stop after the step.

    A second signal raises KeyboardInterrupt.
    """
    numbers: list[int] = []

    def receive(number: int, frame: FrameType | None) -> None:
        if numbers:
            raise KeyboardInterrupt
        numbers.append(number)

    is_main = threading.current_thread() is threading.main_thread()  # only the main thread may set signal handlers
    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)} if is_main else {}
    try:
        yield lambda: bool(numbers)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def name_lost_ranks(fabric: Fabric, command: str) -> Iterator[None]:
    """Replace the error of a broken connection by one line that names the ranks whose processes have ended."""
    if fabric.world_size == 1:
        yield
        return
    ranks: list[Any] = [None] * fabric.world_size
    try:
        torch.distributed.all_gather_object(ranks, (socket.gethostname(), os.getpid()))
        yield
    except RunError:
        raise
    except RuntimeError as error:
        local = {rank: place[1] for rank, place in enumerate(ranks) if place and place[0] == socket.gethostname()}
        deadline = time.monotonic() + 2.0  # a connection ends before its process
        while not (lost := [rank for rank in local if not _is_alive(local[rank])]) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not lost:
            raise
        if fabric.global_rank != min(local.keys() - lost):
            raise SystemExit(1) from error  # another rank says it
        names = " and ".join(f"rank {rank} (process {local[rank]})" for rank in lost)
        raise LostRankError(f"{names} ended, killed or by an error of its own; continue with: {command}") from error


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return not Path("/proc/self").exists()  # unknown without /proc
