"""Build wheel and sdist in dist/, twice and equal, install each alone in a fresh environment, and test it there.

torch and NumPy come from the environment that runs this script; the smoke test needs nothing else from it.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMOKE = """
import sys, torch, sparsesam
assert sparsesam.__file__.startswith(sys.prefix), sparsesam.__file__
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
dynamic = sparsesam.dynamic_mask(sparsity=0.5, refresh=2)
for make in (
    lambda base: sparsesam.SAM(base, model, rho=0.1),
    lambda base: sparsesam.SSAM(base, model, rho=0.1, mask=dynamic),
    lambda base: sparsesam.SSAM(base, model, rho=0.1, mask=sparsesam.fixed_mask("2.*"), norm="masked"),
):
    opt = make(torch.optim.SGD(model.parameters(), lr=0.1))
    def closure():
        opt.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss
    losses = [opt.step(closure).item() for _ in range(20)]
    assert losses[-1] < losses[0], losses
print("sparsesam", sparsesam.__version__, "works with torch", torch.__version__)
"""
#: Tests that read files outside the package, which an sdist must include.
FROM_SDIST = ["tests/docs/test_code_blocks.py", "tests/test_foundation.py", "tests/test_compat.py"]


def main() -> int:
    os.environ.pop("PYTHONPATH", None)
    dist = ROOT / "dist"
    # Fixed times in the archives: the same source gives the same bytes.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(dist), str(ROOT)], check=True)
    with tempfile.TemporaryDirectory() as place:
        check_reproducible(dist, Path(place) / "again")
        for artifact in (newest(dist, "*.whl"), newest(dist, "*.tar.gz")):
            environment = Path(place) / artifact.name
            python = make_environment(environment)
            subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", str(artifact)], check=True)
            subprocess.run([python, "-c", SMOKE], check=True, cwd=place)
            subprocess.run([str(environment / "bin" / "sparsesam"), "--version"], check=True, cwd=place)
        with tarfile.open(newest(dist, "*.tar.gz")) as archive:
            archive.extractall(place, filter="data")
        (source,) = Path(place).glob("sparsesam-*/pyproject.toml")
        there = {**os.environ, "PYTHONPATH": str(source.parent / "src")}
        subprocess.run([sys.executable, "-m", "pytest", "-q", *FROM_SDIST], check=True, cwd=source.parent, env=there)
    return 0


def check_reproducible(dist: Path, again: Path) -> None:
    """Build a second time; both archives must have the same bytes."""
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(again), str(ROOT)], check=True)
    for file in again.iterdir():
        sums = [hashlib.sha256((folder / file.name).read_bytes()).hexdigest() for folder in (dist, again)]
        if sums[0] != sums[1]:
            raise SystemExit(f"{file.name} is not reproducible: SHA-256 {sums[0]}, then {sums[1]}")
        print(f"{file.name}: SHA-256 {sums[0]} in two builds")


def newest(folder: Path, pattern: str) -> Path:
    return max(folder.glob(pattern), key=lambda path: path.stat().st_mtime)


def make_environment(path: Path) -> str:
    """Create a fresh environment that also sees the packages of the current one, with lower priority."""
    venv.create(path, with_pip=True)
    (site,) = path.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return str(path / "bin" / "python")


if __name__ == "__main__":
    sys.exit(main())
