"""Leaves out what the masks make unnecessary. This changes the cost of a step, never its result.

    first pass     the backward computes only the gradients that the ascent needs       (narrowed_backward.py)
                   linear and convolution layers compute only the kept filters' part    (layers.py)
    second pass    modules that ran before the first perturbed weight are not run again  (prefix.py)

This module decides what is left out, and reports why if nothing is. Modes and replaced calls are active only within the
``with`` blocks of one step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from sparsesam.ascent.first_pass import FirstPass
from sparsesam.ascent.graph import has_compiled, is_strided, is_transformed
from sparsesam.ascent.kinds import Ascent, Norm
from sparsesam.ascent.layers import layer_forward
from sparsesam.ascent.plan import Plan, make_plan
from sparsesam.ascent.prefix import Agree, Prefix
from sparsesam.ascent.replaced_calls import Replacement, is_compiled, replaced_calls
from sparsesam.ascent.report import engine_report
from sparsesam.ascent.survey import (
    Survey,
    has_backward_hooks,
    has_gradient_hooks,
    have_global_hooks,
    hooks_left_out,
    survey,
)
from sparsesam.distributed.agreement import all_agree, is_distributed
from sparsesam.distributed.ddp import invalidates_graphs, is_first_of_static_graph, running_ddp
from sparsesam.distributed.shards import is_sharded
from sparsesam.masks.packed import PackedMask
from sparsesam.utils.rng import RNGState

COMPILED = (
    "the whole model is compiled, so that no part of it can be left out; compile its blocks instead, with "
    "sparsesam.compile_blocks(model) or block.compile()"
)


SHARDED = "parameters are sharded (fully_shard, DTensor): hooks gather them in every forward and backward"


TOO_SMALL = "what could be left out takes less time than the engine's checks; it looks again after some steps"
#: steps without the engine after such a step
_STEPS_WITHOUT = 100

NOT_YET_KNOWN = "the first step with DistributedDataParallel finds out whether the closure reads gradients"
READS_GRADIENTS = "the closure reads gradients, on some rank, and DistributedDataParallel must average them before"


@dataclass
class _ModelInfo:
    """What follows from the current model, masks and hooks; kept until ``key`` changes."""

    key: list[Any]
    modules: list[nn.Module]
    alive: Any  # references to what the key names by id
    plan: Plan
    found: Survey
    why_off: str | None
    hooks: str | None  # which hooks prevent leaving anything out; they may be registered on one rank only


class Engine:
    """What is known about one optimizer's model across steps; the state of one step is a `FirstPass`."""

    def __init__(self, model: nn.Module, wrapped: nn.Module, *, off: str | None = None) -> None:
        self.model = model
        self.last: FirstPass | None = None
        self._off = off  # why nothing is ever left out
        self.why_not: str | None = None  # why the last step computed everything
        self._ddp: weakref.ref[DistributedDataParallel] | None = None
        if isinstance(wrapped, DistributedDataParallel):
            self._ddp = weakref.ref(wrapped)
        elif isinstance(wrapped, DataParallel):
            self._off = self._off or "DataParallel copies the model in each forward; use DistributedDataParallel"
        elif is_compiled(wrapped):
            self._off = self._off or COMPILED
        self._info: _ModelInfo | None = None
        self._steps_without = 0
        self._closure_reads_gradients: bool | None = None  # on any rank; None: not known yet
        self._rng = RNGState(model.parameters())

    @property
    def ddp(self) -> DistributedDataParallel | None:
        return None if self._ddp is None else self._ddp()

    # ---- decisions ---------------------------------------------------------------------------------------

    def why_off(self) -> str | None:
        """Returns what switches the engine off before the model is examined; None: nothing."""
        if self._off is not None:
            return self._off
        if is_compiled(self.model):
            return COMPILED
        if self.ddp is not None and is_first_of_static_graph(self.ddp):
            return "DistributedDataParallel records its static graph in this step"
        if self.ddp is not None and self.ddp._comm_hooks:
            return "a communication hook of DistributedDataParallel would not see the ascent's gradients"
        return None

    def _inspect(self, masks: Mapping[str, PackedMask | None], ascent: Ascent, norm: Norm) -> _ModelInfo:
        """Returns what follows from model and masks; recomputed when modules, masks, hooks or requires_grad change."""
        modules = list(self.model.modules())
        key = [ascent, norm, *masks, *map(id, masks.values()), *have_global_hooks()]
        for module in modules:
            key += (id(module), is_compiled(module), getattr(module, "training", False), has_backward_hooks(module))
            for one in module._parameters.values():
                if one is not None:
                    key += (id(one), one.requires_grad, has_gradient_hooks(one))
        if self._info is None or key != self._info.key:
            plan = make_plan(self.model, masks, ascent, norm)
            tensors = [*self.model.parameters(), *self.model.buffers()]
            found = survey(self.model, plan)
            reason = None
            if any(map(is_sharded, tensors)):
                reason = SHARDED
            elif not plan.needed:
                reason = "nothing is perturbed"
            elif ascent == "explicit" and not plan.is_partial and not found.has_clean_parameters:
                reason = "every parameter is perturbed, and no mask is made of whole filters"
            hooks = hooks_left_out(self.model, plan)
            self._info = _ModelInfo(key, modules, (tensors, masks), plan, found, reason, hooks)
        return self._info

    # ---- the two passes ----------------------------------------------------------------------------------

    def switched_off(self, reason: str) -> None:
        """Record for the report why a step computes everything."""
        self.last, self.why_not = None, reason

    @contextmanager
    def first_pass(
        self,
        masks: Mapping[str, PackedMask | None],
        ascent: Ascent,
        norm: Norm,
        *,
        in_closure: bool,
        averages: bool,
        no_reuse: str | None,
        off: str | None,
    ) -> Iterator[FirstPass | None]:
        """Run the block as a first pass that perturbs these parameters under these masks.

        ``averages``: gradients are averaged over all ranks. ``no_reuse``: why the second pass cannot reuse anything,
        ``off``: why nothing can be left out; None: it can. Yields what the block leaves out; None: nothing.
        """
        reason = off or self.why_off()
        if reason is None and self._steps_without > 0:
            self._steps_without -= 1
            reason = TOO_SMALL
        info = self._inspect(masks, ascent, norm) if reason is None else None
        if info is not None:
            reason = info.why_off
            if not (is_distributed() and info.plan.is_explicit):
                reason = reason or info.hooks
        if info is None or reason is not None:
            self.switched_off(str(reason))
            yield None
            return
        plan, found = info.plan, info.found
        prefix = Prefix(found, plan, self._rng, self._agreement(found) if no_reuse is None else {})
        if no_reuse is not None:
            prefix.drop(no_reuse)
        why_full = None
        if self.ddp is not None and in_closure and averages and plan.is_partial and plan.is_explicit:
            # A narrowed backward runs without synchronizing gradients.
            why_full = {None: NOT_YET_KNOWN, True: READS_GRADIENTS, False: None}[self._closure_reads_gradients]
        is_full = why_full is not None or not plan.is_partial
        if is_full and self.ddp is not None and invalidates_graphs(self.ddp):
            prefix.drop("DistributedDataParallel broadcasts buffers between the passes, which needs torch 2.11")
        first = FirstPass(info.modules, plan, prefix, in_closure=in_closure, why_full=why_full)
        if info.hooks is not None:  # other ranks, which may have none, wait for this rank in the same collectives
            first.backward.disable(info.hooks)

        calls: dict[nn.Module, Replacement] = {module: partial(prefix.record, module) for module in found.clean}
        for module, weight in found.layers.items():
            calls[module] = partial(_call_layer, first, module, weight)
        for module in found.without_mode:
            calls[module] = _pause_mode(first, calls.get(module), module in found.clean)
        may_be_compiled = has_compiled()
        if may_be_compiled or is_distributed():
            calls[self.model] = partial(self._call_model, first, calls.get(self.model, _plain_call))
        with replaced_calls(calls) as seen, first.active():
            yield first
        if may_be_compiled and not seen:  # no module was called: the model is part of a compiled function
            self._off = COMPILED
        first.finish()
        self.last, self.why_not = first, None
        # Ranks must all leave out the same, and an implicit ascent needs the engine.
        if ascent == "explicit" and not plan.sliced and not is_distributed() and prefix.is_too_small(plan):
            self._steps_without = _STEPS_WITHOUT
        if why_full == NOT_YET_KNOWN and self.ddp is not None:
            device, group = plan.needed[0].device, self.ddp.process_group
            self._closure_reads_gradients = not all_agree(not first.backward.closure_continues, device, group)

    @contextmanager
    def second_pass(self, first: FirstPass | None) -> Iterator[None]:
        """Run the block, at w + e, reusing outputs that the first pass recorded."""
        if first is None or not first.prefix.is_asked:
            yield
            return
        reuse = {module: partial(first.prefix.reuse, module) for module in first.prefix.modules}
        try:
            with replaced_calls(reuse):
                yield
        finally:
            first.prefix.release()

    def release(self) -> None:
        """Free the activations of a first pass that no second pass will use."""
        if self.last is not None:
            self.last.prefix.release()

    def _agreement(self, found: Survey) -> dict[nn.Module, Agree]:
        """Returns, for modules that synchronize ranks, how the ranks agree on reusing their outputs."""
        agree: dict[nn.Module, Agree] = {}
        if is_distributed():
            group = None if self.ddp is None else self.ddp.process_group
            for module, within in found.clean.items():
                if any(isinstance(one, nn.SyncBatchNorm) for one in within):
                    device = next(module.parameters(), next(self.model.parameters())).device
                    agree[module] = partial(all_agree, device=device, group=group)
        return agree

    def _call_model(self, first: FirstPass, call: Replacement, forward: Any, args: Any, kwargs: Any) -> Any:
        ddp = running_ddp(self.model) if self.ddp is None else None
        if ddp is not None:
            self._ddp = weakref.ref(ddp)
            first.backward.disable("the model was wrapped in DistributedDataParallel after the optimizer was made")
        return call(forward, args, kwargs)

    # ---- report ------------------------------------------------------------------------------------------

    def report(self) -> dict[str, str]:
        if self.last is None:
            reason = self.why_not or self.why_off()
            return {"engine": "on: no step taken yet" if reason is None else f"off: {reason}"}
        return engine_report(self.last)


def _plain_call(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _call_layer(first: FirstPass, module: nn.Module, weight: int, forward: Any, args: Any, kwargs: Any) -> Any:
    if weight in first.plan.moved:
        first.prefix.close()
    x = args[0] if args else kwargs["input"]
    # torch.func.functional_call replaces weights by other tensors.
    is_plain = id(module._parameters["weight"]) == weight and is_strided(x) and not is_transformed()
    if not is_plain:
        return forward(*args, **kwargs)
    first.layers_called.add(weight)
    return layer_forward(module, x, first.plan.sliced[weight], first.backward.switch)


def _pause_mode(first: FirstPass, replacement: Replacement | None, is_clean: bool) -> Replacement:
    def call(forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not is_clean:
            first.prefix.close()
        paused = partial(first.paused, forward)
        return paused(*args, **kwargs) if replacement is None else replacement(paused, args, kwargs)

    return call
