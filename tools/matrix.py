"""Run the core tests on each combination of Python and torch that can be installed, and write docs/versions.md.

    python tools/matrix.py --python python3.10 python3.13 --torch 2.6.0 newest --write docs/versions.md

Every combination gets a virtual environment of its own (kept in --work, so that a second run is quick). Tests of parts
that need other packages skip themselves.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = ["tests/test_*.py", "tests/masks", "tests/ascent", "tests/budget"]
TOOLS = ["numpy", "pytest", "pytest-xdist", "hypothesis", "pytorch-optimizer", "schedulefree"]


@dataclass
class Outcome:
    python: str
    torch: str
    text: str
    seconds: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=["python3.10", "python3.11", "python3.12", "python3.13"])
    parser.add_argument("--torch", nargs="+", default=[declared_minimum(), "newest"])
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "matrix")
    parser.add_argument("--tests", nargs="+", default=TESTS)
    parser.add_argument("--write", type=Path, help="a page for the results")
    options = parser.parse_args()
    outcomes = []
    for python in options.python:
        for torch in options.torch:
            outcome = try_combination(python, torch, options.work, options.tests)
            print(f"{outcome.python} torch {outcome.torch}: {outcome.text} ({outcome.seconds:.0f} s)", flush=True)
            outcomes.append(outcome)
    if options.write:
        options.write.write_text(page(outcomes))
    return 1 if any("failed" in one.text or "error" in one.text for one in outcomes) else 0


def declared_minimum() -> str:
    (found,) = re.findall(r'"torch>=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    return f"{found}.0" if found.count(".") == 1 else found


def try_combination(python: str, torch: str, work: Path, tests: list[str]) -> Outcome:
    interpreter = shutil.which(python)
    if interpreter is None:
        return Outcome(python, torch, "this Python is not installed here", 0)
    version = output([interpreter, "-c", "import platform; print(platform.python_version())"])
    environment = work / f"{python.split('/')[-1]}-{version}-torch-{torch}"
    binary = environment / "bin" / "python"
    if not (environment / "ready").exists():
        subprocess.run([interpreter, "-m", "venv", str(environment)], check=True)
        wanted = "torch" if torch == "newest" else f"torch=={torch}"
        made = subprocess.run(
            [str(binary), "-m", "pip", "install", "-q", wanted, *TOOLS], capture_output=True, text=True
        )
        if made.returncode != 0:
            reason = made.stderr.strip().splitlines()
            return Outcome(version, torch, f"cannot be installed: {reason[-1] if reason else 'pip failed'}", 0)
        (environment / "ready").touch()
    editable = [str(binary), "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)]
    subprocess.run(editable, check=True, capture_output=True)
    installed = output([str(binary), "-c", "import torch; print(torch.__version__)"])
    start = time.monotonic()
    ran = subprocess.run(
        [str(binary), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *expand(tests)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    lines = [line for line in ran.stdout.splitlines() if re.search(r"\b(passed|failed|error)", line)]
    (environment / "tests.log").write_text(ran.stdout + ran.stderr)
    text = re.sub(r"[= ]*in [\d.]+s.*", "", lines[-1]).strip("= ") if lines else f"no tests ran (exit {ran.returncode})"
    return Outcome(version, installed, text, time.monotonic() - start)


def expand(tests: list[str]) -> list[str]:
    return [str(path.relative_to(ROOT)) for pattern in tests for path in sorted(ROOT.glob(pattern))]


def output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def page(outcomes: list[Outcome]) -> str:
    rows = [f"| {one.python} | {one.torch} | {one.text} |" for one in outcomes]
    return "\n".join(
        [
            "# Versions",
            "",
            "The core tests (optimizer, masks, ascent and engine, budget) on each combination of Python and torch that",
            "could be installed, by `make matrix`; tests that need other packages skip themselves.",
            "",
            "| Python | torch | tests |",
            "|---|---|---|",
            *rows,
            "",
            "Everything else (trainers, experiments, report) is tested with the versions in `constraints.txt`.",
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
