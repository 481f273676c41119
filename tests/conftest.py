"""One torch thread per test worker: the workers share the cores, and sums come out the same everywhere."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
