"""A network that waits after its first epoch until a machine has been lost.

WAITING and LOST name two pipes: the network writes its process id to the first, and waits for a writer of the second.
"""

import os

from torch import nn


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


def network(num_classes):
    return nn.Sequential(nn.Flatten(), _Wait(), nn.Linear(64, num_classes))
