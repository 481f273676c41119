"""A run of which every rank leaves its masks: python -m tests.lab.experiment.two_ranks FOLDER OPTIMIZER"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from sparsesam import replay
from sparsesam.lab.experiment import run as module
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.training import Training
from tests.lab.experiment.runs import SHORT

NETWORKS = {"ssam-d": "plain", "sam-on": "late_normalization"}


def main(folder, optimizer, devices, *, engine=True):
    class LeavesMasks(Training):
        def evaluate(self, split):
            left = {"masks": self.optimizer.masks, "savings": tuple(self.optimizer.savings())}
            torch.save(left, Path(folder) / f"left-{self.fabric.global_rank}.pt")
            return super().evaluate(split)

    module.Training = LeavesMasks
    place = RunEnvironment(out=Path(folder) / "run", accelerator="cpu", devices=devices, threads=1, logger="none")
    # 71 images in batches of 16: the last one has 7, so that the two ranks' parts differ.
    model = f"tests.lab.experiment.networks:{NETWORKS[optimizer]}"
    config = replace(SHORT, optimizer=optimizer, model=model, train_size=71, norm="masked", engine=engine)
    module.run_training(config, place)
    module.Training = Training


if __name__ == "__main__":
    replay.OPERATION = 0  # as in conftest.py
    main(sys.argv[1], sys.argv[2], 2)
