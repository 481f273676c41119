"""Batches as trees of tensors with the samples in dimension 0, and the loss of a model on one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def batch_size(batch: Any) -> int:
    """The first dimension of the first tensor of a batch."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise ValueError(f"a batch must hold a tensor with samples in dimension 0, got {type(batch).__name__}")


def leads_with(leaf: Any, size: int) -> bool:
    """Whether this is a tensor with ``size`` samples in dimension 0."""
    return isinstance(leaf, Tensor) and not leaf.is_nested and leaf.dim() > 0 and len(leaf) == size


def slice_batch(batch: Any, samples: slice, size: int) -> Any:
    """The samples of every tensor whose first dimension is ``size``; anything else is shared by them all."""
    return tree_map(lambda leaf: leaf[samples] if leads_with(leaf, size) else leaf, batch)


def to_device(batch: Any, device: torch.device | str) -> Any:
    """The batch detached and moved, ready to be saved for a backward pass."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # Tensors made in inference mode cannot be saved for a backward.
        return (leaf.clone() if leaf.is_inference() else leaf).detach().to(device)

    # Dictionary-like batches of other libraries are not known to torch's pytrees.
    return tree_map(move, dict(batch) if isinstance(batch, Mapping) else batch)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """The model's output for a tensor, a tuple of arguments or a dictionary of named ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def scalar_loss(loss: Any, name: str) -> Tensor:
    """The loss as a tensor without dimensions; ValueError for anything but one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{name} must return one number, got {got}; reduce it with mean or sum")
    return loss.reshape(())
