"""Show installed versions, available devices, and what a trial step leaves out."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

import sparsesam

PACKAGES = "numpy lightning-fabric scikit-learn plotly matplotlib pytorch-lightning transformers accelerate ray"


def add_arguments(parser: Any) -> None:
    pass


def run(options: Any = None) -> None:
    installed = {package.metadata["Name"].lower(): package.version for package in metadata.distributions()}
    lines = {"sparsesam": sparsesam.__version__, "Python": platform.python_version(), "torch": torch.__version__}
    lines |= {name: installed.get(name, "not installed") for name in PACKAGES.split()}
    lines["CPU"] = f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads"
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    none = "none: torch was built without CUDA" if torch.version.cuda is None else "none found"
    lines |= {"cuda": ", ".join(names) or none, "mps": "available" if torch.backends.mps.is_available() else "none"}
    for name, text in {**lines, "savings": f"{_savings()} (in a trial step)"}.items():
        print(f"{name:<20} {text}")


def _savings() -> str:
    """Take a step of a small model with only the last layer perturbed."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    base, mask = torch.optim.SGD(model.parameters()), sparsesam.fixed_mask("2.*")
    opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask, norm="masked")
    opt.minimize(lambda: model(torch.ones(3, 4)).square().sum())
    savings = opt.savings()
    return f"{savings.gradients:.0%} of the first weight gradients left out, {savings.reused} operations reused"
