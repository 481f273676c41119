"""Narrowed layers against naive float64 oracles: dX = dY · (W ⊙ m), dW ⊙ m; and where the plain backward must run."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import sparsesam
from sparsesam import filters
from sparsesam.filters import FilterLayers, weight_gradient
from sparsesam.masks.packed import PackedMask

equal = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-12)


def mask_of(weight, kind):
    generator = torch.Generator().manual_seed(3)
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    if kind == "filters":  # not as many in each group
        mask[: len(mask) // 2 - 1] = mask[-2] = True
    elif kind == "columns":
        mask[:, ::2] = True
    elif kind == "2:4":
        mask = sparsesam.NM(2, 4).select({"w": torch.rand(weight.shape, generator=generator)})["w"]
    elif kind == "all":
        mask[:] = True
    elif kind == "entries":
        mask = torch.rand(weight.shape, generator=generator) < 0.5
    return mask


def wanted_for(weight, kind="filters", ascent="explicit", norm="masked"):
    want = weight_gradient(PackedMask.pack(mask_of(weight, kind)), weight, ascent=ascent, norm=norm)
    return {} if want is None else {weight: want}


def weighted(y):
    """A loss with another gradient at each output."""
    return (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()


def narrowed_gradients(layers, loss_of, inputs):
    with layers:
        loss = loss_of()
    with layers.narrowed():
        return torch.autograd.grad(loss, inputs, allow_unused=True)


def plain_gradients(loss_of, inputs):
    return torch.autograd.grad(loss_of(), inputs, allow_unused=True)


def double(*shape, seed=0, requires_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(requires_grad)


def linear_case(*shape, change=lambda x: x):
    weight = nn.Parameter(double(8, shape[-1], seed=1).detach())
    return (lambda x, w, b: F.linear(change(x), w, b)), double(*shape), weight, double(8, seed=2)


def convolution_case(convolve, *shape, kernel=3, **options):
    dimensions = int(convolve.__name__[4])
    kernel = [kernel] * dimensions if isinstance(kernel, int) else kernel
    channels = shape[-dimensions - 1] // options.get("groups", 1)
    weight = nn.Parameter(double(8, channels, *kernel, seed=1).detach())
    return partial(convolve, **options), double(*shape), weight, double(8, seed=2)


image = partial(convolution_case, torch.conv2d, 5, 4, 9, 8)

CASES = {
    "linear": lambda: linear_case(7, 6),
    "linear, one vector": lambda: linear_case(6),
    "linear, sequence": lambda: linear_case(3, 4, 6),
    "linear, not contiguous": lambda: linear_case(3, 4, 6, change=lambda x: x.transpose(0, 1)),
    "linear, no samples": lambda: linear_case(0, 6),
    "conv2d": image,
    "conv2d stride": lambda: image(stride=2),
    "conv2d padding": lambda: image(padding=(1, 2)),
    "conv2d same": lambda: image(padding="same"),
    "conv2d same, uneven": lambda: image(padding="same", kernel=(2, 5), dilation=(3, 1)),
    "conv2d valid": lambda: image(padding="valid"),
    "conv2d dilation": lambda: image(dilation=(2,)),
    "conv2d groups": lambda: image(groups=2),
    "conv2d everything": lambda: image(stride=2, padding=2, dilation=2, groups=2),
    "conv2d one image": lambda: convolution_case(torch.conv2d, 4, 9, 9, padding="same"),
    "conv2d no samples": lambda: convolution_case(torch.conv2d, 0, 4, 9, 9),
    "conv1d": lambda: convolution_case(F.conv1d, 5, 4, 9, stride=2, padding=1),
    "conv3d": lambda: convolution_case(F.conv3d, 3, 4, 5, 5, 5, padding=1),
}


@pytest.fixture(params=[filters.LARGE, 2000])
def large(request, monkeypatch):
    """Inputs with more bytes are differentiated a few samples at a time."""
    monkeypatch.setattr(filters, "LARGE", request.param)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("ascent", ["explicit", "implicit", "implicit-dense"])
@pytest.mark.parametrize("kind", ["filters", "columns", "2:4", "entries", "none"])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_oracle(name, kind, ascent):
    """y = W x, with dX through W ⊙ m only if the ascent is implicit, and dW of at least the kept entries."""
    call, x, weight, bias = CASES[name]()
    mask = mask_of(weight, kind)
    layers = FilterLayers(wanted_for(weight, kind, ascent))
    inputs = [x, weight, bias]

    def oracle():
        if ascent == "explicit":
            return weighted(torch.tanh(call(torch.sin(x), weight, bias)))
        h = torch.sin(x)
        around = call(h.detach(), weight * ~mask, bias * 0)
        return weighted(torch.tanh(call(h, weight * mask, bias) + around))

    expected = plain_gradients(oracle, inputs)
    with layers:
        y = call(torch.sin(x), weight, bias)
    assert torch.equal(y, call(torch.sin(x), weight, bias))
    with layers.narrowed():
        found = list(torch.autograd.grad(weighted(y.tanh_()), inputs, allow_unused=True))
    found = [torch.zeros_like(one) if grad is None else grad for one, grad in zip(inputs, found, strict=True)]
    if ascent != "implicit-dense":
        found[1] = found[1] * mask
        expected = expected[0], expected[1] * mask, *expected[2:]
    equal(found, list(expected))


class Calls(TorchDispatchMode):
    """Records the shapes of the weights of backward convolutions, and which gradients they compute."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.convolution_backward.default:
            self.made.append((len(args[2]), *args[-1][:2]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("ascent", "expected"),
    [("explicit", [(4, False, True), (8, True, False)]), ("implicit", [(4, True, True)])],
)
def test_only_kept_filters_are_computed(ascent, expected):
    call, x, weight, bias = image()
    layers = FilterLayers(wanted_for(weight, ascent=ascent))
    with Calls() as calls:
        narrowed_gradients(layers, lambda: call(x, weight, bias).sum(), (x, weight))
    assert calls.made == expected


def test_gradient_that_nothing_reaches():
    _, x, weight, bias = linear_case(7, 6)
    layers = FilterLayers(wanted_for(weight))
    found = narrowed_gradients(
        layers, lambda: (F.linear(x, weight, bias).split(4, dim=1)[0] * 0 + x[:, :4]).sum(), (x,)
    )
    equal(found[0], torch.cat([torch.ones(7, 4), torch.zeros(7, 2)], 1).double())


# ---- which calls are recognized ------------------------------------------------------------------------------------


class Subclass(torch.Tensor):
    pass


def traced(x, weight):
    layer = nn.Linear(6, 8, bias=False)
    layer.weight = weight
    return torch.jit.trace(layer, x.detach(), check_trace=False)(x)


@pytest.mark.parametrize(
    ("call", "is_narrow"),
    [
        (lambda x, weight: F.linear(x, weight=weight), True),
        (lambda x, weight: F.linear(bias=None, weight=weight, input=x), True),
        (lambda x, weight: F.conv1d(x[..., None], weight=weight[..., None]), False),  # another tensor
        (lambda x, weight: x @ weight.t(), False),
        (lambda x, weight: F.linear(x, weight * 1), False),
        (lambda x, weight: torch.vmap(lambda one: F.linear(one, weight))(x), False),
        (traced, False),
        (lambda x, weight: F.linear(x.as_subclass(Subclass), weight), False),
        (lambda x, weight: F.linear(torch.nested.as_nested_tensor([x, x]), weight).to_padded_tensor(0.0), False),
    ],
)
def test_each_use_of_a_weight_has_its_gradient(call, is_narrow):
    _, x, weight, _ = linear_case(7, 6)
    layers = FilterLayers(wanted_for(weight))
    expected = plain_gradients(lambda: weighted(call(x, weight)), (x, weight))
    found = narrowed_gradients(layers, lambda: weighted(call(x, weight)), (x, weight))
    mask = mask_of(weight, "filters")
    equal([found[0], found[1] * mask], [expected[0], expected[1] * mask])
    assert bool((found[1] != expected[1]).any()) == bool(layers.called) == is_narrow


def test_forward_mode_and_calls_without_gradients_are_plain():
    _, x, weight, bias = linear_case(7, 6)
    with FilterLayers(wanted_for(weight)) as layers:
        with torch.autograd.forward_ad.dual_level():
            y = F.linear(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), weight, bias)
            equal(torch.autograd.forward_ad.unpack_dual(y).tangent, weight.sum(1).expand(7, 8))
        with torch.no_grad():
            assert F.linear(x, weight, bias).grad_fn is None
        with torch.inference_mode():
            assert F.linear(x, weight, bias).is_inference()
    assert not layers.called


@pytest.mark.parametrize(
    ("options", "words"), [({"padding": "same", "stride": 2}, "strided"), ({"stride": (1, 1, 1)}, "stride")]
)
def test_wrong_calls_raise_errors_of_torch(options, words):
    _, x, weight, bias = image()
    with pytest.raises(RuntimeError, match=words), FilterLayers(wanted_for(weight)):
        torch.conv2d(x, weight, bias, **options)
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("ascent", ["implicit", "implicit-dense"])
def test_complex_weights(ascent):
    """A linear layer's dX goes through the masked weights; a complex convolution is torch's own."""
    x, weight = torch.complex(double(7, 6), double(7, 6, seed=4)), torch.complex(double(8, 6), double(8, 6, seed=5))
    x, weight = x.detach().requires_grad_(), nn.Parameter(weight.detach())
    mask, layers = mask_of(weight, "entries"), FilterLayers(wanted_for(weight, "entries", ascent))
    found = narrowed_gradients(layers, lambda: weighted(torch.view_as_real(F.linear(x, weight))), (x, weight))
    expected_x = plain_gradients(lambda: weighted(torch.view_as_real(F.linear(x, weight * mask))), (x,))
    expected_w = plain_gradients(lambda: weighted(torch.view_as_real(F.linear(x, weight))), (weight,))
    equal([*found], [*expected_x, *expected_w])
    kernel = nn.Parameter(weight.detach()[..., None])
    layers = FilterLayers(wanted_for(kernel, "entries", ascent))

    def convolved():
        return weighted(torch.view_as_real(F.conv1d(x[..., None], kernel)))

    equal(narrowed_gradients(layers, convolved, (x, kernel)), plain_gradients(convolved, (x, kernel)))
    assert (
        weight_gradient(PackedMask.pack(mask_of(weight, "filters")), weight, ascent="explicit", norm="masked") is None
    )


# ---- where the plain backward runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["linear, sequence", "conv2d", "conv2d stride"])
def test_other_differentiation_is_plain(name, monkeypatch):
    """Second derivatives, as for a penalty, and batched ones, as for a Jacobian."""
    monkeypatch.setattr(filters, "LARGE", 0)
    call, x, weight, bias = CASES[name]()
    inputs = (x, weight, bias)

    def gradients():
        y = torch.tanh(call(x, weight, bias))
        once = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        twice = torch.autograd.grad(sum(one.square().sum() for one in once), inputs, retain_graph=True)
        of_each = torch.stack([torch.full_like(y, factor) for factor in range(3)])
        return *once, *twice, *torch.autograd.grad(y, inputs, of_each, is_grads_batched=True)

    expected = gradients()
    with FilterLayers(wanted_for(weight, ascent="implicit")) as layers:
        found = gradients()
    assert layers.called
    equal(found, expected)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_a_weight_see_its_whole_gradient(register):
    _, x, weight, bias = linear_case(7, 6)
    layers, seen = FilterLayers(wanted_for(weight)), []
    getattr(weight, register)(lambda one: seen.append(one.clone() if one.grad is None else one.grad.clone()))
    F.linear(x, weight, bias).sum().backward()
    weight.grad = None
    with layers:
        loss = F.linear(x, weight, bias).sum()
    with layers.narrowed():
        loss.backward(inputs=[weight])
    equal(seen[1], seen[0])


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("forward_inside", [True, False])
@pytest.mark.parametrize("backward_inside", [True, False])
def test_checkpoints_may_run_again_inside_or_outside(use_reentrant, forward_inside, backward_inside):
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh()).double()
    first = nn.Linear(6, 6).double()
    x = double(5, 6)
    weights = [first.weight, block[0].weight, block[2].weight]
    layers = FilterLayers({key: want for weight in weights for key, want in wanted_for(weight).items()})

    def loss_of():
        return weighted(checkpoint(block, torch.tanh(first(x)), use_reentrant=use_reentrant))

    loss_of().backward()
    expected = [weight.grad for weight in weights]
    for weight in weights:
        weight.grad = None
    with layers if forward_inside else nullcontext():
        loss = loss_of()
    with layers if backward_inside else nullcontext(), layers.narrowed() if backward_inside else nullcontext():
        loss.backward()
    masks = [mask_of(weight, "filters") for weight in weights]
    found = [weight.grad for weight in weights]
    equal(*([g * mask for g, mask in zip(each, masks, strict=True)] for each in (found, expected)))


def test_compiled_blocks_are_plain_and_not_compiled_again():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    last = nn.Linear(6, 4).double()
    compiled = torch.compile(block, backend="aot_eager")
    x, weights, graphs = double(5, 6), [block[0].weight, last.weight], []
    expected = plain_gradients(lambda: weighted(last(block(x))), weights)
    for _ in range(3):
        layers = FilterLayers({key: want for weight in weights for key, want in wanted_for(weight).items()})
        found = narrowed_gradients(layers, lambda: weighted(last(compiled(x))), weights)
        equal([*found], [expected[0], expected[1] * mask_of(last.weight, "filters")])
        assert layers.called == {id(last.weight)}
        equal([*plain_gradients(lambda: weighted(last(compiled(x))), weights)], [*expected])
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert graphs == [2, 2, 2]  # with and without the mode


# ---- autocast ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["linear, sequence", "conv2d padding"])
def test_autocast(name, dtype):
    call, x, weight, bias = CASES[name]()
    x, weight, bias = (one.detach().float().requires_grad_() for one in (x, weight, bias))

    def loss_of():
        with torch.autocast("cpu", dtype=dtype):
            h = x * 1
            y = call(h, weight, bias)
            assert y.dtype == dtype
            h.add_(1)  # the cast copy was saved
            # autocast keeps the cast weight, and this is another use of it
            return y.float().square().sum() + torch.matmul(weight.flatten(1).t(), weight.flatten(1)).float().sum()

    expected = plain_gradients(loss_of, (x, weight, bias))
    layers = FilterLayers(wanted_for(weight))
    found = narrowed_gradients(layers, loss_of, (x, weight, bias))
    kept = mask_of(weight, "filters")
    for one, other, mask in zip(found, expected, (True, kept, True), strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one * mask, other * mask, rtol=3e-2, atol=3e-2 * other.abs().max().item())
    assert layers.called


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_autocast_leaves_other_dtypes(dtype):
    _, x, weight, _ = linear_case(7, 6)
    x, weight = x.detach().to(dtype), nn.Parameter(weight.detach().to(dtype))
    with FilterLayers(wanted_for(weight, ascent="implicit")) as layers, torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.linear(x, weight).dtype == dtype
    assert layers.called


# ---- what the ascent needs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ascent", "norm", "is_counted", "expected"),
    [
        ("filters", "explicit", "masked", True, (False, False)),
        ("filters", "explicit", "full", True, None),
        ("entries", "explicit", "masked", True, None),
        ("none", "explicit", "masked", True, None),
        ("filters", "implicit", "masked", True, (True, False)),
        ("entries", "implicit", "masked", True, (True, False)),
        ("none", "implicit", "masked", True, (True, False)),
        ("none", "implicit-dense", "full", True, (True, True)),
        ("none", "implicit-dense", "full", False, (True, False)),
        ("entries", "implicit-dense", "masked", True, (True, True)),
        ("all", "implicit", "masked", True, None),
    ],
)
def test_weight_gradient(kind, ascent, norm, is_counted, expected):
    weight = torch.zeros(8, 4)
    want = weight_gradient(
        PackedMask.pack(mask_of(weight, kind)), weight, ascent=ascent, norm=norm, is_counted=is_counted
    )
    assert (None if want is None else (want.implicit, want.dense)) == expected
    vector = PackedMask.pack(torch.arange(8) < 4)
    assert weight_gradient(vector, torch.zeros(8), ascent=ascent, norm=norm) is None  # biases need everything
