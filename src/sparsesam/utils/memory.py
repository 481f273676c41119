"""The memory that activations take, and the memory that is free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_MEMINFO = Path("/proc/meminfo")


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


def free_bytes(device: torch.device) -> int | None:
    """Returns the memory that can still be allocated on the device; None if unknown."""
    if device.type in ("cuda", "xpu"):
        module: Any = getattr(torch, device.type)
        held_back = module.memory_reserved(device) - module.memory_allocated(device)
        return int(module.mem_get_info(device)[0] + held_back)
    if device.type == "mps":
        return torch.mps.recommended_max_memory() - torch.mps.current_allocated_memory()
    if device.type == "cpu" and _MEMINFO.exists():  # free pages alone would leave out the page cache
        lines = _MEMINFO.read_text().splitlines()
        return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)
    if device.type == "cpu" and "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return None


def _has_storage(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested and not hasattr(tensor, "full_tensor")
