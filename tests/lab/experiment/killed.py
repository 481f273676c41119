"""A run that kills itself after some steps: python -m tests.lab.experiment.killed FOLDER STEP"""

import signal
import sys
from pathlib import Path

from tests import cases
from tests.lab.experiment.runs import InterruptAt, train

SETTINGS = {"optimizer": "ssam-f", "mask_steps": 3}


if __name__ == "__main__":
    with cases.small_modules_are_reused():
        train(Path(sys.argv[1]), InterruptAt(int(sys.argv[2]), signal.SIGKILL), **SETTINGS)
