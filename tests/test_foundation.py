"""Rules that every module must follow."""

import ast
import re
import sys
from pathlib import Path

import pytest

import sparsesam

ROOT = Path(sparsesam.__file__).parent
STANDS_ON_THE_CORE = {"analysis", "integrations", "lab", "__main__"}
CORE = sorted(
    path for path in ROOT.rglob("*.py") if path.relative_to(ROOT).parts[0].removesuffix(".py") not in STANDS_ON_THE_CORE
)
TESTS = Path(__file__).parent
#: Folders of tests that belong to other folders than src/sparsesam.
ELSEWHERE = {"benchmarks", "docs", "examples", "studies", "torture"}


def listed_in_contributing():
    """Sources and tests in the table of CONTRIBUTING.md; a bare name may be in the folder of the name before it."""
    (table,) = re.findall(r"\| source \| tests \|\n.*\n((?:\|.*\n)+)", (TESTS.parent / "CONTRIBUTING.md").read_text())
    columns = [row.strip("| ").split(" | ") for row in table.splitlines()]
    for root, cells in zip((ROOT, TESTS), zip(*columns, strict=True), strict=True):
        found = set()
        for cell in cells:
            folder = root
            for name in re.findall("`([^`]+)`", cell):
                path = folder / name if (folder / name).exists() else root / name
                assert path.exists(), f"CONTRIBUTING.md lists {name}, which does not exist"
                folder = path if path.is_dir() else path.parent
                found |= set(path.glob("*.py")) if path.is_dir() else {path}
        yield found


def imported_modules(source: str) -> set[str]:
    """Full names of what the source imports, within functions too; relative imports are ours."""
    nodes = list(ast.walk(ast.parse(source)))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    named = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module}
    return plain | named


def test_core_is_found():
    assert {"sam.py", "masks", "replay.py"} <= {path.relative_to(ROOT).parts[0] for path in CORE}


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_core_imports_only_torch_and_numpy(path):
    top_level = {name.partition(".")[0] for name in imported_modules(path.read_text())}
    assert top_level - sys.stdlib_module_names <= {"torch", "numpy", "sparsesam"}


def test_imports_inside_functions_are_detected():
    assert imported_modules("def f():\n    import rich.table\n    from scipy import stats") == {
        "rich.table",
        "scipy",
    }


def test_package_is_typed():
    assert (ROOT / "py.typed").exists()


def test_every_source_file_has_tests_that_contributing_names():
    listed, _ = listed_in_contributing()
    for path in ROOT.rglob("*.py"):
        namesake = TESTS / path.relative_to(ROOT).with_name(f"test_{path.name}")
        assert path.stem.startswith("__") or path in listed or namesake.exists(), f"{path} has no test file"


def test_every_test_file_has_source_that_contributing_names():
    _, listed = listed_in_contributing()
    for path in TESTS.rglob("test_*.py"):
        inner = path.relative_to(TESTS)
        namesake = ROOT / inner.with_name(inner.name.removeprefix("test_"))
        if inner.parts[0] not in ELSEWHERE and path != Path(__file__):
            assert path in listed or namesake.exists(), f"{inner} tests no source file"
