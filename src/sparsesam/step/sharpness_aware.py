"""The two-pass step around a base optimizer: perturb to w + e, compute the gradient there, update from w."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from sparsesam.ascent.perturbation.momentum import require_momentum_setting
from sparsesam.distributed.shards import as_shard_of
from sparsesam.masks.mask import MaskRule
from sparsesam.step.checkpoint import SavedState
from sparsesam.step.closures import run_closure, run_empty_closure
from sparsesam.step.gradients import OutsideGradients
from sparsesam.step.parameters import check_model, scale_rho
from sparsesam.step.passes import Phase, Step
from sparsesam.step.settings import Settings, StepKind
from sparsesam.step.wrapper import OptimizerWrapper, inside_wrappers


class SharpnessAware(OptimizerWrapper):
    """Base class of `SAM`, `SSAM` and `ExtrapolatedSAM`; see their docstrings."""

    #: For trainers whose closure adds to the gradients of earlier micro-batches. Gradients are cleared before the
    #: second pass, so the closure must rerun the earlier micro-batches there. If False, such a closure raises an error.
    closure_accumulates: bool = False

    _step: Step | None  # the step in progress

    def __init__(
        self,
        base: Optimizer,
        model: nn.Module,
        settings: Settings,
        *,
        rho: float,
        mask: MaskRule | None,
        adaptive: bool | Literal["all"],
        eta: float,
    ) -> None:
        check_model(model)
        settings.check_model(model)
        settings.check_mask(mask)
        options = {"rho": rho, "adaptive": adaptive, "eta": eta, "perturb": True}
        super().__init__(base, model, settings, mask, options)
        if settings.follows_momentum:
            require_momentum_setting(base)

    # ---- what the user sees ------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        """The number of steps taken."""
        return self._context.counters.steps

    @property
    def skipped_ascents(self) -> int:
        """The number of steps taken without perturbation because the ascent gradient was zero or not finite."""
        return self._context.counters.read().skipped_ascents

    @property
    def skipped_steps(self) -> int:
        """The number of steps without an update: both gradients were not finite, or the closure computed none."""
        return self._context.counters.skipped_steps

    @property
    def skipped_refreshes(self) -> int:
        """The number of refreshes that kept the old mask because the scores were not finite."""
        return self._context.masks.skipped

    @property
    def masks(self) -> dict[str, Tensor]:
        """The current masks, ``{parameter name: bool tensor}``; empty before a mask's first use."""
        if self.mask is None:
            return {p.name: torch.ones_like(p.parameter, dtype=torch.bool) for p in self._perturbed_params()}
        masks, parameters = self._context.masks.masks or {}, self._parameters
        return {name: as_shard_of(parameters[name], mask.unpack()) for name, mask in masks.items()}

    @property
    def sparsity(self) -> float | None:
        """The share of weights that the current masks do not perturb; None before a mask's first use."""
        return self._context.masks.sparsity

    @property
    def needs_first_pass(self) -> bool:
        """Whether the next step needs a gradient at w before ``perturbed()``."""
        return self.settings.needs_first_pass(self._kind)

    @property
    def is_one_pass(self) -> bool:
        """Whether the next step has only one pass, at w + e."""
        return not self.needs_first_pass and self._kind is not StepKind.PLAIN

    @property
    def is_perturbed(self) -> bool:
        """Whether the weights are at w + e."""
        return self._step is not None and self._step.phase is Phase.PERTURBED

    def repeat_micro_batches(self) -> None:
        """For trainers that run earlier micro-batches of a step again: from here on, `in_second_pass` is True."""
        if self._step is not None:
            self._step.repeats = True

    @property
    def in_second_pass(self) -> bool:
        """Whether the second pass of a step is running: compute metrics and log while this is False.

        A one-pass step has no second pass; its metrics are those at w + e.
        """
        step = self._step
        return step is not None and step.phase is Phase.PERTURBED and (step.needs_first_pass or step.repeats)

    @property
    def last_ascent_norm(self) -> float | None:
        """||g|| of the last ascent, as ``norm`` and ``adaptive`` define it; None before the first."""
        norm = self._context.last_ascent_norm
        return None if norm is None else float(norm)

    @property
    def last_update_norm(self) -> float | None:
        """||w - w_before|| of the perturbed weights, for `ExtrapolatedSAM`; None if no update is recorded."""
        extrapolation = self._context.extrapolation
        if extrapolation is None or not extrapolation.back:
            return None
        return float(torch.stack([one.norm() for one in extrapolation.back.values()]).norm())

    @inside_wrappers
    @_disable_dynamo  # as torch.optim does; compiled, the weights would be moved twice
    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        batch: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Take one step.

        The closure clears the gradients, computes the loss, calls ``backward()`` and returns the loss. It is called
        once for each pass, with the same random numbers. ``step`` returns what the closure returned at w, with all
        tensors (also those in dictionaries, lists and tuples) detached; at w + e if that pass is the only one, or if
        ``ascent_fraction`` is below 1. Without a closure, both passes must have run already, the second inside
        ``perturbed()``.

        ``batch`` is for a mask that measures Fisher information on the current batch, and for ``ascent_fraction``: a
        closure that has a parameter is called with the batch, or with the ascent's part of it. ``scaler`` is for a
        closure that scales its loss; call ``scaler.update()`` afterwards, as usual.
        """
        if self.is_perturbed:
            raise RuntimeError("step() inside perturbed() would update the weights at w + e; call it after the block")
        if self._step is not None and self._step.phase is Phase.READY:
            return self._step_after_perturbed(self._step, closure)
        if closure is None:
            if self._step is None and self._only_makes_state():
                self.base.step()
                return None
            raise RuntimeError(
                "step() needs a gradient at w + e: pass a closure, or run the second pass in "
                "`with opt.perturbed(): loss_fn(model(x), y).backward()` before step(); in Lightning with "
                "precision 16-mixed, add the plugin sparsesam.integrations.lightning.SharpnessAwareMixedPrecision"
            )
        step = self._begin()
        self._context.note_statistics(known=False)
        try:
            loss = run_closure(step, closure, batch)
            if scaler is not None and not step.is_empty:
                scaler.step(self)  # calls step() without a closure, or not at all after an overflow
                return loss
        finally:
            self._end_step()
        if step.is_empty:
            self._context.skip_step("the closure computed no gradient: no step is taken (opt.skipped_steps)")
        else:
            step.update()
        return loss

    def _step_after_perturbed(self, step: Step, closure: Callable[[], Any] | None) -> Any:
        with self._discarded_on_error():
            result = None if closure is None else run_empty_closure(step, closure)
        self._end_step()
        step.update()
        self._context.note_statistics()
        return result

    @inside_wrappers
    @contextmanager
    def first_pass(self, *, batch: Any = None) -> Iterator[None]:
        """Within the block, ``loss.backward()`` computes only the gradients that the ascent needs.

        For loops with ``perturbed()``: run the forward and the backward of the first pass in this block, so that the
        engine can leave out what the mask makes unnecessary, here and in the second pass. Without the block, nothing is
        left out. Gradients of unperturbed weights are not computed, those of parameters outside the optimizer are
        restored. Micro-batches may share a block or have one each.
        """
        step = self._step
        if step is not None and step.phase is Phase.BETWEEN and any(p.parameter.grad is not None for p in step.params):
            step.require_unchanged(self._perturbed_params())
            step.phase = Phase.FIRST
        else:
            step = self._begin()
        with self._discarded_on_error():
            if step.first is None:
                step.refresh_before_first_pass(batch)
            with OutsideGradients(self.model, self.base), step.first_pass(in_closure=False):
                yield
        step.phase = Phase.BETWEEN

    @inside_wrappers
    @contextmanager
    def perturbed(self, *, batch: Any = None) -> Iterator[None]:
        """Within the block the weights are at w + e and gradients start from zero; run the second pass there.

        On exit, exceptions included, the weights are restored bit for bit, and the running statistics are those after
        the first pass.
        """
        if self.settings.ascent_fraction < 1:
            raise ValueError(
                f"ascent_fraction={self.settings.ascent_fraction} needs opt.step(closure, batch=...); in a loop with "
                "perturbed() leave it at 1 and run your first pass on a part of the batch"
            )
        if self.is_perturbed:
            raise RuntimeError("perturbed() must not be entered twice; leave the first block before the next ascent")
        with self._discarded_on_error():
            self._context.gradients.require_none_waiting()
        step = self._step
        if step is None or step.phase is not Phase.BETWEEN:
            step = self._begin()
            self._context.engine.switched_off("the first pass was not in `with opt.first_pass():`")
        else:
            step.require_unchanged(self._perturbed_params())
        after_first_pass = step.needs_first_pass or self._context.statistics_moved()
        with self._discarded_on_error(), step.second_pass(batch, statistics_return=after_first_pass):
            yield
        self._context.gradients.wait_for_step(step.params)

    @inside_wrappers
    def zero_grad(self, set_to_none: bool = True) -> None:
        self._context.gradients.clear(set_to_none)
        if self._step is not None and self._step.phase in (Phase.BETWEEN, Phase.READY):
            self._end_step()  # its gradient is gone

    @inside_wrappers
    def refresh_mask(self, *, now: bool = False, batch: Any = None) -> None:
        """Refresh the mask in the next ascent, or ``now`` (for SSAM-D: after a backward pass)."""
        masks = self._context.masks
        if masks.rule is None:
            raise RuntimeError("refresh_mask() needs a mask; SAM perturbs every weight")
        masks.asked = True
        if now:
            if self._step is not None and not self._step.has_every_gradient and masks.needs_gradient:
                raise RuntimeError("refresh_mask(now=True) needs every gradient; call it outside of a first_pass()")
            self._context.refresh(self._perturbed_params(), batch)

    def engine_report(self) -> dict[str, str]:
        """Returns what the last step left out, by parameter, and under "engine" whether it was on, or why not."""
        return self._context.engine.report()

    def _mode(self, name: str) -> Callable[[], None]:
        switch = super()._mode(name)
        if self.is_perturbed:
            raise RuntimeError(
                f"{name}() inside perturbed() would move weights that are at w + e; call it after the block"
            )
        return switch

    # ---- a step ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        if self.is_perturbed:
            raise RuntimeError("an optimizer cannot be copied inside perturbed(): its weights are at w + e")
        return super().__getstate__()

    def _start(self, saved: SavedState) -> None:
        super()._start(saved)
        self._step = None

    @property
    def _kind(self) -> StepKind:
        return self.settings.kind_of(self.steps, has_last=self._context.has_last)

    def _begin(self) -> Step:
        """Start a step: set rho, and list and check the parameters to perturb."""
        if self.is_perturbed:
            raise RuntimeError("a step must not begin inside perturbed(): the weights are at w + e")
        self._check_join()
        self._context.is_joining = self._is_joining
        if self.settings.rho_schedule is not None:
            scale_rho(self.base, self.settings.rho_schedule(self.steps + 1), self.defaults)
        if self._context.extrapolation is not None:
            self._context.extrapolation.begin()
        self._step = Step(
            self._context, self._kind, self._perturbed_params(), closure_accumulates=self.closure_accumulates
        )
        return self._step

    @contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end_step()
            raise

    def _end_step(self) -> None:
        self._step = None
        self._context.engine.release()
