"""Restores the state of a model after it has run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from sparsesam.utils.rng import RNGState


@contextmanager
def preserve_model_state(model: nn.Module, *, evaluate: bool = True, freeze: bool = True) -> Iterator[None]:
    """Enable gradients in the block; on exit, restore training modes, requires_grad, buffers and random states.

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
        _remember_flags(model, stack, evaluate=evaluate, freeze=freeze)
        _remember_buffers(model, stack)
        yield


def _remember_flags(model: nn.Module, stack: ExitStack, *, evaluate: bool, freeze: bool) -> None:
    for module in model.modules():
        stack.callback(setattr, module, "training", module.training)
        # Not eval(): some modules change their weights there (merged adapters).
        module.training = module.training and not evaluate
    for parameter in model.parameters() if freeze else ():
        stack.callback(parameter.requires_grad_, parameter.requires_grad)
        parameter.requires_grad_(False)


def _remember_buffers(model: nn.Module, stack: ExitStack) -> None:
    """Restore all buffers when the stack is closed: the same tensors with the same values.

    Values are compared, because version counters do not show all writes (batch normalization does not raise them), and
    an unchanged buffer must not be written to, so that graphs that saved it stay valid.
    """
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                stack.callback(_put_back, module, name, buffer, buffer.clone())


@torch.no_grad()
def _put_back(module: nn.Module, name: str, buffer: Tensor, value: Tensor) -> None:
    module._buffers[name] = buffer
    if not torch.equal(buffer, value):
        buffer.copy_(value)
