"""Every example runs with --quick."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"lora": ("transformers", "accelerate", "peft"), "lightning_module": ("pytorch_lightning",)}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_script_runs(path):
    for package in ("sklearn", *NEEDS.get(path.stem, ())):
        pytest.importorskip(package)
    ran = subprocess.run([sys.executable, str(path), "--quick"], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout
    assert "NOT" not in ran.stdout


@pytest.mark.slow
def test_vision_example_shows_gain():
    pytest.importorskip("sklearn")
    ran = subprocess.run([sys.executable, EXAMPLES / "vision.py"], capture_output=True, text=True, check=True)
    sgd, *others = (float(one) for one in re.findall(r"accuracy ([\d.]+)%", ran.stdout))
    assert len(others) == 3
    assert min(others) > sgd + 2


def test_notebook_runs(capsys):
    pytest.importorskip("sklearn")
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    names = {}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            source = "".join(cell["source"]).replace("EPOCHS = 30", "EPOCHS = 2")
            exec(compile(source, "notebook.ipynb", "exec"), names)
    assert "SAM" in capsys.readouterr().out


def test_every_example_is_listed():
    listed = (EXAMPLES / "README.md").read_text()
    assert all(f"]({path.name})" in listed for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb"))
