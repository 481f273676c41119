"""One torch thread per test worker: the workers share the cores, and sums are the same everywhere.

Every test starts with the same random state, and the engine reuses modules of any size. In CI (the variable CI is set)
hypothesis tries the same examples each time.
"""

import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import numpy as np
import pytest
import torch

from tests import cases

torch.set_num_threads(1)
hypothesis.settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")


@pytest.fixture(scope="session", autouse=True)
def _small_modules_are_reused():
    with cases.small_modules_are_reused():
        yield


@pytest.fixture(autouse=True)
def seeded():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what other packages draw from)
    torch.manual_seed(0)
