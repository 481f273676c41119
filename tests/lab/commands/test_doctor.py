import platform
import sys
from importlib import metadata

import torch

import sparsesam
from sparsesam.lab import cli


def printed(capsys):
    assert cli.main(["doctor"]) == 0
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


def test_prints_versions_and_devices(capsys):
    found = printed(capsys)
    assert (found["torch"], found["Python"]) == (torch.__version__, platform.python_version())
    assert "threads" in found["CPU"]


def test_savings_are_those_of_a_trial_step(capsys, monkeypatch):
    assert printed(capsys)["savings"].startswith("67% of the first weight gradients left out")
    make = sparsesam.SSAM
    monkeypatch.setattr(sparsesam, "SSAM", lambda *args, **options: make(*args, **options, engine=False))
    assert printed(capsys)["savings"].startswith("0% of the first weight gradients left out, 0 operations reused")


def test_missing_package_is_listed(monkeypatch, capsys):
    monkeypatch.setattr(metadata, "distributions", lambda: [metadata.distribution("numpy")])
    found = printed(capsys)
    assert (found["plotly"], found["numpy"]) == ("not installed", metadata.version("numpy"))


def test_doctor_needs_no_extra_and_other_commands_name_theirs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sparsesam.lab.commands.parser", None)  # as if its packages were missing
    assert cli.main(["train"]) == 2
    assert "pip install 'sparsesam[experiment]'" in capsys.readouterr().err
    assert "left out" in printed(capsys)["savings"]
