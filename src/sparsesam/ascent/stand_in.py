"""Tensors without values: they have the shape of one that is gone, and refuse to be looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsesam.ascent.calls import is_attribute

#: What a stand-in can tell of the tensor that it stands for.
KNOWN = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "is_nested")
_MESSAGE = "the second pass looks at a value that the first pass had no more use for"


class ValueGoneError(RuntimeError):
    """A value was wanted that the first pass had no more use for."""


class StandIn(Tensor):
    """Takes no memory; a torch function called with it raises `ValueGoneError`, and so does a backward through it."""

    refusals = 0  # counted, because a model may catch the error and go on

    @classmethod
    def like(cls, shape: torch.Size, dtype: torch.dtype, device: torch.device, requires_grad: bool) -> Tensor:
        # Code that torch does not see finds no plausible numbers.
        poison = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
        room = torch.full((), poison, dtype=dtype, device=device, requires_grad=requires_grad)
        with torch.enable_grad():
            empty: Tensor = _NoWayBack.apply(room, shape)
        return empty.as_subclass(cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_attribute(func) and func.__self__.__name__ in KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise cls.refusal()

    @classmethod
    def refusal(cls) -> ValueGoneError:
        cls.refusals += 1
        return ValueGoneError(_MESSAGE)


class _NoWayBack(torch.autograd.Function):
    """Operations that torch does not see (custom functions) may still build a graph on a stand-in."""

    @staticmethod
    def forward(ctx: Any, room: Tensor, shape: torch.Size) -> Tensor:
        return room.expand(shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        raise StandIn.refusal()
