"""What a step must leave as it was: torch's mode stacks, and the hooks of a model and its parameters."""

from __future__ import annotations

import torch
from torch import nn


def modes() -> int:
    """The number of torch's modes that are active: functions, dispatch, saved tensors."""
    saved_tensors = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack() + saved_tensors


def hooks_of(model: nn.Module) -> int:
    """The number of hooks of the modules, and of the parameters and their accumulators."""
    of_modules = sum(
        len(hooks) for module in model.modules() for name, hooks in vars(module).items() if name.endswith("_hooks")
    )
    of_parameters = sum(
        len(getattr(p, name) or ())
        for p in model.parameters()
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
    )
    return of_modules + of_parameters
