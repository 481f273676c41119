"""The first pass as torch sees it: every call of the model's forward goes through this mode.

A tensor is *dirty* if a perturbed weight is upstream of it, else *clean*. Dirty calls get detached copies of their
clean inputs and of unperturbed parameters, so that a plain ``loss.backward()`` stops at the frontier and leaves the
clean part's graph alone; clean calls are remembered for the second pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sparsesam.ascent.calls import (
    DIFFERENTIATION,
    argument_of,
    can_be_remembered,
    is_attribute,
    moves_statistics,
    rerun_in_backward,
    version_of,
    written_by,
)
from sparsesam.ascent.layers import LAYERS, nothing_passes
from sparsesam.ascent.memo import PLAIN_TENSORS, EngineFallbackError, Unhashable, map_tensors, memory_of, tensors_in
from sparsesam.ascent.noise import Noise, same_state
from sparsesam.ascent.recording import Plan, Recording
from sparsesam.ascent.stand_in import KNOWN
from sparsesam.ascent.subset import AscentSubset

_MARK = "_sparsesam_mark"
_USED = "_sparsesam_used"  # set on clean tensors whose value went into a dirty call


class FirstPass(TorchFunctionMode):
    """With a ``portion``, clean calls run on the whole batch and dirty calls on the part that the ascent looks at."""

    def __init__(
        self,
        plan: Plan,
        recording: Recording,
        noise: Noise,
        *,
        record: bool,
        same_noise: bool,
        portion: AscentSubset | None = None,
    ) -> None:
        super().__init__()
        self.plan, self.recording, self.noise = plan, recording, noise
        self.record, self.same_noise, self.portion = record, same_noise, portion
        self._whole_batch = {id(tensor) for tensor in portion.whole.values()} if portion is not None else set()
        self._token = recording.token
        self._shields: dict[int, tuple[Tensor, Tensor]] = {}
        self._outside = {id(tensor) for tensor in recording.outside}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_attribute(func):
            result = func(*args, **kwargs)
            if not isinstance(result, Tensor):
                self._notice(func.__self__.__name__, args[0])
                return result
        if func in DIFFERENTIATION:
            raise EngineFallbackError("the model differentiates in its own forward; pass engine=False")
        if self.portion is not None:
            args, kwargs = map_tensors(self._whole, args), map_tensors(self._whole, kwargs)
        tensors = list(tensors_in(args, kwargs))
        if any(id(tensor) in self.plan.statistics for tensor in tensors) and not moves_statistics(func, args, kwargs):
            self._give_up("a running statistic is used by more than its normalization layer")
        dirty = [self._is_dirty(tensor) for tensor in tensors]  # all of them: looking also takes note of newcomers
        if any(dirty):
            self.recording.dirty_calls += 1
            return self._dirty_call(func, args, kwargs, tensors)
        return self._clean_call(func, args, kwargs, tensors)

    # ---- clean or dirty ----------------------------------------------------------------------------------

    def _is_dirty(self, tensor: Tensor) -> bool:
        mark = getattr(tensor, _MARK, None)
        if mark is not None and mark[0] == self._token:
            return bool(mark[1])
        if id(tensor) in self.plan.names:
            return id(tensor) in self.plan.perturbed
        if type(tensor) not in PLAIN_TENSORS or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            self._give_up(f"a tensor of type {type(tensor).__name__}, or inside of torch.func")
            return True
        if tensor.grad_fn is not None:
            self._give_up("a tensor came from an operation that cannot be seen (custom, compiled or checkpointed)")
            return True
        if tensor.requires_grad:
            return True  # the user's own leaf: its gradient may be wanted
        if memory_of(tensor) in self.plan.moved_memory:
            return True
        if id(tensor) not in self._outside:
            self._outside.add(id(tensor))
            self.recording.outside.append(tensor)
        return False

    def _notice(self, attribute: str, tensor: Tensor) -> None:
        """An attribute is read, which the second pass must be able to tell as well."""
        if attribute == "grad_fn" and not self._is_dirty(tensor):
            self._give_up("the graph of a clean value is looked at")
        elif attribute not in KNOWN:
            self.recording.memo.hold(tensor)

    def _mark(self, result: Any, dirty: bool, by_sample: bool = False) -> None:
        for tensor in tensors_in(result):
            if id(tensor) not in self.plan.names:
                setattr(tensor, _MARK, (self._token, dirty, by_sample))

    def _is_by_sample(self, tensor: Tensor) -> bool:
        """Whether a clean value depends on the batch."""
        mark = getattr(tensor, _MARK, None)
        return id(tensor) in self._whole_batch or (mark is not None and mark[0] == self._token and mark[2])

    def closed(self, tensor: Tensor, *, only_ungraded: bool) -> Tensor:
        """A result of the forward as the loss may see it: clean ones without the graph that is still needed.

        ``only_ungraded``: no result requires a gradient, though a backward() must have something to do.
        """
        if self._is_dirty(tensor):
            if self.portion is not None and (tensor.dim() == 0 or len(tensor) != self.portion.kept):
                raise EngineFallbackError("the model's output is not laid out by samples; give no ascent_fraction")
            return tensor.detach().requires_grad_() if only_ungraded and tensor.is_floating_point() else tensor
        # The loss may be of this value alone, or ask for its gradient: a leaf of its own serves both.
        shield = self._shield(tensor)
        return shield.detach().requires_grad_() if tensor.requires_grad else shield

    def is_dirty_output(self, tensor: Tensor) -> bool:
        return tensor.requires_grad and self._is_dirty(tensor)

    def _whole(self, tensor: Tensor) -> Tensor:
        assert self.portion is not None
        return self.portion.whole.get(id(tensor), tensor)

    def _give_up(self, reason: str) -> None:
        if self.portion is not None:
            raise EngineFallbackError(reason)
        if self.recording.unusable is None:
            self.recording.unusable = reason

    # ---- calls -------------------------------------------------------------------------------------------

    def _dirty_call(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        target = written_by(func, args, kwargs)
        if target is not None and not self._is_dirty(target):
            self._give_up("a clean value is overwritten in place by one that depends on perturbed weights")
            result = func(*args, **kwargs)
            self._mark((result, target), dirty=True)
            return result
        if rerun_in_backward():
            self._give_up("activation checkpointing")
            result = func(*args, **kwargs)
        else:
            clean = [(tensor, version_of(tensor)) for tensor in tensors if not self._is_dirty(tensor)]
            result = self._cheaper(func, args, kwargs)
            for tensor, version in clean:
                setattr(tensor, _USED, self._token)
                self.recording.memo.hold(tensor)
                if version_of(tensor) != version and id(tensor) not in self.plan.statistics:
                    raise EngineFallbackError(f"{func} wrote to a value that it was only to read; pass engine=False")
        self._mark(result, dirty=True)
        return result

    def _cheaper(self, func: Any, args: Any, kwargs: Any) -> Any:
        layer = LAYERS.get(func)
        weight = argument_of(args, kwargs, 1, "weight")
        if layer is not None and isinstance(weight, Tensor) and weight.dim() > 1:
            self.recording.dealt_with.add(id(weight))
            want = self.plan.perturbed.get(id(weight))
            if want is not None:
                return layer(want, *self._shielded(args), **self._shielded(kwargs))
            if id(weight) in self.plan.blocking:  # dX = dY · (W ⊙ 0)
                blocked = nothing_passes(self._shield(args[0] if args else kwargs["input"]))
                self._mark(blocked, dirty=True)
                if args:
                    args = (blocked, *args[1:])
                else:
                    kwargs = {**kwargs, "input": blocked}
        return func(*self._shielded(args), **self._shielded(kwargs))

    def _shielded(self, tree: Any) -> Any:
        return map_tensors(self._shield, tree)

    def _shield(self, tensor: Tensor) -> Tensor:
        """A clean input as a dirty call may see it: without its graph, and without samples that do not matter."""
        by_sample = self._is_by_sample(tensor)
        if not (tensor.requires_grad or by_sample) or self._is_dirty(tensor):
            return tensor
        held = self._shields.get(id(tensor))
        if held is None:
            held = self._shields[id(tensor)] = (tensor, self._cut(tensor) if by_sample else tensor.detach())
        return held[1]

    def _cut(self, tensor: Tensor) -> Tensor:
        assert self.portion is not None
        if tensor.dim() == 0 or len(tensor) != self.portion.size:
            raise EngineFallbackError("a value that depends on the batch is not laid out by samples")
        return tensor.detach()[: self.portion.kept]

    def _clean_call(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        if rerun_in_backward():
            self._give_up("activation checkpointing")
        record = self.record and self.recording.unusable is None
        before = [version_of(tensor) for tensor in tensors]
        noise = self.noise.read() if record else None
        result = func(*args, **kwargs)
        self._mark(result, dirty=False, by_sample=any(map(self._is_by_sample, tensors)))
        if not record or noise is None:
            return result
        noise_after = self.noise.read()
        drew = None if same_state(noise, noise_after) else (noise, noise_after)
        inputs = [(t, version, version_of(t)) for t, version in zip(tensors, before, strict=True)]
        if not self._remembered(func, args, kwargs, inputs, result, drew):
            for tensor in tensors:
                self.recording.memo.hold(tensor)
        return result

    def _remembered(
        self, func: Any, args: Any, kwargs: Any, inputs: list[tuple[Tensor, int, int]], result: Any, drew: Any
    ) -> bool:
        """Remember the call for the second pass, if that can find it and do without it."""
        memo = self.recording.memo
        if drew is not None and not self.same_noise:
            return False
        if getattr(func, "__name__", "") == "__set__":
            self._give_up("an attribute of a tensor is assigned to")
            return False
        if any(tensor.is_inference() for tensor, _, _ in inputs):
            return False
        if not all(self._is_there_anyway(tensor) or memo.made(tensor) for tensor, _, _ in inputs):
            return False  # an input is made anew in the second pass
        if not all(self._may_forget_writing(tensor) for tensor, then, now in inputs if then != now):
            if memo.light:  # calls that read what is written cannot be found again, and may want any value
                self.recording.needs_values = True
                self.recording.unusable = self.recording.unusable or "the model writes to a tensor of its own"
            return False
        try:
            key = memo.key_of(func, args, kwargs)
        except Unhashable:
            if not any(True for _ in tensors_in(result)):
                self._give_up("a call that may have side effects, such as a hook on a value of the model")
            return False
        if not can_be_remembered(result) or func is Tensor.data_ptr:
            if not any(True for _ in tensors_in(result)) and inputs:
                self._give_up("the memory of a clean value is given to code outside of torch")
            return False
        memo.add(key, result, inputs, drew, self._is_there_anyway)
        return True

    def _is_there_anyway(self, tensor: Tensor) -> bool:
        return id(tensor) in self.plan.names or id(tensor) in self._outside

    def _may_forget_writing(self, tensor: Tensor) -> bool:
        """Whether the second pass may do without this in-place write."""
        memo = self.recording.memo
        if memo.made(tensor):
            elsewhere = memory_of(tensor) in self.plan.memory or any(
                memory_of(tensor) == memory_of(other) for other in self.recording.outside
            )
            if elsewhere or memo.has_alias(tensor) or getattr(tensor, _USED, None) == self._token:
                self._give_up("an in-place operation on a value that is also used elsewhere")
                return False
            return True
        return id(tensor) in self.plan.statistics


class ClosureWatch(TorchFunctionMode):
    """Around the first call of a closure: gradients that are used for more than the ascent must be all there."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in DIFFERENTIATION:
            wanted = tensors_in(args[1:], kwargs.get("inputs"))
            if (
                kwargs.get("create_graph")
                or kwargs.get("allow_unused")
                or any(id(t) in self.plan.still for t in wanted)
            ):
                raise EngineFallbackError("the closure uses gradients for more than the ascent")
        return func(*args, **kwargs)
