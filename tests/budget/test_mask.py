"""A budget instead of a sparsity: the best choice that fits, and its limits."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.budget import BudgetMask, budget_mask, step_costs
from sparsesam.masks.scores import ScoreContext
from sparsesam.utils.checks import NonFiniteScoreError
from tests import cases


class Given:
    """Fixed scores, whatever the model."""

    needs_gradient = False

    def __init__(self, scores):
        self.scores = scores

    def __call__(self, context):
        return {name: self.scores[name].clone() for name in context.parameters}


def chain():
    torch.manual_seed(0)
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise([7, 12, 8, 12, 4])]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.GELU()) for layer in layers[:-1]), layers[-1])


def conv_model():
    torch.manual_seed(0)
    blocks = [[nn.Conv2d(a, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()] for a in (1, 8, 8)]
    return nn.Sequential(*itertools.chain.from_iterable(blocks), nn.Flatten(), nn.Linear(8 * 36, 3))


class Towers(nn.Module):
    """Two parallel branches."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3)) for _ in range(2))

    def forward(self, x):
        a = b = x
        for left, right in zip(self.left, self.right, strict=True):
            a, b = F.gelu(left(a)), F.gelu(right(b))
        return a + b


def random_scores(model, seed):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(p.shape, generator=generator).pow(4) for n, p in model.named_parameters()}


def context(model):
    return ScoreContext(model, dict(model.named_parameters()), torch.Generator(), 0)


def gathered(masks, scores):
    return sum(float(scores[name][mask].double().sum()) for name, mask in masks.items())


CHAIN = chain()
CHAIN_COSTS = step_costs(CHAIN, torch.zeros(256, 7))

# ---- choosing --------------------------------------------------------------------------------------------------------


def test_masks_do_not_depend_on_the_memory_format():
    made = []
    for memory_format in (torch.contiguous_format, torch.channels_last):
        model = conv_model().to(memory_format=memory_format)
        rule = budget_mask(model, torch.zeros(4, 1, 6, 6), 1.5, score=Given(random_scores(model, 0)), unit="filter")
        made.append(rule.make(context(model)))
    assert made[0].keys() == made[1].keys()
    assert all(torch.equal(mask, made[1][name]) for name, mask in made[0].items())


@pytest.mark.parametrize("budget", [1.2, 1.3, 1.5, 1.8])
def test_choice_is_nearly_that_of_exhaustive_search(budget):
    names = [name for name, _ in CHAIN.named_parameters()]
    subsets = [set(itertools.compress(names, kept)) for kept in itertools.product([False, True], repeat=len(names))]
    masks_of = lambda chosen: {n: torch.full(s, n in chosen) for n, s in CHAIN_COSTS.shapes.items()}  # noqa: E731
    fitting = [masks_of(chosen) for chosen in subsets if CHAIN_COSTS.step(masks_of(chosen)) <= budget]
    for seed in range(10):
        scores = random_scores(CHAIN, seed)
        masks = BudgetMask(CHAIN_COSTS, budget, Given(scores)).make(context(CHAIN))
        assert CHAIN_COSTS.step(masks) <= budget + 1e-12
        assert gathered(masks, scores) >= 0.85 * max(gathered(other, scores) for other in fitting)


@pytest.mark.parametrize("unit", ["tensor", "filter"])
def test_larger_budget_gathers_more_and_is_kept(unit):
    scores = random_scores(CHAIN, 1)
    totals = []
    for budget in (1.2, 1.5, 1.7, 2.5):
        masks = BudgetMask(CHAIN_COSTS, budget, Given(scores), unit).make(context(CHAIN))
        assert CHAIN_COSTS.step(masks) <= budget + 1e-12
        assert all(torch.equal(mask.any(1), mask.all(1)) for mask in masks.values() if mask.dim() > 1)
        totals.append(gathered(masks, scores))
    assert totals == sorted(set(totals))
    assert totals[-1] == pytest.approx(sum(float(score.sum()) for score in scores.values()))  # two passes: everything


@pytest.mark.parametrize("unit", ["tensor", "filter"])
@pytest.mark.parametrize("budget", [1.2, 1.4, 1.7])
def test_normalization_and_biases_are_perturbed_only_behind_frontier(unit, budget):
    model = conv_model()
    costs = step_costs(model, cases.images(16)[0])
    masks = BudgetMask(costs, budget, Given(random_scores(model, 0)), unit).make(context(model))
    frontier = min(costs.first_use[name] for name, mask in masks.items() if mask.any())
    for name, mask in masks.items():
        if mask.dim() < 2:
            assert bool(mask.all()) == bool(mask.any()) == (costs.first_use[name] >= frontier)


def test_cost_of_parallel_branches_is_not_underestimated():
    model = Towers()
    costs = step_costs(model, torch.randn(64, 6))
    for seed, budget, unit in itertools.product(range(5), (1.3, 1.5, 1.7), ("tensor", "filter")):
        masks = BudgetMask(costs, budget, Given(random_scores(model, seed)), unit).make(context(model))
        assert any(mask.any() for mask in masks.values())
        assert costs.step(masks) <= budget + 1e-12


# ---- with the optimizer ----------------------------------------------------------------------------------------------


def train(opt, model, steps):
    for step in range(steps):
        x, y = cases.images(seed=step)
        opt.minimize(lambda: F.cross_entropy(model(x), y))  # noqa: B023


def start(budget=1.4, **options):
    model = conv_model()
    rule = budget_mask(model, cases.images()[0], budget, **options)
    return model, rule, sparsesam.SSAM(cases.sgd(model), model, mask=rule, norm="masked")


def test_excluded_parameters_are_not_chosen():
    model = conv_model()
    groups = [{"params": model[:4].parameters()}, {"params": model[4:].parameters(), "perturb": False}]
    rule = budget_mask(model, cases.images()[0], 1.9)
    opt = sparsesam.SSAM(torch.optim.SGD(groups, lr=0.1), model, mask=rule, norm="masked")
    train(opt, model, 1)
    assert [name for name, mask in opt.masks.items() if mask.any()]
    assert set(opt.masks) == {"0.weight", "1.weight", "1.bias", "3.weight"}


@pytest.mark.parametrize("unit", ["tensor", "filter"])
def test_step_leaves_out_what_budget_excludes(unit):
    model, _, opt = start(unit=unit)
    train(opt, model, 2)
    assert opt.savings().gradients == pytest.approx(opt.sparsity)
    assert any(f"reads {name}," in opt.savings().ended for name, mask in opt.masks.items() if mask.any())


def test_fisher_scores_use_data():
    model, rule, opt = start(data=cases.images(), loss_fn=F.cross_entropy, samples=8)
    assert not rule.needs_gradient
    train(opt, model, 1)
    assert 0 < opt.sparsity < 1


# ---- bad input -------------------------------------------------------------------------------------------------------


def small(budget=1.5, **options):
    return budget_mask(chain(), torch.randn(64, 7), budget, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: small(0.9), "budget must be a finite number of at least 1, got 0.9"),
        (lambda: small(math.inf), "budget must be a finite number of at least 1, got inf"),
        (lambda: small(1.0), r"budget must be at least 1\.0\d+ for this model, got 1.0"),
        (lambda: small(unit="column"), "unit must be one of 'tensor', 'filter', got 'column'"),
        (lambda: small(loss_fn=F.cross_entropy), "data must be given with loss_fn"),
        (lambda: small(data=cases.vectors()), "exactly one of loss_fn and model_loss"),
        (lambda: small(data=[], score=Given({})), "score and data must not both be given"),
        (lambda: small().make(context(conv_model())), "make a new rule"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_budget_that_fits_only_biases_warns():
    budget = 1 + CHAIN_COSTS.passing(["6.bias"]) / CHAIN_COSTS.base + 0.01
    with pytest.warns(UserWarning, match="no weight tensor fits into budget"):
        rule = BudgetMask(CHAIN_COSTS, budget, Given(random_scores(CHAIN, 0)))
    masks = rule.make(context(CHAIN))
    assert [name for name, mask in masks.items() if mask.any()] == ["6.bias"]


@pytest.mark.parametrize(("value", "error"), [(math.nan, NonFiniteScoreError), (-1.0, ValueError)])
def test_negative_or_non_finite_scores_raise(value, error):
    scores = {name: torch.full(p.shape, value) for name, p in CHAIN.named_parameters()}
    with pytest.raises(error, match="the scores of"):
        BudgetMask(CHAIN_COSTS, 1.5, Given(scores)).make(context(CHAIN))
