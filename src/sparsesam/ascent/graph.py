"""What autograd's graph tells before it is differentiated."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable, Iterator
from typing import Any

from torch import Tensor


def nodes_of(roots: Iterable[Tensor], ends: Container[Any] = ()) -> Iterator[Any]:
    """All nodes of a graph up to ``ends``, which are left out."""
    waiting: list[Any] = [root.grad_fn for root in roots]
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


def has_compiled() -> bool:
    """Whether Dynamo has compiled anything in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and bool(dynamo.utils.counters["frames"])


def is_for_single_use(node: Any) -> bool:
    """A compiled backward that writes to what it saved; torch refuses to run it if the graph is to be kept."""
    function = getattr(node, "_forward_cls", None)
    is_compiled = getattr(function, "compiled_bw", None) is not None
    return is_compiled and bool(getattr(getattr(function, "metadata", None), "bw_donated_idxs", None))


def is_reentrant(node: Any) -> bool:
    return type(node).__name__ == "CheckpointFunctionBackward"
