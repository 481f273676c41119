"""Rules that every module must follow."""

import ast
import sys
from pathlib import Path

import pytest

import sparsesam

ROOT = Path(sparsesam.__file__).parent
STANDS_ON_THE_CORE = {"analysis", "integrations", "lab", "__main__"}
CORE = sorted(
    path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0].removesuffix(".py") not in STANDS_ON_THE_CORE
)


def imported_modules(source: str) -> set[str]:
    """Full names of what the source imports, within functions too; relative imports are ours."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module}
    return plain | named


def test_core_is_found():
    assert {"optimizer.py", "masks", "ascent"} <= {path.relative_to(ROOT).parts[0] for path in CORE}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_imports_only_torch_and_numpy(path):
    top_level = {name.partition(".")[0] for name in imported_modules(path.read_text())}
    assert top_level - sys.stdlib_module_names <= {"torch", "numpy", "sparsesam"}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_does_not_import_higher_layers(path):
    parts = {tuple(name.split(".")[:2]) for name in imported_modules(path.read_text())}
    assert not {part for part in parts if part[0] == "sparsesam" and set(part[1:]) & STANDS_ON_THE_CORE}


def test_imports_inside_functions_are_detected():
    assert imported_modules("def f():\n    import rich.table\n    from scipy import stats") == {
        "rich.table",
        "scipy",
    }


def test_every_public_name_exists():
    assert all(hasattr(sparsesam, name) for name in sparsesam.__all__)


def test_package_is_typed():
    assert (ROOT / "py.typed").exists()
