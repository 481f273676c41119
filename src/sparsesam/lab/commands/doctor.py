"""``sparsesam doctor``: installed versions, devices, and whether the fast path of a step is on or why not."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

import sparsesam

HELP = "Show installed versions, available devices, and whether the fast path of a step is on or why not."
PACKAGES = "numpy lightning-fabric scikit-learn plotly matplotlib pytorch-lightning transformers accelerate ray"


def add_arguments(parser: Any) -> None:
    pass


def run(options: Any = None) -> None:
    lines = {"sparsesam": sparsesam.__version__, "Python": platform.python_version(), "torch": torch.__version__}
    lines |= {name: _version(name) for name in PACKAGES.split()}
    lines["CPU"] = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    for number in range(torch.cuda.device_count()):
        capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
        lines[f"cuda:{number}"] = f"{torch.cuda.get_device_name(number)}, compute capability {capability}"
    if not torch.cuda.is_available():
        lines["cuda"] = "none: torch was built without CUDA" if torch.version.cuda is None else "none found"
    lines["mps"] = "available" if torch.backends.mps.is_available() else "none"
    lines["engine"] = f"{_engine()} (in a trial step)"
    for name, text in lines.items():
        print(f"{name:<20} {text}")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _engine() -> str:
    """Take one step of a small model with only the last layer perturbed, and return the engine's report."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.fixed_mask("2.*"), norm="masked")

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 4)).square().sum()
        loss.backward()
        return loss

    opt.step(closure)
    return str(opt.engine_report()["engine"])
