"""Runs the core tests on combinations of Python and torch; writes their rows of docs/versions.md.

    python tools/matrix.py --python 3.10 3.13 --torch 2.6 newest

Every combination gets its own environment below build/matrix, created by uv, which shares files between environments,
and removed after its tests. The other rows of the page stay. Output of pip and pytest is kept in build/matrix.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, WORK = ROOT / "docs" / "versions.md", ROOT / "build" / "matrix"
TESTS = [f"tests/{folder}test_*.py" for folder in ("", "masks/", "budget/", "distributed/")]
#: What the core tests need; those that compare with other packages skip themselves where these are missing.
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "pyyaml", "pytorch-optimizer", "schedulefree"]
(MINIMUM,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
UV = [sys.executable, "-m", "uv"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=["3.10", "3.11", "3.12", "3.13"])
    parser.add_argument("--torch", nargs="+", default=[MINIMUM, "newest"])
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    failed = False
    for torch in options.torch:
        for python in options.python:
            versions, outcome = try_combination(python, torch)
            failed |= "failed" in outcome or "error" in outcome
            row = f"| {versions} | {outcome} | {commit()} |"
            print(row, flush=True)
            write(row)
    return int(failed)


def try_combination(python: str, torch: str) -> tuple[str, str]:
    """Returns the cells with the versions, and those with the outcome."""
    environment = WORK / f"python{python}-torch{torch}"
    binary, log = str(environment / "bin" / "python"), environment.with_name(f"{environment.name}.log")
    pip = [*UV, "pip", "install", "--quiet", "--python", binary]
    for command in (
        [*UV, "venv", "--quiet", "--clear", "--no-project", "--python", python, str(environment)],
        [*pip, "torch" if torch == "newest" else f"torch=={torch}.*", *TOOLS],
        [*pip, "--no-deps", "--reinstall-package", "sparsesam", str(ROOT)],
    ):
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            log.write_text(made.stdout + made.stderr)
            return f"{python} | {torch}", f"cannot be installed, see {log.name} | "
    versions = "import platform, torch; print(platform.python_version(), '|', torch.__version__)"
    cells = subprocess.run([binary, "-c", versions], check=True, capture_output=True, text=True).stdout.strip()
    tests = [str(path.relative_to(ROOT)) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    start = time.monotonic()
    command = [binary, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *tests]
    ran = subprocess.run(command, cwd=ROOT, env=others, capture_output=True, text=True)
    seconds = time.monotonic() - start
    log.write_text(ran.stdout + ran.stderr)
    shutil.rmtree(environment)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", (ran.stdout.splitlines() or [""])[-1])
    return cells, f"{', '.join(counts) or f'failed: pytest ended with {ran.returncode}'} | {seconds:.0f} s"


def place_of(row: str) -> tuple[bool, list[int]]:
    """A row for the least version of torch and one for a newer one, for each Python."""
    python, torch = row.strip("| ").split(" | ")[:2]
    return not torch.startswith(MINIMUM), [int(part) for part in python.split(".")[:2]]


def write(row: str) -> None:
    """Put the row in its place in the table of the page."""
    text = PAGE.read_text()
    (table,) = re.findall(r"(?:^\| \d.*\n)+", text, re.MULTILINE)
    others = [line for line in table.splitlines(keepends=True) if place_of(line) != place_of(row)]
    PAGE.write_text(text.replace(table, "".join(sorted([*others, f"{row}\n"], key=place_of))))


def commit() -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip() or os.environ.get("COMMIT", "not recorded")


if __name__ == "__main__":
    sys.exit(main())
