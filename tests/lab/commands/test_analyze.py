import dataclasses
import json
import shutil

import numpy as np
import pytest

from sparsesam import analysis
from sparsesam.lab.cli import main
from sparsesam.lab.display import cells
from sparsesam.lab.experiment import read_masks
from sparsesam.lab.inspection import ANALYSES, load_run
from sparsesam.lab.inspection.bound import BoundResult
from sparsesam.lab.inspection.convergence import ConvergenceAnalysis
from sparsesam.lab.inspection.hessian import HessianResult
from sparsesam.lab.inspection.sharpness import SharpnessResult
from tests.lab.experiment.runs import train

NETWORKS = "tests.lab.inspection.networks"
SAMPLES = ["--samples", "40"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A plain and a sparse run of 650 weights, and one of another model."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("sgd", "ssam-f"):
        train(root / name, optimizer=name, model=f"{NETWORKS}:linear", mask_steps=3, sparsity=0.75, rho=0.2)
    train(root / "other", optimizer="sgd", model=f"{NETWORKS}:normalized", max_steps=1)
    return root


def analyze(*words):
    return main(["analyze", *map(str, words)])


def written(directory, name):
    content = json.loads((directory / "analyses" / f"{name}.json").read_text())
    assert content["analysis"] == name
    return content


def result_of(directory, name):
    return written(directory, name)["result"]


def refusal(capsys, *words):
    """The single line of the error."""
    assert analyze(*words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


# ---- each kind writes and draws what its function returns -----------------------------------------------------


def hessian(run):
    parts = (
        analysis.hessian_eigenvalues(run.objective, 5),
        analysis.hessian_trace(run.objective, probes=4, tolerance=0.01),
        analysis.spectral_density(run.objective, steps=6, probes=2),
    )
    return HessianResult(*parts)


def with_and_without_mask(make, function, **options):
    """The first run's rho is the default of every run."""
    return lambda run: make(*(function(run.objective, 0.2, masks=masks, **options) for masks in (None, run.masks)))


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (
            "gradients --rho 0.1",
            "gradients",
            lambda run: analysis.gradient_difference(run.objective, 0.1, masks=run.masks),
        ),
        ("landscape --points 4", "landscape-2d", lambda run: analysis.loss_landscape(run.objective, points=4)),
        (
            "landscape --dimensions 1 --points 5 --span [-2,3]",
            "landscape-1d",
            lambda run: analysis.loss_landscape(
                run.objective, analysis.random_directions(run.model, 1), points=5, span=(-2, 3)
            ),
        ),
        (
            "landscape --along eigenvectors --dimensions 1 --points 3",
            "landscape-eigenvector",
            lambda run: dataclasses.replace(
                analysis.loss_landscape(
                    run.objective, (found := analysis.hessian_eigenvalues(run.objective, 1)).vectors, points=3
                ),
                notes=[f"eigenvalues {found.eigenvalues[0]:.4g}"],
            ),
        ),
        ("hessian --count 5 --trace-probes 4 --density-steps 6 --density-probes 2", "hessian", hessian),
        (
            "fisher --layers 1.bias",
            "fisher-layers",
            lambda run: analysis.fisher_vs_hessian(run.objective, parameters=["1.bias"]),
        ),
        ("sharpness --steps 3", "sharpness", with_and_without_mask(SharpnessResult, analysis.sharpness, steps=3)),
        (
            "bound --steps 2 --delta 0.1",
            "bound",
            with_and_without_mask(BoundResult, analysis.generalization_bound, n=72, delta=0.1, classes=10, steps=2),
        ),
        ("masks", "masks", lambda run: analysis.masks_over_time(read_masks(run.path))),
        (
            "convergence --steps 20 --runs 2",
            "convergence",
            lambda run: ConvergenceAnalysis(steps=20, runs=2).measure(run, None),
        ),
    ],
)
def test_command_writes_prints_and_draws_result_of_function(runs, tmp_path, capsys, words, name, expected):
    from PIL import Image

    (kind, *options), picture = words.split(), tmp_path / "a" / "picture.png"
    measures_weights = ANALYSES[kind].needs == "weights"
    options += SAMPLES if measures_weights else []
    assert analyze(kind, runs / "sgd", runs / "ssam-f", *options, "--plot", picture) == 0
    result, printed = expected(load_run(runs / "ssam-f", samples=40)), capsys.readouterr().out
    content = written(runs / "ssam-f", name)
    assert content["result"] == result.to_dict()
    assert ("checkpoint" in content["made"]) is measures_weights
    assert all(cell.text in printed for cell in cells(*ANALYSES[kind].summary(result).values()))
    assert (np.asarray(Image.open(picture).convert("L")) < 128).mean() > 0.002
    assert not list((runs / "ssam-f" / "analyses").glob("*.txt"))


def test_runs_without_masks_are_left_out(runs, capsys):
    assert analyze("masks", runs / "sgd", runs / "ssam-f") == 0
    assert f"left out, without masks: {runs / 'sgd'}\n" in capsys.readouterr().out


def test_mask_that_was_not_recorded_is_noted(runs, tmp_path, capsys):
    shutil.copytree(runs / "ssam-f", tmp_path, ignore=shutil.ignore_patterns("masks"), dirs_exist_ok=True)
    assert analyze("sharpness", tmp_path, "--checkpoint", "best", "--steps", 1, *SAMPLES) == 0
    assert "the mask in use at best.pt was not recorded" in " ".join(capsys.readouterr().out.split())


def test_convergence_needs_no_run(tmp_path):
    assert analyze("convergence", tmp_path, "--steps", 20, "--runs", 2) == 0
    assert written(tmp_path, "convergence")["run"] is None


def test_landscape_along_eigenvectors_has_their_curvature(runs):
    step = 0.02
    words = ["--points", 3, "--span", [-step, step], "--along", "eigenvectors"]
    assert analyze("landscape", runs / "sgd", *words, *SAMPLES) == 0
    loss = np.array(result_of(runs / "sgd", "landscape-eigenvectors")["loss"])
    bends = [(loss[1, 0] - 2 * loss[1, 1] + loss[1, 2]) / step**2, (loss[0, 1] - 2 * loss[1, 1] + loss[2, 1]) / step**2]
    spectrum = analysis.hessian_eigenvalues(load_run(runs / "sgd", samples=40).objective, 2)
    assert bends == pytest.approx(spectrum.eigenvalues, rel=0.05)


def test_line_between_runs_starts_and_ends_at_their_losses(runs):
    assert analyze("landscape", runs / "sgd", runs / "ssam-f", "--between", "--points", 3, *SAMPLES) == 0
    content = written(runs / "sgd", "landscape-between")
    assert content["result"]["notes"][0] == f"to {runs / 'ssam-f'}"
    ends = [load_run(runs / name, samples=40).objective for name in ("sgd", "ssam-f")]
    for objective, found in zip(ends, content["result"]["loss"][::2], strict=True):
        with objective.measuring():
            assert found == pytest.approx(objective.loss(), rel=1e-5)


def test_result_of_some_layers_keeps_result_of_whole_model(runs):
    words = ["--count", 1, "--trace-probes", 2, "--density-steps", 2, "--density-probes", 1, *SAMPLES]
    analyze("hessian", runs / "ssam-f", *words)
    before = written(runs / "ssam-f", "hessian")
    assert analyze("hessian", runs / "ssam-f", *words, "--layers", "*.bias") == 0
    assert result_of(runs / "ssam-f", "hessian-layers")["eigenvalues"]["parameters"] == ["1.bias"]
    assert written(runs / "ssam-f", "hessian") == before


# ---- provenance and resuming ------------------------------------------------------------------------------------


def test_result_has_provenance(runs):
    words = ["--checkpoint", "best", "--split", "test", "--samples", 30, "--statistics", "recomputed", "--steps", 1]
    assert analyze("sharpness", runs / "ssam-f", *words) == 0
    made = written(runs / "ssam-f", "sharpness")["made"]
    run = load_run(runs / "ssam-f", checkpoint="best")
    assert made["checkpoint"] == "best"
    assert (made["step"], made["mask_step"]) == (run.step, run.mask_step)
    assert (made["split"], made["samples"], made["statistics"], made["seed"]) == ("test", 30, "recomputed", 0)
    assert made["options"] == {"rho": 0.2, "steps": 1}
    assert made["seconds"] > 0
    assert {"command", "torch", "cpu", "threads"} <= made["provenance"].keys()


def test_interrupted_landscape_resumes(runs, monkeypatch, capsys):
    words = ["landscape", runs / "ssam-f", "--points", 6, *SAMPLES]
    analyze(*words)
    whole = result_of(runs / "ssam-f", "landscape-2d")
    evaluated = []

    def interrupted_once(*args, progress, **options):
        def count(done, total):
            evaluated.append(done)
            if len(evaluated) == 10:
                raise KeyboardInterrupt

        return analysis.loss_landscape(*args, progress=count, **options)

    monkeypatch.setattr("sparsesam.lab.inspection.landscape.loss_landscape", interrupted_once)
    assert analyze(*words) == 130
    assert "run the same command to continue" in capsys.readouterr().err
    assert analyze(*words) == 0
    assert evaluated == list(range(1, 37))
    assert result_of(runs / "ssam-f", "landscape-2d") == whole


# ---- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "ANALYSIS"),
        ("hessian", "RUN"),
        ("landscap SGD", "sparsesam analyze: argument ANALYSIS: invalid choice: 'landscap' (choose from"),
        ("landscape SGD --point 3", "sparsesam analyze landscape: unknown option 'point'; did you mean points"),
        ("landscape SGD --between", "--between needs two runs, got 1"),
        ("landscape SGD OTHER --between", "--between needs two runs with weights of the same names and shapes, got"),
        ("hessian SGD EMPTY", "EMPTY has no run"),
        ("hessian SGD --layers encoder.*", "parameters selects none of the model's 2 floating-point parameters"),
        ("masks SGD", "no masks; train with a mask"),
        ("gradients SGD --plot a.gif", "plot must end in .png"),
        ("gradients SGD --samples 0", "samples must be at least 1, or null, got 0"),
        ("bound SGD --split test", "split must be train"),
    ],
)
def test_bad_input_is_refused_in_one_line(runs, tmp_path, capsys, words, message):
    paths = {"SGD": str(runs / "sgd"), "OTHER": str(runs / "other"), "EMPTY": str(tmp_path)}
    line = refusal(capsys, *(paths.get(word, word) for word in words.split()))
    assert message.replace("EMPTY", str(tmp_path)) in line


def test_random_loss_is_rejected_unless_allowed(tmp_path, capsys):
    train(tmp_path, model=f"{NETWORKS}:noisy", max_steps=1)
    line = refusal(capsys, "sharpness", tmp_path, *SAMPLES)
    assert "the loss is not deterministic" in line
    assert "--allow-random" in line
    assert analyze("sharpness", tmp_path, *SAMPLES, "--allow-random", "--steps", 1) == 0
    assert "one draw" in result_of(tmp_path, "sharpness")["every"]["measured_on"]["random_loss"]


def test_frozen_parameters_are_excluded_and_unused_ones_are_not(tmp_path):
    train(tmp_path, optimizer="ssam-f", model=f"{NETWORKS}:with_frozen_and_unused", max_steps=2)
    for kind in ("gradients", "sharpness --steps 2", "bound --steps 2", "landscape --points 2", "fisher --probes 3"):
        assert analyze(*kind.split()[:1], tmp_path, *kind.split()[1:], *SAMPLES) == 0
    words = ["--count", 1, "--trace-probes", 2, "--density-steps", 2]
    assert analyze("hessian", tmp_path, *words, *SAMPLES) == 0
    found = result_of(tmp_path, "hessian")["eigenvalues"]
    assert found["parameters"] == ["used.weight", "used.bias", "unused.weight", "unused.bias"]
