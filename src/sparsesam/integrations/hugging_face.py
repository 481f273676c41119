"""Hugging Face's Trainer, extended from one forward-backward pass per step to two."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsesam.integrations.accelerate import AccumulatedPasses
from sparsesam.integrations.extras import required_by
from sparsesam.integrations.metrics import step_metrics
from sparsesam.sam import SharpnessAware

with required_by("sparsesam.integrations.hugging_face", '"sparsesam[huggingface]"'):
    from transformers import Trainer


class SharpnessAwareTrainer(Trainer):
    """A Trainer for ``SAM`` and ``SSAM``; combine it with another one as ``class Mine(SharpnessAwareTrainer, Other)``.

    After the gradients of all micro-batches of a step are accumulated, the micro-batches run again at w + e with the
    random numbers of the first pass. Losses are logged at w, gradient norms at w + e; rho, sparsity and counters are
    logged too.
    """

    _passes: AccumulatedPasses | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Called at the start of each step."""
        self._passes = None
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        if self._passes is None:
            self._passes = AccumulatedPasses(self.accelerator, model, self._sharpness_aware())
        here, there = self._passes.run(partial(super().training_step, model, inputs, *args, **kwargs))
        return here if here is not None else sum(there, torch.zeros((), device=self.args.device))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add `step_metrics` to the training logs, for every reporter."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if "loss" in logs and isinstance(optimizer, SharpnessAware):
            logs = {**logs, **step_metrics(optimizer)}
        super().log(logs, *args, **kwargs)

    def _sharpness_aware(self) -> SharpnessAware:
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"optimizers must hold sparsesam's SAM or SSAM, got {type(optimizer).__name__}; write "
                "optimizers=(sparsesam.SAM(base, model, rho=0.05), None), or use transformers' own Trainer"
            )
        return optimizer
