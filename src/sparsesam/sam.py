"""The step, top to bottom: a pass at w, the ascent to w + e, a pass there, back to w, the base optimizer's update.

    opt.minimize(lambda: loss_fn(model(x), y))     shortest and cheapest: the optimizer differentiates
    opt.step(closure)                              torch.optim's contract: the closure calls backward() itself
    with opt.first_pass(): …                       in two phases, for loops that need to do something in between
    with opt.perturbed(): …
    opt.step()

All three give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.optim import Optimizer

from sparsesam.ascent import PerturbingOptimizer, Phase, Step
from sparsesam.checkpoint import OwnState
from sparsesam.distributed.ddp import refuse_join
from sparsesam.distributed.shards import reshard
from sparsesam.gradients import (
    ACCUMULATED,
    UNUSED,
    Objective,
    OldGradients,
    gradients_of,
    has_gradients,
    part_of,
    require_gradients,
    restored_outside,
    takes_batch,
    without_graph,
)
from sparsesam.masks.mask import MaskRule
from sparsesam.options import require_mask_rule, scale_rho
from sparsesam.savings import Savings, Shortcuts
from sparsesam.utils.restore import RNGState, Snapshot, WarnOfPerturbedWeights, statistics_of
from sparsesam.wrapper import inside_wrappers


class SharpnessAware(PerturbingOptimizer):
    """Base class of all methods: the passes of a step. Its arguments are those of `PerturbingOptimizer`."""

    closure_accumulates: bool = False
    """For trainers whose closure adds to the gradients of earlier micro-batches. It must run them again in the second
    pass, before which gradients are cleared. If False, such a closure raises an error."""

    def _start(self, own: OwnState) -> None:
        super()._start(own)
        self._rng = RNGState(self.model.parameters())
        self._unused = OldGradients()  # those of perturbed(), until a step uses them
        self._savings = Savings(0.0, 0, 0, "no step taken yet")
        self._records_from = 0  # the step from which on operations are recorded

    # ---- one step --------------------------------------------------------------------------------------------

    @inside_wrappers
    def minimize(
        self,
        loss: Callable[..., Any] | Sequence[Callable[..., Any]],
        *,
        has_aux: bool = False,
        batch: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Take one step on a function that returns the loss; the optimizer differentiates it, once for each pass.

        The first backward computes only the gradients of `ascent_inputs`. Returns the loss at w, as `step` does.
        To clip gradients, register a step pre-hook on the base optimizer.

        Args:
            loss: returns a scalar loss, and does not call ``backward()``. Of a list, the losses are added up, one after
                another, as in gradient accumulation.
            has_aux: the function returns ``(loss, aux)``, and so does ``minimize``, with ``aux`` of the same pass; a
                list of them for a list of functions.
            batch: as in `step`; a function that has a parameter is called with it.
            scaler: scales the loss of each pass; call ``scaler.update()`` afterwards.
        """
        return self.step(Objective(self, loss, has_aux=has_aux, scaler=scaler), batch=batch, scaler=scaler)

    @inside_wrappers
    @_disable_dynamo  # as torch.optim does; compiled, the weights would be moved twice
    @torch.no_grad()
    def step(
        self,
        closure: Callable[..., Any] | None = None,
        *,
        batch: Any = None,
        scaler: torch.amp.GradScaler | None = None,
    ) -> Any:
        """Take one step.

        The closure clears the gradients, computes the loss, calls ``backward()`` and returns the loss. It is called
        once for each pass, with the same random numbers. ``step`` returns what the closure returned at w, with all its
        tensors detached; at w + e if that pass is the only one, or if ``ascent_fraction`` is below 1. Without a
        closure, both passes must have run already, the second inside ``perturbed()``.

        ``batch`` is for a mask that measures Fisher information on the current batch, and for ``ascent_fraction``: a
        closure that has a parameter is called with the batch, or with the ascent's part of it. ``scaler`` is for a
        closure that scales its loss; call ``scaler.update()`` afterwards, as usual.
        """
        if scaler is not None:
            self.check_scaler()
        if self.is_perturbed:
            raise RuntimeError("step() inside perturbed() would update the weights at w + e; call it after the block")
        step = self._step
        is_ready = step is not None and step.phase is Phase.READY
        if closure is None and not is_ready:
            if step is None and self._only_makes_state():
                self.base.step()
                return None
            raise RuntimeError(
                "step() needs a gradient at w + e: pass a closure, or run the second pass in `with opt.perturbed():` "
                "before step(). For trainers see docs/moving-over.md"
            )
        result, is_empty = None, False
        try:
            if step is not None and is_ready:
                result = None if closure is None else self._after_passes(step, closure, batch)
            elif closure is not None:
                step = self._begin(batch)
                with torch.enable_grad():
                    result, is_empty = self._run_passes(step, closure, batch)
            if is_empty:
                self.own.counters.skipped_steps += 1
                self._warn_once("the closure computed no gradient: no step is taken (opt.skipped_steps)")
            elif scaler is None:
                self.update()
            else:
                scaler.step(self)  # calls step() without a closure, or not at all after an overflow
        finally:
            self._end()
        return result

    def _run_passes(self, step: Step, closure: Callable[..., Any], batch: Any) -> tuple[Any, bool]:
        """Call the closure once for each pass. Returns its result, and whether it computed no gradient, on purpose."""
        fraction, narrows = self.options.ascent_fraction, isinstance(closure, Objective)
        with_batch = batch is not None and takes_batch(closure)
        if fraction < 1 and step.first_passes and not with_batch:
            raise ValueError(
                f"batch must be given with ascent_fraction={fraction}, and the closure must take it: "
                "opt.step(closure, batch=(x, y)) with def closure(batch): ..."
            )
        whole = (batch,) if with_batch else ()
        part = (part_of(batch, fraction),) if with_batch and fraction < 1 and step.first_passes else whole
        watched = [] if narrows else step.tensors
        if isinstance(closure, Objective):
            self.base.zero_grad()
            if step.shortcuts is not None and len(closure.functions) > 1:
                step.shortcuts.give_up_tape("several functions: activations of the first are not kept")
        if not step.ascends:
            last = without_graph(closure(*whole))
            step.phase = Phase.READY
            self._combine(step)
            return last, self._found_nothing(last, OldGradients())
        first = None
        if step.first_passes:
            with OldGradients(watched) as old, self._first_pass(step, narrows=narrows):
                first = without_graph(closure(*part))  # otherwise it would keep activations during the second pass
            if self._found_nothing(first, old):
                return first, True
        clears = step.first_passes > 0 or self.closure_accumulates
        returns = step.first_passes > 0 and fraction == 1
        with OldGradients([] if clears else watched) as old, self._perturbed(step, batch, clears, returns):
            for _ in range(step.first_passes - 1):
                closure(*part)
                self.ascend(step)
                self._restart(step)
            last = without_graph(closure(*whole))
        return first if returns else last, self._found_nothing(last, old)

    def _found_nothing(self, result: Any, old: OldGradients) -> bool:
        """Whether a closure computed no gradient on purpose; in the first step, that is taken for a mistake.

        Raise if it added to the ``old`` gradients.
        """
        if not self.closure_accumulates:
            old.require_not_added_to(ACCUMULATED)
            if old.are_untouched:
                return True
        return (result is None or self.steps > 0) and not has_gradients(self.base)

    def _after_passes(self, step: Step, closure: Callable[..., Any], batch: Any) -> Any:
        """After perturbed(), call a closure that computes nothing, as Lightning's manual optimization passes."""
        if batch is None and not isinstance(closure, Objective):
            with OldGradients(step.tensors) as old, torch.enable_grad():
                result = without_graph(closure())
            if old.are_untouched and not self.closure_accumulates:
                return result
        raise RuntimeError(
            "step(closure) after perturbed(): the gradient at w + e already exists; call step() without a closure, or "
            "leave both passes to step(closure)"
        )

    # ---- the two passes --------------------------------------------------------------------------------------

    @inside_wrappers
    @contextmanager
    def first_pass(self, *, batch: Any = None) -> Iterator[None]:
        """Run the first pass in this block, with ``opt.backward(loss)`` in place of ``loss.backward()``.

        `backward` computes only the gradients that the ascent needs; ``loss.backward()`` computes all. Gradients of
        parameters outside the optimizer are restored. Micro-batches may share a block or have one each.
        """
        step = self._step
        if step is not None and step.phase is Phase.BETWEEN and any(p.grad is not None for p in step.tensors):
            self._require_unchanged(step)
            if step.shortcuts is not None:
                step.shortcuts.give_up_tape("several blocks: activations of the first are not kept")
        else:
            step = self._begin(batch)
        with self._ended_on_error(), self._first_pass(step, narrows=True, between=True):
            yield
        step.phase = Phase.BETWEEN

    @inside_wrappers
    def backward(self, loss: Tensor, **options: Any) -> None:
        """``loss.backward()``; in a first pass (a closure's: without DDP), only of the gradients that are needed."""
        shortcuts = self._first_shortcuts()
        loss.backward(**options) if shortcuts is None else shortcuts.backward(loss, options)

    def _first_shortcuts(self) -> Shortcuts | None:
        return self._step.shortcuts if self._step is not None and self._step.phase is Phase.FIRST else None

    @property
    def ascent_inputs(self) -> list[Tensor] | None:
        """Inside `first_pass`: the parameters whose gradient is needed, for ``loss.backward(inputs=…)``; None: all."""
        shortcuts = self._first_shortcuts()
        return None if shortcuts is None else shortcuts.inputs_for_trainer()

    @inside_wrappers
    @contextmanager
    def perturbed(self, *, batch: Any = None) -> Iterator[None]:
        """Within the block the weights are at w + e and gradients start from zero; run the second pass there.

        Random numbers are those of `first_pass`. On exit, exceptions included, the weights are restored bit for bit,
        and the running statistics are those after the first pass.
        """
        if self.options.ascent_fraction < 1:
            raise ValueError(
                f"ascent_fraction={self.options.ascent_fraction} needs opt.step(closure, batch=...); in a loop with "
                "perturbed() leave it at 1 and run your first pass on a part of the batch"
            )
        if self.is_perturbed:
            raise RuntimeError("perturbed() must not be entered twice; leave the first block before the next ascent")
        with self._ended_on_error():
            unused = self._unused
            self._watch_unused([])
            unused.require_not_added_to(UNUSED)
            step = self._step
            had_first_pass = step is not None and step.phase is Phase.BETWEEN
            if step is None or not had_first_pass:
                step = self._begin(batch, shortcuts=False)
            else:
                self._require_unchanged(step)
            if step.first_passes > 1:
                raise RuntimeError(f"a step has {step.first_passes + 1} passes: use minimize()")
            with self._perturbed(step, batch, clears=True, returns=had_first_pass or step.first_passes > 0):
                yield
        self._watch_unused(step.tensors)

    @contextmanager
    def _first_pass(self, step: Step, *, narrows: bool, between: bool = False) -> Iterator[None]:
        step.phase = Phase.FIRST
        if step.rng is None:
            step.rng, step.statistics = self._rng.read(), Snapshot(statistics_of(self.model.modules()))
        with restored_outside(self.model, self.base):
            if step.shortcuts is None:
                yield
                return
            # A mask computed from the gradient needs the gradient averaged over all ranks.
            is_local = self.options.ascent_scope == "local" and not self._refresh_due(step.params)
            with step.shortcuts.first_pass(narrows=narrows, is_local=is_local, between=between):
                yield

    @contextmanager
    def _perturbed(self, step: Step, batch: Any, clears: bool, returns: bool) -> Iterator[None]:
        """``clears``: gradients start from zero. ``returns``: running statistics are those of the first pass again."""
        step.phase = Phase.PERTURBED
        statistics = statistics_of(self.model.modules()) if returns else []
        step.written = Snapshot([*step.params.renormalized, *statistics])
        step.hook = self.model.register_state_dict_pre_hook(WarnOfPerturbedWeights())
        try:
            self._ascend(step, batch)
            if step.params.shards is not None:
                reshard(self.model)
            if clears:
                self._restart(step)
            with nullcontext() if step.shortcuts is None else step.shortcuts.second_pass():
                yield
        finally:
            self._restore(step)
            step.phase = Phase.READY  # an error ends the step
        self._combine(step)

    def _require_unchanged(self, step: Step) -> None:
        """Use the current groups and masks; raise if they need gradients that the first pass left out.

        What is trainable was settled by the first pass, also if flags were changed since.
        """
        params = step.params if step.params.is_current(flags=False) else self._perturbed_params()
        masks = self._masks_of(params)
        if not step.is_complete and (masks != step.masks or self._refresh_due(params)):
            raise RuntimeError(
                "masks or parameter groups changed between first_pass() and perturbed(), and gradients of the newly "
                "perturbed weights were not computed; make such changes before first_pass()"
            )
        step.params, step.masks = params, masks

    def _restart(self, step: Step) -> None:
        """Clear the gradients, and return to the random states and running statistics before the first pass."""
        self.base.zero_grad()
        if step.rng is not None and step.statistics is not None:
            self._rng.write(step.rng)
            step.statistics.restore()

    def _watch_unused(self, parameters: list[Tensor]) -> None:
        """Watch the gradients of these parameters until a step uses them, in place of earlier ones."""
        self._unused.release()
        self._unused = OldGradients(parameters)

    def _restore(self, step: Step) -> None:
        self._perturbation.undo()
        if step.params.shards is not None:
            reshard(self.model)
        if step.written is not None:
            step.written.restore()
        if step.hook is not None:
            step.hook.remove()

    # ---- to w + e --------------------------------------------------------------------------------------------

    def _begin(self, batch: Any, *, shortcuts: bool = True) -> Step:
        """Start a step: set rho, list and check the parameters to perturb, make a mask that needs no gradient."""
        self._end()
        if self._ddp is not None:
            refuse_join(self._ddp)
        if self.options.rho_schedule is not None:
            for group in self.param_groups:
                self._complete(group)
                scale_rho(group, self.rho_key, self.options.rho_schedule(self.steps + 1))
        params, ascends = self._perturbed_params(), self._ascends(self.steps)
        step = Step(ascends, self.passes() - 1 if ascends else 0, params)
        is_due = step.first_passes > 0 and self._refresh_due(params)
        if is_due and not self.own.masks.needs_gradient:
            self._refresh(params, batch)
            is_due = False
        step.masks = self._masks_of(params)
        if step.first_passes and not is_due and not self._moves(step):
            step.ascends, step.first_passes = False, 0
        if step.first_passes and shortcuts:
            what, everything = (self.model, self._ddp, params, step.masks, self.options), self.needs_every_gradient
            records = self.steps >= self._records_from
            step.shortcuts = Shortcuts(*what, everything=everything, is_due=is_due, records=records)
        self._step = step
        return step

    # ---- the update ------------------------------------------------------------------------------------------

    def update(self) -> None:
        """Run the base optimizer's update, with the gradient at w + e."""
        step = self._step
        assert step is not None, "an update ends a step"
        require_gradients(self.base, "second")
        self._watch_unused([])
        if step.ascent_failed and not all(bool(gradient.isfinite().all()) for gradient in gradients_of(self.base)):
            self.own.counters.skipped_steps += 1
            self._warn_once("both gradients of a step are not finite: weights are not updated (opt.skipped_steps)")
        else:
            self.base.step()
            self.after_update()
        self.own.counters.steps += 1

    @contextmanager
    def _ended_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _end(self) -> None:
        if self._step is not None and self._step.phase is Phase.PERTURBED:
            self._restore(self._step)  # Ctrl-C before or while that was done
        step, self._step = self._step, None
        if step is not None and step.first_passes:
            nothing = Savings(0.0, 0, 0, "the first pass was not in `with opt.first_pass():`")
            self._savings = nothing if step.shortcuts is None else step.shortcuts.savings()
            if step.shortcuts is not None and not step.shortcuts.release():
                self._records_from = self.steps + 100  # batches may have grown by then

    def savings(self) -> Savings:
        """Returns what the last step left out; its ``str`` says it in three lines."""
        return self._savings

    @inside_wrappers
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)
        self._watch_unused([])
        if self._step is not None and self._step.phase in (Phase.BETWEEN, Phase.READY):
            self._end()  # its gradient is gone


class SAM(SharpnessAware):
    """Implements sharpness-aware minimization, min_w max_{||e|| <= rho} f(w + e), around any first-order optimizer.

        e = rho * g / ||g||
        w <- base's update of w with the gradient at w + e

    Foret et al. 2021. rho is usually 0.05 to 0.2. Unlike in davda54/sam and pytorch-optimizer, running statistics are
    updated once per step, both passes have the same dropout masks, and ``adaptive=True`` leaves biases unscaled.
    The arguments are those of `SharpnessAware`.

    Examples:
        >>> base = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> opt = sparsesam.SAM(base, model, rho=0.05)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))  # the loss at w
    """


class SSAM(SharpnessAware):
    """Implements sparse SAM: only the weights where the mask m is 1 are perturbed.

        e = rho * m ⊙ g / ||g||            norm="full", the paper's: shorter by the factor ||m ⊙ g|| / ||g||
        e = rho * m ⊙ g / ||m ⊙ g||        norm="masked": gradients outside the mask need not be computed

    Mi et al. 2022. The paper's first mask is random; here SSAM-F measures Fisher information before the first step.
    rho is SAM's with ``norm="masked"``, and larger the sparser the mask with ``"full"``.

    Examples:
        >>> mask = sparsesam.fisher_mask(train_set, loss_fn, sparsity=0.5, samples=16)
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask)
        >>> loss = opt.minimize(lambda: loss_fn(model(x), y))
        >>> round(opt.sparsity, 2)
        0.5
    """

    def __init__(self, base: Optimizer, model: nn.Module, rho: float = 0.05, *, mask: MaskRule, **options: Any) -> None:
        require_mask_rule(mask)
        super().__init__(base, model, rho, mask=mask, **options)
