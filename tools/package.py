"""Build wheel and sdist in dist/, twice and equal, install each alone in a fresh environment, and test it there.

torch and NumPy come from the environment that runs this script; the smoke test needs nothing else from it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
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
    losses = [opt.minimize(lambda: torch.nn.functional.cross_entropy(model(x), y)).item() for _ in range(20)]
    assert losses[-1] < losses[0], losses
print("sparsesam", sparsesam.__version__, "works with torch", torch.__version__)
"""
#: Tests that read files outside the package, which an sdist must include.
FROM_SDIST = ["tests/docs/test_code_blocks.py", "tests/test_foundation.py", "tests/test_compat.py"]


def main() -> None:
    os.environ.pop("PYTHONPATH", None)
    os.environ.setdefault("SOURCE_DATE_EPOCH", "1577836800")  # times in the archives: the same source, the same bytes
    shutil.rmtree(DIST, ignore_errors=True)
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for out in (DIST, place / "again"):
            subprocess.run([sys.executable, "-m", "build", "--outdir", out, ROOT], check=True)
        for artifact in sorted(DIST.iterdir()):
            first, second = (hashlib.sha256((out / artifact.name).read_bytes()) for out in (DIST, place / "again"))
            if first.digest() != second.digest():
                raise SystemExit(f"{artifact.name} is not reproducible")
            print(f"{artifact.name}: SHA-256 {first.hexdigest()} in two builds")
            environment = place / artifact.name
            python = make_environment(environment)
            subprocess.run([python, "-m", "pip", "install", "-q", "--no-deps", artifact], check=True)
            subprocess.run([python, "-c", SMOKE], check=True, cwd=place)
            subprocess.run([environment / "bin" / "sparsesam", "--version"], check=True, cwd=place)
        (archive,) = DIST.glob("*.tar.gz")
        shutil.unpack_archive(archive, place, filter="data")
        source = place / archive.name.removesuffix(".tar.gz")
        there = {**os.environ, "PYTHONPATH": str(source / "src")}
        subprocess.run([sys.executable, "-m", "pytest", "-q", *FROM_SDIST], check=True, cwd=source, env=there)


def make_environment(path: Path) -> Path:
    """Create a fresh environment that also sees the packages of the current one, with lower priority."""
    venv.create(path, with_pip=True)
    (site,) = path.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return path / "bin" / "python"


if __name__ == "__main__":
    main()
