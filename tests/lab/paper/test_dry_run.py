"""Dry runs of every CIFAR recipe at full scale, so that a misspelled setting is found before a long run."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from sparsesam.lab.cli import main
from sparsesam.lab.data import load_dataset
from sparsesam.lab.data.published import CIFAR10, CIFAR100
from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.paper.dry_run import (
    PAPER_TFLOPS,
    SHAPES,
    DryRun,
    analysis_cost,
    build_on_meta,
    cost,
    cost_table,
    dry_run,
    dry_run_config,
    measured_model,
    total,
)
from sparsesam.lab.paper.recipe import Recipe, recipe, recipes

RUNS = {
    f"{one.label}: {label}": config
    for one in recipes().values()
    for label, config in one.at("full").sweep([0]).variants.items()
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
    found = dry_run_config(CIFAR[label])
    assert found.steps == (0 if "vit" in CIFAR[label].model else 2)
    assert bool(found.reason) == (found.steps == 0)


def test_every_model_and_optimizer_is_built():
    """Building raises for unknown names and settings that do not go together; not raising is the check."""
    configs = {replace(config, dataset="cifar10", rho=0.1, label_noise=0.0) for config in CIFAR.values()}
    assert {config.model for config in configs} == {config.model for config in CIFAR.values()}
    for config in configs:
        build_on_meta(config)
    with pytest.raises(ValueError, match="model must be one of"):
        build_on_meta(replace(config, model="resnet81"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "label", {kind(config): label for label, config in RUNS.items() if kind(config) not in KINDS}.values()
)
def test_every_other_kind_of_run_takes_steps(label):
    assert dry_run_config(RUNS[label]).steps == 2


def test_bad_setting_names_its_row():
    content = {
        "place": "Table 0",
        "title": "",
        "full": {"settings": {"dataset": "cifar10", "model": "resnet81"}, "columns": {"CIFAR-10": {}}},
        "rows": {"SGD": {"set": {"optimizer": "sgd"}, "paper": []}},
    }
    with pytest.raises(RunError, match=r"SGD, CIFAR-10 cannot run: ValueError: model must be one of resnet18"):
        list(dry_run(Recipe("misspelled", **content, scale="full")))


def test_cost_of_all_seeds_is_shown():
    one = recipe("nm_vit")
    labels, found = zip(*dry_run(one), strict=True)
    assert list(labels) == ["SAM, s / step", "SSAM-F implicit 1:2, s / step", "SSAM-F implicit 2:4, s / step"]
    drawn = cost_table(one, found, seeds=3, tflops=10)
    console = Console(width=200, record=True, quiet=True)
    console.print(drawn)
    assert list(drawn.columns[0].cells)[-1] == "all, 3 seeds"
    assert list(drawn.columns[1].cells)[-1] == "9"


def test_command_shows_cost_and_throughput(capsys):
    assert main(["paper", "run", "speedup", "--scale", "full", "--dry-run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "built, no steps: two steps take" in printed
    assert "Hours are at 24.5 TFLOP/s, the speed of the A100 that table 10 of the paper implies" in printed
    assert main(["paper", "run", "speedup", "--dry-run", "--tflops", "0"]) == 2


RESNET = TrainConfig(dataset="cifar10", model="resnet18", epochs=2, batch_size=100, fisher_samples=50)


def of(**settings):
    return cost(TrainConfig(**{**RESNET.__dict__, **settings}))


def test_model_is_measured_without_memory():
    parameters, flops, saved = measured_model("resnet18", *SHAPES["cifar10"][:3])
    assert parameters == 11_173_962
    assert flops == pytest.approx(2 * 555.4e6, rel=1e-3)  # multiplications and additions
    assert 2e6 < saved < 20e6


def test_passes_of_each_optimizer():
    assert (of(optimizer="sgd").steps, of(optimizer="sgd").passes) == (1000, 1000)
    assert of(optimizer="sam").passes == 2000
    assert of(optimizer="sam", ascent_fraction=0.25).passes == 1250
    assert of(optimizer="sam", ascent_every=2).passes == 1500
    assert of(optimizer="sam", ascent="momentum").passes == 1000
    assert of(optimizer="ssam-d").passes == 2000
    assert of(optimizer="ssam-f").passes == 2000 + 2 * 0.5  # two masks of half a batch each
    assert of(optimizer="ssam-f", mask_epochs=None).passes == 2000 + 0.5
    assert of(optimizer="sam", max_steps=10).passes == 20


def test_operations_of_run():
    assert of(optimizer="sam").flops == pytest.approx(2000 * 3 * 100 * 1.1108e9, rel=1e-3)


def test_stated_throughput_gives_time_of_papers_table_10():
    epoch = of(optimizer="sam", epochs=1, batch_size=128)
    assert epoch.flops / (PAPER_TFLOPS * 1e12) == pytest.approx(13.60, rel=0.01)


@pytest.mark.parametrize(
    ("label", "forwards"), [("grad-diff", 0), ("landscape", 2048 * 50**2), ("hessian", 6 * 2048 * (20 + 100 + 4 * 80))]
)
def test_analysis_of_figure_is_part_of_its_cost(label, forwards):
    one = recipe(label).at("full")
    configs = [one.config(row, column) for row, column in one.cells]
    images = {config: forwards or 2 * 3 * config.batch_size for config in configs}
    flops = [count * measured_model(config.model, *SHAPES[config.dataset][:3])[1] for config, count in images.items()]
    assert analysis_cost(one).flops == pytest.approx(sum(flops))
    drawn = cost_table(one, [DryRun(configs[0], cost(configs[0]), 0)], seeds=2, tflops=1)
    hours = [float(hour.replace(",", "")) for hour in drawn.columns[5].cells]
    assert list(drawn.columns[0].cells)[1] == "analysis of the trained networks"
    assert hours[2] == pytest.approx(2 * hours[0] + hours[1], abs=0.2)


def test_tables_have_no_analysis():
    assert analysis_cost(recipe("table 9")).flops == 0


def test_shapes_match_data_sets():
    digits = load_dataset("digits")
    assert SHAPES["digits"] == (digits.num_classes, digits.in_channels, digits.image_size, len(digits.train.labels))
    for one in (CIFAR10, CIFAR100):
        assert SHAPES[one.name] == (one.num_classes, one.in_channels, 32, one.train_size)


def test_sum_has_largest_memory():
    small, large = of(optimizer="sgd"), of(optimizer="sam", batch_size=200)
    assert total([small, large]).memory == large.memory > small.memory
    assert total([small, large]).steps == small.steps + large.steps


def test_timed_vit_fits_one_gpu_of_80_gb():
    one = recipe("nm_vit").at("full")
    memory = [cost(config).memory for config in one.sweep([0]).variants.values()]
    assert 5e9 < max(memory) < 40e9  # an estimate, so with some margin


def test_custom_data_sets_have_no_cost_unless_loaded():
    with pytest.raises(ValueError, match="dataset must be one of digits, cifar10"):
        cost(TrainConfig(dataset="module:function"))
