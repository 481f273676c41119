"""Accelerate's ``accelerator.accumulate`` with two passes per step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.sam import SharpnessAware
from sparsesam.utils.restore import RNGSnapshot, RNGState

if TYPE_CHECKING:
    from accelerate import Accelerator


class AccumulatedPasses:
    """Runs both passes over the micro-batches of a step, in a loop with ``accelerator.accumulate``.

        passes = AccumulatedPasses(accelerator, model, opt)
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = passes(lambda x=x, y=y: loss_fn(model(x), y))
                prepared.step()
                prepared.zero_grad()

    ``model`` and ``prepared`` are returned by ``accelerator.prepare``; ``opt`` is either optimizer. At the last
    micro-batch of a step, all micro-batches run again at w + e with the random numbers of the first pass, so the
    variables that the functions use must not change in between.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: Optimizer) -> None:
        optimizer = getattr(optimizer, "optimizer", optimizer)
        if not isinstance(optimizer, SharpnessAware):
            raise TypeError(
                f"the optimizer must be sparsesam's SAM or SSAM, got {type(optimizer).__name__}; with a Trainer write "
                "optimizers=(sparsesam.SAM(base, model, rho=0.05), None), or use transformers' own Trainer"
            )
        self._accelerator, self._model, self.optimizer = accelerator, model, optimizer
        self._rng = RNGState(model.parameters())
        self._micro_batches: list[tuple[Callable[[], Tensor], RNGSnapshot]] = []

    def __call__(self, compute_loss: Callable[[], Tensor]) -> Tensor:
        """Run one micro-batch, at the last one all of them at w + e, and return its loss at w.

        In steps without a first pass, return 0, and at the last micro-batch the sum of the losses at w + e.
        """

        def forward_backward() -> Tensor:
            loss = compute_loss()
            inputs = self.optimizer.ascent_inputs  # only what the ascent needs
            self._accelerator.backward(loss, **({} if inputs is None else {"inputs": inputs}))
            return loss.detach()

        return self.run(forward_backward)

    def run(self, forward_backward: Callable[[], Tensor]) -> Tensor:
        """As above, with a function that also runs the backward."""
        state = self._rng.read()
        loss = torch.zeros((), device=self._accelerator.device)
        needs_first_pass = self.optimizer.needs_first_pass
        if needs_first_pass:
            with self.optimizer.first_pass():
                loss = forward_backward()
        self._micro_batches.append((forward_backward, state))  # unless it raised
        if self._accelerator.sync_gradients:
            all_of_them, self._micro_batches = self._micro_batches, []
            with self.optimizer.perturbed():
                for number, (again, then) in enumerate(all_of_them, start=1):
                    if needs_first_pass:
                        self._rng.write(then)
                    is_last = number == len(all_of_them)
                    with nullcontext() if is_last else self._accelerator.no_sync(self._model):
                        second = again()
                    loss = loss if needs_first_pass else loss + second
        return loss
