"""A run that kills itself after some steps: python -m tests.lab.experiment.killed FOLDER STEP"""

import signal
import sys
from pathlib import Path

from tests.lab.experiment.runs import InterruptAt, train

SETTINGS = {"optimizer": "ssam-f", "mask_steps": 3}


if __name__ == "__main__":
    train(Path(sys.argv[1]), InterruptAt(int(sys.argv[2]), signal.SIGKILL), **SETTINGS)
