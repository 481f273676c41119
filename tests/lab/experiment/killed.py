"""A run that kills itself after some steps: python -m tests.lab.experiment.killed FOLDER STEP"""

import os
import signal
import sys
from pathlib import Path

from sparsesam.lab.experiment.observers import RunObserver
from tests.lab.experiment.runs import train

SETTINGS = {"optimizer": "ssam-f", "mask_steps": 3}


class KillAt(RunObserver):
    def __init__(self, step):
        self.at = step

    def step(self, training):
        if training.steps_taken == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    train(Path(sys.argv[1]), KillAt(int(sys.argv[2])), **SETTINGS)
