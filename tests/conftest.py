"""One torch thread per test worker: the workers share the cores, and sums are the same everywhere.

Every test starts with the same random state. In CI (the variable CI is set) hypothesis tries the same examples.
"""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

from sparsesam import replay

torch.set_num_threads(1)
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what other packages draw from)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _records_small_operations(monkeypatch):
    """The models of the tests are so small that their operations would not be recorded."""
    monkeypatch.setattr(replay, "OPERATION", 0)
