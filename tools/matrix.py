"""Runs the core tests on every combination of Python and torch that can be installed; writes docs/versions.md.

    python tools/matrix.py --python 3.10 3.13 --torch 2.6 newest --write docs/versions.md

Every combination gets its own environment below --work, created by uv, which shares files between environments. It is
removed after its tests unless --keep is given. Results are stored next to them in results.json: combinations that
passed at this commit are not run again, and ``--python`` without values only writes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = [f"tests/{folder}test_*.py" for folder in ("", "masks/", "budget/", "distributed/")]
#: What the core tests need; those that compare with other packages skip themselves where these are missing.
TOOLS = ["pytest", "pytest-xdist", "hypothesis", "pyyaml", "pytorch-optimizer", "schedulefree"]
PYTHONS = ["3.10", "3.11", "3.12", "3.13"]
UV = [sys.executable, "-m", "uv"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="*", default=PYTHONS)
    parser.add_argument("--torch", nargs="*", default=[declared_minimum(), "newest"])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="paths or patterns, from the root of the repository")
    parser.add_argument("--write", type=Path, help="the page for the results")
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    results = options.work / "results.json"
    rows = json.loads(results.read_text()) if results.exists() else {}
    for torch in options.torch:
        for python in options.python:
            name = f"{python} {torch}"
            if name in rows and rows[name]["commit"] == commit() and not is_failure(rows[name]):
                continue
            rows[name] = row = try_combination(python, torch, options)
            print(" | ".join(row.values()), flush=True)
            results.write_text(json.dumps(rows, indent=1))
    if options.write:
        every = [f"{python} {torch}" for torch in (declared_minimum(), "newest") for python in PYTHONS]
        options.write.write_text(page(list(rows.values()), [name for name in every if name not in rows]))
    return int(any(map(is_failure, rows.values())))


def is_failure(row: dict[str, str]) -> bool:
    return re.search(r"failed|\d errors?", row["tests"]) is not None


def declared_minimum() -> str:
    (found,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return str(found)


def try_combination(python: str, torch: str, options: argparse.Namespace) -> dict[str, str]:
    environment = options.work / f"python{python}-torch{torch}"
    binary = environment / "bin" / "python"
    wanted = "torch" if torch == "newest" else f"torch=={torch}.*"
    pip = [*UV, "pip", "install", "--quiet", "--python", str(binary)]
    for command in (
        [*UV, "venv", "--quiet", "--clear", "--no-project", "--python", python, str(environment)],
        [*pip, wanted, *TOOLS],
        [*pip, "--no-deps", "--reinstall-package", "sparsesam", str(ROOT)],
    ):
        made = subprocess.run(command, capture_output=True, text=True)
        if made.returncode != 0:
            (options.work / f"{environment.name}.log").write_text(made.stdout + made.stderr)
            reason = "cannot be installed: " + " ".join(made.stderr.split())[:300].replace("|", "/")
            return {"python": python, "torch": torch, "tests": reason, "seconds": "", "commit": commit()}
    versions = "import platform, torch; print(platform.python_version(), torch.__version__)"
    python, torch = output([str(binary), "-c", versions]).split()
    start = time.monotonic()
    ran = subprocess.run(
        [str(binary), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *expand(options.tests)],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    seconds = f"{time.monotonic() - start:.0f} s"
    (options.work / f"{environment.name}.log").write_text(ran.stdout + ran.stderr)
    if not options.keep:
        shutil.rmtree(environment)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", (ran.stdout.splitlines() or [""])[-1])
    tests = ", ".join(counts) or f"failed: pytest ended with {ran.returncode}"
    return {"python": python, "torch": torch, "tests": tests, "seconds": seconds, "commit": commit()}


def expand(tests: list[str]) -> list[str]:
    return [path.relative_to(ROOT).as_posix() for pattern in tests for path in sorted(ROOT.glob(pattern))]


def commit() -> str:
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip() or os.environ.get("COMMIT", "not recorded")


def output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def page(rows: list[dict[str, str]], not_run: list[str]) -> str:
    def order(row: dict[str, str]) -> list[int]:
        return [int(part) for name in ("torch", "python") for part in re.findall(r"\d+", row[name])[:2]]

    table = [f"| {' | '.join(row.values())} |" for row in sorted(rows, key=order)]
    return "\n".join(
        [
            "<!-- Written by `make matrix` (tools/matrix.py). -->",
            "",
            "# Versions",
            "",
            "The core tests (optimizers, masks, savings, budget, DDP, FSDP2, torch.func, compat) on combinations",
            "of Python and torch, each in its own environment, without a GPU. Tests that need a newer torch, or",
            "packages that are not installed in the environment, are skipped.",
            "",
            "| Python | torch | tests | time | commit |",
            "|---|---|---|---|---|",
            *table,
            *(f"| {name.replace(' ', ' | ')} | not run yet | | |" for name in not_run),
            "",
            f"{platform.system()} {platform.machine()}, one process. Trainers, the command line and the report are",
            "tested with the versions in `constraints.txt`.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
