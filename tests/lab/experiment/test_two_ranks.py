"""Two processes: the same masks on both, and the weights that one process reaches with the same global batch."""

import os
import subprocess
import sys

import pytest
import torch

from tests.lab.experiment import two_ranks
from tests.lab.experiment.runs import state


@pytest.mark.xdist_group("ranks")  # one rendezvous at a time
@pytest.mark.parametrize("optimizer", two_ranks.NETWORKS)
def test_two_ranks_reach_weights_of_one_with_equal_masks(optimizer, tmp_path):
    single, double = tmp_path / "single", tmp_path / "double"
    single.mkdir(), double.mkdir()
    subprocess.run(
        [sys.executable, "-m", "tests.lab.experiment.two_ranks", str(double), optimizer],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=True,
        timeout=120,
    )
    two_ranks.main(single, optimizer, devices=1, engine=False)
    expected, *left = (torch.load(p, weights_only=True) for p in (single / "left-0.pt", *sorted(double.glob("left-*"))))
    assert len(left) == 2
    for found in left:
        assert all(torch.equal(found["masks"][name], mask) for name, mask in expected["masks"].items())
        if optimizer == "sam-on":  # unperturbed layers come before perturbed ones
            gradients, reused, *_ = found["savings"]
            assert gradients > 0.5
            assert reused > 0
    weights = (state(folder / "run")["training"]["model"] for folder in (double, single))
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-11)
