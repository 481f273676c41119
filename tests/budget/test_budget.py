"""A budget instead of a sparsity: the best choice that fits, its report, and its limits."""

from __future__ import annotations

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.budget import BudgetMask, budget_mask
from sparsesam.budget.choice import best_prefixes, best_subset
from sparsesam.budget.costs import layer_costs
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


def chain(depth=4, bias=True):
    torch.manual_seed(0)
    widths = [7, 11, 6, 9, 5, 8][: depth + 1]
    layers = [nn.Linear(a, b, bias=bias) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*itertools.chain.from_iterable((layer, nn.Tanh()) for layer in layers[:-1]), layers[-1])


def random_scores(model, seed, sharp=3):
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.rand(p.shape, generator=generator).pow(sharp) for n, p in model.named_parameters()}


def context(model):
    return ScoreContext(model, dict(model.named_parameters()), torch.Generator(), 0)


def gathered(masks, scores):
    return sum(float(scores[name][mask].double().sum()) for name, mask in masks.items())


def conv_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 3),
    )


# ---- choosing ------------------------------------------------------------------------------------------------

numbers = st.floats(0, 10, allow_nan=False)


@settings(deadline=None)
@given(items=st.lists(st.tuples(numbers, numbers), max_size=8), capacity=st.floats(0, 30))
def test_best_subset_equals_exhaustive_search(items, capacity):
    values, costs = [value for value, _ in items], [cost for _, cost in items]
    chosen = best_subset(values, costs, capacity)
    subsets = itertools.product([False, True], repeat=len(items))
    fitting = [s for s in subsets if sum(itertools.compress(costs, s)) <= capacity]
    assert sum(costs[i] for i in chosen) <= capacity
    assert sum(values[i] for i in chosen) == pytest.approx(max(sum(itertools.compress(values, s)) for s in fitting))


def test_many_items_are_thinned_and_nearly_optimal():
    generator = np.random.default_rng(0)
    values, costs = generator.random(60), generator.random(60)
    chosen = best_subset(values.tolist(), costs.tolist(), 12.0)
    order = np.argsort(-values / costs)
    bound = values[order][np.cumsum(costs[order]) <= 12.0].sum() + values.max()
    assert costs[chosen].sum() <= 12.0
    assert bound - values.max() <= values[chosen].sum() <= bound


lists = st.lists(
    st.tuples(st.lists(numbers, min_size=1, max_size=3), st.floats(0, 3), st.floats(0.1, 3)), min_size=1, max_size=4
)


@settings(deadline=None)
@given(lists=lists, capacity=st.floats(0, 20))
def test_prefixes_fit_and_are_nearly_optimal(lists, capacity):
    values = [np.cumsum([0.0, *sorted(entries, reverse=True)]) for entries, _, _ in lists]
    costs = [np.array([0.0] + [opening + k * each for k in range(1, len(e) + 1)]) for e, opening, each in lists]
    taken = best_prefixes(values, costs, capacity)
    assert sum(c[k] for c, k in zip(costs, taken, strict=True)) <= capacity + 1e-9
    choices = itertools.product(*(range(len(v)) for v in values))
    fitting = [c for c in choices if sum(cost[k] for cost, k in zip(costs, c, strict=True)) <= capacity]
    best = max(sum(v[k] for v, k in zip(values, c, strict=True)) for c in fitting)
    # The difference is at most the value of one list.
    assert sum(v[k] for v, k in zip(values, taken, strict=True)) >= best - max(v[-1] for v in values) - 1e-9


def test_prefixes_of_equal_cost_are_best_entries():
    values = [np.cumsum([0.0, 9, 5, 1]), np.cumsum([0.0, 8, 7, 6])]
    costs = [np.arange(4.0), np.arange(4.0)]
    assert best_prefixes(values, costs, 4.0) == [1, 3]


CHAIN = chain()
CHAIN_COSTS = layer_costs(CHAIN, torch.zeros(256, 7), how="count")


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 999), budget=st.floats(1.13, 2.1))
def test_choice_equals_exhaustive_search(seed, budget):
    scores = random_scores(CHAIN, seed)
    masks = BudgetMask(CHAIN_COSTS, budget, Given(scores)).make(context(CHAIN))
    assert CHAIN_COSTS.step(masks) <= budget + 1e-12
    assert gathered(masks, scores) == pytest.approx(exhaustive_search(CHAIN, CHAIN_COSTS, scores, budget))


def exhaustive_search(model, costs, scores, budget):
    weights = [name for name, p in model.named_parameters() if p.dim() > 1]
    best = 0.0
    for frontier in sorted(set(costs.first_use.values())):
        behind = [name for name, place in costs.first_use.items() if place >= frontier]
        for kept in itertools.product([False, True], repeat=len(weights)):
            chosen = set(itertools.compress(weights, kept))
            if not chosen <= set(behind):
                continue
            chosen |= {name for name in behind if name not in weights}
            masks = {n: torch.full(p.shape, n in chosen) for n, p in model.named_parameters()}
            if costs.step(masks) <= budget:
                best = max(best, gathered(masks, scores))
    return best


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 999), budget=st.floats(1.13, 2.1))
def test_filters_fit_and_gather_at_least_as_much_as_tensors(seed, budget):
    scores = random_scores(CHAIN, seed, sharp=6)
    tensors = BudgetMask(CHAIN_COSTS, budget, Given(scores)).make(context(CHAIN))
    filters = BudgetMask(CHAIN_COSTS, budget, Given(scores), unit="filter").make(context(CHAIN))
    assert CHAIN_COSTS.step(filters) <= budget + 1e-12
    assert gathered(filters, scores) >= gathered(tensors, scores) - 1e-9
    for mask in filters.values():
        if mask.dim() > 1:
            assert torch.equal(mask.any(1), mask.all(1))


@pytest.mark.parametrize("unit", ["tensor", "filter"])
@pytest.mark.parametrize("budget", [1.2, 1.4, 1.7])
def test_normalization_and_biases_are_perturbed_only_behind_frontier(unit, budget):
    model = conv_model()
    costs = layer_costs(model, cases.images(16)[0], how="count")
    rule = BudgetMask(costs, budget, Given(random_scores(model, 0)), unit)
    masks = rule.make(context(model))
    frontier = min(costs.first_use[name] for name, mask in masks.items() if mask.any())
    for name, mask in masks.items():
        if mask.dim() < 2:
            assert bool(mask.all()) == bool(mask.any()) == (costs.first_use[name] >= frontier)


def test_larger_budget_gathers_more():
    scores = random_scores(CHAIN, 1)
    rules = [BudgetMask(CHAIN_COSTS, budget, Given(scores)) for budget in (1.2, 1.3, 1.5, 1.8, 2.2)]
    totals = [gathered(rule.make(context(CHAIN)), scores) for rule in rules]
    assert totals == sorted(totals)


def test_cost_of_parallel_branches_is_not_underestimated():
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.left = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))
            self.right = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(3))

        def forward(self, x):
            a = b = x
            for left in self.left:
                a = left(a).tanh()
            for right in self.right:
                b = right(b).tanh()
            return a + b

    model = Towers()
    costs = layer_costs(model, torch.randn(64, 6), how="count")
    for seed, budget in itertools.product(range(5), (1.2, 1.3, 1.5, 1.7)):
        scores = random_scores(model, seed)
        for unit in ("tensor", "filter"):
            masks = BudgetMask(costs, budget, Given(scores), unit).make(context(model))
            assert costs.step(masks) <= budget + 1e-12


@pytest.mark.parametrize("unit", ["tensor", "filter"])
def test_budget_of_two_passes_perturbs_everything_without_scores(unit):
    masks = BudgetMask(CHAIN_COSTS, 2.5, Given({}), unit).make(context(CHAIN))
    assert all(mask.all() for mask in masks.values())


def test_excluded_parameters_are_not_chosen():
    model = conv_model()
    opt_groups = [{"params": model[:4].parameters()}, {"params": model[4:].parameters(), "perturb": False}]
    rule = budget_mask(model, cases.images()[0], 1.9, how="count")
    opt = sparsesam.SSAM(torch.optim.SGD(opt_groups, lr=0.1), model, mask=rule, norm="masked")
    opt.step(cases.closure_for(model, opt, *cases.images()))
    assert set(opt.masks) == {"0.weight", "1.weight", "1.bias", "3.weight"}
    assert any(mask.any() for mask in opt.masks.values())


# ---- with the optimizer --------------------------------------------------------------------------------------


def train(opt, model, steps, seed=0):
    for step in range(steps):
        opt.step(cases.closure_for(model, opt, *cases.images(seed=seed + step)))


@pytest.mark.parametrize("unit", ["tensor", "filter"])
def test_engine_skips_what_budget_excludes(unit):
    model = conv_model()
    rule = budget_mask(model, cases.images()[0], 1.4, unit=unit, how="count")
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule, norm="masked")
    train(opt, model, 2)
    lines, frontier = opt.engine_report(), rule.report(opt.masks).frontier
    assert lines["engine"] == "on"
    first = min(place for name, place in rule.costs.first_use.items() if name.startswith(f"{frontier}."))
    for name, mask in opt.masks.items():
        assert ("used again" in lines[name]) == (rule.costs.first_use[name] < first)
        assert ("not perturbed" in lines[name]) == (not mask.any())


def test_fisher_scores_use_data():
    model = conv_model()
    data = {"data": cases.images(), "loss_fn": F.cross_entropy, "samples": 8}
    rule = budget_mask(model, cases.images()[0], 1.5, how="count", **data)
    assert not rule.needs_gradient
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule, norm="masked")
    train(opt, model, 1)
    assert 0 < opt.sparsity < 1


@pytest.mark.parametrize("unit", ["tensor", "filter"])
def test_resumed_run_equals_uninterrupted(unit):
    def start():
        model = conv_model()
        rule = budget_mask(model, cases.images()[0], 1.4, unit=unit, how="count", refresh=3, seed=1)
        return model, sparsesam.SSAM(cases.sgd(model), model, mask=rule, norm="masked")

    model, opt = start()
    train(opt, model, 4)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    saved = copy.deepcopy(opt.state_dict())
    resumed_model, resumed = start()
    resumed_model.load_state_dict(weights)
    resumed.load_state_dict(saved)
    assert resumed.mask.report(resumed.masks) == opt.mask.report(opt.masks)
    train(opt, model, 4, seed=4)
    train(resumed, resumed_model, 4, seed=4)
    assert cases.same_bits(model.state_dict().values(), resumed_model.state_dict().values())


def test_report_lists_what_was_chosen():
    model = conv_model()
    rule = budget_mask(model, cases.images()[0], 1.4, how="count")
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=rule, norm="masked")
    with pytest.raises(ValueError, match="before the first step"):
        rule.report(opt.masks)
    train(opt, model, 1)
    report = rule.report(opt.masks)
    assert report.share == pytest.approx(1 - opt.sparsity)
    assert 1 < report.predicted <= 1.4
    assert report.frontier == next(row.layer for row in report.rows if row.share)
    assert sum(row.forward + row.input_gradient + row.weight_gradient for row in report.rows) == pytest.approx(1, 0.01)
    assert "budget 1.400" in str(report)


# ---- bad input -----------------------------------------------------------------------------------------------


def small(budget=1.5, **options):
    return budget_mask(chain(), torch.randn(64, 7), budget, how="count", **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: small(0.9), "budget must be a finite number of at least 1, got 0.9"),
        (lambda: small(math.nan), "budget must be a finite number of at least 1, got nan"),
        (lambda: small(math.inf), "budget must be a finite number of at least 1, got inf"),
        (lambda: small(1.0), r"budget must be at least 1\.0\d+ for this model, got 1.0"),
        (lambda: small(unit="column"), "unit must be one of 'tensor', 'filter', got 'column'"),
        (lambda: small(loss_fn=F.cross_entropy), "data must be given with loss_fn"),
        (lambda: small(data=cases.vectors()), "with data, give either loss_fn"),
        (lambda: small(data=[], score=Given({})), "score and data must not both be given"),
    ],
)
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_budget_that_fits_only_biases_warns():
    bias = 1 + CHAIN_COSTS.passing(["6.bias"]) / CHAIN_COSTS.base + 0.01
    scores = random_scores(CHAIN, 0)
    with pytest.warns(UserWarning, match="no weight tensor fits into budget"):
        rule = BudgetMask(CHAIN_COSTS, bias, Given(scores))
    masks = rule.make(context(CHAIN))
    assert [name for name, mask in masks.items() if mask.any()] == ["6.bias"]


def test_different_model_raises():
    with pytest.raises(ValueError, match="make a new rule"):
        small().make(context(conv_model()))


@pytest.mark.parametrize(("value", "error"), [(math.nan, NonFiniteScoreError), (-1.0, ValueError)])
def test_negative_or_non_finite_scores_raise(value, error):
    scores = {name: torch.full(p.shape, value) for name, p in CHAIN.named_parameters()}
    with pytest.raises(error, match="the scores of"):
        BudgetMask(CHAIN_COSTS, 1.5, Given(scores)).make(context(CHAIN))
