"""Accelerate's ``accelerator.accumulate`` with two passes per step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsesam.ascent.rng import RNGSnapshot, RNGState
from sparsesam.sharpness_aware import SharpnessAware

if TYPE_CHECKING:
    from accelerate import Accelerator


class AccumulatedPasses:
    """Both passes over the micro-batches of a step, in a loop with ``accelerator.accumulate``.

        passes = AccumulatedPasses(accelerator, model, opt)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = passes(lambda x=x, y=y: loss_fn(model(x), y))
                prepared.step()
                prepared.zero_grad()

    ``model`` and ``prepared`` are what ``accelerator.prepare`` returned, ``opt`` is the optimizer itself. In the last
    micro-batch of a step all of them run again at w + e, with the random numbers of the first time, so what the
    functions refer to must not change in between.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: SharpnessAware) -> None:
        self._accelerator, self._model = accelerator, model
        self._optimizer = optimizer
        self._rng = RNGState(model.parameters())
        self._micro_batches: list[tuple[Callable[[], Tensor], RNGSnapshot]] = []

    def __call__(self, compute_loss: Callable[[], Tensor]) -> Tensor:
        """Run one micro-batch; returns its loss at w (at w + e in steps that have only that pass)."""
        accelerator, optimizer = self._accelerator, self._optimizer
        self._micro_batches.append((compute_loss, self._rng.read()))
        needs_first_pass = optimizer.needs_first_pass
        loss: Tensor | None = None
        if needs_first_pass:
            with optimizer.first_pass():
                loss = compute_loss()
                accelerator.backward(loss)
        if not accelerator.sync_gradients:
            return torch.zeros(()) if loss is None else loss.detach()
        others, self._micro_batches = self._micro_batches, []
        with optimizer.perturbed():
            for number, (again, state) in enumerate(others, start=1):
                if needs_first_pass:
                    self._rng.write(state)
                with nullcontext() if number == len(others) else accelerator.no_sync(self._model):
                    there = again()
                    accelerator.backward(there)
        return (there if loss is None else loss).detach()
