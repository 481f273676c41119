from functools import partial

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


@pytest.mark.parametrize(
    "make",
    [*(partial(case, wrap) for wrap in MASKS.values()), *(partial(nm_case, name, 16, 2, 2, CPU) for name in NM_CASES)],
    ids=[*MASKS, *NM_CASES],
)
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_every_case_takes_steps(make, precision):
    each = make(precision=precision)
    before = weights_of(each.model)
    each()
    assert all(p.isfinite().all() for p in each.model.parameters())
    assert not same_bits(each.model.parameters(), before)
