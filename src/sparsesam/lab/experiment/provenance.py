"""What is needed to repeat a measurement: versions, machine, threads, command, commit."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

import sparsesam


def provenance() -> dict[str, str | int | None]:
    return {
        "command": _command(),
        "commit": _commit(),
        "sparsesam": sparsesam.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "machine": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def _command() -> str:
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = f"python -m {module.name.removesuffix('.__main__')}" if module else Path(sys.argv[0]).name
    return shlex.join([*program.split(), *sys.argv[1:]])


def _commit() -> str | None:
    """Returns the commit of this file's checkout, with "+changes" if files differ from it; None outside git."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.check_output(["git", *arguments], cwd=folder, text=True, stderr=subprocess.DEVNULL).strip()

    try:
        # An installed copy may be inside another project's checkout, where this file is not tracked.
        git("ls-files", "--error-unmatch", Path(__file__).name)
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), None)
