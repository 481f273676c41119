"""What a module's output depends on beside its inputs: compared before an output is used again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

#: values that are equal if ``==`` says so, and that nobody changes in place
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice, range)
_CONTAINERS = (list, dict, set)
#: a call that is replaced for the duration of a pass
_CALLS = ("forward", "_compiled_call_impl")
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
        self.flags = [getattr(module, "training", False) for module in modules]  # frozen scripts have none
        self.tensors: list[Tensor | None] = []
        self.versions: list[int] = []
        self.attributes = [{k: v for k, v in module.__dict__.items() if k not in _CALLS} for module in modules]
        self.sizes = [
            (value, len(value)) for held in self.attributes for value in held.values() if type(value) in _CONTAINERS
        ]
        for module, held in zip(modules, self.attributes, strict=True):
            skip = isinstance(module, _NORMALIZATION) and module.training
            attributes = (value for value in held.values() if isinstance(value, Tensor))
            buffers = () if skip else module._buffers.values()
            for tensor in (*module._parameters.values(), *buffers, *attributes):
                self.tensors.append(tensor)
                self.versions.append(0 if tensor is None or tensor.is_inference() else tensor._version)

    def difference(self, other: ModuleState) -> str | None:
        """In what the two differ; None: in nothing."""
        if self.flags != other.flags:
            return "training and evaluation mode alternate"
        if len(self.tensors) != len(other.tensors) or any(
            a is not b for a, b in zip(self.tensors, other.tensors, strict=True)
        ):
            return "a parameter or buffer is replaced"
        if self.versions != other.versions:
            return "a parameter or buffer is written to in the forward"
        if any(map(_attributes_differ, self.attributes, other.attributes)):
            return "an attribute of a module changes in the forward"
        if any(len(value) != size for value, size in (*self.sizes, *other.sizes)):
            return "a list or dictionary of a module changes in the forward"
        return None


def _attributes_differ(left: dict[str, Any], right: dict[str, Any]) -> bool:
    return left.keys() != right.keys() or any(
        value is not right[name] and not _are_equal(value, right[name]) for name, value in left.items()
    )


def _are_equal(left: Any, right: Any) -> bool:
    return type(left) in _PLAIN and type(right) is type(left) and bool(left == right)
