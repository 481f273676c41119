"""The cost of a step: layer by layer, and compared with what the engine really computes."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.budget.call_trace import MultiplyAdds
from sparsesam.budget.costs import layer_costs
from tests import cases


def chain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))


def masks_of(model, *names):
    return {
        name: torch.full(p.shape, any(name.startswith(one) for one in names)) for name, p in model.named_parameters()
    }


class Block(nn.Module):
    """A residual block whose shortcut runs after, and beside, its first convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(4, 4, 1, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = F.relu_(self.inner(x) + self.shortcut(x))
        return self.head(x.mean((2, 3)))


class TokenModel(nn.Module):
    """Attention over embedded tokens, with a parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(5, 8))
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        x = x + self.attend(x, x, x, need_weights=False)[0]
        return {"logits": self.head(self.drop(self.norm(x)).mean(1))}


def test_linear_layer_counts_three_products():
    first, second, _ = layer_costs(chain(), torch.randn(16, 6), how="count").layers
    assert first.forward == 16 * 6 * 8 + 16 * 8  # with its tanh
    assert first.input_gradient == 16 * 8  # of the tanh: the gradient of the data is not needed
    assert second.input_gradient == 16 * 8 * 5 + 16 * 5
    assert second.weight_gradient == pytest.approx(16 * 8 * 5 + 5)  # and the bias


def test_convolution_counts_every_product():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.Conv2d(4, 5, 3, stride=2, padding=1, bias=False))
    second = layer_costs(model, torch.randn(2, 3, 8, 8), how="count").layers[1]
    products = 2 * 5 * 3 * 3 * 4 * 9
    assert (second.forward, second.input_gradient, second.weight_gradient) == (products, products, products)


@pytest.mark.parametrize(("build", "shape"), [(chain, (4, 6)), (Block, (2, 1, 6, 6))])
def test_layers_sum_to_whole_pass(build, shape):
    model, x = build(), torch.randn(shape)
    costs = layer_costs(model, x, how="count")
    total = sum(one.forward + one.input_gradient + one.weight_gradient for one in costs.layers)
    assert total == pytest.approx(costs.base)
    assert total == pytest.approx(pass_count(model, x), rel=0.02)


def pass_count(model, x):
    with MultiplyAdds() as counter:
        model(x).sum().backward()
    return counter.total


def test_layers_are_in_execution_order_with_parameters_of_model_itself():
    model = TokenModel()
    costs = layer_costs(model, {"tokens": torch.arange(10).reshape(2, 5)}, how="count")
    assert [one.layer for one in costs.layers] == ["embed", "place", "attend", "norm", "head"]
    assert set(costs.first_use) == {name for name, _ in model.named_parameters()}


def test_layer_called_twice_costs_twice():
    shared = nn.Linear(6, 6)
    (both,) = layer_costs(nn.Sequential(shared, nn.Tanh(), shared), torch.randn(4, 6), how="count").layers
    once = layer_costs(nn.Sequential(shared, nn.Tanh()), torch.randn(4, 6), how="count").layers[0]
    assert both.forward == 2 * once.forward - 4 * 6  # one tanh fewer


def test_no_perturbation_costs_one_base_step_and_full_costs_two():
    model = chain()
    costs = layer_costs(model, torch.randn(512, 6), how="count")
    assert costs.step(masks_of(model)) == 1
    assert costs.step(masks_of(model, "")) == pytest.approx(2, rel=0.02)


def test_layers_upstream_of_frontier_cost_nothing():
    model = chain()
    costs = layer_costs(model, torch.randn(512, 6), how="count")
    _, second, third = costs.layers
    step = costs.step(masks_of(model, "2."))
    moving = costs.moving * (40 + 5)
    extra = second.forward + third.forward + third.input_gradient + second.weight_gradient + 512 * 5 + moving
    assert step == pytest.approx(1 + extra / costs.base)  # 512 * 5: back through the tanh between the two


def test_branch_beside_frontier_costs_only_its_forward():
    """It is called after the first perturbed layer, where nothing is recorded any more."""
    model = Block()
    costs = layer_costs(model, torch.randn(2, 1, 6, 6), how="count")
    inner, shortcut = (costs.passing([f"{name}.weight"]) for name in ("inner", "shortcut"))
    assert costs.first_use["inner.weight"] < costs.first_use["shortcut.weight"]
    by_name = {call.layer: call for call in costs.calls}
    assert inner - shortcut == pytest.approx(by_name["inner"].forward)


@pytest.mark.parametrize(
    "kept",
    [
        ("head",),
        ("inner", "head"),
        ("shortcut",),
        ("norm", "inner"),
        ("stem",),
        ("",),
    ],
)
def test_prediction_equals_engine(kept):
    """The oracle counts every product of a real step, with all its hooks and modes."""
    model = Block()
    x, y = cases.images(64)
    costs = layer_costs(model, x, how="count")
    masks = masks_of(model, *kept)
    done = step_count(model, x, y, masks) - step_count(model, x, y, masks_of(model))
    assert 1 + done / costs.base == pytest.approx(costs.step(masks), rel=0.01)


def test_prediction_for_some_filters_equals_engine():
    model = Block()
    x, y = cases.images(64)
    costs = layer_costs(model, x, how="count")
    masks = masks_of(model, "head", "norm")
    masks["inner.weight"][[0, 2]] = True
    done = step_count(model, x, y, masks) - step_count(model, x, y, masks_of(model))
    assert costs.can_slice("inner.weight")
    assert 1 + done / costs.base == pytest.approx(costs.step(masks), rel=0.02)


def step_count(model, x, y, masks):
    """Multiply-adds of the second step with these masks; all zeros: of a step of SGD."""
    model = copy.deepcopy(model)
    base = cases.sgd(model)
    opt = base
    if any(mask.any() for mask in masks.values()):
        opt = sparsesam.SSAM(base, model, mask=sparsesam.fixed_mask(masks), norm="masked")
    closure = cases.closure_for(model, opt, x, y)
    opt.step(closure)
    with MultiplyAdds() as counter:
        opt.step(closure)
    return counter.total


def test_grouped_convolutions_and_attention_are_not_sliced():
    grouped = nn.Sequential(nn.Conv2d(4, 4, 3), nn.Conv2d(4, 8, 3, groups=2))
    costs = layer_costs(grouped, torch.randn(2, 4, 6, 6), how="count")
    assert costs.can_slice("0.weight")
    assert not costs.can_slice("1.weight")
    words = layer_costs(TokenModel(), torch.arange(10).reshape(2, 5), how="count")
    assert not words.can_slice("attend.in_proj_weight")


def test_some_filters_cost_less_and_some_weights_do_not():
    model = chain()
    costs = layer_costs(model, torch.randn(512, 6), how="count")
    rows, entries = masks_of(model), masks_of(model)
    rows["2.weight"][:2] = True
    entries["2.weight"][:, :2] = True
    whole = costs.step(masks_of(model, "2.weight"))
    assert costs.step(rows) < costs.step(entries) < whole + 0.02


@pytest.mark.parametrize("how", ["time", "count"])
@pytest.mark.parametrize("training", [True, False])
def test_model_state_is_preserved(how, training):
    model = Block().train(training)
    model.stem.weight.requires_grad_(False)
    model.norm.eval()
    before = copy.deepcopy(model.state_dict())
    flags = [module.training for module in model.modules()]
    noise = torch.get_rng_state()
    layer_costs(model, torch.randn(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)), how=how, repeats=1)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert flags == [module.training for module in model.modules()]
    assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 6
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(noise, torch.get_rng_state())


def test_counts_are_deterministic():
    x = torch.randn(2, 1, 6, 6)
    once, again = (layer_costs(Block(), x, how="count") for _ in range(2))
    assert once.calls == again.calls
    assert once.base == again.base


@pytest.mark.parametrize("how", ["time", "cpu-time"])
def test_measured_times_are_positive(how):
    costs = layer_costs(cases.convnet(), torch.randn(16, 1, 6, 6), how=how, repeats=3)
    assert all(one.forward > 0 for one in costs.layers)
    assert math.isfinite(costs.base)
    assert costs.base > 0
    assert costs.moving > 0


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(6, 6), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x) if self.calls % 2 else self.layer(self.layer(x))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: layer_costs(chain(), torch.randn(2, 6), how="guess"),
            "how must be one of 'time', .* got 'guess'",
        ),
        (
            lambda: layer_costs(chain(), torch.randn(2, 6), repeats=0),
            "repeats must be an integer of at least 1, got 0",
        ),
        (lambda: layer_costs(nn.Tanh(), torch.randn(2, 6)), "model must have parameters that require a gradient"),
        (lambda: layer_costs(Undecided(), torch.randn(2, 6), how="count"), "same calls in each forward"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_counting_does_not_change_result():
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 8, 3), torch.randn(2, 3, 16, 16)
    layer(x).square().sum().backward()
    expected, layer.weight.grad = layer.weight.grad, None
    with MultiplyAdds():
        layer(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, expected)
