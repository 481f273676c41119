import pytest
import torch
from benchmarks.cases import Case, OtherCase, sam, ssam
from torch import nn

import sparsesam

FIRST = sparsesam.fixed_mask("0.*")
WRAPS = {"SGD": None, "SAM": sam, "SSAM": ssam(FIRST), "half of the batch": ssam(FIRST, ascent_fraction=0.5)}


torch.manual_seed(0)
MODEL = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
BATCH = (torch.randn(8, 4), torch.randint(3, (8,)))


def case(wrap):
    return Case(MODEL, BATCH, wrap)


@pytest.mark.parametrize("name", WRAPS)
def test_call_takes_one_step(name):
    made = case(WRAPS[name])
    before = made.loss(made.batch)
    for _ in range(5):
        made()
    assert made.loss(made.batch) < before


def test_share_of_perturbed_weights_and_passes():
    cases = {name: case(wrap) for name, wrap in WRAPS.items()}
    for made in cases.values():
        made()
    perturbed = {name: made.perturbed for name, made in cases.items()}
    assert perturbed == pytest.approx({"SGD": 0, "SAM": 1, "SSAM": 20 / 35, "half of the batch": 20 / 35})
    assert [made.passes for made in cases.values()] == [1, 2, 2, 1.5]


def test_other_look_sam_takes_second_pass_in_every_kth_step():
    pytest.importorskip("pytorch_optimizer")
    made = OtherCase(MODEL, BATCH, "LookSAM", k=4)
    made()
    made()
    assert made.passes == 5 / 4


def test_step_that_makes_mask_needs_more_memory():
    fresh = ssam(sparsesam.random_mask(sparsity=0.5, refresh=None))
    assert case(fresh).peak_bytes(refresh=True) > case(fresh).peak_bytes()
