"""``python -m benchmarks.replay_overhead``: microseconds of CPU time per recorded and replayed operation."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsesam.replay import Tape

OPERATIONS, ROUNDS = 100, 100


def timed(step: Callable[[Tape | None], None], moved: dict[str, Tensor]) -> tuple[float, float]:
    """Seconds of CPU time of a step without a tape, and with one: medians of alternating rounds."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(ROUNDS):
        for taped in (False, True):
            start = time.thread_time()
            step(Tape(moved, between=False) if taped else None)
            seconds[taped].append(time.thread_time() - start)
    return median(seconds[False]), median(seconds[True])


def main() -> None:
    torch.set_num_threads(1)
    x, weight = torch.randn(8, requires_grad=True), nn.Parameter(torch.randn(8))

    def chain() -> Tensor:
        h = x
        for _ in range(OPERATIONS):
            h = torch.tanh(h)
        return h * weight

    def record(tape: Tape | None) -> None:
        with tape.recording() if tape else nullcontext():
            chain()

    def record_and_replay(tape: Tape | None) -> None:
        record(tape)
        with tape.replaying() if tape else nullcontext():
            chain()

    plain, recorded = timed(record, {"weight": weight})
    plain_twice, both = timed(record_and_replay, {"weight": weight})
    per_record = (recorded - plain) / OPERATIONS * 1e6
    print(f"recorded  {per_record:6.1f} us per operation more than a plain one")
    print(
        f"replayed  {(both - plain_twice) / OPERATIONS * 1e6 - per_record:6.1f} us per operation more than a plain one"
    )

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    inputs, labels = torch.randn(8, 64), torch.randint(0, 10, (8,))
    for name, prefix in (("every weight", ""), ("the last layer", "2.")):
        moved = {key: p for key, p in model.named_parameters() if key.startswith(prefix)}

        def step(tape: Tape | None, moved: dict[str, nn.Parameter] = moved) -> None:
            with tape.recording() if tape else nullcontext():
                torch.autograd.backward(F.cross_entropy(model(inputs), labels), inputs=list(moved.values()))
            with tape.replaying() if tape else nullcontext():
                F.cross_entropy(model(inputs), labels).backward()

        plain, taped = timed(step, dict(moved))
        print(f"MLP 64-64-10, batch 8, {name} perturbed: {plain * 1e3:.2f} ms plain, {(taped - plain) * 1e3:+.2f} ms")


if __name__ == "__main__":
    main()
