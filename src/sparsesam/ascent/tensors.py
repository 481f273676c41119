"""Tensors inside arguments and results, and where their values are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

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


def memory_of(tensor: Tensor) -> int | None:
    """The address of its storage; None if it has none of its own (sparse, nested, sharded, empty, meta, vmap)."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
        return None
    return tensor.untyped_storage().data_ptr() or None
