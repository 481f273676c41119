"""The code of docs/multi-gpu.md runs, block by block, on two ranks."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from tests import cases
from tests.distributed.processes import run_ranks

pytestmark = [pytest.mark.xdist_group("ranks"), cases.needs_fsdp2_on_a_cpu]

PAGE = Path(__file__).parents[2] / "docs" / "multi-gpu.md"


def blocks(section):
    (text,) = re.findall(rf"^## {section}$(.*?)(?=^## |\Z)", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def every_block(rank, folder):
    warnings.simplefilter("ignore", FutureWarning)
    batches = [tuple(t.chunk(2)[rank] for t in cases.vectors(seed=seed)) for seed in range(5)]
    names = {"torch": torch, "sparsesam": sparsesam, "loss_fn": F.cross_entropy, "loader": batches, "net": cases.mlp()}
    names["train_set"], names["path"] = cases.vectors(), f"{folder}/saved"
    exec(*blocks("DDP"), names)
    steps = [names["opt"].steps]
    del names["model"]
    names |= {"net": cases.mlp(), "loader": batches}
    exec(*blocks("FSDP2"), names)
    exec(*blocks("Checkpoints"), names)
    return [*steps, names["opt"].steps, names["opt"].sparsity]


def test_page_runs(tmp_path):
    for ddp, fsdp2, sparsity in run_ranks(every_block, 2, str(tmp_path)):
        assert (ddp, fsdp2) == (5, 5)
        assert abs(sparsity - 0.9) < 0.01
