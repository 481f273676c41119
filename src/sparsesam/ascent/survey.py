"""Finds the modules whose calls the engine may replace."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsesam.ascent.layers import is_layer
from sparsesam.ascent.plan import Plan
from sparsesam.ascent.replaced_calls import is_compiled

#: torch's attention modules, which in evaluation mode take a fast path unless a torch function mode is active
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


@dataclass
class Survey:
    """``clean`` modules hold no perturbed weight; each is listed with all of its submodules.

    ``of_torch``: the clean modules that consist only of torch's own modules, and their number of weights.
    ``layers``: linear and convolution layers with a narrowed backward, and the id of their weight.
    ``without_mode``: modules that must run without a torch function mode.
    """

    clean: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    of_torch: dict[nn.Module, int] = field(default_factory=dict)
    layers: dict[nn.Module, int] = field(default_factory=dict)
    without_mode: list[nn.Module] = field(default_factory=list)

    @property
    def has_clean_parameters(self) -> bool:
        """Whether a clean module has parameters; if none has, there is too little to reuse."""
        return any(next(module.parameters(), None) is not None for module in self.clean)


def survey(model: nn.Module, plan: Plan) -> Survey:
    found = Survey()
    _visit(model, plan, found)
    return found


def _visit(module: nn.Module, plan: Plan, found: Survey) -> tuple[bool, list[nn.Module]]:
    """Returns whether a module is free of perturbed weights, and all modules in it."""
    within, free = [module], True
    is_script = isinstance(module, torch.jit.ScriptModule)
    is_closed = is_compiled(module) or is_script
    for child in module.children():
        if is_closed:  # calls of the modules inside cannot be replaced
            below = list(child.modules())
            child_free = not any(id(parameter) in plan.moved for parameter in child.parameters())
        elif child in found.clean:
            child_free, below = True, found.clean[child]
        else:
            child_free, below = _visit(child, plan, found)
        free = free and child_free
        within += below
    free = free and not any(id(parameter) in plan.moved for parameter in module.parameters(recurse=False))
    if is_compiled(module) or (isinstance(module, _ATTENTION) and not module.training):
        found.without_mode.append(module)
    has_forward = "forward" in module.__dict__ or type(module).forward is not nn.Module.forward
    is_called = has_forward and not is_script
    if free and is_called:
        found.clean[module] = list(dict.fromkeys(within))
        if all(map(_is_of_torch, within)):
            found.of_torch[module] = sum(parameter.numel() for parameter in module.parameters())
    if not is_closed and is_layer(module):
        weight = module._parameters.get("weight")
        if id(weight) in plan.sliced:
            found.layers[module] = id(weight)
    return free, within


def _is_of_torch(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and "forward" not in module.__dict__


def has_forward_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def have_global_hooks() -> tuple[bool, bool]:
    """Whether backward and forward hooks are registered for all modules."""
    every = nn.modules.module
    return (
        bool(every._global_backward_hooks or every._global_backward_pre_hooks),
        bool(every._global_forward_hooks or every._global_forward_pre_hooks),
    )


def has_backward_hooks(module: nn.Module) -> bool:
    return bool(module._backward_hooks or module._backward_pre_hooks)


def has_gradient_hooks(tensor: Tensor) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def hooks_left_out(model: nn.Module, plan: Plan) -> str | None:
    """Returns which hooks would not be called if a pass left something out; None: there are none."""
    backward, forward = have_global_hooks()
    if backward or forward:
        return f"{'backward' if backward else 'forward'} hooks are registered for all modules"
    for module in model.modules():
        if has_backward_hooks(module):
            return f"a backward hook is registered on {type(module).__name__}"
    whole = {id(parameter) for parameter in plan.needed} - plan.sliced.keys()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in whole and has_gradient_hooks(parameter):
            return f"a gradient hook is registered on {name}"
    return None
