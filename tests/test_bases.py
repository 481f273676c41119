"""Every base optimizer: a step equals a plain two-pass loop around it."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.nn import functional as F

import sparsesam
from tests import cases

pytorch_optimizer = pytest.importorskip("pytorch_optimizer")
schedulefree = pytest.importorskip("schedulefree")

RHO = 0.1

TORCH = {
    name: getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop")
} | {"Rprop": torch.optim.Rprop, "SGD": lambda p, **options: torch.optim.SGD(p, lr=0.1, momentum=0.9, **options)}

# Excluded: those that need more than a gradient (second derivatives, a closure, a process group, the model), whose
# constructors take more than parameters (Muon's), that draw from the global stream of numpy, and wrappers of others.
OTHERS = """
    a2grad accsgd adabelief adabound adadelta adafactor adai adalite adamc adamg adamod adamp adams adan adanorm
    adapnm adasmooth ademamix adopt aggmo aida alice amos apollo avagrad came conda dadaptadam dadaptsgd diffgrad
    emonavi exadam fadam fira fromage ftrl galore grams gravity grokfastadamw kate lamb laprop lars lion lorarite
    madgrad mars msvag nero novograd padam pid pnm prodigy qhadam qhm ranger scalableshampoo schedulefreeadamw
    schedulefreeradam schedulefreesgd scion sgdp sgdsai sgdw shampoo signsgd sm3 soap splus srmm stableadamw swats
    tiger vsgd yogi
"""
SCHEDULE_FREE = ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
BASES = {
    **{f"torch {name}": make for name, make in TORCH.items()},
    **{f"pytorch-optimizer {name}": pytorch_optimizer.load_optimizer(name) for name in OTHERS.split()},
    **{f"schedulefree {name}": getattr(schedulefree, name) for name in SCHEDULE_FREE},
}


def two_pass_step(model, base, x, y, *, rho=RHO, sign=1):
    """The step written down; norms and products round as ours do, because some bases amplify one rounding to 1e-2."""
    parameters = list(model.parameters())
    base.zero_grad()
    F.cross_entropy(model(x), y).backward()
    length = torch.stack([torch.linalg.vector_norm(p.grad) for p in parameters])
    scale = sign * rho / torch.linalg.vector_norm(length).item()
    before = cases.weights_of(model)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=scale)
    base.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for parameter, value in zip(parameters, before, strict=True):
            parameter.copy_(value)
    base.step()


def built(make, **options):
    model = cases.mlp(torch.float32)
    torch.manual_seed(0)  # some draw projections
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        base = make(model.parameters(), **options)
    if hasattr(base, "train"):
        base.train()
    return model, base


@pytest.mark.parametrize("name", BASES)
def test_step_equals_two_pass_loop_bitwise(name):
    model, inner = built(BASES[name])
    twin, twin_base = built(BASES[name])
    opt = sparsesam.SAM(inner, model, rho=RHO)
    for seed in range(6):
        x, y = cases.vectors(seed=seed, dtype=torch.float32)
        torch.manual_seed(seed)
        opt.step(cases.closure_for(model, opt, x, y))
        torch.manual_seed(seed)
        two_pass_step(twin, twin_base, x, y)
        assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))
    assert not cases.same_bits(cases.weights_of(model), cases.weights_of(cases.mlp(torch.float32)))


# ---- maximize -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torch SGD", "torch Adam", "pytorch-optimizer lion", "pytorch-optimizer sgdp"])
def test_base_that_maximizes_is_perturbed_downhill(name):
    model, inner = built(BASES[name], maximize=True)
    twin, twin_base = built(BASES[name], maximize=True)
    opt = sparsesam.SAM(inner, model, rho=RHO)
    for seed in range(4):
        x, y = cases.vectors(seed=seed, dtype=torch.float32)
        opt.step(cases.closure_for(model, opt, x, y))
        two_pass_step(twin, twin_base, x, y, sign=-1)
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))


def test_momentum_sam_goes_against_momentum_also_where_base_maximizes():
    model = cases.mlp()
    base = cases.sgd(model, maximize=True)
    opt = sparsesam.MomentumSAM(base, model, rho=0.1)
    cases.train(model, opt, range(1))
    buffers = [base.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    e = cases.perturbation_of(opt, model, *cases.vectors())
    assert all((move * buffer).sum() < 0 for move, buffer in zip(e, buffers, strict=True))


# ---- optimizers with two sets of weights ----------------------------------------------------------------------


def test_train_and_eval_reach_schedule_free_base():
    model, inner = built(schedulefree.AdamWScheduleFree)
    opt = sparsesam.SAM(inner, model, rho=RHO)
    cases.train(model, opt, range(3), dtype=torch.float32)
    trained = cases.weights_of(model)
    opt.eval()
    assert not cases.same_bits(trained, cases.weights_of(model))
    opt.train()
    torch.testing.assert_close(trained, cases.weights_of(model))


def test_other_bases_have_no_train_and_eval():
    _, opt = cases.made(sparsesam.SAM, rho=RHO)
    assert not hasattr(opt, "train")
    assert not hasattr(opt, "eval")
