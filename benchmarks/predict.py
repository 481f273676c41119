"""Predicted, not measured: the time of a step with DistributedDataParallel on 8 to 1,024 GPUs.

The time of a step is the sum of its passes, the part of the gradient all-reduce that the backward does not hide, the
move to w + e and back, and the base optimizer's update:

    all-reduce   2 (n - 1) / n · bytes / slowest link + 2 · log2(nodes) · latency
    exposed      max(all-reduce - backward, all-reduce of the last bucket)
    move         max(launches · host time per launch, bytes moved / memory bandwidth)

It ignores stragglers, input pipelines, network contention and the effect of a smaller batch per GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from benchmarks.runner import Session, benchmark
from benchmarks.timing import show

GPUS = (8, 16, 64, 1024)
#: gradients and weights are float32
_BYTES = 4
#: PyTorch's DistributedDataParallel sends gradients in buckets of 25 MiB; the last waits for the end of the backward
_BUCKET = 25 * 2**20


@dataclass(frozen=True)
class Assumptions:
    """Defaults: ResNet-50 in bf16 with 256 images per A100, nodes of 8 with 200 Gb/s for each GPU."""

    parameters: float = 25.6e6
    pass_ms: float = 100.0
    backward_share: float = 2 / 3
    memory_gbs: float = 1500.0
    launch_us: float = 5.0
    node_gbs: float = 250.0
    link_gbs: float = 25.0
    latency_us: float = 15.0
    gpus_per_node: int = 8


@dataclass(frozen=True)
class Method:
    """``passes`` in units of SGD's, ``sent`` in copies of the gradient per pass, ``moved`` in bytes per weight."""

    passes: float
    sent: tuple[float, ...]
    moved: float
    launches: float = 30


# Floats per weight that SAM's move reads and writes: norm 1, join g 2, scale 2, fill 2, save 2, add 3, restore 2.
_SAM_MOVED = 4 * 14
# Bytes: norm 4; g once and w three times joined, 32, and w copied back twice, 16; the kept half's int64 positions found
# twice from bits, 16, and read four times, 16; two gathers, 12, scale and fill, 8, add, 6, and two scatters, 20.
_ENTRIES_MOVED = 4 + 32 + 16 + 16 + 16 + 12 + 8 + 6 + 20

METHODS = {
    "SGD": Method(1, (1,), 0, launches=0),
    "SAM, global": Method(2, (1, 1), _SAM_MOVED),
    "SAM, local": Method(2, (0, 1), _SAM_MOVED),
    "half of the entries, global": Method(2, (1, 1), _ENTRIES_MOVED, launches=64),
    # ResNet-50's last stage: 15.0 M of 25.6 M weights with the classifier; passes as measured for ResNet-18 on a CPU.
    "last stage, global": Method(1.24, (0.67, 1), _SAM_MOVED * 0.67),
}


def all_reduce_ms(share: float, gpus: int, given: Assumptions) -> float:
    """Returns the time to all-reduce a share of the gradients."""
    if gpus == 1 or share == 0:
        return 0.0
    sent = 2 * (gpus - 1) / gpus * share * given.parameters * _BYTES
    nodes = math.ceil(gpus / given.gpus_per_node)
    slowest = given.node_gbs if nodes == 1 else given.link_gbs
    return 1e3 * sent / (slowest * 1e9) + 2 * math.log2(max(nodes, 1)) * given.latency_us / 1e3


def exposed_ms(share: float, gpus: int, backward_ms: float, given: Assumptions) -> float:
    """Returns the time of the all-reduce that remains after the backward has ended."""
    whole = all_reduce_ms(share, gpus, given)
    last_bucket = min(share, _BUCKET / (given.parameters * _BYTES))
    return max(whole - backward_ms, all_reduce_ms(last_bucket, gpus, given))


def move_ms(method: Method, given: Assumptions) -> float:
    traffic = method.moved * given.parameters / (given.memory_gbs * 1e9)
    return max(method.launches * given.launch_us / 1e3, 1e3 * traffic)


def step_ms(method: Method, gpus: int, given: Assumptions) -> float:
    """Returns the time of a step. The update reads gradient, weight and momentum and writes weight and momentum."""
    update = 1e3 * 5 * _BYTES * given.parameters / (given.memory_gbs * 1e9)
    backward = given.backward_share * given.pass_ms * method.passes / len(method.sent)
    sent = sum(exposed_ms(share, gpus, backward, given) for share in method.sent)
    return method.passes * given.pass_ms + sent + move_ms(method, given) + update


@benchmark(options=Assumptions)
def predict(session: Session, **given: float) -> None:
    """Predicted, not measured: what would a step cost under DDP on 8 to 1,024 GPUs, and x SGD on as many?"""
    rows = []
    for gpus in GPUS:
        times = [step_ms(method, gpus, Assumptions(**given)) for method in METHODS.values()]  # type: ignore[arg-type]
        rows.append((gpus, *(f"{time:.1f} ms, {time / times[0]:.2f} x" for time in times)))
    show(" | ".join(["GPUs", *METHODS]), rows)
