"""The cost of a step, compared with the operations that a real step runs."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.budget import MultiplyAdds, step_costs
from sparsesam.budget.costs import _MOVING, ENTRY
from tests import cases


class Block(nn.Module):
    """A residual block whose shortcut runs after, and beside, its first convolution."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.inner = nn.Conv2d(4, 4, 3, padding=1)
        self.shortcut = nn.Conv2d(4, 4, 1, bias=False)
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        x = self.norm(self.stem(x)).relu()
        x = F.relu_(self.inner(x) + self.shortcut(x))
        return self.head(x.mean((2, 3)))


class TokenModel(nn.Module):
    """Attention over embedded tokens, with dropout and a parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.zeros(5, 8))
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        x = self.norm(x + self.attend(x, x, x, need_weights=False)[0])
        x = x + self.narrow(self.drop(F.gelu(self.wide(x))))
        return self.head(x.mean(1))


class Unusual(nn.Module):
    """A view of a weight is taken long before its use, an output is written to, a gradient has two steps, and a weight
    is used twice.
    """

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(36, 8)
        self.middle, self.last = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        last = self.last.t()
        x = F.relu_(self.first(x.flatten(1)))
        return F.gelu(torch.addmm(self.bias, x, self.middle, alpha=2.0)).mm(self.middle) @ last


def tokens(count=64):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(11, (count, 5), generator=generator), torch.randint(3, (count,), generator=generator)


def masks_of(model, *prefixes):
    """Whole parameters; with a "/" at the end of the prefix, every other filter of the weights."""
    masks = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in model.named_parameters()}
    for prefix in prefixes:
        for name, mask in masks.items():
            if name.startswith(prefix.removesuffix("/")):
                mask[:: 2 if prefix.endswith("/") and mask.dim() > 1 else 1] = True
    return masks


def example(model):
    return tokens() if isinstance(model, TokenModel) else cases.images(64)


def products_of_step(model, masks):
    """The multiply-adds of a real step after the first, in which nothing has to be set up."""
    (x, y), model = example(model), copy.deepcopy(model)
    opt = cases.ssam(model, masks)
    opt.minimize(lambda: F.cross_entropy(model(x), y))
    with MultiplyAdds() as counter:
        opt.minimize(lambda: F.cross_entropy(model(x), y))
    return counter.products


# ---- predicted and real steps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "kept"),
    [
        (Block, ["head"]),
        (Block, ["inner", "head"]),
        (Block, ["inner.bias"]),
        (Block, ["shortcut"]),
        (Block, ["norm", "inner"]),
        (Block, ["stem"]),
        (Block, [""]),
        (Block, ["norm", "inner/", "head/"]),
        (Block, ["/"]),
        (TokenModel, ["head"]),
        (TokenModel, ["narrow", "head"]),
        (TokenModel, ["attend.out_proj", "norm"]),
        (TokenModel, ["place"]),
        (TokenModel, ["embed", "wide"]),
        (TokenModel, ["norm", "wide/", "head/"]),
        (Unusual, ["last"]),
        (Unusual, ["middle"]),
        (Unusual, ["bias"]),
    ],
)
def test_predicted_products_are_those_of_step(build, kept, monkeypatch):
    """Other operations are left out: a step has more of them than its passes."""
    monkeypatch.setattr("sparsesam.budget.costs.ENTRY", 0.0)
    model = build()
    costs, masks = step_costs(model, example(model)[0]), masks_of(model, *kept)
    assert costs.step(masks) * costs.base == pytest.approx(products_of_step(model, masks), rel=1e-9)


def test_no_perturbation_costs_one_base_step_and_full_costs_two():
    model, (x, _) = Block(), cases.images(64)
    costs = step_costs(model, x)
    assert costs.step(masks_of(model)) == 1
    assert costs.step(masks_of(model, "")) == pytest.approx(2, rel=0.01)
    with MultiplyAdds() as counter:
        model(x).mean().backward()
    assert costs.base == pytest.approx(counter.products + ENTRY * counter.others, rel=0.01)


def test_some_filters_of_grouped_convolution_and_attention_cost_as_much_as_all():
    grouped = nn.Sequential(nn.Conv2d(4, 8, 3), nn.Conv2d(8, 8, 3, groups=2))
    for model, name, x in (
        (grouped, "1.weight", torch.randn(64, 4, 6, 6)),
        (TokenModel(), "attend.in_proj_weight", tokens()[0]),
    ):
        costs = step_costs(model, x)
        moving = _MOVING * ENTRY * costs.shapes[name].numel()
        assert costs.perturbing(name, 0.5) + moving / 2 == pytest.approx(costs.perturbing(name, 1))


# ---- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
def test_model_state_is_preserved(training):
    model = Block().train(training)
    model.stem.weight.requires_grad_(False)
    model.norm.eval()
    before = cases.snapshot(model)
    step_costs(model, torch.ones(2, 1, 6, 6))
    torch.testing.assert_close(cases.snapshot(model), before, rtol=0, atol=0)


def test_traced_graph_is_freed():
    model = Block()
    step_costs(model, cases.images()[0])
    gc.collect()
    assert not [held for held in gc.get_objects() if type(held).__name__ == "_Trace"]


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Tanh(), "model must have parameters that require a gradient"),
        (Detached(6, 2), "model must return a tensor that depends on its parameters"),
    ],
)
def test_bad_input(model, words):
    with pytest.raises(ValueError, match=words):
        step_costs(model, torch.randn(2, 6))
