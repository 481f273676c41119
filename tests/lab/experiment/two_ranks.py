"""A run of which every rank leaves its masks: python -m tests.lab.experiment.two_ranks FOLDER OPTIMIZER"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

from sparsesam.lab.experiment import run as module
from sparsesam.lab.experiment.config import RunEnvironment
from tests.lab.experiment.runs import SHORT


def main(folder, optimizer, devices):
    tell = module._complete_epoch

    def tell_masks(config, training, *rest):
        masks = getattr(training.optimizer, "masks", {})
        torch.save(masks, Path(folder) / f"masks-{training.fabric.global_rank}.pt")
        tell(config, training, *rest)

    module._complete_epoch = tell_masks
    # 71 images in batches of 16: the last one has 7, so that the two ranks' parts differ.
    config = replace(SHORT, optimizer=optimizer, model="tests.lab.experiment.plain_model:build", train_size=71)
    place = RunEnvironment(out=Path(folder) / "run", accelerator="cpu", devices=devices, threads=1, tensorboard=False)
    module.run(config, place)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], 2)
