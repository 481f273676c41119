from __future__ import annotations

import platform
import sys

import torch

from sparsesam.lab import cli
from sparsesam.lab.commands import doctor


def test_prints_versions_devices_and_fast_paths(capsys):
    assert cli.main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert torch.__version__ in said
    assert platform.python_version() in said
    assert all(title in said for title in ("Versions", "Devices", "Fast paths"))


def test_engine_status_comes_from_trial_step(monkeypatch):
    assert doctor.fast_paths()["engine"].startswith("on")
    monkeypatch.setattr(doctor.sparsesam.SSAM, "engine_report", lambda self: {"engine": "off: for a reason"})
    assert doctor.fast_paths()["engine"].startswith("off: for a reason")


def test_missing_package_is_listed_with_its_purpose(monkeypatch):
    monkeypatch.setitem(doctor._OPTIONAL, "no-such-package", "nothing")
    assert doctor.installed_versions()["no-such-package"] == "not installed (for nothing)"


def test_doctor_needs_no_extra_and_other_commands_name_theirs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sparsesam.lab.commands.parser", None)  # as if its packages were missing
    assert cli.main(["train"]) == 2
    assert "pip install 'sparsesam[experiment]'" in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0
    assert "Fast paths" in capsys.readouterr().out
