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


def is_strided(tensor: Any) -> bool:
    """Whether it is a tensor of the common kind: not sparse, nested or of a class of its own."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_nested


def memory_of(tensor: Tensor) -> int | None:
    """The address of its storage; None if it has none of its own (sparse, nested, sharded, empty, meta, vmap)."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or not is_strided(tensor):
        return None
    return tensor.untyped_storage().data_ptr() or None
