"""Linear and convolution layers that compute only the gradients that the ascent needs under a mask.

For y = W x with kept output rows R (filters), and dY the gradient of y:

    dW[R] = dY[R] · xᵀ                      zero in the other rows
    dX    = Wᵀ · dY                         explicit
    dX    = W[R]ᵀ · dY[R]                   implicit, whole rows
    dX    = (W ⊙ m)ᵀ · dY                   implicit, any mask

The forward makes the same calls as the plain layer. Slicing rows keeps every product dense. While its `Switch` is off,
a layer runs the plain backward: only the backward of the ascent leaves anything out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparsesam.masks.packed import PackedMask
from sparsesam.semi_structured import input_gradient
from sparsesam.utils.convolutions import expand_arguments


@dataclass(frozen=True)
class WeightGradient:
    """Which gradients of one weight tensor the ascent needs."""

    mask: PackedMask
    implicit: bool  # dX is computed with the masked weights; with an empty mask, not at all
    dense: bool  # dW is computed for every entry, whatever the mask

    @property
    def rows(self) -> Tensor | None:
        """The kept output rows, if the mask consists of whole rows."""
        return self.mask.rows


@dataclass
class Switch:
    """On while the backward of the ascent runs."""

    on: bool = False


#: bytes of an input above which gradients are computed a few samples at a time
LARGE = 8 << 20
#: samples whose windows are multiplied at a time
_IN_CACHE = 4
#: dtypes in which sums over samples need no wider accumulator
_EXACT = (torch.float32, torch.float64)


class _Linear:
    """y = x Wᵀ + b for a matrix x; the result is not a view, so in-place operations may follow."""

    groups = 1

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def dx(self, dy: Tensor, weight: Tensor, x: Tensor, mask: PackedMask | None = None) -> Tensor:
        return dy @ weight.conj() if mask is None else input_gradient(dy, weight, mask)

    def dw(self, dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return dy.t() @ x.conj()

    def plain(self, dy: Tensor, weight: Tensor, x: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
        """Returns the requested ones of dX, dW and db; supports double backward."""
        ways = (lambda: self.dx(dy, weight, x), lambda: self.dw(dy, weight, x), lambda: dy.sum(0))
        return tuple(way() if want else None for way, want in zip(ways, wanted, strict=True))


@dataclass
class _Convolution:
    convolve: Callable[..., Tensor]
    stride: list[int]
    padding: list[int]
    dilation: list[int]
    groups: int

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.convolve(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)

    def dx(self, dy: Tensor, weight: Tensor, x: Tensor, mask: PackedMask | None = None) -> Tensor:
        weight = weight if mask is None else weight * mask.unpack(weight.device)
        # oneDNN takes as long for a strided 1x1 kernel as for one without stride.
        picks_pixels = weight[0, 0].numel() == 1 and max(self.stride) > 1 and not any(self.padding)
        if picks_pixels and self.groups == 1 and dy.device.type == "cpu":
            return _scatter_input_gradient(dy, weight.flatten(1), x, self.stride)
        if self._has_few_windows(weight, x):
            return _input_gradient_of_windows(self._windows(dy, weight), weight, x)
        count = _samples_at_a_time(x)
        if count >= len(x):
            return self._gradient(0, dy, weight, x)
        dx = torch.empty_like(x)
        for place, part, given in zip(dx.split(count), dy.split(count), x.split(count), strict=True):
            place.copy_(self._gradient(0, part, weight, given))
        return dx

    def dw(self, dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        if self._has_few_windows(weight, x):
            return _weight_gradient_of_windows(self._windows(dy, weight), weight, x)
        count = _samples_at_a_time(x)
        pairs = zip(dy.split(count), x.split(count), strict=True)
        return reduce(torch.add, (self._gradient(1, part, weight, given) for part, given in pairs))

    def _has_few_windows(self, weight: Tensor, x: Tensor) -> bool:
        """Whether dY's windows take no more memory than x, so that matrix products with them are faster.

        oneDNN takes as long for one filter as for sixteen.
        """
        is_large = x.device.type == "cpu" and x.nbytes > LARGE and x.is_contiguous() and x.dtype in _EXACT
        is_plain = self.groups == 1 and weight.dim() == 4 and {*self.stride, *self.dilation} == {1}
        fits = all(pad < size for pad, size in zip(self.padding, weight.shape[2:], strict=True))
        return is_large and is_plain and fits and weight[:, 0].numel() <= x.shape[1]

    def _windows(self, dy: Tensor, weight: Tensor) -> Tensor:
        """Returns dY at the outputs that each input pixel contributes to: (N, filters, kernel, size of the input)."""
        rows, columns = weight.shape[2:]
        top, left = rows - 1 - self.padding[0], columns - 1 - self.padding[1]
        padded = F.pad(dy, (left, left, top, top))
        return padded.unfold(2, rows, 1).unfold(3, columns, 1).permute(0, 1, 4, 5, 2, 3)

    def _gradient(self, place: int, dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
        return self.plain(dy, weight, x, [place == 0, place == 1, False])[place]  # type: ignore[return-value]

    def plain(self, dy: Tensor, weight: Tensor, x: Tensor, wanted: list[bool]) -> tuple[Tensor | None, ...]:
        """Returns the requested ones of dX, dW and db; supports double backward."""
        zeros, biases = [0] * len(self.stride), [len(weight)] if wanted[2] else None
        return torch.ops.aten.convolution_backward(  # type: ignore[no-any-return]
            dy, x, weight, biases, self.stride, self.padding, self.dilation, False, zeros, self.groups, wanted
        )


class _Ascent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: _Linear | _Convolution,
        want: WeightGradient,
        switch: Switch,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.set_materialize_grads(False)
        ctx.layer, ctx.want, ctx.switch = layer, want, switch
        return layer(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        dx = dw = db = None
        if dy is None:  # no gradient reaches this output
            return None, None, None, None, None, None
        x, weight = (saved.to(dy.dtype) for saved in ctx.saved_tensors)
        layer: _Linear | _Convolution = ctx.layer
        want: WeightGradient = ctx.want
        need_x, need_w, need_b = ctx.needs_input_grad[:3]
        if not ctx.switch.on:
            return *layer.plain(dy, weight, x, [need_x, need_w, need_b]), None, None, None
        # Filters of a grouped convolution see different inputs.
        rows = want.rows if layer.groups == 1 else None
        kept = (dy, weight) if rows is None else (dy.index_select(1, rows), weight.index_select(0, rows))
        is_blocked = want.implicit and want.mask.is_empty
        if need_w and rows is not None and not want.dense:
            dw = torch.zeros_like(weight).index_copy_(0, rows, layer.dw(*kept, x))
        elif need_w and (want.dense or not is_blocked):
            dw = layer.dw(dy, weight, x)
        if need_x and not want.implicit:
            dx = layer.dx(dy, weight, x)
        elif need_x and not is_blocked:
            dx = layer.dx(*kept, x, want.mask if rows is None else None)
        if need_b:
            db = dy.transpose(0, 1).flatten(1).sum(1)
        return dx, dw, db, None, None, None


def _samples_at_a_time(x: Tensor) -> int:
    """Returns the number of samples per call: all; on a CPU, if x is `LARGE`, as many as take half of that.

    oneDNN copies x, dY and dX into its own layout. glibc returns buffers of that size to the system after each call,
    and the page faults of the next call may take as long as the product itself.
    """
    if x.device.type != "cpu" or x.nbytes <= LARGE:
        return max(1, len(x))
    return max(1, LARGE // 2 * len(x) // x.nbytes)


def _scatter_input_gradient(dy: Tensor, weight: Tensor, x: Tensor, stride: list[int]) -> Tensor:
    """dX of a strided 1x1 kernel: one product for the pixels that it reads, zeros between them."""
    sizes = dy.shape[2:]
    seen = torch.matmul(weight.t(), dy.flatten(2)).reshape(len(dy), weight.shape[1], *sizes)
    dx = torch.zeros_like(x)
    places = [slice(0, (size - 1) * step + 1, step) for size, step in zip(sizes, stride, strict=True)]
    dx[(slice(None), slice(None), *places)] = seen
    return dx


def _input_gradient_of_windows(windows: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """dX = Wᵀ · windows, a few samples at a time, so that their data stays in cache."""
    dx, matrix = torch.empty_like(x), weight.flip(2, 3).transpose(0, 1).flatten(1)
    for place, part in zip(dx.flatten(2).split(_IN_CACHE), windows.split(_IN_CACHE), strict=True):
        columns = part.reshape(len(part), matrix.shape[1], -1)
        torch.bmm(matrix.expand(len(part), -1, -1), columns, out=place)
    return dx


def _weight_gradient_of_windows(windows: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """dW = the sum of windows · xᵀ over the samples."""
    filters, channels, *kernel = weight.shape
    sums = x.new_zeros(min(_IN_CACHE, len(x)), weight[:, 0].numel(), channels)
    for given, part in zip(x.flatten(2).split(_IN_CACHE), windows.split(_IN_CACHE), strict=True):
        sums[: len(part)].baddbmm_(part.reshape(len(part), sums.shape[1], -1), given.transpose(1, 2))
    return sums.sum(0).view(filters, *kernel, channels).permute(0, 3, 1, 2).flip(2, 3)


# Arguments have torch's names, because calls may pass them by keyword.
def _linear(want: WeightGradient, switch: Switch, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    rows = input.reshape(-1, input.shape[-1])
    output: Tensor = _Ascent.apply(rows, weight, bias, _Linear(), want, switch)
    return output.view(*input.shape[:-1], len(weight))


def _convolution(
    convolve: Callable[..., Tensor],
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
    if input.dim() == weight.dim() - 1:  # one sample without a batch dimension
        return _convolution(convolve, want, switch, input[None], weight, bias, stride, padding, dilation, groups)[0]
    input, stride, padding, dilation = expand_arguments(input, weight, stride, padding, dilation)
    layer = _Convolution(convolve, stride, padding, dilation, groups)
    return _Ascent.apply(input, weight, bias, layer, want, switch)  # type: ignore[no-any-return]


#: Torch functions with a narrowed backward, and the function that replaces each, called with the same arguments.
LAYERS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.linear: _linear,
    **{convolve: partial(_convolution, convolve) for convolve in (torch.conv1d, torch.conv2d, torch.conv3d)},
}

_FUNCTIONS: dict[Any, Callable[..., Any]] = {
    nn.Linear.forward: F.linear,
    nn.Conv1d.forward: torch.conv1d,
    nn.Conv2d.forward: torch.conv2d,
    nn.Conv3d.forward: torch.conv3d,
}


_CONVOLUTIONS: tuple[Any, ...] = tuple(one._conv_forward for one in (nn.Conv1d, nn.Conv2d, nn.Conv3d))


def is_layer(module: nn.Module) -> bool:
    """Whether the module computes what torch's linear or convolution layer does; its class may be a subclass."""
    cls: Any = type(module)
    if "forward" in module.__dict__ or cls.forward not in _FUNCTIONS:
        return False
    return cls.forward is nn.Linear.forward or cls._conv_forward in _CONVOLUTIONS


def layer_forward(module: Any, x: Tensor, want: WeightGradient, switch: Switch) -> Tensor:
    """Returns the layer's output with the narrowed backward."""
    forward = type(module).forward
    geometry: tuple[Any, ...] = ()
    if forward is not nn.Linear.forward:
        geometry = (module.stride, module.padding, module.dilation, module.groups)
        if module.padding_mode != "zeros":
            x = F.pad(x, module._reversed_padding_repeated_twice, mode=module.padding_mode)
            geometry = (module.stride, 0, module.dilation, module.groups)
    return LAYERS[_FUNCTIONS[forward]](want, switch, x, module.weight, module.bias, *geometry)
