"""Nobody should find a misspelt setting after a day on a cluster: the full scale of every CIFAR recipe is rehearsed."""

import re
from dataclasses import replace

import pytest
from rich.console import Console

from sparsesam.lab.cli import main
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.paper.dry_run import build_on_meta, cost_table, dry_run, dry_run_config
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
    """WRN-28-10 takes steps with SGD and SAM here, and its masks are made in the slow tests."""
    return config.model == "wrn-28-10" and config.optimizer.startswith("ssam")


KINDS = {kind(config): label for label, config in reversed(list(CIFAR.items())) if not is_slow(config)}


@pytest.mark.parametrize("label", KINDS.values())
def test_every_kind_of_cifar_run_takes_its_steps(label):
    found = dry_run_config(CIFAR[label])
    assert found.steps == (0 if "vit" in CIFAR[label].model else 2)
    assert bool(found.reason) == (found.steps == 0)


def test_every_model_and_optimizer_is_built():
    for config in {replace(config, dataset="cifar10", rho=0.1, label_noise=0.0) for config in CIFAR.values()}:
        build_on_meta(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "label", {kind(config): label for label, config in RUNS.items() if kind(config) not in KINDS}.values()
)
def test_every_other_kind_of_run_takes_its_steps(label):
    assert dry_run_config(RUNS[label]).steps == 2


def test_a_bad_setting_is_told_with_its_row():
    content = {
        "place": "Table 0",
        "title": "",
        "full": {"settings": {"dataset": "cifar10", "model": "resnet81"}, "columns": {"CIFAR-10": {}}},
        "rows": {"SGD": {"set": {"optimizer": "sgd"}, "paper": []}},
    }
    with pytest.raises(RunError, match=r"SGD, CIFAR-10 cannot run: ValueError: model must be one of resnet18"):
        dry_run(Recipe("misspelt", **content, scale="full"), lambda label, one: None)


def test_the_cost_of_all_seeds_is_shown():
    one = recipe("nm_vit")
    heard = []
    found = dry_run(one, lambda label, one: heard.append(label))
    assert heard == ["SAM, s / step", "SSAM-F implicit 1:2, s / step", "SSAM-F implicit 2:4, s / step"]
    drawn = cost_table(one, found, seeds=3, tflops=10)
    console = Console(width=200, record=True, quiet=True)
    console.print(drawn)
    assert list(drawn.columns[0].cells)[-1] == "all, 3 seeds"
    assert list(drawn.columns[1].cells)[-1] == "9"


def test_the_command_tells_cost_and_throughput(capsys):
    assert main(["paper", "run", "speedup", "--scale", "full", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "built, no steps: two steps are" in printed
    assert "Hours at 24.5 TFLOP/s, what table 10 of the paper implies" in printed
    assert main(["paper", "run", "speedup", "--dry-run", "--tflops", "0"]) == 2
