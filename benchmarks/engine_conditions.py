"""The engine in common training setups: two ranks with DistributedDataParallel, compiled blocks, and a tiny model.

python -m benchmarks.engine_conditions ddp       [--rounds 7] [--batch 32] [--wall]
python -m benchmarks.engine_conditions compiled  [--rounds 7] [--batch 64] [--wall]
python -m benchmarks.engine_conditions tiny      [--rounds 2000]

``ddp`` and ``compiled``: ResNet-18, last stage and classifier perturbed, x an SGD step under the same conditions; CPU
seconds with one thread (a rank's own), or wall-clock seconds with ``--wall``. ``tiny``: milliseconds that the engine
adds to a step of a 64-64-10 perceptron, batch 8.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
from torch import distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

import sparsesam
from benchmarks.cases import Batch, Case, cifar_batch, sam, ssam
from benchmarks.engine import TAILS
from benchmarks.timing import format_ratios, interleaved, medians, print_provenance, ratios
from sparsesam.lab.models import build_model

Clock = Callable[[], float]


def cases(model: nn.Module, batch: Batch, prepare: Callable[[nn.Module], nn.Module]) -> dict[str, Case]:
    """Returns SGD, SAM and the last stage, each on a copy of the model prepared in the same way."""
    stage = sparsesam.fixed_mask(*TAILS["resnet18"][1])
    wraps = {
        "SGD": None,
        "SAM": sam,
        "last stage + classifier": ssam(stage),
        "last stage, norm of all": ssam(stage, norm="full"),
        "last stage, engine off": ssam(stage, engine=False),
    }
    return {name: Case(model, batch, wrap, prepare=prepare) for name, wrap in wraps.items()}


def resnet(batch: int) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    return build_model("resnet18", image_size=32), cifar_batch(batch)


def timed(chosen: dict[str, Case], rounds: int, clock: Clock) -> str:
    table = format_ratios(ratios(interleaved(chosen, "SGD", rounds=rounds, warmup=2, clock=clock)), "SGD")
    return f"{table}\n{chosen['last stage + classifier'].optimizer.savings()}"


def on_a_rank(rank: int, folder: str, batch: int, rounds: int, clock: Clock) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, data = resnet(batch)
    table = timed(cases(model, data, DistributedDataParallel), rounds, clock)
    if rank == 0:
        print(table)
    dist.barrier()
    dist.destroy_process_group()


def ddp(batch: int, rounds: int, clock: Clock) -> None:
    print(f"ResNet-18, two ranks, {batch} images each, {rounds} interleaved rounds, rank 0")
    with tempfile.TemporaryDirectory() as folder:
        start_processes(on_a_rank, (folder, batch, rounds, clock), nprocs=2, start_method="spawn")


def compiled(batch: int, rounds: int, clock: Clock) -> None:
    print(f"ResNet-18, compiled blocks (inductor), {batch} images, {rounds} interleaved rounds")
    model, data = resnet(batch)
    print(timed(cases(model, data, sparsesam.compile_blocks), rounds, clock))


def tiny(rounds: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    data = (torch.randn(8, 64), torch.randint(10, (8,)))
    chosen = {"SGD": Case(model, data)}
    masks = {"last layer": sparsesam.fixed_mask("2.*"), "unstructured 50 %": sparsesam.random_mask(sparsity=0.5)}
    for what, mask in masks.items():
        chosen[f"{what}, engine on"] = Case(model, data, ssam(mask))
        chosen[f"{what}, engine off"] = Case(model, data, ssam(mask, engine=False))
    milliseconds = {name: 1e3 * seconds for name, seconds in medians(chosen, rounds, time.process_time).items()}
    for name, value in milliseconds.items():
        print(f"{name:30} {value:.3f} ms a step")
    for what in masks:
        added = milliseconds[f"{what}, engine on"] - milliseconds[f"{what}, engine off"]
        print(f"{what}: the engine adds {added:+.3f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("condition", choices=["ddp", "compiled", "tiny"])
    parser.add_argument("--rounds", type=int, help="default 7, for tiny 2000")
    parser.add_argument("--batch", type=int, help="images in a step; default 64, for ddp 32 on each rank")
    parser.add_argument("--wall", action="store_true", help="wall-clock instead of CPU seconds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print_provenance()
    clock = time.perf_counter if options.wall else time.process_time
    if options.condition == "ddp":
        ddp(options.batch or 32, options.rounds or 7, clock)
    elif options.condition == "compiled":
        compiled(options.batch or 64, options.rounds or 7, clock)
    else:
        tiny(options.rounds or 2000)


if __name__ == "__main__":
    main()
