"""Batches as trees of tensors with the samples in dimension 0, and the loss of a model on one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


def batch_size(batch: Any) -> int:
    """Returns the number of samples: the size of dimension 0 of the batch's first tensor."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return len(leaf)
    raise ValueError(f"a batch must hold a tensor with samples in dimension 0, got {type(batch).__name__}")


def slice_batch(batch: Any, samples: slice, size: int) -> Any:
    """Slice every tensor that has ``size`` entries in dimension 0; anything else is left as it is."""

    def sliced(leaf: Any) -> Any:
        is_whole = isinstance(leaf, Tensor) and not leaf.is_nested and leaf.dim() > 0 and len(leaf) == size
        return leaf[samples] if is_whole else leaf

    return tree_map(sliced, batch)


def to_device(batch: Any, device: torch.device | str) -> Any:
    """Returns the batch detached and moved to the device, so that autograd can save its tensors."""

    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        # Tensors created in inference mode cannot be saved for backward.
        return (leaf.clone() if leaf.is_inference() else leaf).detach().to(device)

    # torch's pytrees do not know dictionary-like batches of other libraries.
    return tree_map(move, dict(batch) if isinstance(batch, Mapping) else batch)


def call_model(model: nn.Module, inputs: Any) -> Any:
    """Call the model with a tensor, a tuple of positional arguments or a dictionary of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def scalar_loss(loss: Any, name: str) -> Tensor:
    """Returns the loss as a 0-D tensor; raises ValueError unless it is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise ValueError(f"{name} must return one number, got {got}; reduce it with mean or sum")
    return loss.reshape(())
