"""Inputs and state that a module's output depends on; compared before an output is reused."""

from __future__ import annotations

import enum
import functools
import operator
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten

from sparsesam.ascent.graph import is_strided
from sparsesam.ascent.replaced_calls import ReplacedCall, is_compiled

#: immutable values that can be compared by ``==``
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device, slice, range)
#: values without mutable contents
_UNCHANGING = frozenset((*_PLAIN, types.ModuleType, torch.memory_format, torch.layout))
_MOST_VALUES = 50_000
#: attributes that every module has, and calls that the engine replaces during a pass
_BASE = frozenset((*nn.Module().__dict__, "forward", "_compiled_call_impl"))
_NORMALIZATION = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)


class Inputs:
    """The arguments of a call. `of` returns None if they hold something that cannot be compared."""

    def __init__(self, leaves: list[Any], structure: TreeSpec | int) -> None:
        self.leaves, self.structure = leaves, structure
        self._versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in leaves]
        self._copies = [
            (leaf, leaf.clone()) for leaf in leaves if isinstance(leaf, Tensor) and _has_external_memory(leaf)
        ]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs | None:
        leaves: list[Any]
        structure: TreeSpec | int
        if not kwargs and all(isinstance(argument, Tensor) for argument in args):
            leaves, structure = list(args), len(args)  # tree_flatten takes longer than a small layer
        else:
            leaves, structure = tree_flatten((args, kwargs))
        return cls(leaves, structure) if all(map(_is_comparable, leaves)) else None

    @property
    def are_unchanged(self) -> bool:
        pairs = zip(self.leaves, self._versions, strict=True)
        same = all(leaf._version == version for leaf, version in pairs if isinstance(leaf, Tensor))
        return same and all(torch.equal(leaf, copy) for leaf, copy in self._copies)


def _has_external_memory(tensor: Tensor) -> bool:
    """Whether its memory is not torch's (numpy, another process), so that writes to it do not raise its version."""
    return tensor.device.type == "cpu" and not tensor.untyped_storage().resizable()


def unsupported_leaf(tree: Any) -> str | None:
    """Returns the type of a leaf in a result that is neither an ordinary tensor nor a plain value; None: all are."""
    for leaf in [tree] if isinstance(tree, Tensor) else tree_flatten(tree)[0]:
        if not _is_comparable(leaf):
            return type(leaf).__name__
        if isinstance(leaf, Tensor) and leaf.is_leaf and leaf.requires_grad:
            return "parameter"
    return None


def _is_comparable(leaf: Any) -> bool:
    if isinstance(leaf, Tensor):
        return is_strided(leaf) and not leaf.is_inference()
    return type(leaf) in _PLAIN


class ModuleState:
    """The contents of a module and its submodules: parameters, buffers, flags, attributes, and what these contain."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.values, self._versions, self._unsupported = _read(module)

    def difference(self) -> str | None:
        """Returns what has changed since construction; None: nothing."""
        if self._unsupported is not None:
            return f"a module holds a {self._unsupported}, whose state cannot be compared"
        values, versions, _ = _read(self._module)
        if len(values) != len(self.values):
            return "a parameter, buffer or attribute of a module is added or removed in the forward"
        if not all(map(operator.is_, values, self.values)):
            for now, then in zip(values, self.values, strict=True):
                if now is not then and not _are_equal(now, then):
                    return f"an attribute of a module, of type {type(then).__name__}, changes in the forward"
        if versions != self._versions:
            return "a parameter, buffer or other tensor of a module is written to in the forward"
        return None


def _read(module: nn.Module) -> tuple[list[Any], list[int], str | None]:
    """Returns the values a forward may depend on, the tensors' versions, and the type of what cannot be read."""
    values: list[Any] = []
    versions: list[int] = []
    holders: list[Any] = [module]
    seen: set[int] = set()
    for holder in holders:
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        held = _contents(holder)
        if held is None or len(values) > _MOST_VALUES:
            return values, versions, type(holder).__name__
        values += held
        for value in held:
            if type(value) in _UNCHANGING:
                continue
            if isinstance(value, Tensor):
                versions.append(0 if value.is_inference() else value._version)
            else:
                holders.append(value)
    return values, versions, None


def _contents(holder: Any) -> Sequence[Any] | None:
    """Returns the contents of an object; None: they cannot be read."""
    if isinstance(holder, nn.Module):
        own = [value for name, value in holder.__dict__.items() if name not in _BASE]
        forward = None if is_compiled(holder) else holder.__dict__.get("forward")
        own.append(forward.own if isinstance(forward, ReplacedCall) else forward)
        buffers = () if _ignores_statistics(holder) else holder._buffers.values()
        training = getattr(holder, "training", False)  # frozen ScriptModules lack this attribute
        return [training, *holder._parameters.values(), *buffers, *holder._modules.values(), *own]
    if isinstance(holder, ReplacedCall):  # held by the user's own wrapper around a forward
        return [holder.module, holder.own]
    if isinstance(holder, (list, tuple, set, frozenset)):
        return list(holder)
    if isinstance(holder, dict):
        return [*holder, *holder.values()]
    if isinstance(holder, types.FunctionType):
        cells = [cell.cell_contents for cell in holder.__closure__ or () if cell != _EMPTY]
        return [*cells, holder.__defaults__, holder.__kwdefaults__, *vars(holder).values()]
    if isinstance(holder, (types.MethodType, types.BuiltinFunctionType)):
        return [holder.__self__]
    if isinstance(holder, functools.partial):
        return [holder.func, *holder.args, *holder.keywords.values()]
    if isinstance(holder, (type, enum.Enum)):
        return ()
    has_only_a_dict = hasattr(holder, "__dict__") and type(holder).__basicsize__ == _PlainObject.__basicsize__
    if has_only_a_dict or type(holder) is types.SimpleNamespace:
        return list(vars(holder).values())
    return None


class _PlainObject:
    pass


_EMPTY = types.CellType()


def _ignores_statistics(module: nn.Module) -> bool:
    """Whether the output is independent of the buffers it updates, as in torch's normalization in training mode."""
    return module.training and isinstance(module, _NORMALIZATION) and type(module).forward.__module__[:6] == "torch."


def _are_equal(left: Any, right: Any) -> bool:
    return type(left) in _PLAIN and type(right) is type(left) and bool(left == right)
