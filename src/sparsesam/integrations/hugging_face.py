"""Hugging Face's Trainer, extended from one forward-backward pass per step to two."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from sparsesam.integrations.accelerate import AccumulatedPasses
from sparsesam.integrations.extras import required_by
from sparsesam.integrations.metrics import step_metrics

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
            optimizer: Any = self.optimizer
            self._passes = AccumulatedPasses(self.accelerator, model, optimizer)
        return self._passes.run(partial(super().training_step, model, inputs, *args, **kwargs))

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Add `step_metrics` to the training logs, for every reporter."""
        if "loss" in logs and self._passes is not None:
            logs = {**logs, **step_metrics(self._passes.optimizer)}
        super().log(logs, *args, **kwargs)
