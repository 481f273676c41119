"""What is restored after a pass: copies of tensors, a model's state, the states of random generators."""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Snapshot:
    """Copies of tensors, to be restored later."""

    @torch.no_grad()
    def __init__(self, tensors: Iterable[Tensor]) -> None:
        # Grouped by device and dtype, so that an accelerator copies each group in one launch.
        groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for tensor in tensors:
            groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        self._saved = [(group, [torch.empty_like(tensor) for tensor in group]) for group in groups.values()]
        for group, values in self._saved:
            torch._foreach_copy_(values, group)

    @torch.no_grad()
    def restore(self) -> None:
        for group, values in self._saved:
            torch._foreach_copy_(group, values)

    @torch.no_grad()
    def restore_changed(self) -> None:
        """Write only to tensors with other values: a buffer may be read-only memory, or expanded. It synchronizes."""
        for group, values in self._saved:
            for tensor, value in zip(group, values, strict=True):
                if tensor.layout is not torch.strided or not torch.equal(tensor, value):
                    tensor.copy_(value)


def statistics_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Returns the running statistics of layers in training mode.

    Layers are recognized by the names of their buffers, so that custom normalization layers are included; lazy ones
    have none before their first forward. What is written to them does not raise version counters, as in batch
    normalization: graphs that saved them stay valid.
    """
    return [
        buffer.data
        for module in modules
        if getattr(module, "training", False)  # frozen ScriptModules lack this attribute
        for name, buffer in module._buffers.items()  # as named_buffers() does, which is slow for every step
        if buffer is not None and name in _STATISTICS and not is_lazy(buffer)
    ]


@contextmanager
def preserve_model_state(model: nn.Module, *, evaluate: bool = True, freeze: bool = True) -> Iterator[None]:
    """Enable gradients in the block; on exit, restore modes, requires_grad, gradients, buffers and random states.

    ``evaluate``: run in evaluation mode. ``freeze``: no parameter requires a gradient within the block.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        rng = RNGState(model.parameters())
        stack.callback(rng.write, rng.read())
        stack.callback(torch.clear_autocast_cache)
        torch.clear_autocast_cache()
        # torch's fused transformer kernels run only without gradients and hide the layers.
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            # cuDNN has no backward of a recurrent layer in evaluation mode, and no second derivative in any mode.
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            # Compiled graphs do not run the hooks and have no second derivative.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        if isinstance(model, nn.parallel.DistributedDataParallel):
            stack.enter_context(model.no_sync())
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
            # Not eval(): some modules change their weights there (merged adapters).
            module.training = module.training and not evaluate
            for name, buffer in module._buffers.items():
                stack.callback(operator.setitem, module._buffers, name, buffer)
        for parameter in model.parameters():
            stack.callback(setattr, parameter, "grad", parameter.grad)
            if freeze:
                stack.callback(parameter.requires_grad_, parameter.requires_grad)
                parameter.requires_grad_(False)
        # Graphs that saved a buffer stay valid if its version is not raised.
        stack.callback(Snapshot(buffer.data for buffer in model.buffers()).restore_changed)
        yield


class WarnOfPerturbedWeights:
    """A hook of the model inside perturbed(). A copy of the model that is made there gets a function without effect."""

    def __call__(self, *_: object) -> None:
        warnings.warn(
            "the model's state_dict() holds the perturbed weights w + e here; save it after the step, or outside of "
            "perturbed() and of the closure",
            RuntimeWarning,
            stacklevel=3,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return type, (slice(None),)  # the class slice, which takes any three arguments


RNGSnapshot = tuple[Tensor, ...]


class RNGState:
    """Reads and sets the states of torch's global generators, from which dropout draws."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        devices = {tensor.device for tensor in tensors}
        self._devices = sorted((d for d in devices if d.type in ("cuda", "xpu", "mps")), key=str)

    def read(self) -> RNGSnapshot:
        return (torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(*_index(d)) for d in self._devices))

    def write(self, state: RNGSnapshot) -> None:
        torch.set_rng_state(state[0])
        for device, saved in zip(self._devices, state[1:], strict=True):
            torch.get_device_module(device).set_rng_state(saved, *_index(device))


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)
