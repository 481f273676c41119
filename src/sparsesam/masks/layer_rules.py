"""Squared per-sample gradients of a layer's parameters from its inputs and output gradients.

A rule is a function ``rule(layer, calls, into)``. ``calls`` holds, for each time the layer ran, its
input a and the gradient g of the summed loss with respect to its output, both with the samples in
dimension 0. ``into`` maps the layer's own parameter names to accumulators of the parameters' shapes, and
only the wanted names are there. The rule adds, in place,

    into[p] += sum_b (sum_calls d loss_b / d p)^2

so that a layer used twice adds its two gradients before they are squared, as autograd does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerCall(NamedTuple):
    """One run of a layer: input (B, ...) and gradient of the summed loss at its output (B, ...)."""

    input: Tensor
    grad: Tensor


Accumulators = dict[str, Tensor]
Rule = Callable[[Any, Sequence[LayerCall], Accumulators], None]
Vectors = Callable[[Any, LayerCall], dict[str, Tensor]]
RuleT = TypeVar("RuleT", bound=Rule)
VectorsT = TypeVar("VectorsT", bound=Vectors)

# Elements of a temporary. On a CPU it should stay in the cache; on a GPU it should fill the device.
CPU_ELEMENTS = 2**16
GPU_ELEMENTS = 2**24
# Unfolded patches of the samples that are multiplied one after the other on a CPU (4 MB of float32).
PATCH_ELEMENTS = 2**20
# Rows of one weight's product are computed together up to this many elements (64 MB of float32).
PRODUCT_ELEMENTS = 2**24
# From here on oneDNN's own weight-gradient kernel beats unfold and a matrix product.
MANY_POSITIONS = 65


class _Entry(NamedTuple):
    rule: Rule
    accepts: Callable[[Any], bool]


_REGISTRY: dict[type[nn.Module], _Entry] = {}


def _anything(layer: Any) -> bool:
    return True


def register(*types: type[nn.Module], accepts: Callable[[Any], bool] = _anything) -> Callable[[RuleT], RuleT]:
    """Declare the rule of these layer types; ``accepts`` may refuse a layer because of its options."""

    def wrap(rule: RuleT) -> RuleT:
        for layer_type in types:
            _REGISTRY[layer_type] = _Entry(rule, accepts)
        return rule

    return wrap


def find_rule(layer: nn.Module) -> tuple[str, Rule] | None:
    """The registered type's name and rule, or None when nothing proves that the rule describes the layer.

    A subclass keeps the rule only while it keeps ``forward``; re-parametrized layers (weight norm, pruning)
    hold other parameters than the ones declared by the type and have none.
    """
    for layer_type, entry in _REGISTRY.items():
        if isinstance(layer, layer_type):
            same_forward = type(layer).forward is layer_type.forward and "forward" not in layer.__dict__
            if same_forward and _holds_its_own_parameters(layer) and entry.accepts(layer):
                return layer_type.__name__, entry.rule
            return None
    return None


def _holds_its_own_parameters(layer: nn.Module) -> bool:
    own = layer._parameters
    has_weight = own.get("weight") is not None
    return set(own) <= {"weight", "bias"} and has_weight and ("bias" in own or not hasattr(layer, "bias"))


# --- sums over samples -------------------------------------------------------------------------------------


def _chunks(
    batch: int, elements_per_sample: int, device: torch.device, cpu_elements: int = CPU_ELEMENTS
) -> Iterator[slice]:
    elements = cpu_elements if device.type == "cpu" else GPU_ELEMENTS
    size = max(1, elements // max(1, elements_per_sample))
    for start in range(0, batch, size):
        yield slice(start, min(start + size, batch))


def _slice_of(calls: Sequence[LayerCall], samples: slice, dtype: torch.dtype) -> list[LayerCall]:
    return [LayerCall(a[samples].to(dtype), g[samples].to(dtype)) for a, g in calls]


def _with_vectors(vectors: Vectors) -> Rule:
    """A rule from the per-sample gradients themselves, for parameters small enough to hold (B, n) of them."""

    def rule(layer: Any, calls: Sequence[LayerCall], into: Accumulators) -> None:
        reference = next(iter(into.values()))
        per_sample = sum(call.input[0].numel() for call in calls)
        for samples in _chunks(len(calls[0].grad), per_sample, reference.device):
            parts = [vectors(layer, call) for call in _slice_of(calls, samples, reference.dtype)]
            for name, total in into.items():
                gradient = parts[0][name]
                for part in parts[1:]:
                    gradient = gradient + part[name]
                total += gradient.square().sum(0).view_as(total)

    return rule


def _register_vectors(*types: type[nn.Module]) -> Callable[[VectorsT], VectorsT]:
    def wrap(vectors: VectorsT) -> VectorsT:
        register(*types)(_with_vectors(vectors))
        return vectors

    return wrap


def _add_squared_products(into: Tensor, left: Tensor, right: Tensor) -> None:
    """Add sum_b (left_b @ right_b)^2 to into (G, O, K), with left (B, G, O, L) and right (B, G, L, K)."""
    _, groups, rows, positions = left.shape
    columns = right.shape[-1]
    if positions == 1:
        # The square of an outer product is the outer product of the squares: one product for all samples.
        squares = left.squeeze(3).square().permute(1, 2, 0), right.squeeze(2).square().transpose(0, 1)
        into += torch.bmm(*squares)
        return
    block = max(1, PRODUCT_ELEMENTS // (groups * columns))
    for start in range(0, rows, block):
        _add_squared_block(into[:, start : start + block], left[:, :, start : start + block], right)


def _add_squared_block(into: Tensor, left: Tensor, right: Tensor) -> None:
    groups, rows, columns = into.shape
    product: Tensor | None = None
    for samples in _chunks(len(left), groups * rows * columns, into.device):
        some = samples.stop - samples.start
        if some > 1:
            into += torch.matmul(left[samples], right[samples]).square_().sum(0)
        elif groups == 1:
            product = torch.empty_like(into[0]) if product is None else product
            torch.mm(left[samples.start, 0], right[samples.start, 0], out=product)
            into[0].addcmul_(product, product)
        else:
            grouped = torch.bmm(left[samples.start], right[samples.start])
            into.addcmul_(grouped, grouped)


def _add_squared_sums(into: Tensor, per_sample: Sequence[Tensor]) -> None:
    """Add sum_b (sum_calls v_b)^2 to into (n), for the calls' per-sample gradients v (B, n)."""
    total = per_sample[0]
    for other in per_sample[1:]:
        total = total + other
    into += total.square().sum(0)


# --- linear and embedding ----------------------------------------------------------------------------------


def _positions_first(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, ..., d) -> (B, L, d)."""
    return tensor.reshape(len(tensor), -1, tensor.shape[-1]).to(dtype)


@register(nn.Linear)
def linear(layer: nn.Linear, calls: Sequence[LayerCall], into: Accumulators) -> None:
    """dW_b = g_b^T a_b over the positions L of a sample, a (B, L, K), g (B, L, O); db_b = sum_l g_bl."""
    dtype = next(iter(into.values())).dtype
    gradients = torch.cat([_positions_first(g, dtype) for _, g in calls], 1)
    if "bias" in into:
        into["bias"] += gradients.sum(1).square().sum(0)
    if "weight" in into:
        inputs = torch.cat([_positions_first(a, dtype) for a, _ in calls], 1)
        _add_squared_products(into["weight"].unsqueeze(0), gradients.transpose(1, 2).unsqueeze(1), inputs.unsqueeze(1))


@register(nn.Embedding, accepts=lambda layer: not (layer.max_norm or layer.scale_grad_by_freq or layer.sparse))
def embedding(layer: nn.Embedding, calls: Sequence[LayerCall], into: Accumulators) -> None:
    """dW_b[v] = sum of g_bl over the positions l where sample b holds token v; padding gets none."""
    weight = into["weight"]
    tokens = torch.cat([a.reshape(len(a), -1) for a, _ in calls], 1).long()
    gradients = torch.cat([_positions_first(g, weight.dtype) for _, g in calls], 1)
    rows = torch.arange(len(tokens), device=tokens.device).unsqueeze(1) * layer.num_embeddings + tokens
    keep = torch.ones_like(tokens, dtype=torch.bool)
    if layer.padding_idx is not None:
        keep = tokens != layer.padding_idx
    found, place = torch.unique(rows[keep], return_inverse=True)
    sums = weight.new_zeros(len(found), weight.shape[1]).index_add_(0, place, gradients[keep])
    weight.index_add_(0, found % layer.num_embeddings, sums.square_())


# --- convolution -------------------------------------------------------------------------------------------


@register(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(layer: nn.Conv2d, calls: Sequence[LayerCall], into: Accumulators) -> None:
    """dW_b = sum over positions of g_b x (the input's patch there); db_b = sum over positions of g_b."""
    if "bias" in into:
        dtype = into["bias"].dtype
        _add_squared_sums(into["bias"], [g.flatten(2).sum(2, dtype=dtype) for _, g in calls])
    if "weight" in into:
        add = _convolve_samples if _prefers_convolution(layer, calls) else _multiply_patches
        add(layer, calls, into["weight"])


def _prefers_convolution(layer: nn.Conv2d, calls: Sequence[LayerCall]) -> bool:
    patches_are_views = math.prod(layer.kernel_size) == 1
    on_cpu = calls[0].grad.device.type == "cpu"
    if len(layer.kernel_size) == 3:
        return True
    return on_cpu and not patches_are_views and _positions(calls) >= MANY_POSITIONS


def _positions(calls: Sequence[LayerCall]) -> int:
    return sum(math.prod(g.shape[2:]) for _, g in calls)


def _padded(layer: nn.Conv2d, input: Tensor) -> tuple[Tensor, list[int]]:
    """The input and the zero padding left to apply; other kinds of padding are applied here."""
    if layer.padding_mode != "zeros":
        return F.pad(input, layer._reversed_padding_repeated_twice, mode=layer.padding_mode), [
            0 for _ in layer.kernel_size
        ]
    if isinstance(layer.padding, str):
        return F.pad(input, layer._reversed_padding_repeated_twice), [0 for _ in layer.kernel_size]
    return input, list(layer.padding)


def _convolve_samples(layer: nn.Conv2d, calls: Sequence[LayerCall], into: Tensor) -> None:
    """One weight-gradient kernel per sample: no patches in memory."""
    weight = layer.weight.detach().to(into.dtype)
    dimensions = len(layer.kernel_size)
    for sample in range(len(calls[0].grad)):
        gradient: Tensor | None = None
        for a, g in _slice_of(calls, slice(sample, sample + 1), into.dtype):
            padded, padding = _padded(layer, a)
            part = torch.ops.aten.convolution_backward(
                g, padded, weight, None, list(layer.stride), padding, list(layer.dilation),
                False, [0] * dimensions, layer.groups, [False, True, False],
            )[1]  # fmt: skip
            gradient = part if gradient is None else gradient + part
        assert gradient is not None
        into.addcmul_(gradient, gradient)


def _multiply_patches(layer: nn.Conv2d, calls: Sequence[LayerCall], into: Tensor) -> None:
    """One product per sample of the output gradient (O, L) and the unfolded input (L, C k k)."""
    groups = layer.groups
    grouped = into.view(groups, into.shape[0] // groups, -1)
    patch_elements = grouped.shape[0] * grouped.shape[2] * _positions(calls)
    for samples in _chunks(len(calls[0].grad), patch_elements, into.device, PATCH_ELEMENTS):
        lefts, rights = [], []
        for a, g in _slice_of(calls, samples, into.dtype):
            lefts.append(g.reshape(len(g), groups, grouped.shape[1], -1))
            rights.append(_patches(layer, a).reshape(len(a), groups, grouped.shape[2], -1))
        left = lefts[0] if len(lefts) == 1 else torch.cat(lefts, 3)
        right = rights[0] if len(rights) == 1 else torch.cat(rights, 3)
        _add_squared_products(grouped, left, right.transpose(2, 3))


def _patches(layer: nn.Conv2d, input: Tensor) -> Tensor:
    """(B, C, ...) -> (B, C k k, L)."""
    padded, padding = _padded(layer, input)
    if padded.dim() == 4:
        return F.unfold(padded, layer.kernel_size, layer.dilation, tuple(padding), layer.stride)
    kernel, dilation, stride = ((1, size[0]) for size in (layer.kernel_size, layer.dilation, layer.stride))
    return F.unfold(padded.unsqueeze(2), kernel, dilation, (0, padding[0]), stride)


# --- normalization -----------------------------------------------------------------------------------------


def _scale_and_shift(normalized: Tensor, grad: Tensor, kept: tuple[int, ...]) -> dict[str, Tensor]:
    """Of y = scale * normalized + shift, summed over every dimension but the samples' and the kept ones."""
    summed = [d for d in range(1, grad.dim()) if d not in kept]
    product = normalized * grad
    if not summed:
        return {"weight": product, "bias": grad}
    return {"weight": product.sum(summed), "bias": grad.sum(summed)}


def _has_statistics(layer: Any) -> bool:
    return layer.running_mean is not None


def _batch_norm_vectors(layer: nn.BatchNorm2d, call: LayerCall) -> dict[str, Tensor]:
    """dscale_b = sum g (x - mean) / sqrt(var + eps) with the running statistics, which are constants."""
    assert layer.running_mean is not None
    assert layer.running_var is not None
    dtype = call.grad.dtype
    shape = (1, -1) + (1,) * (call.input.dim() - 2)
    gradients = _scale_and_shift(call.input - layer.running_mean.to(dtype).view(shape), call.grad, (1,))
    gradients["weight"] = gradients["weight"] * (layer.running_var.to(dtype) + layer.eps).rsqrt()
    return gradients


register(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, accepts=_has_statistics)(_with_vectors(_batch_norm_vectors))


@_register_vectors(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def _instance_norm_vectors(layer: nn.InstanceNorm2d, call: LayerCall) -> dict[str, Tensor]:
    """Statistics of each sample's channel, or the running ones when the layer keeps them."""
    mean, variance = layer.running_mean, layer.running_var
    if mean is not None and variance is not None:
        mean, variance = mean.to(call.input.dtype), variance.to(call.input.dtype)
    normalized = F.instance_norm(call.input, mean, variance, use_input_stats=mean is None, eps=layer.eps)
    return _scale_and_shift(normalized, call.grad, (1,))


@_register_vectors(nn.GroupNorm)
def _group_norm_vectors(layer: nn.GroupNorm, call: LayerCall) -> dict[str, Tensor]:
    return _scale_and_shift(F.group_norm(call.input, layer.num_groups, eps=layer.eps), call.grad, (1,))


@_register_vectors(nn.LayerNorm)
def _layer_norm_vectors(layer: nn.LayerNorm, call: LayerCall) -> dict[str, Tensor]:
    normalized = F.layer_norm(call.input, layer.normalized_shape, eps=layer.eps)
    return _scale_and_shift(normalized, call.grad, _last(layer.normalized_shape, call.grad))


@_register_vectors(nn.RMSNorm)
def _rms_norm_vectors(layer: nn.RMSNorm, call: LayerCall) -> dict[str, Tensor]:
    shape = list(layer.normalized_shape)
    return _scale_and_shift(F.rms_norm(call.input, shape, eps=layer.eps), call.grad, _last(shape, call.grad))


def _last(normalized_shape: Sequence[int], grad: Tensor) -> tuple[int, ...]:
    return tuple(range(grad.dim() - len(normalized_shape), grad.dim()))
