"""Every benchmark runs with --quick; the figures are not looked at."""

import dataclasses
import re

import pytest
import torch
from benchmarks.runner import BENCHMARKS, Session

from benchmarks import __main__ as runner

NEEDS = {"hessian": ("curvlinops", "scipy"), "steps": ("pytorch_optimizer",), "methods": ("pytorch_optimizer",)}
SLOW = ("compiled", "ddp", "report", "sweep")  # start processes, or compile


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in BENCHMARKS]
)
def test_every_benchmark_runs(name, capfd):
    for package in NEEDS.get(name, ()):
        pytest.importorskip(package)
    threads = torch.get_num_threads()
    runner.main([name, "--quick"])
    printed = capfd.readouterr().out
    assert printed.count("commit ") == 1
    assert printed.count(f"== {name}: {BENCHMARKS[name].question}") == 1
    assert len(printed.partition(f"== {name}")[2].splitlines()) > 4
    assert torch.get_num_threads() == threads


def test_list_names_every_benchmark_and_its_question(capsys):
    runner.main([])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(BENCHMARKS)
    for line, found in zip(lines, BENCHMARKS.values(), strict=True):
        assert found.question
        assert found.question in line


def test_options_reach_the_benchmarks_that_have_them(monkeypatch, capsys):
    seen = {}
    for name in ("budget", "tiny"):
        record = lambda session, name=name, **own: seen.update({name: (session, own)})  # noqa: E731
        monkeypatch.setitem(BENCHMARKS, name, dataclasses.replace(BENCHMARKS[name], function=record))
    runner.main(["budget", "tiny", "--rounds", "3", "--batch", "8", "--budgets", "1.1", "1.2"])
    session, own = seen["budget"]
    assert (session, own["batch"], own["budgets"]) == (Session(rounds=3), 8, [1.1, 1.2])
    assert seen["tiny"] == (Session(rounds=3, threads=1, cpu_time=True), {"operations": 100})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "NAME must be one of .*, got 'nothing'"),
        (["--quick"], "name a benchmark before the options"),
        (["sweep", "--rounds", "3"], "unrecognized arguments: --rounds 3"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        runner.main(arguments)
    assert re.search(message, capsys.readouterr().err)


def test_only_keeps_reference_and_cases_with_one_of_the_words():
    cases = dict.fromkeys(["SGD", "SAM", "last stage", "last block", "filters"])
    assert list(Session(only="last,filt").chosen(cases, "SGD")) == ["SGD", "last stage", "last block", "filters"]
