"""Skips what the mask makes unnecessary. It may change the cost of a step, never its result.

The engine listens to calls of the user's model: those before the ascent run as `FirstPass`, those at w + e as
`SecondPass`. Nothing of the model is replaced, and nothing is left on it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from sparsesam.ascent.first_pass import FirstPass
from sparsesam.ascent.memo import EngineFallbackError, Memo
from sparsesam.ascent.noise import Noise
from sparsesam.ascent.plan import Ascent, describe, explicit_after_all, make_plan, saves_nothing
from sparsesam.ascent.recording import Plan, Recording
from sparsesam.ascent.second_pass import SecondPass
from sparsesam.ascent.statistics import statistics_of
from sparsesam.ascent.subset import AscentSubset
from sparsesam.masks.packed import PackedMask

#: Forwards without a backward that are remembered: more are no part of one pass.
_FORWARDS = 8

#: torch's own, which have a fast path in evaluation mode
_ATTENTION = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)


class Engine:
    """The two passes of one optimizer's steps."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.plan: Plan | None = None
        self.same_noise = False
        self.portion: AscentSubset | None = None
        self.only_within_steps = False  # after a closure: what the user's loop does between steps is not looked at
        self.within_step = False
        self.second = False
        self.recorded_forwards = 0  # those that the second pass has still to come to
        self.recording: Recording | None = None
        self.last: Recording | None = None
        self.off: str | None = None
        self.keeps_values = False  # of the first pass, even if no call of the second seems to need them
        self.in_parallel = False  # seen inside of DistributedDataParallel, which waits for every gradient
        self._plan_for: tuple[Any, ...] = ()
        self._mode: FirstPass | SecondPass | None = None
        self._depth = 0
        self._had_gradient: set[int] = set()
        self._noise = Noise(model.parameters())
        self._handles: list[RemovableHandle] = []
        self._finalizers: list[Any] = []

    # ---- life of a step ----------------------------------------------------------------------------------

    def arm(self, why_not: str | None, moved: Mapping[str, PackedMask | None], ascent: Ascent) -> None:
        """Prepare the coming first pass, in which these parameters move under these masks; or not at all.

        A plan is kept until other parameters take part; whoever changes a mask sets ``plan`` to None.
        """
        trainable = (id(one) for one in self.model.parameters() if one.requires_grad)
        plan_for = tuple(trainable), tuple(id(one) for one in statistics_of(self.model)), tuple(moved)
        if plan_for != self._plan_for:
            self.plan, self._plan_for = None, plan_for
        plan = self.plan
        if why_not is None and plan is None:
            plan = make_plan(self.model, moved, ascent)
            if saves_nothing(plan):
                why_not = "every parameter is perturbed, and no mask is made of whole filters"
        self.off = why_not
        self.listen(plan if why_not is None else None)

    def why_not(self) -> str | None:
        """What about the model keeps the engine from looking at it."""
        for module in self.model.modules():
            if _is_compiled(module):
                return "a part of the model is compiled"
            if isinstance(module, _ATTENTION) and self.model.training and not module.training:
                return f"{type(module).__name__} in evaluation mode takes another path when it is looked at"
        return "the model runs inside of DistributedDataParallel" if self.in_parallel else None

    def report(self) -> dict[str, str]:
        if self.plan is None:
            return {"engine": f"off: {self.off}"}
        if self.last is None:
            return {"engine": "on: no step taken yet", **describe(self.plan, set())}
        unusable = self.last.unusable
        state = "on" if unusable is None else f"on, but the second pass was computed in full: {unusable}"
        return {"engine": state, **describe(self.plan, self.last.reused, self.last.dealt_with)}

    def listen(self, plan: Plan | None) -> None:
        """From now on forwards are first passes under this plan; None: leave them alone."""
        self.plan = plan
        if plan is None:
            self.drop()
        elif not self._handles:
            me = weakref.ref(self)
            self._handles = [
                nn.modules.module.register_module_forward_pre_hook(_before(me)),
                nn.modules.module.register_module_forward_hook(_after(me), always_call=True),
            ]
            self._finalizers = [weakref.finalize(self, handle.remove) for handle in self._handles]

    def drop(self) -> None:
        """Stop listening and forget what was recorded."""
        for handle, finalizer in zip(self._handles, self._finalizers, strict=True):
            handle.remove()
            finalizer.detach()
        self._handles, self._finalizers = [], []
        self.forget()

    def forget(self) -> None:
        if self._mode is not None:  # Ctrl-C in a forward: torch calls no hooks then
            self._mode.__exit__(None, None, None)
        self._mode, self._depth = None, 0
        if self.recording is not None:
            self.keeps_values = self.keeps_values or self.recording.needs_values
            self.recording.let_go()
        self.recording = None
        self.portion = None
        self.same_noise = False
        self.within_step = False
        self.second = False

    @property
    def left_gradients_out(self) -> bool:
        """Whether the first pass of this step computed less than every gradient."""
        return self.recording is not None and self.recording.dirty_calls > 0

    def begin_second(self) -> None:
        """The weights are at w + e: calls of the model are second passes until `forget`."""
        self.second = True
        recording = self.recording
        if recording is None:
            return
        if recording.unusable is None and not recording.memo.is_as_left():
            recording.unusable = "a clean value was written to outside of the model"
        if recording.unusable is None and self._leaked():
            recording.unusable = "a clean value left the model by another way than its output"
        recording.memo.rewind()
        self.recorded_forwards = recording.forwards
        self.last = recording

    @property
    def is_at_work(self) -> bool:
        """Whether the pass that runs now is not the plain one."""
        return self.recording is not None and self.recording.unusable is None

    def missed_a_value(self) -> bool:
        """Whether the second pass that has just run asked for a value that was let go."""
        return self.is_at_work and self.recording is not None and self.recording.memo.missed_a_value()

    def compute_in_full(self, reason: str) -> None:
        """The second pass did not work with what the first one left."""
        if self.recording is not None:
            self.recording.unusable = reason

    def explicit_after_all(self) -> list[str]:
        """The weights for which the implicit ascent of this step was an explicit one."""
        if self.plan is None:
            return []
        return explicit_after_all(self.plan, set() if self.recording is None else self.recording.dealt_with)

    def _leaked(self) -> bool:
        """Whether the first backward went into the clean part: then a parameter there has a gradient."""
        assert self.plan is not None
        for parameter in self.model.parameters():
            if id(parameter) in self.plan.still and parameter.grad is not None:
                if id(parameter) not in self._had_gradient or bool(parameter.grad.any()):
                    return True
        return False

    # ---- forwards ----------------------------------------------------------------------------------------

    def before_forward(self) -> None:
        self._depth += 1
        if self._depth > 1 or self.plan is None or not torch.is_grad_enabled():
            return
        self.in_parallel = self.in_parallel or _inside_parallel()
        if self.in_parallel:
            return
        if not (self.model.training or self.within_step) or (self.only_within_steps and not self.within_step):
            return
        if self.second:
            if self.recording is not None and self.recording.unusable is None:
                self._mode = SecondPass(self.plan, self.recording, self._noise)
        else:
            if self.recording is None:
                # Between the phases of the user's own loop nobody could repeat a pass that lacks a value.
                self.recording = Recording(Memo(light=self.within_step and not self.keeps_values))
                self._had_gradient = {id(p) for p in self.model.parameters() if p.grad is not None}
                record = True
            else:  # another micro-batch: its activations are not worth their memory
                record = self.recording.forwards < _FORWARDS and not self._backward_has_run()
            self.recording.forwards += 1
            self._mode = FirstPass(
                self.plan,
                self.recording,
                self._noise,
                record=record,
                same_noise=self.same_noise,
                portion=self.portion,
            )
        if self._mode is not None:
            self._mode.__enter__()

    def after_forward(self, output: Any) -> Any:
        self._depth -= 1
        if self._depth > 0 or self._mode is None:
            return None
        mode, self._mode = self._mode, None
        mode.__exit__(None, None, None)
        if isinstance(mode, SecondPass):
            mode.require_fresh(output)
            self.recorded_forwards -= 1
            if self.recorded_forwards == 0 and mode.recording.memo.light:
                mode.recording.memo.release()
        else:
            mode.recording.memo.settle()
        return self._closed(mode, output) if isinstance(mode, FirstPass) else None

    def _closed(self, mode: FirstPass, output: Any) -> Any:
        """Clean results are handed out without their graph, which a backward pass would use up."""
        leaves, structure = tree_flatten(output)
        if any(not isinstance(leaf, Tensor | int | float | str | bool | None) for leaf in leaves):
            mode.recording.unusable = (
                mode.recording.unusable or "the model's output is an object that cannot be looked into"
            )
            return None
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not tensors:  # also where the forward raised
            return None
        if not any(mode.is_dirty_output(tensor) for tensor in tensors):
            if mode.portion is not None:
                raise EngineFallbackError("no output depends on a perturbed weight")
            if any(tensor.requires_grad for tensor in tensors):
                mode.recording.unusable = mode.recording.unusable or "no output depends on a perturbed weight"
                return None
        only_ungraded = not any(tensor.requires_grad for tensor in tensors)
        closed = [
            mode.closed(leaf, only_ungraded=only_ungraded) if isinstance(leaf, Tensor) else leaf for leaf in leaves
        ]
        if all(a is b for a, b in zip(closed, leaves, strict=True)):
            return None
        return tree_unflatten(closed, structure)

    def _backward_has_run(self) -> bool:
        assert self.plan is not None
        return any(
            parameter.grad is not None and id(parameter) not in self._had_gradient
            for parameter in self.model.parameters()
            if id(parameter) in self.plan.perturbed
        )


def _is_compiled(module: nn.Module) -> bool:
    """By ``torch.compile(module)`` or by ``module.compile()``."""
    return (
        isinstance(getattr(module, "_orig_mod", None), nn.Module)
        or getattr(module, "_compiled_call_impl", None) is not None
    )


def _inside_parallel() -> bool:
    parallel = nn.parallel.DistributedDataParallel
    return getattr(parallel, "_active_ddp_module", None) is not None


def _before(engine: weakref.ref[Engine]) -> Callable[[nn.Module, Any], None]:
    def hook(module: nn.Module, args: Any) -> None:
        one = engine()
        if one is not None and module is one.model:
            one.before_forward()

    return hook


def _after(engine: weakref.ref[Engine]) -> Callable[[nn.Module, Any, Any], Any]:
    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        one = engine()
        if one is not None and module is one.model:
            return one.after_forward(output)
        return None

    return hook
