"""``sparsesam doctor``: installed versions, devices, and which fast paths are on or why not."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING

import torch
from torch import nn

import sparsesam
from sparsesam.ascent.semi_structured import Hardware

if TYPE_CHECKING:
    from sparsesam.lab.commands.parser import Namespace, Parser

HELP = "Show installed versions, available devices, and which fast paths are on or why not."

#: Optional packages and what they are used for.
_OPTIONAL = {
    "pytorch-lightning": "Lightning",
    "transformers": "Hugging Face's Trainer",
    "accelerate": "Accelerate",
    "lightning-fabric": "training runs",
    "scikit-learn": "the digits data set",
    "plotly": "the report",
    "matplotlib": "figures as files",
    "ray": "sweeps on a cluster",
}


def add_arguments(parser: Parser) -> None:
    pass


def run(options: Namespace | None = None) -> None:
    for title, lines in (("Versions", installed_versions()), ("Devices", devices()), ("Fast paths", fast_paths())):
        print(title)
        for name, text in lines.items():
            print(f"  {name:<22} {text}")


def installed_versions() -> dict[str, str]:
    found = {"sparsesam": sparsesam.__version__, "Python": platform.python_version(), "torch": torch.__version__}
    found["numpy"] = metadata.version("numpy")
    for name, purpose in _OPTIONAL.items():
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = f"not installed (for {purpose})"
    return found


def devices() -> dict[str, str]:
    found = {"CPU": f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"}
    for number in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
        found[f"cuda:{number}"] = f"{torch.cuda.get_device_name(number)}, compute capability {capability}"
    if not torch.cuda.is_available():
        found["cuda"] = "none: torch was built without CUDA" if torch.version.cuda is None else "none found"
    found["mps"] = "available" if torch.backends.mps.is_available() else "none"
    found["processes"] = "torch.distributed is not available"
    if (distributed := torch.distributed).is_available():
        backends = ("nccl", "gloo", "mpi")
        found["processes"] = ", ".join(one for one in backends if getattr(distributed, f"is_{one}_available")())
    return found


def fast_paths() -> dict[str, str]:
    launches = "on" if torch.cuda.is_available() else "on for devices other than the CPU, off here"
    return {
        "engine": _engine(),
        "2:4 products": _semi_structured(),
        "few launches": launches,
    }


def _engine() -> str:
    """Take one step of a small model with only the last layer perturbed, and return the engine's report."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.fixed_mask("2.*"), norm="masked")

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    return f"{opt.engine_report()['engine']} (in a trial step)"


def _semi_structured() -> str:
    if not torch.cuda.is_available():
        return "off: no CUDA device; masked dense products are used"
    hardware = Hardware.of(torch.device("cuda"))
    if hardware is None or hardware.capability < (8, 0):
        return "off: needs compute capability 8.0 or higher"
    return f"on: {'cuSPARSELt' if hardware.has_cusparselt else 'CUTLASS'}"
