import pytest

from tests.lab.data.server import serve


@pytest.fixture
def server():
    with serve() as running:
        yield running


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache for this test."""
    monkeypatch.setenv("SPARSESAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
