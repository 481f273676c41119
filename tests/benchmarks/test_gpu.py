"""The GPU table, made small enough for any machine."""

from __future__ import annotations

import pytest
import torch
from benchmarks.gpu import Setting, beyond_passes, make_case, methods, sparse_product, table
from tests.cases import same_bits, weights_of
from torch import nn


def small():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=8),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 16, 64),
        nn.Linear(64, 10),
    )


@pytest.fixture
def setting():
    return Setting(torch.device("cpu"), small, 4, None)


def test_table_has_row_with_numbers_for_each_method(setting):
    lines = table(setting, rounds=1).splitlines()
    rows = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]] for line in lines[2:]}
    assert rows.keys() == methods().keys()
    for milliseconds, ratio, launches, waits, *_ in rows.values():
        assert float(milliseconds) > 0
        assert float(ratio) > 0
        assert int(launches) >= 0
        assert int(waits) == 0
    assert rows["SGD"][2] == "0"


def test_launches_exclude_those_of_passes(setting):
    cases = {name: make_case(setting, wrap) for name, wrap in methods().items()}
    for case in cases.values():
        case()
    sgd, sam, entries = (beyond_passes(cases[name])[0] for name in ("SGD", "SAM", "entries, sparsity 0.5"))
    tensors = len(list(cases["SAM"].model.parameters()))
    assert sgd == 0 < sam < 40
    assert sam < entries <= sam + 5 * tensors


def test_mixed_precision_takes_steps():
    setting = Setting(torch.device("cpu"), small, 4, torch.bfloat16)
    for wrap in methods().values():
        case = make_case(setting, wrap)
        before = weights_of(case.model)
        case()
        assert all(p.isfinite().all() for p in case.model.parameters())
        assert not same_bits(case.model.parameters(), before)


def test_sparse_product_is_dense_without_gpu(setting):
    assert sparse_product(setting) == "dense (1:2, (64, 128))"
