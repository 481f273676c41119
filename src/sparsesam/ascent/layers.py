"""Linear and convolution layers whose ascent computes only the gradients that the mask asks for.

For y = W x with kept output rows R (filters), and dY the gradient of y:

    dW[R] = dY[R] · xᵀ                      and nothing for the other rows
    dX    = Wᵀ · dY                         explicit
    dX    = W[R]ᵀ · dY[R]                   implicit, whole rows
    dX    = (W ⊙ m)ᵀ · dY                   implicit, any mask

The forward is that of the plain layer, call for call. Slicing channels keeps every product a dense one. While its
`Switch` is off, a layer's backward is the plain one: only the ascent's own backward may leave anything out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsesam.ascent.semi_structured import input_gradient
from sparsesam.masks.packed import PackedMask


@dataclass(frozen=True)
class WeightGradient:
    """What the ascent needs of one weight tensor."""

    mask: PackedMask
    rows: Tensor | None  # the kept output rows, where the mask is made of whole rows
    implicit: bool  # dX goes through the masked weights
    dense: bool  # dW for every entry, whatever the mask


@dataclass
class Switch:
    """On while the ascent's backward runs."""

    on: bool = False


class _LinearAscent(torch.autograd.Function):
    """y = x Wᵀ + b for a matrix x; of a matrix the result is no view, so that in-place operations may follow."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, want: WeightGradient, switch: Switch
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.want, ctx.switch = want, switch
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # nothing comes back through what lies downstream
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        want: WeightGradient | None = ctx.want if ctx.switch.on else None
        x, weight = x.to(dy.dtype), weight.to(dy.dtype)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        rows = None if want is None else want.rows
        kept = dy if rows is None else dy.index_select(1, rows)
        dx = dw = db = None
        if need_x:
            if want is None or not want.implicit:
                dx = dy @ weight.conj()
            elif rows is not None:
                dx = kept @ weight.index_select(0, rows).conj()
            else:
                dx = input_gradient(dy, weight, want.mask)
        if need_w:
            if want is None or want.dense or rows is None:
                dw = dy.t() @ x.conj()
            else:
                dw = _scatter_rows(kept.t() @ x.conj(), rows, weight)
        if need_b:
            db = dy.sum(0)
        return dx, dw, db, None, None


class _ConvAscent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        geometry: tuple[Any, ...],
        convolve: Callable[..., Tensor],
        want: WeightGradient,
        switch: Switch,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.geometry, ctx.want, ctx.switch = geometry, want, switch
        return convolve(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        want: WeightGradient | None = ctx.want if ctx.switch.on else None
        x, weight = x.to(dy.dtype), weight.to(dy.dtype)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        # Filters of a grouped convolution see different inputs.
        rows = want.rows if want is not None and ctx.geometry[3] == 1 else None
        dx_by = dw_by = (dy, weight)
        if want is not None and (rows is not None or want.implicit):
            if rows is not None:
                some = dy.index_select(1, rows), weight.index_select(0, rows)
            else:
                some = dy, weight * want.mask.unpack(weight.device)
            dx_by = some if want.implicit else dx_by
            dw_by = some if rows is not None and not want.dense else dw_by
        if dx_by is dw_by:
            dx, dw = _conv_backward(*dx_by, x, ctx.geometry, need_x=need_x, need_w=need_w)
        else:
            dx, _ = _conv_backward(*dx_by, x, ctx.geometry, need_x=need_x)
            _, dw = _conv_backward(*dw_by, x, ctx.geometry, need_w=need_w)
        if dw is not None and rows is not None and len(dw) < len(weight):
            dw = _scatter_rows(dw, rows, weight)
        db = dy.transpose(0, 1).flatten(1).sum(1) if need_b else None
        return dx, dw, db, None, None, None, None


def _conv_backward(
    dy: Tensor,
    weight: Tensor,
    x: Tensor,
    geometry: tuple[Any, ...],
    *,
    need_x: bool = False,
    need_w: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
    if not (need_x or need_w):
        return None, None
    stride, padding, dilation, groups = geometry
    zeros = [0] * len(stride)
    # oneDNN takes as long for a strided kernel of one pixel as if it were not strided.
    picks_pixels = weight[0, 0].numel() == 1 and max(stride) > 1 and not any(padding) and groups == 1
    by_product = need_x and picks_pixels and dy.device.type == "cpu"
    dx = dw = None
    if by_product:
        dx = _spread(dy, weight.flatten(1), x, stride)
    if need_w or not by_product:
        wanted = [need_x and not by_product, need_w, False]
        found = torch.ops.aten.convolution_backward(
            dy, x, weight, None, stride, padding, dilation, False, zeros, groups, wanted
        )
        dx, dw = found[0] if dx is None else dx, found[1]
    return dx if need_x else None, dw if need_w else None


def _spread(dy: Tensor, weight: Tensor, x: Tensor, stride: list[int]) -> Tensor:
    """The input gradient of a kernel of one pixel: one product for the pixels it saw, zeros between them."""
    sizes = dy.shape[2:]
    seen = torch.matmul(weight.t(), dy.flatten(2)).reshape(len(dy), weight.shape[1], *sizes)
    dx = torch.zeros_like(x)
    places = [slice(0, (size - 1) * step + 1, step) for size, step in zip(sizes, stride, strict=True)]
    dx[(slice(None), slice(None), *places)] = seen
    return dx


def _scatter_rows(some: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    return torch.zeros_like(weight).index_copy_(0, rows, some.to(weight.dtype))


class _NothingPasses(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, switch: Switch) -> Tensor:
        ctx.switch = switch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        return None if ctx.switch.on else dy, None


def nothing_passes(x: Tensor, switch: Switch) -> Tensor:
    """The same values, through which no gradient comes back in the ascent: dX = dY · (W ⊙ 0)."""
    return _NothingPasses.apply(x, switch)  # type: ignore[no-any-return]


# The names of the arguments are torch's: a call may use them.
def linear_ascent(
    want: WeightGradient, switch: Switch, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    return _LinearAscent.apply(rows, weight, bias, want, switch).view(*input.shape[:-1], len(weight))  # type: ignore[no-any-return]


def convolution_ascent(convolve: Callable[..., Tensor], dimensions: int) -> Callable[..., Tensor]:
    def ascent(
        want: WeightGradient,
        switch: Switch,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Tensor:
        x = input
        if x.dim() == dimensions + 1:  # one sample without a batch dimension
            return ascent(want, switch, x[None], weight, bias, stride, padding, dilation, groups)[0]
        stride, dilation = _tuple(stride, dimensions), _tuple(dilation, dimensions)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            x, padding = _pad_same(x, weight, dilation), 0
        geometry = (stride, _tuple(padding, dimensions), dilation, groups)
        return _ConvAscent.apply(x, weight, bias, geometry, convolve, want, switch)  # type: ignore[no-any-return]

    return ascent


def _tuple(value: Any, dimensions: int) -> list[int]:
    return [value] * dimensions if isinstance(value, int) else list(value) * (dimensions if len(value) == 1 else 1)


def _pad_same(x: Tensor, weight: Tensor, dilation: list[int]) -> Tensor:
    pads: list[int] = []
    for size, spread in zip(reversed(weight.shape[2:]), reversed(dilation), strict=True):
        total = spread * (size - 1)
        pads += [total // 2, total - total // 2]
    return F.pad(x, pads)


#: The functions that have an ascent of their own; how to call it with their arguments.
LAYERS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: linear_ascent,
    torch.conv1d: convolution_ascent(torch.conv1d, 1),
    torch.conv2d: convolution_ascent(torch.conv2d, 2),
    torch.conv3d: convolution_ascent(torch.conv3d, 3),
}

_CONVOLUTIONS = {nn.Conv1d: torch.conv1d, nn.Conv2d: torch.conv2d, nn.Conv3d: torch.conv3d}


def is_layer(module: nn.Module) -> bool:
    """Whether its forward is that of torch's linear or convolution layer, whatever its own class."""
    kinds: tuple[Any, ...] = (nn.Linear, *_CONVOLUTIONS)
    return "forward" not in module.__dict__ and any(type(module).forward is kind.forward for kind in kinds)


def layer_forward(module: Any, x: Tensor, want: WeightGradient | None, switch: Switch) -> Tensor:
    """The layer's output, by way of its ascent; without a ``want``, nothing passes back through it."""
    if want is None:
        blocked = nothing_passes(x, switch) if x.requires_grad else x
        return type(module).forward(module, blocked)  # type: ignore[no-any-return]
    for kind, function in _CONVOLUTIONS.items():
        if isinstance(module, kind):
            padding: Any = module.padding
            if module.padding_mode != "zeros":
                x, padding = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0
            geometry = (module.stride, padding, module.dilation, module.groups)
            return LAYERS[function](want, switch, x, module.weight, module.bias, *geometry)
    return linear_ascent(want, switch, x, module.weight, module.bias)
