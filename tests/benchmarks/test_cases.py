import pytest
import torch
from benchmarks.cases import Case, sam, ssam
from torch import nn

import sparsesam

FIRST = sparsesam.fixed_mask("0.*")
WRAPS = {"SGD": None, "SAM": sam, "SSAM": ssam(FIRST), "half of the batch": ssam(FIRST, ascent_fraction=0.5)}


def case(wrap):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    return Case(model, (torch.randn(8, 4), torch.randint(3, (8,))), wrap)


@pytest.mark.parametrize("name", WRAPS)
def test_call_takes_one_step(name):
    one = case(WRAPS[name])
    before = one.loss(one.batch)
    for _ in range(5):
        one()
    assert one.loss(one.batch) < before


def test_share_of_perturbed_weights():
    perturbed = {}
    for name, wrap in WRAPS.items():
        one = case(wrap)
        one()
        perturbed[name] = one.perturbed
    assert perturbed == pytest.approx({"SGD": 0, "SAM": 1, "SSAM": 20 / 35, "half of the batch": 20 / 35})


def test_step_that_makes_mask_needs_more_memory():
    fresh = ssam(sparsesam.random_mask(sparsity=0.5, refresh=None))
    assert case(fresh).peak_bytes(refresh=True) > case(fresh).peak_bytes()
