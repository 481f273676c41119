"""The commands of docs/analyze.md make its pictures; here with smaller settings."""

from __future__ import annotations

import importlib.util

import pytest

from tests.docs import pages

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")

LESS = {
    "train": ["--epochs", "2", "--train-size", "128", "--test-size", "32", "--logger", "none"],
    "landscape": ["--points", "3", "--samples", "32"],
    "hessian": ["--samples", "32", "--trace-probes", "2", "--density-probes", "1", "--density-steps", "5"],
    "fisher": ["--samples", "32", "--probes", "2"],
    "convergence": ["--steps", "20", "--runs", "2"],
    "masks": [],
}


def load():
    spec = importlib.util.spec_from_file_location("gallery", pages.ROOT / "tools" / "gallery.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_picture_is_made_by_its_commands(tmp_path, monkeypatch):
    gallery = load()
    monkeypatch.chdir(tmp_path)
    for command in gallery.commands():
        kind = command[1] if command[0] == "analyze" else "train"
        less = LESS.get(kind, ["--samples", "32"])
        gallery.run(command, *less, *(["--mask-epochs", "1"] if "--mask-epochs" in command else []))
    for name in gallery.SHOWN:
        gallery.draw(name, tmp_path / f"{name}.png")
        assert f"(gallery/{name}.png)" in gallery.PAGE.read_text()
        assert (gallery.PICTURES / f"{name}.png").exists()
