import pytest
import torch
from torch import nn

from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.experiment.cost import passes_per_step, plain_pass_operations
from tests.lab.experiment.runs import train


def cost(tmp_path, **settings):
    return train(tmp_path / "run", train_size=64, epochs=2, **settings).forward_backwards_per_step


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "sgd", "accumulate": 2}, 1),
        ({"optimizer": "auto"}, 1.125),
        ({"optimizer": "sam"}, 2),
        ({"optimizer": "sam", "ascent": "momentum"}, 1),
        ({"optimizer": "sam", "ascent_fraction": 0.25}, 1.25),
        ({"optimizer": "sam", "ascent_every": 2}, 1.5),
        ({"optimizer": "sam", "ascent_steps": 2}, 3),
        ({"optimizer": "sam", "ascent_start": 1}, 1.5),
        ({"optimizer": "ssam-random", "mask_epochs": None}, 2),
        ({"optimizer": "sam", "compile": True, "ascent_every": 2}, 1.5),
    ],
    ids=str,
)
def test_passes_are_counted_in_units_of_plain_pass_and_known_from_settings(tmp_path, settings, expected):
    assert cost(tmp_path, **settings) == pytest.approx(expected, rel=1e-6)
    assert passes_per_step(TrainConfig(epochs=2, **settings)) == pytest.approx(expected)


def test_work_skipped_by_engine_is_not_counted(tmp_path):
    settings = {"optimizer": "ssam-random", "pattern": "filter", "sparsity": 0.9, "norm": "masked", "mask_epochs": None}
    assert cost(tmp_path, **settings) < 1.9


def test_run_with_few_perturbed_layers_costs_little_more_than_plain_steps(tmp_path):
    assert cost(tmp_path, optimizer="ssam", layers="12.*") < 1.01


def test_masks_are_counted(tmp_path):
    # Eight samples of a batch of sixteen, once in eight steps; rules for layers may cost more than a plain pass.
    found = cost(tmp_path, optimizer="ssam-f", mask_epochs=None, fisher_samples=8)
    assert 2 + 0.5 / 8 * 0.5 < found < 2 + 0.5 / 8 * 3


def test_linear_layer_operations_are_exact_and_nothing_changes():
    model = nn.Sequential(nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    # Forward and weight gradient, 12 * 5 each, and the input gradient for the normalization's weights.
    assert plain_pass_operations(model, torch.ones(4, 12), torch.zeros(4, dtype=torch.long)) == 3 * 12 * 5
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
