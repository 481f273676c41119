"""Networks for runs in processes of their own."""

import os
import signal

from torch import nn

from sparsesam.lab.models import small_cnn


def blocked(num_classes, in_channels):
    """Signals through the named pipe BEGUN that its run has started."""
    with open(os.environ["BEGUN"], "w") as pipe:
        pipe.write(f"{os.getpid()}\n")
    return small_cnn(num_classes, in_channels)


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


def killed(num_classes):
    """Kills the second rank once, in the middle of a step."""
    return nn.Sequential(nn.Flatten(), _Killed(), nn.Linear(64, num_classes))


class _Wait(nn.Module):
    evaluated = False

    def forward(self, x):
        if not self.training:
            self.evaluated = True
        elif self.evaluated:
            self.evaluated = False
            with open(os.environ["WAITING"], "w") as pipe:
                pipe.write(f"{os.getpid()}\n")
            open(os.environ["LOST"]).close()
        return x


def waiting(num_classes):
    """Waits after its first epoch until a machine has been lost.

    WAITING and LOST name two pipes: it writes its process id to the first, and waits for a writer of the second.
    """
    return nn.Sequential(nn.Flatten(), _Wait(), nn.Linear(64, num_classes))


class _Double(nn.Module):
    def forward(self, x):
        return x.double()


def plain(num_classes, in_channels):
    """Without batch normalization: the gradient is the mean over images, however they are spread over ranks. In
    float64, so that ranks' rounding does not decide which of two equal weights a mask keeps.
    """
    layers = nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, num_classes))
    return nn.Sequential(_Double(), layers.double())


class _Statistics(nn.BatchNorm2d):
    def forward(self, x):
        super().forward(x)
        return x


def with_statistics(num_classes, in_channels):
    """Measures batch statistics, but does not normalize with them."""
    return nn.Sequential(_Statistics(in_channels, affine=False), plain(num_classes, in_channels))


def late_normalization(num_classes, in_channels):
    """SAM on its normalization layers perturbs only the last stage."""
    last = nn.Sequential(nn.Flatten(), nn.LayerNorm(8 * 6 * 6), nn.Linear(8 * 6 * 6, num_classes))
    return nn.Sequential(_Double(), nn.Sequential(nn.Conv2d(in_channels, 8, 3), nn.ReLU()).double(), last.double())
