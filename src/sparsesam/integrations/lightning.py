"""Accumulation, fp16 and logging with Lightning's Trainer.

It calls ``optimizer.step(closure)``, so plain training works without this module.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer

from sparsesam.integrations.extras import required_by
from sparsesam.integrations.metrics import step_metrics
from sparsesam.sam import SharpnessAware
from sparsesam.utils.restore import RNGSnapshot, RNGState, Snapshot, statistics_of

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
    from pytorch_lightning.plugins import MixedPrecision
else:
    # Both packages may be installed, with separate classes; prefer the one that is already imported.
    _names = ("lightning.pytorch", "pytorch_lightning")
    try:
        _lightning = import_module(next((name for name in _names if name in sys.modules), _names[0]))
    except ImportError:
        with required_by("sparsesam.integrations.lightning", '"sparsesam[lightning]"'):
            _lightning = import_module(_names[1])
    Callback, MixedPrecision = _lightning.Callback, _lightning.plugins.MixedPrecision


class AccumulatedAscent(Callback):
    """Runs the second pass of ``Trainer(accumulate_grad_batches=n)`` over all n batches, like the first.

    Lightning's closure runs the last batch only. This callback reruns the others at w + e, with their original random
    numbers; without it, the optimizer rejects the closure.

    In steps with a single pass at w + e, gradients at w are not needed: batches before the last run only their
    forward at w, for what ``training_step`` logs, and normalization statistics are left unchanged.
    """

    def __init__(self) -> None:
        self._batches: list[tuple[tuple[Any, ...], RNGSnapshot]] = []
        self._statistics: Snapshot | None = None  # set during a forward-only batch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        optimizer = _sharpness_aware(trainer)
        # Stochastic weight averaging (SWA) ends with an epoch without backward passes.
        optimizer.closure_accumulates = not trainer.fit_loop._skip_backward
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._batches = []
        if optimizer.closure_accumulates:
            takes_index = len(inspect.signature(pl_module.training_step).parameters) > 1
            arguments = (batch, batch_idx) if takes_index else (batch,)
            self._batches.append((arguments, RNGState(pl_module.parameters()).read()))
            if optimizer.is_one_pass and trainer.fit_loop._should_accumulate():
                trainer.fit_loop._skip_backward = True
                self._statistics = Snapshot(statistics_of(pl_module.modules()))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if self._statistics is not None:
            trainer.fit_loop._skip_backward = False
            self._statistics.restore()
            self._statistics = None

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        self.on_train_batch_end(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Called after each pass over the last batch, before clipping."""
        if isinstance(optimizer, SharpnessAware) and optimizer.is_perturbed:
            self.run_others_again(trainer, pl_module, optimizer)

    def run_others_again(self, trainer: Trainer, pl_module: LightningModule, optimizer: SharpnessAware) -> None:
        """Run the batches of this step before the last at w + e; further calls in this step do nothing."""
        optimizer.repeat_micro_batches()
        rng = RNGState(pl_module.parameters())
        now = rng.read()
        unsynchronized = getattr(trainer.strategy, "block_backward_sync", nullcontext)
        others, self._batches = self._batches[:-1], []
        hook, pl_module._current_fx_name = pl_module._current_fx_name, "training_step"  # for self.log
        for number, (arguments, then) in enumerate(others, start=1):
            rng.write(then)
            with nullcontext() if number == len(others) else unsynchronized():
                output = trainer.strategy.training_step(*arguments)
                loss = output["loss"] if isinstance(output, Mapping) else output
                if loss is not None:
                    trainer.strategy.backward(loss / trainer.accumulate_grad_batches, optimizer)
        pl_module._current_fx_name = hook
        rng.write(now)


class SharpnessAwareMixedPrecision(MixedPrecision):
    """fp16 with a GradScaler: ``Trainer(plugins=[SharpnessAwareMixedPrecision("16-mixed", "cuda")])``.

    Lightning's own plugin runs the closure once and calls ``step()`` without it. This plugin runs both passes, then
    unscales, clips and applies the gradient at w + e. The ascent does not depend on the scale of its gradient.
    """

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Any, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        scaler = self.scaler
        if scaler is None or not isinstance(optimizer, SharpnessAware) or not model.automatic_optimization:
            return super().optimizer_step(optimizer, model=model, closure=closure, **kwargs)

        def call() -> Any:
            result = closure()
            if optimizer.is_perturbed:
                for callback in model.trainer.callbacks:  # type: ignore[attr-defined]
                    if isinstance(callback, AccumulatedAscent):
                        callback.run_others_again(model.trainer, model, optimizer)
            return result

        def unscale_clip_step(optimizer: SharpnessAware) -> None:
            """Called with the gradient at w + e, unless the step is skipped."""
            scaler.unscale_(optimizer)
            self._after_closure(model, optimizer)
            scaler.step(optimizer)
            scaler.update()

        stepper: Any = SimpleNamespace(step=unscale_clip_step)
        return optimizer.step(call, scaler=stepper, **kwargs)


class SharpnessAwareMonitor(Callback):
    """Logs `step_metrics` to the Trainer's loggers."""

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        metrics = step_metrics(_sharpness_aware(trainer))
        self.log_dict(metrics, on_step=True, on_epoch=False)  # type: ignore[attr-defined]


def _sharpness_aware(trainer: Trainer) -> SharpnessAware:
    found = [optimizer for optimizer in trainer.optimizers if isinstance(optimizer, SharpnessAware)]
    if not found:
        raise TypeError(
            "configure_optimizers must return sparsesam's SAM or SSAM, got "
            f"{', '.join(type(optimizer).__name__ for optimizer in trainer.optimizers)}"
        )
    return found[0]
