"""Replaces the calls of modules within a ``with`` block."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

#: called with the module's own forward and the arguments of the call
Replacement = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class ReplacedCall:
    """Replaces forward in a module's ``__dict__``; ``own`` is what was there before, or None."""

    def __init__(self, module: nn.Module, key: str, replacement: Replacement, seen: set[nn.Module]) -> None:
        self.module, self.__wrapped__, self.replacement, self.seen = module, getattr(module, key), replacement, seen
        self.own = module.__dict__.get(key)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.__wrapped__(*args, **kwargs)
        self.seen.add(self.module)
        return self.replacement(self.__wrapped__, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """A copy of the module that is made within the block gets the original forward."""
        if self.own is not None:
            return copy.deepcopy(self.own, memo)
        copied = memo[id(self.module)]
        return types.MethodType(type(copied).forward, copied)


@contextmanager
def replaced_calls(replacements: Mapping[nn.Module, Replacement]) -> Iterator[set[nn.Module]]:
    """Within the block, calls of these modules go through their replacements; yields the modules called so far.

    For ``module.compile()`` the compiled call is replaced, not ``forward``, which Dynamo guards on.
    """
    undo: list[tuple[str, ReplacedCall]] = []
    seen: set[nn.Module] = set()
    try:
        for module, replacement in replacements.items():
            key = "_compiled_call_impl" if is_compiled_in_place(module) else "forward"
            undo.append((key, ReplacedCall(module, key, replacement, seen)))
            module.__dict__[key] = undo[-1][1]
        yield seen
    finally:
        try:
            _undo(undo)
        except BaseException:  # Ctrl-C while restoring
            _undo(undo)
            raise


def _undo(undo: list[tuple[str, ReplacedCall]]) -> None:
    while undo:
        key, call = undo[-1]
        attributes = call.module.__dict__
        if attributes.get(key) is call:  # not if the user has assigned another one
            if call.own is None:
                del attributes[key]
            else:
                attributes[key] = call.own
        undo.pop()


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether it is compiled by ``module.compile()``."""
    return module.__dict__.get("_compiled_call_impl") is not None


def is_compiled(module: nn.Module) -> bool:
    """Whether it is compiled by ``module.compile()``, or returned by ``torch.compile(module)``."""
    return is_compiled_in_place(module) or "_orig_mod" in module._modules
