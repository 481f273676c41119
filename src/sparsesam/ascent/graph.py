"""Helpers to inspect tensors, and the autograd graph before it is differentiated."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

_PLAIN = (Tensor, nn.Parameter)


def tensors_in(*trees: Any) -> list[Tensor]:
    """Returns the tensors in tuples, lists and dictionaries, in order."""
    found: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, (tuple, list)) and tree:
            found += tensors_in(*tree)
        elif isinstance(tree, dict) and tree:
            found += tensors_in(*tree.values())
    return found


def is_strided(tensor: Any) -> bool:
    """Whether it is an ordinary dense tensor: not sparse, nested, or of a subclass."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def memory_of(tensor: Tensor) -> int | None:
    """Returns the address of the storage; None if there is none (sparse, nested, sharded, empty, meta, vmap)."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not is_strided(tensor):
        return None
    return tensor.untyped_storage().data_ptr() or None


def nodes_of(roots: Iterable[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """Yield all nodes of the graph reachable from ``roots``, up to but without ``ends``."""
    waiting = list(roots)
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node not in ends:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def leaf_of(node: Any) -> Tensor | None:
    """Returns the leaf tensor whose gradient this node accumulates; None for other nodes."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def has_compiled() -> bool:
    """Whether Dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])


def is_for_single_use(node: Any) -> bool:
    """Whether this is a compiled backward that overwrites its saved tensors; torch rejects retain_graph=True for it."""
    function = getattr(node, "_forward_cls", None)
    is_compiled = getattr(function, "compiled_bw", None) is not None
    return is_compiled and bool(getattr(getattr(function, "metadata", None), "bw_donated_idxs", None))


def custom_function_name(node: Any) -> str | None:
    """Returns the name of the user's autograd.Function whose backward this node calls; None for other nodes."""
    function = node._forward_cls if isinstance(node, BackwardCFunction) else None  # type: ignore[attr-defined]
    if function is None or function.__module__.split(".")[0] in ("torch", "sparsesam"):
        return None
    return str(function.__name__)


def autocast_state() -> tuple[Any, ...]:
    """Returns, for each kind of device, the dtype of autocast; False: it is off."""
    kinds = ("cpu", "cuda", "xpu", "mps")
    return tuple(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in kinds)


def is_transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active."""
    in_func = torch._C._functorch.peek_interpreter_stack() is not None
    return in_func or torch.autograd.forward_ad._current_level >= 0
