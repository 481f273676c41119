"""What can be told of a call of a torch function from its name, arguments and result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

DIFFERENTIATION = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
_NORMALIZATION = (nn.functional.batch_norm, nn.functional.instance_norm, torch.batch_norm, torch.instance_norm)
_REMEMBERED = (Tensor, int, float, bool, complex, str, type(None), torch.Size, torch.dtype, torch.device)


def is_attribute(func: Any) -> bool:
    return getattr(func, "__name__", "") == "__get__"


def version_of(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def argument_of(args: tuple[Any, ...], kwargs: dict[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def written_by(func: Callable[..., Any], args: Any, kwargs: Any) -> Tensor | None:
    """The tensor that a call writes to, told by the conventions of torch's names."""
    name = getattr(func, "__name__", "")
    in_place = (name.endswith("_") and not name.endswith("__")) or (
        name.startswith("__i")
        and name.endswith("__")
        and name not in ("__index__", "__int__", "__invert__", "__init__")
    )
    if "out" in kwargs and isinstance(kwargs["out"], Tensor):
        return kwargs["out"]
    flagged = kwargs.get("inplace", False) is True
    if (in_place or flagged or name in ("__setitem__", "__set__")) and args and isinstance(args[0], Tensor):
        return args[0]
    return None


def can_be_remembered(result: Any) -> bool:
    """Tensors and plain values; what can be changed without torch, such as numpy's arrays, is made anew."""
    if type(result) in (tuple, list) or hasattr(result, "_fields") or type(result).__module__ == "torch.return_types":
        return all(can_be_remembered(item) for item in result)
    return isinstance(result, _REMEMBERED) and not (isinstance(result, Tensor) and result.is_inference())


def moves_statistics(func: Callable[..., Any], args: Any, kwargs: Any) -> bool:
    """Whether a call is one with which a normalization layer moves its statistics, and does no more with them."""
    if func in _NORMALIZATION:
        return bool(argument_of(args, kwargs, 5, "training") or kwargs.get("use_input_stats", False))
    counts = func in (Tensor.add_, Tensor.__iadd__, Tensor.__float__)
    return counts and isinstance(args[0], Tensor) and not args[0].is_floating_point()


def rerun_in_backward() -> bool:
    """Whether hooks on saved tensors are active, as inside torch.utils.checkpoint."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
