"""Helpers to inspect trees of tensors and the autograd graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor


def tensors_in(*trees: Any) -> list[Tensor]:
    """Returns the tensors in tuples, lists and dictionaries, in order."""
    found: list[Tensor] = []
    for tree in trees:
        if isinstance(tree, Tensor):
            found.append(tree)
        elif isinstance(tree, (tuple, list, dict)):
            found += tensors_in(*(tree.values() if isinstance(tree, dict) else tree))
    return found


def nodes_of(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield all nodes of the graph reachable from ``roots``."""
    waiting = list(roots)
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]


def leaf_of(node: Any) -> Tensor | None:
    """Returns the leaf tensor whose gradient this node accumulates; None for other nodes."""
    return node.variable if type(node).__name__ == "AccumulateGrad" else None
