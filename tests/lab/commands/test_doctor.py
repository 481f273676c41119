from __future__ import annotations

import platform
import sys
from importlib import metadata

import torch
from torch import nn

from sparsesam.lab import cli
from sparsesam.lab.commands import doctor


def test_prints_versions_devices_and_fast_paths(capsys):
    assert cli.main(["doctor"]) == 0
    output = capsys.readouterr().out
    assert torch.__version__ in output
    assert platform.python_version() in output
    assert all(title in output for title in ("Versions", "Devices", "Fast paths"))


def test_engine_status_comes_from_trial_step():
    assert doctor.fast_paths()["engine"].startswith("on")
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert doctor.fast_paths()["engine"].startswith("off: forward hooks are registered for all modules")


def test_missing_package_is_listed_with_its_purpose(monkeypatch):
    def version(name):
        if name == "plotly":
            raise metadata.PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(metadata, "version", version)
    found = doctor.installed_versions()
    assert (found["plotly"], found["ray"]) == ("not installed (for the report)", "1.2.3")


def test_doctor_needs_no_extra_and_other_commands_name_theirs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sparsesam.lab.commands.parser", None)  # as if its packages were missing
    assert cli.main(["train"]) == 2
    assert "pip install 'sparsesam[experiment]'" in capsys.readouterr().err
    assert cli.main(["doctor"]) == 0
    assert "Fast paths" in capsys.readouterr().out
