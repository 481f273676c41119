from pathlib import Path

from sparsesam.lab.data import cache_dir


def test_the_variable_decides(monkeypatch):
    monkeypatch.setenv("SPARSESAM_CACHE", "somewhere")
    assert cache_dir() == Path("somewhere")


def test_otherwise_the_platform_does(monkeypatch, tmp_path):
    monkeypatch.delenv("SPARSESAM_CACHE")
    for platform, variable in (("linux", "XDG_CACHE_HOME"), ("win32", "LOCALAPPDATA")):
        monkeypatch.setattr("sys.platform", platform)
        monkeypatch.setenv(variable, str(tmp_path / platform))
        assert cache_dir() == tmp_path / platform / "sparsesam"


def test_a_mac_has_its_own_place(monkeypatch):
    monkeypatch.delenv("SPARSESAM_CACHE")
    monkeypatch.setattr("sys.platform", "darwin")
    assert cache_dir() == Path.home() / "Library" / "Caches" / "sparsesam"
