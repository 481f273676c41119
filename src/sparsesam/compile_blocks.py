"""torch.compile block by block, so that the second forward can use blocks of the first again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch._functorch.config as functorch
from torch import nn
from torch.utils import _python_dispatch

from sparsesam.distributed.ddp import unwrap

Model = TypeVar("Model", bound=nn.Module)

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_REGIONS = "wrap_inductor_compiled_regions"
#: Whether compiled code runs compiled while the tape's dispatch mode is active; older versions of torch run it eagerly.
COMPILES_WITHIN_MODES = hasattr(_python_dispatch, "is_in_any_mode_without_ignore_compile_internals")


def compile_blocks(model: Model, **options: Any) -> Model:
    """Compiles the repeated blocks of a model in place, with ``block.compile(**options)``, and returns the model.

    A block is a module with parameters and submodules, of a class that the model uses more than once, such as a
    residual block or a transformer layer; of nested blocks, the outermost is compiled. In a model without blocks, the
    outermost modules with parameters are compiled. Modules that are already compiled are not compiled again.

    This compiles faster than ``torch.compile(model)``, because equal blocks share their code. Each block is one
    operation for the second forward, which uses it again if it draws no random numbers and writes to no buffer but, in
    host memory, to running statistics. It is shown by torch's option ``wrap_inductor_compiled_regions``; with a torch
    or a backend without it, blocks always run. A torch that would not compile in recorded passes records nothing.

    It also turns off torch's donated buffers for this process (``torch._functorch.config.donated_buffer``): with them,
    a compiled backward overwrites tensors that the second forward would use.

    Args:
        model: the model, which must not be compiled as a whole.
        options: options of ``torch.compile``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    own = unwrap(model)
    if is_compiled(model) or is_compiled(own):
        raise ValueError(
            f"model must not be compiled as a whole, got a compiled {type(own).__name__}; leave out "
            "torch.compile(model) or model.compile() and call compile_blocks(model) instead"
        )
    counts = Counter(type(module) for module in own.modules() if module is not own and _is_block(module))
    blocks = [*_outermost(own, lambda module: counts[type(module)] > 1)] or [*_outermost(own, _can_compile)]
    if not blocks:
        raise ValueError(
            f"model must have submodules with parameters, got {type(own).__name__} without; a single layer has no part "
            "that could be left out: compile it with model.compile()"
        )
    functorch.donated_buffer = False
    options = _with_regions(**options)
    for block in blocks:
        if not is_compiled(block):
            block.compile(**options)
    return model


def is_compiled(module: nn.Module) -> bool:
    """Whether it is compiled by ``module.compile()``, or returned by ``torch.compile(module)``."""
    return module.__dict__.get("_compiled_call_impl") is not None or "_orig_mod" in module._modules


def _with_regions(*, backend: Any = "inductor", mode: str | None = None, **options: Any) -> dict[str, Any]:
    """torch.compile takes a mode or options: a mode is written out as its options."""
    if backend != "inductor" or _REGIONS not in torch._inductor.list_options():
        return {"backend": backend, "mode": mode, **options}
    own = torch._inductor.list_mode_options(mode) if mode is not None else {}
    return {"backend": backend, **options, "options": {_REGIONS: True, **own, **(options.get("options") or {})}}


def _is_block(module: nn.Module) -> bool:
    has_modules = next(module.children(), None) is not None
    return has_modules and not isinstance(module, _CONTAINERS) and _can_compile(module)


def _can_compile(module: nn.Module) -> bool:
    is_called = type(module).forward is not nn.Module.forward
    has_parameters = next(module.parameters(), None) is not None
    return is_called and has_parameters and not isinstance(module, torch.jit.ScriptModule)


def _outermost(module: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> Iterator[nn.Module]:
    for child in module.children():
        if is_wanted(child):
            yield child
        elif not is_compiled(child):
            yield from _outermost(child, is_wanted)
