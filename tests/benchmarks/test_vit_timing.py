import math

import pytest
import torch
from benchmarks.vit_timing import CASES, PAPER, case


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_every_case_takes_steps(name, precision):
    step = case(name, 16, 2, 2, torch.device("cpu"), precision)
    first, second = step(), step()
    assert math.isfinite(second)
    assert second != first


def test_papers_numbers_belong_to_cases():
    assert PAPER.keys() <= CASES.keys()
