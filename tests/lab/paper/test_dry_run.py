"""Dry runs of every CIFAR recipe at full scale, so that a misspelled setting is found before a long run."""

import re

import pytest

from sparsesam.lab.cli import main
from sparsesam.lab.data import load_dataset
from sparsesam.lab.data.published import CIFAR10, CIFAR100
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.paper.dry_run import SHAPES, dry_run, measure_model, run_cost, take_steps
from sparsesam.lab.paper.recipe import recipe, recipes

RUNS = {
    f"{known.label}: {label}": config
    for known in recipes().values()
    for label, config in known.at("full").sweep([0]).variants.items()
}
CIFAR = {label: config for label, config in RUNS.items() if config.dataset.startswith("cifar")}


def kind(config):
    """Runs of one kind differ only in numbers, and run the same code."""
    pattern = "N:M" if re.match(r"\d", config.pattern) else config.pattern
    return (config.model, config.optimizer, pattern, config.ascent, config.ascent_fraction, config.drop)


def is_slow(config):
    """WRN-28-10 takes steps with SGD and SAM here; its masks are made in the slow tests."""
    return config.model == "wrn-28-10" and config.optimizer.startswith("ssam")


KINDS = {kind(config): label for label, config in reversed(list(CIFAR.items())) if not is_slow(config)}


@pytest.mark.parametrize("label", KINDS.values())
def test_every_kind_of_cifar_run_takes_steps(label):
    expected = "built, no steps: two steps take" if "vit" in CIFAR[label].model else "2 steps"
    assert take_steps(CIFAR[label]).startswith(expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    "label", {kind(config): label for label, config in RUNS.items() if kind(config) not in KINDS}.values()
)
def test_every_other_kind_of_run_takes_steps(label):
    assert take_steps(RUNS[label]) == "2 steps"


def test_bad_setting_names_its_row():
    misspelled = recipe("resnet_cifar").at("full", {"model": "resnet81"})
    with pytest.raises(RunError, match=r"SGD, .* cannot run: ValueError: model must be one of resnet18"):
        list(dry_run(misspelled, seeds=1, tflops=10))


def test_every_run_has_line_and_cost_is_of_all_seeds():
    *lines, total = dry_run(recipe("nm_vit"), seeds=3, tflops=10)
    runs = ["SAM, s / step", "SSAM-F implicit 1:2, s / step", "SSAM-F implicit 2:4, s / step"]
    for run, line in zip(runs, lines, strict=True):
        assert line.startswith(f"{run}: 2 steps; estimated: 60 steps, ")
    assert total.startswith("all, 3 seeds: 540 steps, ")


def test_command_shows_cost_and_throughput(capsys):
    assert main(["paper", "run", "speedup", "--scale", "full", "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "built, no steps: two steps take" in printed
    assert "hours at 24.5 TFLOP/s" in printed
    assert main(["paper", "run", "speedup", "--dry-run", "--tflops", "0"]) == 2


RESNET = {"dataset": "cifar10", "model": "resnet18", "epochs": 2, "batch_size": 100, "fisher_samples": 50}


def cost(**settings):
    return run_cost(TrainConfig(**{**RESNET, **settings}))


def test_model_is_measured_without_memory():
    model, flops = measure_model("resnet18", "cifar10")
    assert next(model.parameters()).is_meta
    assert flops == pytest.approx(2 * 555.4e6, rel=1e-3)  # multiplications and additions


@pytest.mark.parametrize(
    ("settings", "passes"),
    [
        ({"optimizer": "sgd"}, 1000),
        ({"optimizer": "sam"}, 2000),
        ({"optimizer": "sam", "ascent_fraction": 0.25}, 1250),
        ({"optimizer": "sam", "ascent_every": 2}, 1500),
        ({"optimizer": "sam", "ascent": "momentum"}, 1000),
        ({"optimizer": "sam", "max_steps": 10}, 20),
        ({"optimizer": "ssam-d"}, 2000),
        ({"optimizer": "ssam-f"}, 2000 + 2 * 0.5),  # two masks of half a batch each
        ({"optimizer": "ssam-f", "mask_epochs": None}, 2000 + 0.5),
    ],
)
def test_passes_and_operations_of_each_optimizer(settings, passes):
    assert cost(**settings)[1:] == (passes, pytest.approx(passes * 3 * 100 * 1.1108e9, rel=1e-3))


@pytest.mark.parametrize(
    ("label", "forwards"), [("landscape", 2048 * 50**2), ("hessian", 6 * 2048 * (20 + 100 + 4 * 80))]
)
def test_analysis_of_figure_is_part_of_its_cost(label, forwards, monkeypatch):
    monkeypatch.setattr("sparsesam.lab.paper.dry_run.take_steps", lambda config: "no steps")
    chosen = recipe(label).at("full")
    lines = list(dry_run(chosen, seeds=2, tflops=1e-3))
    *runs, analysis, total = [float(line.split()[-3].replace(",", "")) for line in lines]
    assert lines[-2].startswith("analysis of the trained networks: ")
    assert analysis == pytest.approx(len(chosen.cells) * forwards * 1.1108e9 / 1e9 / 3600, rel=1e-3)
    assert total == pytest.approx(2 * sum(runs) + analysis, rel=1e-4)


def test_shapes_match_data_sets():
    digits = load_dataset("digits")
    assert SHAPES["digits"] == (digits.num_classes, digits.in_channels, digits.image_size, len(digits.train.labels))
    for data in (CIFAR10, CIFAR100):
        assert SHAPES[data.name] == (data.num_classes, data.in_channels, 32, data.train_size)


def test_custom_data_sets_have_no_cost_unless_loaded():
    with pytest.raises(ValueError, match="dataset must be one of digits, cifar10"):
        cost(dataset="module:function")
