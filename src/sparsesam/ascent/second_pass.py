"""The second pass as torch sees it: calls that the first pass remembers are not made again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsesam.ascent.calls import is_attribute, version_of
from sparsesam.ascent.memo import Unhashable, map_tensors, memory_of, tensors_in
from sparsesam.ascent.noise import Noise
from sparsesam.ascent.recording import Plan, Recording


class SecondPass(TorchFunctionMode):
    def __init__(self, plan: Plan, recording: Recording, noise: Noise) -> None:
        super().__init__()
        self.plan, self.recording, self.noise = plan, recording, noise
        self._known = {id(tensor) for tensor in recording.outside}
        self._twins: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        memo = self.recording.memo
        if is_attribute(func):
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):
                return result
        try:
            key = memo.key_of(func, map_tensors(self._twin, args), map_tensors(self._twin, kwargs))
            call = memo.find(key, self.noise)
        except Unhashable:
            call = None
        if call is not None:
            if call.noise is not None:
                self.noise.write(call.noise[1])
            for tensor, _, _ in call.inputs:
                if id(tensor) in self.plan.names:
                    self.recording.reused.add(self.plan.names[id(tensor)])
            return memo.outputs(call)
        tensors = list(tensors_in(args, kwargs))
        memo.require_fresh(tensors)
        result = func(*args, **kwargs)
        memo.keep_up(tensors)
        return result

    def require_fresh(self, output: Any) -> None:
        """What the model returns must have been brought to the version that it had here."""
        self.recording.memo.require_fresh(list(tensors_in(output)))

    def _twin(self, tensor: Tensor) -> Tensor:
        """The first pass's tensor with the same content, for loops that move the batch to a device in each pass."""
        if (
            id(tensor) in self._known
            or id(tensor) in self.plan.names
            or tensor.requires_grad
            or self.recording.memo.made(tensor)
        ):
            return tensor
        held, version = self._twins.get(id(tensor)), version_of(tensor)
        if held is None or held[0] is not tensor or held[1] != version:
            held = self._twins[id(tensor)] = (tensor, version, self._find_twin(tensor))
        return held[2]

    def _find_twin(self, tensor: Tensor) -> Tensor:
        for other in self.recording.outside:
            if (
                memory_of(other) is not None
                and memory_of(tensor) is not None
                and other.shape == tensor.shape
                and other.dtype == tensor.dtype
                and other.device == tensor.device
                and torch.equal(other, tensor)
            ):
                return other
        return tensor
