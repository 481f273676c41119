"""A step on the current device: time, launches, syncs and memory of SGD, SAM and masks, as a Markdown table.

python -m benchmarks.gpu [--device cuda] [--model resnet18 | vit] [--precision bf16] [--batch 128] [--rounds 20]

Launches and waits exclude the passes of a step and the base optimizer's update: they count dispatched operations that
reach the device. On CUDA the last column counts the warnings of `torch.cuda.set_sync_debug_mode` in a whole step; it
must be 0.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import sparsesam
from benchmarks.cases import SGD, Case, Wrap, cifar_batch, sam, ssam
from benchmarks.dispatch import LaunchCounter
from benchmarks.timing import device_name, interleaved, print_provenance, ratios
from sparsesam import perturbation
from sparsesam.lab.models import resnet18
from sparsesam.lab.models.vit import vit
from sparsesam.masks.packed import PackedMask
from sparsesam.semi_structured import Hardware, choose_backend

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "resnet18": resnet18,
    "vit": partial(vit, 10, 3, 32, patch_size=4, dim=384, depth=6, heads=6, mlp_ratio=4.0),
}


@dataclass(frozen=True)
class Setting:
    """The settings shared by all rows of a table."""

    device: torch.device
    model: Callable[[], nn.Module]
    batch: int
    precision: torch.dtype | None


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=_default_device())
    parser.add_argument("--model", choices=tuple(MODELS), default="resnet18")
    parser.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args(arguments)
    setting = Setting(torch.device(options.device), MODELS[options.model], options.batch, PRECISIONS[options.precision])
    print_provenance()
    print(f"{options.model}, batch {options.batch}, {options.precision}, {device_name(setting.device)}")
    print(f"2:4 products: {sparse_product(setting)}\n")
    print(table(setting, options.rounds))


def table(setting: Setting, rounds: int) -> str:
    """Returns a Markdown table with a row for each method."""
    cases = {name: make_case(setting, wrap) for name, wrap in methods().items()}
    for case in cases.values():
        case()  # creates momentum and masks
    timed = interleaved(cases, "SGD", rounds=rounds, warmup=3, clock=_clock(setting.device))
    lines = ["| | ms | x SGD | launches | waits | MB | CUDA syncs |", "|---|---|---|---|---|---|---|"]
    for ratio in ratios(timed):
        case = cases[ratio.name]
        launches, waits = beyond_passes(case)
        cells = [f"{1e3 * ratio.seconds:.1f}", f"{ratio.median:.2f}", str(launches), str(waits)]
        cells += [_peak(case, setting.device), _cuda_syncs(case, setting.device)]
        lines.append(f"| {ratio.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def methods() -> dict[str, Wrap | None]:
    def masked(pattern: str, sparsity: float | None = None, *, norm: str = "full", **options: Any) -> Wrap:
        return ssam(sparsesam.random_mask(pattern=pattern, sparsity=sparsity), norm=norm, **options)

    return {
        "SGD": None,
        "SAM": sam,
        "ASAM": lambda base, model: sparsesam.SAM(base, model, rho=1.0, adaptive=True),
        "entries, sparsity 0.5": masked("unstructured", 0.5),
        "entries, sparsity 0.9": masked("unstructured", 0.9),
        "filters, sparsity 0.5, masked norm": masked("filter", 0.5, norm="masked"),
        "2:4": masked("2:4"),
        "2:4, implicit": masked("2:4", norm="masked", ascent="implicit"),
        "1:2, implicit": masked("1:2", norm="masked", ascent="implicit"),
    }


def make_case(setting: Setting, wrap: Wrap | None) -> Case:
    torch.manual_seed(0)
    model = setting.model().to(setting.device)
    images, labels = (tensor.to(setting.device) for tensor in cifar_batch(setting.batch))
    settings = {**SGD, "foreach": True}
    return Case(model, (images, labels), wrap, settings=settings, precision=setting.precision)


def beyond_passes(case: Case) -> tuple[int, int]:
    """Returns launches and waits of a step, without its two passes (base optimizer: one) and the base's update."""
    counts = []
    for run in (case, case.closure, case.base.step):
        with (
            mock.patch.object(perturbation, "HOSTS", ()),
            LaunchCounter() as counter,
        ):  # treat a CPU like an accelerator
            run()
        counts.append((counter.count, counter.syncs.total()))
    passes = 1 if case.optimizer is case.base else 2
    launches, waits = (step - passes * one - update for step, one, update in zip(*counts, strict=True))
    return launches, waits


def sparse_product(setting: Setting) -> str:
    """Returns torch's sparse backend for the model's largest linear layer; "dense" if there is none."""
    layers = [m.weight.detach() for m in setting.model().modules() if isinstance(m, nn.Linear)]
    weight = max(layers, key=Tensor.numel).to(setting.device, setting.precision or torch.float32)
    n, m = (1, 2) if weight.dtype == torch.float32 else (2, 4)
    mask = PackedMask.pack(sparsesam.NM(n, m).select({"w": torch.rand(weight.shape)})["w"])
    dy = weight.new_empty(setting.batch * 64, weight.shape[0])
    backend = choose_backend(dy, weight, mask, Hardware.of(setting.device))
    return f"{'dense' if backend is None else backend.__name__} ({n}:{m}, {tuple(weight.shape)})"


def _peak(case: Case, device: torch.device) -> str:
    if device.type != "cuda":
        return "–"
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    case()
    return f"{(torch.cuda.max_memory_allocated(device) - before) / 2**20:.0f}"


def _cuda_syncs(case: Case, device: torch.device) -> str:
    if device.type != "cuda":
        return "–"
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return str(sum("synchroniz" in str(one.message) for one in caught))


def _clock(device: torch.device) -> Callable[[], float]:
    def clock() -> float:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        return time.perf_counter()

    return clock


def _default_device() -> str:
    return str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"


if __name__ == "__main__":
    main()
