"""Linear and convolution layers whose backward computes only the gradients that the ascent needs under a mask.

For y = W x with kept output rows R (filters), and dY the gradient of y:

    dW[R] = dY[R] · xᵀ                      zero in the other rows
    dX    = Wᵀ · dY                         explicit
    dX    = W[R]ᵀ · dY[R]                   implicit, whole rows
    dX    = (W ⊙ m)ᵀ · dY                   implicit, any mask; nothing, if the mask is empty

In the block of a `FilterLayers` mode, ``F.linear`` and ``torch.conv1d`` to ``conv3d`` with one of its weights compute
the same values as ever, and record a backward that can be narrowed. It computes less only in the block of
``narrowed()``, where the optimizer itself differentiates. Slicing rows keeps every product dense.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sparsesam.masks.packed import PackedMask
from sparsesam.semi_structured import input_gradient


@dataclass(frozen=True)
class WeightGradient:
    """Which gradients of one weight tensor the ascent needs."""

    mask: PackedMask
    implicit: bool  # dX is computed with the masked weights; with an empty mask, not at all
    dense: bool  # dW is computed for every entry, whatever the mask


def weight_gradient(
    mask: PackedMask, weight: Tensor, *, ascent: str, norm: str, is_counted: bool = True
) -> WeightGradient | None:
    """Returns how a layer can compute its gradients at lower cost; None: it cannot.

    ``is_counted``: the weight belongs to a group that is perturbed, so that its gradient counts in the norm.
    """
    if mask.is_full or weight.dim() < 2:
        return None
    if ascent == "explicit" and (mask.rows is None or norm == "full" or weight.is_complex()):
        return None
    dense = is_counted and (ascent == "implicit-dense" or (mask.is_empty and norm == "full"))
    return WeightGradient(mask, implicit=ascent != "explicit", dense=dense)


class FilterLayers(TorchFunctionMode):
    """In its block, linear and convolution layers with one of these weights have a backward that can be narrowed.

    A weight is recognized by its identity, whoever makes the call. Other uses of it have their plain backward, and so
    have layers in compiled code, function transforms, traced code and checkpoints, and under other hooks on saved
    tensors. ``called`` has the ids of the weights whose layer was called otherwise.
    """

    def __init__(self, wanted: Mapping[Tensor, WeightGradient]) -> None:
        super().__init__()
        self.called: set[int] = set()
        self._wanted = wanted
        self.is_narrow = False  # while the backward of the ascent runs

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """In the block, a backward, and what is differentiated within it, computes only what the ascent needs."""
        self.is_narrow = True
        try:
            yield
        finally:
            self.is_narrow = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # first, so that torch.compile traces nothing else of this mode
            return func(*args, **kwargs)
        if func in LAYERS:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            want = self._wanted.get(weight)
            if want is not None and _is_plain_call(func, (*args, *kwargs.values())):
                self.called.add(id(weight))
                return LAYERS[func](self, want, *args, **kwargs)
        return func(*args, **kwargs)


def _is_plain_call(func: Any, arguments: tuple[Any, ...]) -> bool:
    """Whether a call of a layer records a graph of ordinary tensors, which only this forward and its backward use."""
    tensors = [t for t in arguments if isinstance(t, Tensor)]
    return (
        torch.is_grad_enabled()
        and all(type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided for t in tensors)
        and not any(t.is_nested or (t.is_complex() and func is not F.linear) for t in tensors)
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch.autograd.forward_ad._current_level < 0
        and not torch.jit.is_tracing()  # type: ignore[attr-defined]
        and not are_saved_tensors_hooked()
    )


def are_saved_tensors_hooked() -> bool:
    """A checkpoint's hooks compare what two runs of the same code save, and one may run outside of the mode."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("saved tensors have hooks"):
            return False
    except RuntimeError:  # how torch says that there are hooks; torch 2.6 has no other way
        return True


#: bytes of a convolution's input above which a CPU computes its gradients a few samples at a time
LARGE = 8 << 20

#: the needed ones of dX, dW and db
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class _Call:
    """One call of a layer; a convolution has a geometry: stride, padding, dilation and groups."""

    function: Callable[..., Tensor]
    parameter: Tensor
    layers: FilterLayers
    want: WeightGradient
    geometry: tuple[Any, ...] = ()

    def plain(self, dy: Tensor, weight: Tensor, x: Tensor, need: tuple[bool, ...]) -> Gradients:
        """Returns the needed gradients; supports double backward."""
        if self.geometry:
            *sizes, groups = self.geometry
            biases, zeros = [len(weight)] if need[2] else None, [0] * len(sizes[0])
            backward = torch.ops.aten.convolution_backward
            return backward(dy, x, weight, biases, *sizes, False, zeros, groups, need)  # type: ignore[no-any-return]
        dx = dy @ weight.conj() if need[0] else None
        return dx, dy.t() @ x.conj() if need[1] else None, dy.sum(0) if need[2] else None

    def narrowed(self, dy: Tensor, weight: Tensor, x: Tensor, need: tuple[bool, ...]) -> Gradients:
        """Returns those that the ascent needs; dW is zero in rows that are not kept."""
        mask, implicit, rows = self.want.mask, self.want.implicit, self.want.mask.rows
        dense = self.want.dense or _has_hooks(self.parameter)
        need_x, need_w, need_b = need
        db = dy.sum([place for place in range(dy.dim()) if place != 1]) if need_b else None
        if implicit and mask.is_empty:
            return None, self._some(dy, weight, x, False, need_w and dense)[1], db
        if rows is None or (self.geometry and self.geometry[3] > 1):  # filters of a group have inputs of their own
            return *self._some(dy, weight, x, need_x, need_w, mask if implicit else None), db
        kept = dy.index_select(1, rows), weight.index_select(0, rows)
        dx, dw = self._some(*kept, x, need_x and implicit, need_w and not dense)
        if dw is not None:
            dw = torch.zeros_like(weight).index_copy_(0, rows, dw)
        dx_of_all, dw_of_all = self._some(dy, weight, x, need_x and not implicit, need_w and dense)
        return dx if implicit else dx_of_all, dw_of_all if dense else dw, db

    def _some(
        self, dy: Tensor, weight: Tensor, x: Tensor, need_x: bool, need_w: bool, mask: PackedMask | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Returns dX, through the masked weights, and dW, if they are needed."""
        if not (need_x or need_w):
            return None, None
        if not self.geometry:
            dx, dw, _ = self.plain(dy, weight, x, (need_x and mask is None, need_w, False))
            return input_gradient(dy, weight, mask) if need_x and mask is not None else dx, dw
        weight = weight if mask is None else weight * mask.unpack(weight.device)
        count = max(1, len(x))
        if x.device.type == "cpu" and x.nbytes > LARGE and x.dtype in (torch.float32, torch.float64):
            # oneDNN copies x, dY and dX into its own layout. glibc returns buffers of that size to the system after
            # each call, and the page faults of the next call may take as long as the product itself.
            count = max(1, LARGE // 2 * len(x) // x.nbytes)
        dx, dw = torch.empty_like(x) if need_x and count < len(x) else None, None
        for place in range(0, max(1, len(x)), count):
            at = slice(place, place + count)
            dx_part, dw_part, _ = self.plain(dy[at], weight, x[at], (need_x, need_w, False))
            if dx is None or dx_part is None:
                dx = dx_part
            else:
                dx[at] = dx_part
            dw = dw_part if dw is None or dw_part is None else dw.add_(dw_part)
        return dx, dw


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, call: _Call) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.call = call
        y = call.function(x, weight, bias, *call.geometry)
        # A view that is made in here could not be written in place.
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # no gradient reaches this output
            return None, None, None, None
        call: _Call = ctx.call
        x, weight = ctx.saved_tensors
        shape, gradients = x.shape, call.narrowed if call.layers.is_narrow else call.plain
        if not call.geometry:  # gradients of a linear layer are those of matrices
            x, dy = (t.reshape(math.prod(t.shape[:-1]), t.shape[-1]) for t in (x, dy))
        dx, dw, db = gradients(dy, weight, x, ctx.needs_input_grad[:3])
        return None if dx is None else dx.view(shape), dw, db, None


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _apply(call: _Call, x: Tensor, bias: Tensor | None) -> Tensor:
    tensors: tuple[Tensor | None, ...] = (x, call.parameter, bias)
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        # What autocast would do within the call, where no gradient is recorded, and its cache would keep that.
        dtype, kept = torch.get_autocast_dtype(kind), (torch.float64, torch.complex64, torch.complex128)
        tensors = tuple(t if t is None or t.dtype in kept else t.to(dtype) for t in tensors)
    return _Layer.apply(*tensors, call)  # type: ignore[no-any-return]


# Arguments have torch's names, because calls may pass them by keyword.
def _linear(
    layers: FilterLayers, want: WeightGradient, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    return _apply(_Call(F.linear, weight, layers, want), input, bias)


def _convolution(
    convolve: Callable[..., Tensor], layers: FilterLayers, want: WeightGradient,
    input: Tensor, weight: Tensor, bias: Tensor | None = None,
    stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    def each(option: Any) -> list[int]:
        sizes = [option] if isinstance(option, int) else list(option)
        return sizes * (weight.dim() - 2) if len(sizes) == 1 else sizes

    sizes, dilations = each(stride), each(dilation)
    if padding == "same":
        if set(sizes) != {1}:  # torch's error
            return convolve(input, weight, bias, stride, padding, dilation, groups)
        totals = [spread * (size - 1) for size, spread in zip(weight.shape[2:], dilations, strict=True)]
        padding = [total // 2 for total in totals]
        if any(total % 2 for total in totals):  # one more zero at the end, as torch adds it
            input = F.pad(input, [side for total in reversed(totals) for side in (0, total % 2)])
    is_unbatched = input.dim() == weight.dim() - 1
    call = _Call(convolve, weight, layers, want, (sizes, each(0 if padding == "valid" else padding), dilations, groups))
    y = _apply(call, input.unsqueeze(0) if is_unbatched else input, bias)
    return y.squeeze(0) if is_unbatched else y


#: Torch functions with a narrowed backward, and what replaces each: called with the mode, the gradient that is wanted
#: and the same arguments.
LAYERS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    **{convolve: partial(_convolution, convolve) for convolve in (torch.conv1d, torch.conv2d, torch.conv3d)},
}
