"""The memory that activations take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class SavedBytes:
    """Counts the bytes that autograd saves for backward within ``with saved.counted():``, each storage once."""

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        self.total = 0
        # By address of the storage, not of its data: on the meta device, data has none.
        self._seen = {tensor.untyped_storage()._cdata for tensor in known if _has_storage(tensor)}

    def counted(self) -> saved_tensors_hooks:
        return saved_tensors_hooks(self._note, lambda tensor: tensor)

    def _note(self, tensor: Tensor) -> Tensor:
        if _has_storage(tensor):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.total += storage.nbytes()
        return tensor.detach()  # an output that is saved with its own graph would never be freed


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "full_tensor")
