"""What a pass changes besides gradients, put back before the pass is run again."""

from __future__ import annotations

import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn

from sparsesam.ascent.noise import Noise

#: Buffers larger than this are not copied in each step.
_LARGE = 1 << 20
_CONTAINERS = (dict, OrderedDict, list, set)


class Rewind:
    """Random streams (torch's, Python's, numpy's), and the modules' attributes, lists, dictionaries and buffers.

    Beyond its reach is what a closure does outside of the model, and what a pass writes into large buffers.
    """

    def __init__(self, model: nn.Module, noise: Noise) -> None:
        self._noise, self._noise_state = noise, noise.read()
        self._python, self._numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (what models draw from)
        modules = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
        self._attributes = [(module.__dict__, dict(module.__dict__)) for module in modules]
        containers = (value for _, held in self._attributes for value in held.values() if type(value) in _CONTAINERS)
        self._contents = [(value, value.copy()) for value in containers]
        self._buffers = [
            (buffer, buffer.clone())
            for buffer in model.buffers()
            if buffer.numel() <= _LARGE and not buffer.is_inference()
        ]

    @torch.no_grad()
    def restore(self) -> None:
        self._noise.write(self._noise_state)
        random.setstate(self._python)
        np.random.set_state(self._numpy)  # noqa: NPY002
        for now, then in (*self._attributes, *self._contents):
            now.clear()
            now.extend(then) if isinstance(now, list) else now.update(then)
        for buffer, values in self._buffers:
            buffer.copy_(values)
