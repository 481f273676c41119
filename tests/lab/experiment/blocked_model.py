"""A network whose run signals through a named pipe that it has started."""

import os

from sparsesam.lab.models import small_cnn


def build(num_classes, in_channels):
    with open(os.environ["BEGUN"], "w") as pipe:
        pipe.write(f"{os.getpid()}\n")
    return small_cnn(num_classes, in_channels)
