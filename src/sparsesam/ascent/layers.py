"""Linear and convolution layers whose ascent computes only the gradients that the mask asks for.

For y = W x with kept output rows R (filters), and dY the gradient of y:

    dW[R] = dY[R] · xᵀ                      and nothing for the other rows
    dX    = Wᵀ · dY                         explicit
    dX    = W[R]ᵀ · dY[R]                   implicit, whole rows
    dX    = (W ⊙ m)ᵀ · dY                   implicit, any mask

The forward is that of the plain layer, call for call. Slicing channels keeps every product a dense one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
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


class _LinearAscent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, want: WeightGradient) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.want = want
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:  # nothing comes back through what lies downstream
            return None, None, None, None
        x, weight = ctx.saved_tensors
        want: WeightGradient = ctx.want
        x, weight = x.to(dy.dtype), weight.to(dy.dtype)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        rows = want.rows
        flat = _samples(dy)  # selecting columns of a matrix is ten times faster than of a cube
        kept = flat if rows is None else flat.index_select(1, rows)
        dx = dw = db = None
        if need_x:
            if not want.implicit:
                dx = flat @ weight.conj()
            elif rows is not None:
                dx = kept @ weight.index_select(0, rows).conj()
            else:
                dx = input_gradient(flat, weight, want.mask)
            dx = dx.view(x.shape)
        if need_w:
            if want.dense or rows is None:
                dw = flat.t() @ _samples(x).conj()
            else:
                dw = _scatter_rows(kept.t() @ _samples(x).conj(), rows, weight)
        if need_b:
            db = flat.sum(0)
        return dx, dw, db, None


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
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.geometry, ctx.want = geometry, want
        return convolve(x, weight, bias, *geometry)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        if dy is None:
            return None, None, None, None, None, None
        x, weight = ctx.saved_tensors
        want: WeightGradient = ctx.want
        x, weight = x.to(dy.dtype), weight.to(dy.dtype)
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        rows = want.rows if ctx.geometry[3] == 1 else None  # filters of a grouped convolution see different inputs
        dx = dw = None
        if rows is None:
            through = weight * want.mask.unpack(weight.device) if want.implicit else weight
            if need_x:
                dx, _ = _conv_backward(dy, x, through, ctx.geometry, need_x=True)
            if need_w:
                _, dw = _conv_backward(dy, x, weight, ctx.geometry, need_w=True)
        else:
            kept, kept_weight = dy.index_select(1, rows), weight.index_select(0, rows)
            through_kept = need_x and want.implicit
            if need_x and not want.implicit:
                dx, _ = _conv_backward(dy, x, weight, ctx.geometry, need_x=True)
            if need_w and want.dense:
                _, dw = _conv_backward(dy, x, weight, ctx.geometry, need_w=True)
            if through_kept or (need_w and not want.dense):
                some_dx, some_dw = _conv_backward(
                    kept, x, kept_weight, ctx.geometry, need_x=through_kept, need_w=need_w and not want.dense
                )
                dx = some_dx if through_kept else dx
                dw = dw if some_dw is None else _scatter_rows(some_dw, rows, weight)
        db = dy.transpose(0, 1).flatten(1).sum(1) if need_b else None
        return dx, dw, db, None, None, None


def _conv_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    geometry: tuple[Any, ...],
    *,
    need_x: bool = False,
    need_w: bool = False,
) -> tuple[Tensor | None, Tensor | None]:
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
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> None:
        return None


def nothing_passes(x: Tensor) -> Tensor:
    """The same values, through which no gradient comes back, and upstream of which none is computed.

    Unlike a detached tensor it still asks for a gradient, so that a ``backward()`` downstream has one to make.
    """
    return _NothingPasses.apply(x)  # type: ignore[no-any-return]


def _samples(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


# The names of the arguments are torch's: a call may use them.
def linear_ascent(want: WeightGradient, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return _LinearAscent.apply(input, weight, bias, want)  # type: ignore[no-any-return]


def convolution_ascent(convolve: Callable[..., Tensor], dimensions: int) -> Callable[..., Tensor]:
    def ascent(
        want: WeightGradient,
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
            return ascent(want, x[None], weight, bias, stride, padding, dilation, groups)[0]
        stride, dilation = _tuple(stride, dimensions), _tuple(dilation, dimensions)
        if padding == "valid":
            padding = 0
        elif padding == "same":
            x, padding = _pad_same(x, weight, dilation), 0
        geometry = (stride, _tuple(padding, dimensions), dilation, groups)
        return _ConvAscent.apply(x, weight, bias, geometry, convolve, want)  # type: ignore[no-any-return]

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
