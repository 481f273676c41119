import platform
import sys
from importlib import metadata

import torch
from torch import nn

from sparsesam.lab import cli


def printed(capsys):
    assert cli.main(["doctor"]) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_prints_versions_and_devices(capsys):
    found = printed(capsys)
    assert (found["torch"], found["Python"]) == (torch.__version__, platform.python_version())
    assert "threads" in found["CPU"]


def test_engine_status_comes_from_trial_step(capsys):
    assert printed(capsys)["engine"].startswith("on")
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert printed(capsys)["engine"].startswith("off: forward hooks are registered for all modules")


def test_missing_package_is_listed(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "distributions", lambda: [metadata.distribution("numpy")])
    found = printed(capsys)
    assert (found["plotly"], found["numpy"]) == ("not installed", metadata.version("numpy"))


def test_doctor_needs_no_extra_and_other_commands_name_theirs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sparsesam.lab.commands.parser", None)  # as if its packages were missing
    assert cli.main(["train"]) == 2
    assert "pip install 'sparsesam[experiment]'" in capsys.readouterr().err
    assert printed(capsys)["engine"].startswith("on")
