"""Hugging Face's Trainer: it runs one backward pass and calls ``optimizer.step()``; here it runs two."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sparsesam.ascent.rng import RNGSnapshot, RNGState
from sparsesam.integrations.extras import required_by
from sparsesam.integrations.metrics import step_metrics
from sparsesam.sharpness_aware import SharpnessAware

with required_by("sparsesam.integrations.hugging_face", '"sparsesam[huggingface]"'):
    from transformers import Trainer


class SharpnessAwareTrainer(Trainer):
    """A Trainer for ``SAM`` and ``SSAM``; to add it to another trainer, ``class Mine(SharpnessAwareTrainer, Other)``.

    Once the gradient of all micro-batches of a step is there, they run again at w + e, with the random numbers of
    the first time. Logged losses are those at w, gradient norms those at w + e; rho, sparsity and counters are logged
    with them.
    """

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Called at the beginning of a step."""
        self._micro_batches: list[tuple[Any, RNGSnapshot]] = []
        return super().get_batch_samples(*args, **kwargs)

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Tensor:
        optimizer, rng = self._sharpness_aware(), RNGState(model.parameters())
        self._micro_batches.append((inputs, rng.read()))
        needs_first_pass = optimizer.needs_first_pass
        here = there = torch.zeros((), device=self.args.device)
        if needs_first_pass:
            with optimizer.first_pass():
                here = super().training_step(model, inputs, *args, **kwargs)
        if not self.accelerator.sync_gradients:
            return here
        with optimizer.perturbed():
            for number, (again, state) in enumerate(self._micro_batches, start=1):
                if needs_first_pass:
                    rng.write(state)
                with nullcontext() if number == len(self._micro_batches) else self.accelerator.no_sync(model):
                    there = there + super().training_step(model, again, *args, **kwargs)
        return here if needs_first_pass else there

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds `step_metrics` to whatever is logged during training, for every reporter."""
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
