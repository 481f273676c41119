"""The same twenty steps on one process and on several must give the same weights."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases

STEPS = 20


def network(seed=0):
    """No normalization over the batch, whose statistics would differ by rank; 3 classes do not divide by 2 or 4."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Tanh(), nn.Conv2d(8, 6, 2), nn.Tanh(), nn.Flatten(), nn.Linear(54, 3)
    ).double()


def fisher(**options):
    data = cases.images(32, torch.float64)
    return sparsesam.fisher_mask(data, F.cross_entropy, samples=8, refresh=5, **options)


def dynamic(**options):
    return sparsesam.dynamic_mask(refresh=4, total_steps=STEPS, **options)


RULES = {
    "sam": lambda: None,
    "fisher": lambda: fisher(sparsity=0.5),
    "dynamic": lambda: dynamic(sparsity=0.5),
    "random": lambda: sparsesam.random_mask(sparsity=0.7, refresh=3),
    "fixed": lambda: sparsesam.fixed_mask(cases.half_masks(network())),
    "fixed layers": lambda: sparsesam.fixed_mask("5.*"),
    "fisher filter": lambda: fisher(sparsity=0.5, pattern="filter"),
    "dynamic filter": lambda: dynamic(sparsity=0.5, pattern="filter"),
    "fisher 2:4": lambda: fisher(pattern="2:4"),
    "dynamic 2:4": lambda: dynamic(pattern="2:4"),
}

METHODS = {
    "MomentumSAM": lambda base, model, rho: sparsesam.MomentumSAM(base, model, 5 * rho),
    "ExtrapolatedSAM": lambda base, model, rho: sparsesam.ExtrapolatedSAM(base, model, 0.025),
    "ExtrapolatedSAM of a mask": lambda base, model, rho: sparsesam.ExtrapolatedSAM(
        base, model, 0.025, mask=dynamic(sparsity=0.5)
    ),
    "GSAM": sparsesam.GSAM,
    "WSAM": sparsesam.WSAM,
    "LookSAM": functools.partial(sparsesam.LookSAM, every=3),
    "FriendlySAM": sparsesam.FriendlySAM,
    "FriendlySAM of a mask": lambda base, model, rho: sparsesam.FriendlySAM(
        base, model, rho, mask=dynamic(sparsity=0.5), norm="masked"
    ),
    "ZSharp": functools.partial(sparsesam.ZSharp, quantile=0.8),
    "ESAM": sparsesam.ESAM,
    "two ascents": functools.partial(sparsesam.SAM, ascent_steps=2),
    "layer radius": functools.partial(sparsesam.SAM, radius="layer", adaptive="layer"),
    "element radius": lambda base, model, rho: sparsesam.SAM(base, model, rho / 10, radius="element"),
}


def optimizer(kind, model, *, base=cases.sgd, **options):
    if kind in METHODS:
        return METHODS[kind](base(model), model, 0.1, **options)
    rule = RULES[kind]()
    if rule is None:
        return sparsesam.SAM(base(model), model, rho=0.1, **options)
    return sparsesam.SSAM(base(model), model, rho=0.1, mask=rule, **options)


def train(model, opt, share=(0, 1), steps=range(STEPS)):
    """Steps on the given share, (rank, ranks), of each batch of sixteen."""
    rank, ranks = share
    for seed in steps:
        x, y = (tensor.chunk(ranks)[rank] for tensor in cases.images(16, torch.float64, seed=seed))
        opt.step(cases.closure_for(model, opt, x, y))


def reached(model, opt):
    """Weights and masks; ``model`` may be a DistributedDataParallel or sharded."""
    model = getattr(model, "module", model)
    weights = {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
    return weights, {name: whole(mask) for name, mask in opt.masks.items()}


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def steps_of_ranks(rank, ranks, kinds, wrap, **options):
    """What the ranks reach with each kind; ``wrap`` is a function of the model."""
    found = {}
    for kind in kinds:
        model = wrap(network())
        opt = optimizer(kind, model, **options)
        train(model, opt, (rank, ranks))
        found[kind] = (*reached(model, opt), opt.sparsity)
    return found


def assert_equal(found, kind, **options):
    """What ranks reached equals what one process reaches."""
    model = network()
    opt = optimizer(kind, model, **options)
    train(model, opt)
    weights, masks = reached(model, opt)
    torch.testing.assert_close(found[0], weights, rtol=1e-10, atol=1e-10)
    assert found[1].keys() == masks.keys()
    assert all(torch.equal(found[1][name], mask) for name, mask in masks.items())


def reseeded(state_dict, seed):
    """The checkpoint with a different random state of the masks."""
    state_dict = copy.deepcopy(state_dict)
    generator = torch.Generator().manual_seed(seed)
    state_dict["param_groups"][0]["sparsesam"]["mask"]["generator"] = generator.get_state().numpy().tobytes().hex()
    return state_dict
