"""When a closure's ``backward()`` may wait until the closure returns, and what it may do meanwhile.

A closure that looks at gradients must find all of them; one that returns without doing so needs only those of the
ascent. So its backward waits, until it returns or does anything that could tell.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from sparsesam.ascent.graph import function_of_ones_own
from sparsesam.ascent.survey import has_gradient_hooks
from sparsesam.distributed import is_distributed

_READS = (
    "item tolist detach clone cpu to float double half int long bool size dim numel __len__ __float__ __int__ __bool__ "
    "__format__ __repr__ add sub mul div neg __radd__ __rsub__ __rmul__ __rdiv__ sqrt exp log abs "
    "eq ne __eq__ __ne__ lt le gt ge sum mean max min argmax argmin topk softmax isnan isfinite isinf "
    "__getitem__ view view_as reshape flatten squeeze unsqueeze expand_as t type"
)
_FUNCTIONS = "isnan isfinite isinf is_tensor stack cat argmax topk softmax sum mean max exp sqrt eq"
_ATTRIBUTES = ("shape", "device", "dtype", "requires_grad", "is_leaf", "ndim", "layout", "is_cuda")

#: functions that neither change a tensor nor depend on a backward pass: what people log a loss and an accuracy with
HARMLESS: frozenset[Any] = frozenset(
    (
        *(getattr(Tensor, name) for name in _READS.split()),
        *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
        *(getattr(torch, name) for name in _FUNCTIONS.split()),
        torch._C._set_grad_enabled,  # torch.no_grad()
    )
)


def is_harmless(func: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call may come before a backward pass that is due."""
    return func in HARMLESS and kwargs.get("out") is None


def backward_context() -> tuple[Any, ...]:
    """What a backward pass depends on beside its graph."""
    autocast = (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda", "xpu"))
    cudnn = torch.backends.cudnn
    return (
        *autocast,
        torch.is_anomaly_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        torch.cuda.is_initialized() and (cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32),
        _get_current_dispatch_mode(),
    )


def why_at_once(roots: list[Tensor], nodes: list[Any], needed: tuple[Tensor, ...]) -> str | None:
    """What of a backward pass could be noticed before a closure returns; None: nothing."""
    if not all(root.requires_grad for root in roots):
        return "a loss does not require grad"  # torch says so
    if any(map(has_gradient_hooks, needed)):
        return "a gradient hook is registered on a perturbed parameter"
    for node in nodes:
        function = function_of_ones_own(node)
        if function is not None:
            return f"the closure may see what the backward of {function} does"
    # Collective operations write to a loss without torch's knowledge.
    if is_distributed() and any(hasattr(root.grad_fn, "_saved_result") for root in roots):
        return "the loss is a part of its own graph, and ranks may average it"
    return None
