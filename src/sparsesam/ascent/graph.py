"""What torch tells of tensors, and of autograd's graph before it is differentiated."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

_PLAIN = (Tensor, nn.Parameter)


def tensors_in(*trees: Any) -> list[Tensor]:
    """Tensors in tuples, lists and dictionaries, in order."""
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
    """Whether it is a tensor of the common kind: not sparse, nested or of a class of its own."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def memory_of(tensor: Tensor) -> int | None:
    """The address of its storage; None if it has none of its own (sparse, nested, sharded, empty, meta, vmap)."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not is_strided(tensor):
        return None
    return tensor.untyped_storage().data_ptr() or None


def nodes_of(roots: Iterable[Any], ends: Container[Any] = ()) -> Iterator[Any]:
    """All nodes of a graph from these on and up to ``ends``, which are left out."""
    waiting = list(roots)
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen and node not in ends:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def leaf_of(node: Any) -> Tensor | None:
    """The tensor whose gradient a node adds to."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None


def next_sequence_nr() -> int:
    """That of the next node of this thread: autograd numbers them as they are made."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


def sequence_nr(node: Any) -> int:
    return int(node._sequence_nr())


def has_compiled() -> bool:
    """Whether Dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])


def is_for_single_use(node: Any) -> bool:
    """A compiled backward that writes to what it saved; torch refuses to run it if the graph is to be kept."""
    function = getattr(node, "_forward_cls", None)
    is_compiled = getattr(function, "compiled_bw", None) is not None
    return is_compiled and bool(getattr(getattr(function, "metadata", None), "bw_donated_idxs", None))


def custom_function_name(node: Any) -> str | None:
    """The name of the user's autograd.Function whose backward a node calls."""
    function = node._forward_cls if isinstance(node, BackwardCFunction) else None  # type: ignore[attr-defined]
    if function is None or function.__module__.split(".")[0] in ("torch", "sparsesam"):
        return None
    return str(function.__name__)


def is_reentrant(node: Any) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"


def is_transformed() -> bool:
    """Within torch.func's transformations and forward-mode differentiation."""
    in_func = torch._C._functorch.peek_interpreter_stack() is not None
    return in_func or torch.autograd.forward_ad._current_level >= 0
