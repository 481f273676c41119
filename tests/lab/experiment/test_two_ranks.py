"""Two processes: the same masks and averages on both, and the weights of one process with the same global batch."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparsesam import replay
from sparsesam.lab.experiment import run
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.training import Training
from tests.lab.experiment.runs import SHORT, same, state

NETWORKS = {"ssam-d": "with_statistics", "sam-on": "late_normalization"}


def train(folder, optimizer, devices, *, engine=True):
    class LeavesMasks(Training):
        def evaluate(self, split):
            found = super().evaluate(split)
            left = {"masks": self.optimizer.masks, "savings": tuple(self.optimizer.savings())}
            left["average"] = self.ema.state_dict()
            torch.save(left, Path(folder) / f"left-{self.fabric.global_rank}.pt")
            return found

    run.Training = LeavesMasks
    place = RunEnvironment(out=Path(folder) / "run", accelerator="cpu", devices=devices, threads=1, logger="none")
    # 71 images in batches of 16: the last one has 7, so that the two ranks' parts differ.
    model = f"tests.lab.experiment.networks:{NETWORKS[optimizer]}"
    config = replace(SHORT, optimizer=optimizer, model=model, train_size=71, norm="masked", engine=engine, ema=0.5)
    run.run_training(config, place)
    run.Training = Training


@pytest.mark.xdist_group("ranks")  # one rendezvous at a time
@pytest.mark.parametrize("optimizer", NETWORKS)
def test_two_ranks_reach_weights_of_one_with_equal_masks(optimizer, tmp_path):
    single, double = tmp_path / "single", tmp_path / "double"
    single.mkdir(), double.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run([sys.executable, "-m", __name__, double, optimizer], env=environment, check=True, timeout=300)
    train(single, optimizer, devices=1, engine=False)
    expected, *left = (torch.load(p, weights_only=True) for p in (single / "left-0.pt", *sorted(double.glob("left-*"))))
    assert len(left) == 2
    assert same(left[0]["average"], left[1]["average"])
    for found in left:
        assert all(torch.equal(found["masks"][name], mask) for name, mask in expected["masks"].items())
        if optimizer == "sam-on":  # unperturbed layers come before perturbed ones
            gradients, reused, *_ = found["savings"]
            assert gradients > 0.5
            assert reused > 0
    for name, weight in state(single / "run")["training"]["model"].items():
        if "running" not in name:  # a rank measures its own images
            torch.testing.assert_close(state(double / "run")["training"]["model"][name], weight, rtol=1e-9, atol=1e-11)


if __name__ == "__main__":
    replay.OPERATION = 0  # as in conftest.py
    train(sys.argv[1], sys.argv[2], 2)
