"""The same twenty steps on one process and on several must give the same weights."""

from __future__ import annotations

import copy
from functools import partial

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
    "fisher": fisher(sparsity=0.5),
    "dynamic": dynamic(sparsity=0.5),
    "random": sparsesam.random_mask(sparsity=0.7, refresh=3),
    "fixed": sparsesam.fixed_mask(cases.half_masks(network())),
    "fixed layers": sparsesam.fixed_mask("5.*"),
    "fisher filter": fisher(sparsity=0.5, pattern="filter"),
    "dynamic filter": dynamic(sparsity=0.5, pattern="filter"),
    "fisher 2:4": fisher(pattern="2:4"),
    "dynamic 2:4": dynamic(pattern="2:4"),
}
MASKS = {"sam": partial(sparsesam.SAM, rho=0.1)}
MASKS |= {name: partial(sparsesam.SSAM, rho=0.1, mask=rule) for name, rule in RULES.items()}
METHODS = {
    "MomentumSAM": partial(sparsesam.MomentumSAM, rho=0.5),
    "ExtrapolatedSAM": partial(sparsesam.ExtrapolatedSAM, rho=0.025),
    "ExtrapolatedSAM of a mask": partial(sparsesam.ExtrapolatedSAM, rho=0.025, mask=RULES["dynamic"]),
    "GSAM": partial(sparsesam.GSAM, rho=0.1),
    "WSAM": partial(sparsesam.WSAM, rho=0.1),
    "LookSAM": partial(sparsesam.LookSAM, rho=0.1, every=3),
    "FriendlySAM": partial(sparsesam.FriendlySAM, rho=0.1),
    "FriendlySAM of a mask": partial(sparsesam.FriendlySAM, rho=0.1, mask=RULES["dynamic"], norm="masked"),
    "ZSharp": partial(sparsesam.ZSharp, rho=0.1, quantile=0.8),
    "ESAM": partial(sparsesam.ESAM, rho=0.1),
    "two ascents": partial(sparsesam.SAM, rho=0.1, ascent_steps=2),
    "layer radius": partial(sparsesam.SAM, rho=0.1, radius="layer", adaptive="layer"),
    "element radius": partial(sparsesam.SAM, rho=0.01, radius="element"),
}


def optimizer(kind, model, *, base=cases.sgd, **options):
    return {**MASKS, **METHODS}[kind](base(model), model, **options)


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
