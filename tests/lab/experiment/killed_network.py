"""A network whose second rank is killed once in the middle of a step."""

import os
import signal

from torch import nn


class _Killed(nn.Module):
    """Every step of SAM calls it twice."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += self.training
        first_attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0" and os.environ.get("KILL") == "yes"
        if first_attempt and "1" in (os.environ.get("RANK"), os.environ.get("LOCAL_RANK")) and self.calls == 16:
            os.kill(os.getpid(), signal.SIGKILL)
        return x


def network(num_classes):
    return nn.Sequential(nn.Flatten(), _Killed(), nn.Linear(64, num_classes))
