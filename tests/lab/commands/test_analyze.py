import json

import numpy as np
import pytest

from sparsesam import analysis
from sparsesam.lab.cli import main
from sparsesam.lab.display.numbers import significant
from sparsesam.lab.experiment import read_masks
from sparsesam.lab.experiment.errors import Interrupted
from sparsesam.lab.inspection import ANALYSES, load_run
from tests.lab.experiment.runs import InterruptAt, train

NETWORKS = "tests.lab.inspection.networks"
SAMPLES = ["--samples", "40"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A plain and a sparse run of 650 weights."""
    root = tmp_path_factory.mktemp("runs")
    for name in ("sgd", "ssam-f"):
        train(root / name, optimizer=name, model=f"{NETWORKS}:linear", mask_steps=3, sparsity=0.75, rho=0.2)
    return root


def analyze(*words):
    return main(["analyze", *map(str, words)])


def written(directory, name):
    content = json.loads((directory / "analyses" / f"{name}.json").read_text())
    assert content["analysis"] == name
    return content


def result_of(directory, name):
    return written(directory, name)["result"]


def refused(capsys, *words):
    """The single line of the error, and the exit code."""
    code = analyze(*words)
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return code, lines[0]


# ---- each kind writes what its function returns ---------------------------------------------------------------


def test_gradients_inside_and_outside_mask(runs, capsys):
    assert analyze("gradients", runs / "sgd", runs / "ssam-f", *SAMPLES, "--rho", 0.1) == 0
    run = load_run(runs / "ssam-f", samples=40)
    expected = analysis.gradient_difference(run.objective, 0.1, masks=run.masks).to_dict()
    found = result_of(runs / "ssam-f", "gradients")
    assert found == expected
    assert found["inside"]["weights"] == round(650 * 0.25)
    assert result_of(runs / "sgd", "gradients")["inside"] is None
    assert "r < 0, inside the mask" in capsys.readouterr().out


def test_landscape_uses_same_random_numbers_for_every_run(runs):
    assert analyze("landscape", runs / "sgd", runs / "ssam-f", "--points", 4, "--seed", 3, *SAMPLES) == 0
    for name in ("sgd", "ssam-f"):
        run = load_run(runs / name, samples=40, seed=3)
        expected = analysis.loss_landscape(run.objective, points=4, seed=3).to_dict()
        assert result_of(runs / name, "landscape-2d") == expected
    assert not list((runs / "sgd" / "analyses").glob("*.txt"))


def test_default_landscape_is_50_by_50_over_minus_one_to_one(runs):
    assert analyze("landscape", runs / "sgd", "--samples", 2) == 0
    found = result_of(runs / "sgd", "landscape-2d")
    assert np.shape(found["loss"]) == (50, 50)
    assert (found["x"][0], found["x"][-1]) == (-1, 1)


def test_landscape_on_line(runs):
    assert analyze("landscape", runs / "sgd", "--dimensions", 1, "--points", 5, "--span", [-2, 3], *SAMPLES) == 0
    found = result_of(runs / "sgd", "landscape-1d")
    assert found["x"] == [-2, -0.75, 0.5, 1.75, 3]
    expected = analysis.loss_landscape(
        load_run(runs / "sgd", samples=40).objective, dimensions=1, points=5, span=(-2, 3)
    )
    assert found["loss"] == expected.loss.tolist()


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
    assert content["made"]["other"] == str(runs / "ssam-f")
    ends = [load_run(runs / name, samples=40).objective for name in ("sgd", "ssam-f")]
    for objective, found in zip(ends, content["result"]["loss"][::2], strict=True):
        with objective.measuring():
            assert found == pytest.approx(objective.loss(), rel=1e-5)


def test_hessian(runs, capsys):
    words = ["--count", 5, "--trace-probes", 4, "--density-steps", 6, "--density-probes", 2]
    assert analyze("hessian", runs / "sgd", *words, *SAMPLES) == 0
    objective = load_run(runs / "sgd", samples=40).objective
    found = result_of(runs / "sgd", "hessian")
    assert found["eigenvalues"] == analysis.hessian_eigenvalues(objective, 5).to_dict()
    assert found["trace"] == analysis.hessian_trace(objective, probes=4, tolerance=0.01).to_dict()
    assert found["density"] == analysis.spectral_density(objective, steps=6, probes=2).to_dict()
    assert significant(found["eigenvalues"]["ratio"]) in capsys.readouterr().out


def test_hessian_of_some_layers_keeps_result_of_whole_model(runs):
    words = ["--count", 1, "--trace-probes", 2, "--density-steps", 2, "--density-probes", 1, *SAMPLES]
    analyze("hessian", runs / "ssam-f", *words)
    before = written(runs / "ssam-f", "hessian")
    assert analyze("hessian", runs / "ssam-f", *words, "--layers", "*.bias") == 0
    assert result_of(runs / "ssam-f", "hessian-layers")["eigenvalues"]["parameters"] == ["1.bias"]
    assert written(runs / "ssam-f", "hessian") == before


def test_sharpness_with_and_without_mask_at_first_runs_rho(runs):
    assert analyze("sharpness", runs / "ssam-f", "--steps", 3, *SAMPLES) == 0
    run, found = load_run(runs / "ssam-f", samples=40), result_of(runs / "ssam-f", "sharpness")
    assert found["every"] == analysis.sharpness(run.objective, 0.2, steps=3).to_dict()
    assert found["masked"] == analysis.sharpness(run.objective, 0.2, steps=3, masks=run.masks).to_dict()
    assert 0 < found["masked"]["increase"] < found["every"]["increase"]


def test_masks_over_time(runs, capsys):
    assert analyze("masks", runs / "ssam-f") == 0
    found = written(runs / "ssam-f", "masks")
    assert found["result"] == analysis.masks_over_time(read_masks(runs / "ssam-f")).to_dict()
    assert found["result"]["steps"] == [0, 3, 6, 9, 12]
    assert "checkpoint" not in found["made"]
    assert "ever perturbed" in capsys.readouterr().out


def test_fisher_is_compared_with_exact_diagonal_of_small_model(runs):
    assert analyze("fisher", runs / "sgd", *SAMPLES, "--layers", "1.bias") == 0
    objective = load_run(runs / "sgd", samples=40).objective
    found = result_of(runs / "sgd", "fisher-layers")
    assert found == analysis.fisher_vs_hessian(objective, parameters=["1.bias"]).to_dict()
    assert found["hessian"] == "exact"


def test_bound_counts_every_training_image(runs):
    assert analyze("bound", runs / "ssam-f", *SAMPLES, "--steps", 2, "--delta", 0.1) == 0
    run, found = load_run(runs / "ssam-f", samples=40), result_of(runs / "ssam-f", "bound")
    options = {"n": 72, "delta": 0.1, "classes": 10, "steps": 2}
    assert found["every"]["bound"] == analysis.generalization_bound(run.objective, 0.2, **options).bound
    assert (
        found["masked"]["bound"] == analysis.generalization_bound(run.objective, 0.2, masks=run.masks, **options).bound
    )
    assert any("40 of the 72 samples" in word for word in found["every"]["notes"])


def test_convergence_needs_no_run(tmp_path, capsys):
    assert analyze("convergence", tmp_path, "--steps", 20, "--runs", 2) == 0
    found = result_of(tmp_path, "convergence")
    for method in ("SAM", "SSAM"):
        assert found[method.lower()] == analysis.measure_convergence(method, steps=20, runs=2).to_dict()
    assert "all satisfied" in capsys.readouterr().out


# ---- provenance, pictures, resuming -----------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "words",
    [
        "gradients",
        "landscape --points 4",
        "landscape --points 4 --dimensions 1",
        "hessian --count 2 --trace-probes 2 --density-steps 4 --density-probes 1",
        "sharpness --steps 2",
        "fisher --layers 1.bias",
        "bound --steps 2",
    ],
)
def test_pictures_of_two_runs(runs, tmp_path, words):
    from PIL import Image

    kind, *options = words.split()
    picture = tmp_path / "a" / "picture.png"
    assert analyze(kind, runs / "sgd", runs / "ssam-f", *options, *SAMPLES, "--plot", picture) == 0
    assert (np.asarray(Image.open(picture).convert("L")) < 128).mean() > 0.002


def test_pictures_of_masks_and_convergence(runs, tmp_path):
    assert analyze("masks", runs / "ssam-f", "--plot", tmp_path / "masks.svg") == 0
    assert analyze("convergence", tmp_path, "--steps", 9, "--runs", 1, "--plot", tmp_path / "curves.pdf") == 0
    assert "<svg" in (tmp_path / "masks.svg").read_text()
    assert (tmp_path / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_interrupted_landscape_resumes(runs, monkeypatch, capsys):
    import sparsesam.lab.inspection.landscape as module

    words = ["landscape", runs / "ssam-f", "--points", 6, *SAMPLES]
    analyze(*words)
    whole = result_of(runs / "ssam-f", "landscape-2d")
    evaluated = []

    def stopping(at):
        def measure(objective, *, progress, **options):
            def interrupt(done, total):
                evaluated.append(done)
                if done == at:
                    raise KeyboardInterrupt

            return analysis.loss_landscape(objective, progress=interrupt, **options)

        return measure

    monkeypatch.setattr(module, "loss_landscape", stopping(10))
    assert analyze(*words) == 130
    assert "run the same command to continue" in capsys.readouterr().err
    monkeypatch.setattr(module, "loss_landscape", stopping(None))
    assert analyze(*words) == 0
    assert evaluated == list(range(1, 37))
    assert result_of(runs / "ssam-f", "landscape-2d") == whole


def test_unfinished_run_is_analyzed(tmp_path):
    with pytest.raises(Interrupted):
        train(tmp_path, InterruptAt(7), model=f"{NETWORKS}:linear")
    assert analyze("gradients", tmp_path, *SAMPLES) == 0
    assert written(tmp_path, "gradients")["made"]["step"] == 8  # the signal is seen one step later


# ---- bad input ----------------------------------------------------------------------------------------------------


def test_unknown_kind_or_option_suggests_nearest(runs, capsys):
    assert refused(capsys, "landscap", runs / "sgd") == (
        2,
        "sparsesam analyze: unknown analysis 'landscap'; did you mean landscape?",
    )
    code, line = refused(capsys, "landscape", runs / "sgd", "--point", 3)
    assert code == 2
    assert line.startswith("sparsesam analyze landscape: unknown option 'point'; did you mean points")
    assert refused(capsys)[0] == 2
    assert refused(capsys, "hessian")[0] == 2


def test_path_without_run_is_reported(runs, tmp_path, capsys):
    code, line = refused(capsys, "hessian", runs / "sgd", tmp_path)
    assert code == 2
    assert f"{tmp_path} has no run" in line


def test_masks_of_run_without_masks(runs, tmp_path, capsys):
    assert "its optimizer is sgd" in refused(capsys, "masks", runs / "sgd")[1]
    assert analyze("masks", runs / "sgd", runs / "ssam-f") == 0
    assert "left out" in capsys.readouterr().out
    train(tmp_path, optimizer="ssam-f", model=f"{NETWORKS}:linear", max_steps=1)
    (tmp_path / "masks" / "00000000.npz").unlink()
    code, line = refused(capsys, "masks", tmp_path)
    assert code == 2
    assert "train it with --record-masks true" in line


def test_random_loss_is_rejected_unless_allowed(tmp_path, capsys):
    train(tmp_path, model=f"{NETWORKS}:noisy", max_steps=1)
    code, line = refused(capsys, "sharpness", tmp_path, *SAMPLES)
    assert code == 2
    assert "the loss is not deterministic" in line
    assert "--allow-random" in line
    assert analyze("sharpness", tmp_path, *SAMPLES, "--allow-random", "--steps", 1) == 0
    assert "one draw" in result_of(tmp_path, "sharpness")["every"]["measured_on"]["random_loss"]


def test_frozen_parameters_are_excluded_and_unused_ones_named(tmp_path, capsys):
    train(tmp_path, optimizer="ssam-f", model=f"{NETWORKS}:with_frozen_and_unused", max_steps=2)
    for kind in ("gradients", "sharpness --steps 2", "bound --steps 2", "landscape --points 2", "fisher --probes 3"):
        assert analyze(*kind.split()[:1], tmp_path, *kind.split()[1:], *SAMPLES) == 0
    words = ["--count", 1, "--trace-probes", 2, "--density-steps", 2]
    assert analyze("hessian", tmp_path, *words, *SAMPLES) == 0
    found = result_of(tmp_path, "hessian")["eigenvalues"]
    assert found["parameters"] == ["used.weight", "used.bias", "unused.weight", "unused.bias"]
    assert "the loss does not depend on unused.weight, unused.bias" in capsys.readouterr().out


def test_single_class_is_rejected(tmp_path, capsys):
    train(tmp_path, dataset=f"{NETWORKS}:one_class", model=f"{NETWORKS}:linear", max_steps=1)
    for kind in ANALYSES:
        if kind not in ("masks", "convergence"):
            code, line = refused(capsys, kind, tmp_path)
            assert code == 2
            assert "has one class" in line


def test_landscapes_of_different_models_are_not_combined(runs, tmp_path, capsys):
    train(tmp_path, model=f"{NETWORKS}:normalized", max_steps=1)
    code, line = refused(capsys, "landscape", runs / "sgd", tmp_path)
    assert code == 2
    assert "runs must have the same model" in line
    assert "--between needs two runs, got 1" in refused(capsys, "landscape", tmp_path, "--between")[1]


def test_bad_values_are_rejected_before_measuring(runs, capsys):
    assert "plot must end in .png" in refused(capsys, "gradients", runs / "sgd", "--plot", "a.gif")[1]
    assert "samples must be at least 1, or null, got 0" in refused(capsys, "gradients", runs / "sgd", "--samples", 0)[1]
    assert (
        "parameters selects none of the model's 2 floating-point parameters"
        in refused(capsys, "hessian", runs / "sgd", "--layers", "encoder.*")[1]
    )
    assert "split must be train" in refused(capsys, "bound", runs / "sgd", "--split", "test")[1]
