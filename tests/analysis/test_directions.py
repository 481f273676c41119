import pytest
import torch
from torch import nn

from sparsesam.analysis import (
    random_directions,
)
from tests.cases import convnet


def test_every_filter_of_a_direction_has_its_weights_norm():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 5, 2), nn.Linear(6, 7))
    (direction,) = random_directions(model, 1)
    assert set(direction) == {"0.weight", "2.weight", "3.weight"}
    for i in range(4):
        assert direction["0.weight"][i].norm() == pytest.approx(model[0].weight[i].norm().item(), rel=1e-5)
    for i in range(5):
        assert direction["2.weight"][:, i].norm() == pytest.approx(model[2].weight[:, i].norm().item(), rel=1e-5)


def test_biases_and_normalization_move_only_when_asked_each_entry_by_itself():
    model = convnet()
    assert set(random_directions(model, 1)[0]) == {"0.weight", "4.weight"}
    (moved,) = random_directions(model, 1, one_dimensional="normalize")
    assert torch.equal(moved["1.weight"].abs(), model[1].weight.abs())
    assert torch.equal(moved["0.weight"], random_directions(model, 1)[0]["0.weight"])
