"""Steps on the current device: launches, waits and memory; and the paper's timing of N:M masks."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn

import sparsesam
from benchmarks.cases import SGD, Case, Wrap, cifar_batch, sam, ssam
from benchmarks.dispatch import LaunchCounter
from benchmarks.runner import Session, benchmark
from benchmarks.timing import show
from sparsesam import perturbation
from sparsesam.lab.models import build_model
from sparsesam.lab.models.vit import VisionTransformer

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"
WIDTH = 8192
#: Seconds of one iteration on an A100 (the paper's table nm_vit).
PAPER = {"SAM": 4.10, "implicit 1:2": 3.58, "implicit 2:4": 3.53}


@benchmark(rounds=20, only="", quick={"model": "resnet10-small", "batch": 2})
def gpu(
    session: Session, *, device: str = DEVICE, model: str = "resnet18", precision: str = "fp32", batch: int = 128
) -> None:
    """What do SGD, SAM and masks cost on this device: time, launches, waits, memory?

    --model is a name of ours, or ``vit``. Launches and waits exclude the passes of a step and the base optimizer's
    update: they count dispatched operations that reach the device. On CUDA the last column counts the warnings of
    `torch.cuda.set_sync_debug_mode` in a whole step; it must be 0.
    """
    where, half = torch.device(device), PRECISIONS[precision]
    torch.manual_seed(0)
    wide = partial(VisionTransformer, 10, 3, 32, patch_size=4, dim=384, depth=6, heads=6, mlp_ratio=4.0)
    network = (wide() if model == "vit" else build_model(model)).to(where)
    images, labels = (tensor.to(where) for tensor in cifar_batch(batch))
    cases = {
        name: Case(network, (images, labels), wrap, settings={**SGD, "foreach": True}, precision=half)
        for name, wrap in session.chosen(MASKS, "SGD").items()
    }
    print(where)
    rows = []
    for name, ratio in session.compare(cases, "SGD", where).items():
        cuda = of_cuda(cases[name]) if where.type == "cuda" else ("–", "–")
        rows.append((name, ratio.milliseconds, f"{ratio.median:.2f}", *beyond_passes(cases[name]), *cuda))
    show(" | ms | x SGD | launches | waits | MB | CUDA syncs", rows)


def masked(pattern: str, sparsity: float | None = None, *, norm: str = "full", **options: Any) -> Wrap:
    return ssam(sparsesam.random_mask(pattern=pattern, sparsity=sparsity), norm=norm, **options)


MASKS: dict[str, Wrap | None] = {
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
NM_CASES: dict[str, Wrap | None] = {
    "Adam": None,
    "SAM": sam,
    "explicit 2:4": masked("2:4"),
    "implicit 1:2": masked("1:2", ascent="implicit-dense"),
    "implicit 2:4": masked("2:4", ascent="implicit-dense"),
    "implicit 2:4, masked dW": masked("2:4", norm="masked", ascent="implicit"),
    "implicit 2:4 filters, masked dW": masked("2:4 filters", norm="masked", ascent="implicit"),
}


def beyond_passes(case: Case) -> tuple[int, int]:
    """Returns launches and waits of a step, without its two passes (base optimizer: one) and the base's update."""
    counts = []
    for run in (case, case.closure, case.base.step):
        with mock.patch.object(perturbation, "HOSTS", ()), LaunchCounter() as counter:  # a CPU like an accelerator
            run()
        counts.append((counter.count, counter.syncs))
    passes = 1 if case.optimizer is case.base else 2
    launches, waits = (step - passes * each - update for step, each, update in zip(*counts, strict=True))
    return launches, waits


def of_cuda(case: Case) -> tuple[str, str]:
    """Returns the peak of memory beyond what is held, in MB, and the number of synchronizations, of a step."""
    torch.cuda.reset_peak_memory_stats()
    held, mode = torch.cuda.memory_allocated(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case()
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    syncs = sum("synchroniz" in str(warning.message) for warning in caught)
    return f"{(torch.cuda.max_memory_allocated() - held) / 2**20:.0f}", str(syncs)


@benchmark(rounds=5, only="", quick={"scale": 1 / 512, "image": 2, "batch": 2})
def nm_vit(
    session: Session,
    *,
    scale: float = 0.125,
    image: int = 16,
    batch: int = 4,
    precision: str = "fp32",
    device: str = DEVICE,
) -> None:
    """The paper's timing of N:M masks: what does a step of a ViT with a single, very wide block cost, x SAM?

    The paper uses --scale 1 (a width of 8192), --image 32 and --batch 16 with Adam on an A100: 403 million weights, so
    that each case takes 8 GB, and all cases are in memory at once; --only selects fewer. Sparse tensor cores skip half
    of the multiplications of the input gradient in an implicit 2:4 ascent, in 16 bits; on other devices the masked
    product is dense and costs as much as the unmasked one. Masks are random, and are made
    once, before the timing.
    """
    where = torch.device(device)
    cases = {
        name: nm_case(name, round(WIDTH * scale), image, batch, where, PRECISIONS[precision])
        for name in session.chosen(NM_CASES, "SAM")
    }
    print(f"{precision} on {where}, patches of one pixel")
    rows = []
    for name, ratio in session.compare(cases, "SAM", where).items():
        theirs = (f"{PAPER[name]:.2f}", f"{PAPER[name] / PAPER['SAM']:.2f}") if name in PAPER else ("–", "–")
        rows.append((name, f"{ratio.seconds:.4f}", ratio, *theirs))
    show(" | s | x SAM (quartiles) | paper: s | x SAM", rows)


def nm_case(name: str, width: int, side: int, batch: int, device: torch.device, precision: torch.dtype | None) -> Case:
    torch.manual_seed(0)
    model = VisionTransformer(10, 3, side, patch_size=1, dim=width, depth=1, heads=1, mlp_ratio=1.0)
    data = (torch.randn(batch, 3, side, side, device=device), torch.arange(batch, device=device) % 10)
    return Case(
        model,
        data,
        NM_CASES[name],
        prepare=partial(nn.Module.to, device=device),
        base=torch.optim.Adam,
        settings={"lr": 1e-3},
        precision=precision,
    )
