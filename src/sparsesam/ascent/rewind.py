"""What a pass changes besides gradients, put back before the pass is run again."""

from __future__ import annotations

import random

import numpy as np
from torch import nn

from sparsesam.ascent.noise import Noise
from sparsesam.ascent.statistics import StatisticsSnapshot


class Rewind:
    """Random streams (torch's, Python's, numpy's), running statistics, and what the modules' attributes refer to.

    Beyond its reach is what a closure does outside of the model, and what is changed inside of lists and other buffers.
    """

    def __init__(self, model: nn.Module, noise: Noise) -> None:
        self._noise, self._noise_state = noise, noise.read()
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what models draw from)
        self._statistics = StatisticsSnapshot(model)
        self._attributes = [(module, dict(module.__dict__), dict(module._buffers)) for module in model.modules()]

    def restore(self) -> None:
        self._noise.write(self._noise_state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for module, attributes, buffers in self._attributes:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        self._statistics.restore()
