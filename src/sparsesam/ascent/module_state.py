"""What a module's output depends on beside its inputs: compared before an output is used again."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

#: values that are equal if ``==`` says so, and that nobody changes in place
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice, range)
_CONTAINERS = (list, dict, set)
#: what every module has, and calls that are replaced for the duration of a pass
_BASE = frozenset((*nn.Module().__dict__, "forward", "_compiled_call_impl"))
#: in training mode their output does not depend on the running statistics, which DDP may overwrite
_NORMALIZATION = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Inputs:
    """The arguments of a call. ``None`` from `of` means that they hold something that cannot be compared."""

    def __init__(self, leaves: list[Any], structure: TreeSpec | int) -> None:
        self.leaves, self.structure = leaves, structure
        self.versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        leaves: list[Any]
        structure: TreeSpec | int
        if not kwargs and all(isinstance(argument, Tensor) for argument in args):
            leaves, structure = list(args), len(args)  # torch's way takes longer than a small layer
        else:
            leaves, structure = tree_flatten((args, kwargs))
        return cls(leaves, structure) if all(map(_is_comparable, leaves)) else None

    @property
    def are_unchanged(self) -> bool:
        return all(
            leaf._version == version
            for leaf, version in zip(self.leaves, self.versions, strict=True)
            if isinstance(leaf, Tensor)
        )


def strange_leaf(tree: Any) -> str | None:
    """The type of something in a result that is neither a common tensor nor a plain value."""
    for leaf in [tree] if isinstance(tree, Tensor) else tree_flatten(tree)[0]:
        if not _is_comparable(leaf):
            return type(leaf).__name__
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
            return "parameter"
    return None


def _is_comparable(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        common = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
        return common and not (leaf.is_nested or leaf.is_inference())
    return type(leaf) in _PLAIN


class ModuleState:
    """Parameters, buffers, flags and attributes of a module and all modules in it, by identity and version."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._values, self._versions = _read(modules)

    def difference(self) -> str | None:
        """What has changed since; None: nothing."""
        values, versions = _read(self._modules)
        if len(values) != len(self._values):
            return "a parameter, buffer or attribute of a module is added or removed in the forward"
        if not all(map(operator.is_, values, self._values)):
            for now, then in zip(values, self._values, strict=True):
                if now is not then and not _are_equal(now, then):
                    return f"an attribute of a module changes in the forward, from one {type(then).__name__} to another"
        if versions != self._versions:
            return "a parameter, buffer, list or dictionary of a module is written to in the forward"
        return None


def _read(modules: Sequence[nn.Module]) -> tuple[list[Any], list[int]]:
    """All values that a forward may depend on, and the versions and sizes of those that can change in place."""
    values: list[Any] = []
    versions: list[int] = []
    for module in modules:
        held = module.__dict__
        own = [value for name, value in held.items() if name not in _BASE]
        tensors = [*module._parameters.values(), *(value for value in own if isinstance(value, Tensor))]
        if not (isinstance(module, _NORMALIZATION) and module.training):
            tensors += module._buffers.values()
        values += (getattr(module, "training", False), *module._modules.values(), *own, *tensors)
        versions += [0 if one is None or one.is_inference() else one._version for one in tensors]
        versions += [len(value) for value in own if type(value) in _CONTAINERS]
    return values, versions


def _are_equal(left: Any, right: Any) -> bool:
    return type(left) in _PLAIN and type(right) is type(left) and bool(left == right)
