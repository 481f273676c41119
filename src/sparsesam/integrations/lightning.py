"""Lightning's Trainer needs nothing from here, unless it accumulates gradients over several batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from sparsesam.ascent.rng import RNGSnapshot, RNGState

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class AccumulatedAscent(Callback):
    """The second pass of ``Trainer(accumulate_grad_batches=n)`` sees all n batches, as the first does.

    Lightning hands the optimizer a closure of the last batch only; the gradients of those before it are already
    there. That is enough for the ascent, but the gradient at w + e would be that of one batch, divided by n. So once
    the optimizer has cleared the gradients, the other batches run again, with the random numbers they had before.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[tuple[Any, ...], RNGSnapshot]] = []
        self._cleared = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._batches = []
        takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1
        arguments = (batch, batch_idx) if takes_index else (batch,)
        self._batches.append((arguments, RNGState(pl_module.parameters()).read()))

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        self._cleared = all(parameter.grad is None for parameter in pl_module.parameters())

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called after each pass over the last batch, and before clipping."""
        if not self._cleared:
            return
        noise = RNGState(pl_module.parameters())
        now = noise.read()
        unsynchronized = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        others = self._batches[:-1]
        hook, pl_module._current_fx_name = pl_module._current_fx_name, "training_step"  # for self.log
        for number, (arguments, then) in enumerate(others, start=1):
            noise.write(then)
            with nullcontext() if number == len(others) else unsynchronized():
                output = trainer.strategy.training_step(*arguments)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is not None:
                    trainer.strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
        pl_module._current_fx_name = hook
        noise.write(now)
