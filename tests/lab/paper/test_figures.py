"""Each figure at a smoke scale: one epoch on a few digits, a few points, and a picture."""

import json

import pytest

from sparsesam.lab.cli import main
from sparsesam.lab.experiment.run_directory import read_json, seal
from sparsesam.lab.paper.comparison import RecipeRuns
from sparsesam.lab.paper.figures import FIGURES
from sparsesam.lab.paper.recipe import Recipe, recipes
from tests.lab.experiment.runs import result_with

SMOKE = ["--set", "epochs=1", "train_size=48", "fisher_samples=8", "--seeds", "1", "--jobs", "1"]
#: Thirteen wide networks take longer than a smoke test should.
SLOW = {"sparsity-acc"}
DRAWN = [
    pytest.param(label, marks=pytest.mark.slow if label in SLOW else ())
    for label, known in recipes().items()
    if known.figure is not None
]
NUMBERS = {
    "grad-diff": "small-cnn, digits, SGD: r < 0, every weight",
    "hessian": "SSAM-D: lambda_1",
    "vis-landscape": "SSAM-F: loss at the weights",
    "sparsity-acc": "Shades are 95 % intervals",
    "speedup": "The time of the steps themselves",
    "train-curve": "Lines are means",
}


@pytest.fixture
def few_points(monkeypatch):
    few = {"landscape": {"samples": 16, "points": 4}, "hessian": {"samples": 16, "density_steps": 5, "trace_probes": 3}}
    monkeypatch.setattr(Recipe, "analysis", property(lambda recipe: dict(few.get(recipe.figure, {}))))


@pytest.mark.parametrize("label", DRAWN)
def test_each_figure_is_trained_analyzed_and_drawn(label, tmp_path, capsys, few_points):
    file = tmp_path / "figure.png"
    assert main(["paper", "run", label, *SMOKE, "--out", str(tmp_path), "--plot", str(file)]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert NUMBERS.get(label, "") in printed
    assert f"figure: {file}" in printed


@pytest.mark.parametrize(("scale", "dotted"), [("laptop", False), ("full", True)])
def test_accuracy_against_sparsity_has_line_per_method_and_papers_dotted(tmp_path, scale, dotted):
    chosen = recipes()["sparsity-acc"].at(scale)
    jobs = chosen.sweep([0, 1]).jobs(tmp_path)
    for place, job in enumerate(jobs):
        job.directory.mkdir()
        result = result_with(test_accuracy=0.9 - place / 1000)
        (job.directory / "result.json").write_text(json.dumps({"result": result}))
    (figure,), _ = FIGURES["sparsity"](RecipeRuns(chosen, jobs))
    assert list(figure.panels) == [column.label for column in chosen.columns]
    series = {line.name: line for line in next(iter(figure.panels.values()))}
    assert {"SAM", "SSAM-F", "SSAM-D"} <= series.keys()
    assert series["SAM"].y[0] == series["SAM"].y[1]
    assert any(line.faint for line in series.values()) is dotted


def test_every_drawing_belongs_to_recipe():
    assert {known.figure for known in recipes().values()} - {None} == {*FIGURES, "corruption"}


def test_hessian_has_panel_for_each_row_and_is_kept_until_run_changes(tmp_path, few_points):
    command = ["paper", "run", "hessian", *SMOKE, "--out", str(tmp_path)]
    main(command)
    files = sorted(tmp_path.glob("*/analyses/hessian.json"))
    before = [file.stat().st_mtime_ns for file in files]
    chosen = recipes()["hessian"].at("laptop", {"epochs": 1, "train_size": 48, "fisher_samples": 8})
    (figure,), _ = FIGURES["hessian"](RecipeRuns(chosen, chosen.sweep([0]).jobs(tmp_path)))
    assert [file.stat().st_mtime_ns for file in files] == before
    assert list(figure.panels) == ["SGD", "SAM", "SSAM-F", "SSAM-D"]
    content = read_json(files[0])
    files[0].write_text(json.dumps(seal({**content, "made": {**content["made"], "step": 0}})))
    assert main(command) == 0
    assert read_json(files[0])["made"]["step"] == content["made"]["step"] > 0


def test_unsupported_plots_are_rejected_before_training(tmp_path, capsys):
    assert main(["paper", "run", "hessian", "--plot", "figure.gif", "--out", str(tmp_path)]) == 2
    assert "plot must end in .png" in capsys.readouterr().err
    assert main(["paper", "run", "table 9", "--plot", "figure.png", "--out", str(tmp_path)]) == 2
    assert "mask-strategy is a table" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
