import math

import pytest
import torch
from benchmarks.cases import Case
from benchmarks.devices import MASKS, NM_CASES, beyond_passes, nm_case
from tests.cases import same_bits, weights_of
from torch import nn

CPU = torch.device("cpu")


def case(wrap, precision=None):
    torch.manual_seed(0)
    body = (nn.Conv2d(3, 8, 3, stride=8), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
    model = nn.Sequential(*body, nn.Linear(8 * 16, 64), nn.Linear(64, 10))
    return Case(model, (torch.randn(4, 3, 32, 32), torch.arange(4)), wrap, precision=precision)


def test_launches_exclude_those_of_passes():
    cases = {name: case(wrap) for name, wrap in MASKS.items()}
    for each in cases.values():
        each()
    counted = {name: beyond_passes(each) for name, each in cases.items()}
    assert {waits for _, waits in counted.values()} == {0}
    sgd, sam, entries = (counted[name][0] for name in ("SGD", "SAM", "entries, sparsity 0.5"))
    tensors = len(list(cases["SAM"].model.parameters()))
    assert sgd == 0 < sam < 40
    assert sam < entries <= sam + 5 * tensors


def test_mixed_precision_takes_steps():
    for wrap in MASKS.values():
        each = case(wrap, torch.bfloat16)
        before = weights_of(each.model)
        each()
        assert all(p.isfinite().all() for p in each.model.parameters())
        assert not same_bits(each.model.parameters(), before)


@pytest.mark.parametrize("name", NM_CASES)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_every_nm_case_takes_steps(name, precision):
    each = nm_case(name, 16, 2, 2, CPU, precision)
    losses = []
    for _ in range(2):
        each()
        losses.append(each.loss(each.batch).item())
    assert math.isfinite(losses[1])
    assert losses[1] != losses[0]
