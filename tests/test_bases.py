"""Every base optimizer: a step equals a plain two-pass loop around it."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
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
OTHERS = [
    "a2grad",
    "accsgd",
    "adabelief",
    "adabound",
    "adadelta",
    "adafactor",
    "adai",
    "adalite",
    "adamc",
    "adamg",
    "adamod",
    "adamp",
    "adams",
    "adan",
    "adanorm",
    "adapnm",
    "adasmooth",
    "ademamix",
    "adopt",
    "aggmo",
    "aida",
    "alice",
    "amos",
    "apollo",
    "avagrad",
    "came",
    "conda",
    "dadaptadam",
    "dadaptsgd",
    "diffgrad",
    "emonavi",
    "exadam",
    "fadam",
    "fira",
    "fromage",
    "ftrl",
    "galore",
    "grams",
    "gravity",
    "grokfastadamw",
    "kate",
    "lamb",
    "laprop",
    "lars",
    "lion",
    "lorarite",
    "madgrad",
    "mars",
    "msvag",
    "nero",
    "novograd",
    "padam",
    "pid",
    "pnm",
    "prodigy",
    "qhadam",
    "qhm",
    "ranger",
    "scalableshampoo",
    "schedulefreeadamw",
    "schedulefreeradam",
    "schedulefreesgd",
    "scion",
    "sgdp",
    "sgdsai",
    "sgdw",
    "shampoo",
    "signsgd",
    "sm3",
    "soap",
    "splus",
    "srmm",
    "stableadamw",
    "swats",
    "tiger",
    "vsgd",
    "yogi",
]
SCHEDULE_FREE = {
    "AdamWScheduleFree": schedulefree.AdamWScheduleFree,
    "SGDScheduleFree": schedulefree.SGDScheduleFree,
    "RAdamScheduleFree": schedulefree.RAdamScheduleFree,
}
BASES = {
    **{f"torch {name}": make for name, make in TORCH.items()},
    **{f"pytorch-optimizer {name}": pytorch_optimizer.load_optimizer(name) for name in OTHERS},
    **{f"schedulefree {name}": make for name, make in SCHEDULE_FREE.items()},
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


def test_soap_amplifies_rounding_of_perturbation():
    """Why SOAP differs from other implementations of SAM: its eigenvectors, not our step, amplify one rounding."""
    results = []
    for rho in (RHO, RHO * (1 + 2**-23)):
        model, base = built(BASES["pytorch-optimizer soap"])
        for seed in range(20):
            x, y = cases.vectors(seed=seed, dtype=torch.float32)
            two_pass_step(model, base, x, y, rho=rho)
        results.append(cases.weights_of(model))
    assert max((a - b).abs().max().item() for a, b in zip(*results, strict=True)) > 1e-4


# ---- options of the base with our names ----------------------------------------------------------------------


def test_base_with_own_rho_keeps_it():
    model = cases.mlp()
    groups = [{"params": model[0].parameters(), "rho": 0.8}, {"params": model[2:].parameters(), "sam_rho": 0.4}]
    opt = sparsesam.SAM(torch.optim.Adadelta(groups, rho=0.7), model, rho=0.2)
    assert [group["rho"] for group in opt.param_groups] == [0.8, 0.7]
    assert [group["sam_rho"] for group in opt.param_groups] == [0.2, 0.4]
    x, y = cases.vectors()
    before = cases.weights_of(model)
    F.cross_entropy(model(x), y).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    length = torch.cat([g.reshape(-1) for g in gradients]).norm()
    with opt.perturbed():
        moves = [now - then for now, then in zip(cases.weights_of(model), before, strict=True)]
    radii = [0.2, 0.2, 0.4, 0.4, 0.4, 0.4]
    expected = [rho * g / length for rho, g in zip(radii, gradients, strict=True)]
    torch.testing.assert_close(moves, expected, rtol=1e-9, atol=1e-12)


def test_base_with_own_rho_resumes_and_follows_schedule():
    def make():
        model = cases.mlp()
        base = torch.optim.Adadelta(model.parameters(), rho=0.7)
        return model, sparsesam.SAM(base, model, rho=0.2, rho_schedule=sparsesam.Warmup(4))

    model, opt = make()
    for seed in range(2):
        opt.step(cases.closure_for(model, opt, *cases.vectors(seed=seed)))
    twin, resumed = make()
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    resumed.load_state_dict(copy.deepcopy(opt.state_dict()))
    for m, o in ((model, opt), (twin, resumed)):
        o.step(cases.closure_for(m, o, *cases.vectors(seed=2)))
    assert cases.same_bits(cases.weights_of(model), cases.weights_of(twin))
    assert resumed.param_groups[0]["rho"] == 0.7
    assert resumed.param_groups[0]["sam_rho"] == pytest.approx(0.2 * 3 / 4)


def test_errors_use_option_name_of_group():
    model = cases.mlp()
    opt = sparsesam.SAM(torch.optim.Adadelta(model.parameters()), model, rho=0.2)
    opt.param_groups[0]["sam_rho"] = -1
    with pytest.raises(ValueError, match="sam_rho must be"):
        opt.step(cases.closure_for(model, opt, *cases.vectors()))


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


def test_maximizing_loss_equals_minimizing_its_negative():
    x, y = cases.vectors()
    results = []
    for maximize in (False, True):
        model = cases.mlp()
        opt = sparsesam.SSAM(
            cases.sgd(model, maximize=maximize), model, rho=0.1, mask=sparsesam.fixed_mask(cases.half_masks(model))
        )
        sign = 1 if maximize else -1
        for _ in range(5):
            opt.step(cases.closure_for(model, opt, x, y, backward=lambda loss, sign=sign: (sign * loss).backward()))
        results.append(cases.weights_of(model))
    assert cases.same_bits(*results)


def test_groups_may_differ_in_maximize():
    model = cases.mlp()
    groups = [{"params": model[0].parameters(), "maximize": True}, {"params": model[2:].parameters()}]
    opt = sparsesam.SAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.1)
    F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    gradients, before = [p.grad.clone() for p in model.parameters()], cases.weights_of(model)
    with opt.perturbed():
        dots = [((now - w) * g).sum() for now, w, g in zip(cases.weights_of(model), before, gradients, strict=True)]
    assert [bool(dot > 0) for dot in dots] == [False, False, True, True, True, True]


def test_momentum_sam_goes_against_momentum_also_where_base_maximizes():
    x, y = cases.vectors()
    model = cases.mlp()
    base = cases.sgd(model, maximize=True)
    opt = sparsesam.MomentumSAM(base, model, rho=0.1)
    opt.step(cases.closure_for(model, opt, x, y))
    buffers = [base.state[p]["momentum_buffer"].clone() for p in model.parameters()]
    before = cases.weights_of(model)
    with opt.perturbed():
        dots = [((now - w) * b).sum() for now, w, b in zip(cases.weights_of(model), before, buffers, strict=True)]
    assert all(dot < 0 for dot in dots)


# ---- weights that a forward writes to -------------------------------------------------------------------------


class TokenModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, max_norm=0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


def entry_masked(model):
    return sparsesam.SSAM(cases.sgd(model), model, rho=0.5, mask=sparsesam.fixed_mask(cases.half_masks(model)))


def embedding_unperturbed(model):
    groups = [{"params": model.embedding.parameters(), "perturb": False}, {"params": model.head.parameters()}]
    return sparsesam.SAM(torch.optim.SGD(groups, lr=0.1), model, rho=0.5)


@pytest.mark.parametrize("make", [entry_masked, embedding_unperturbed])
def test_renormalized_embeddings_are_restored_bitwise(make):
    model = TokenModel()
    opt = make(model)
    x, y = torch.arange(16).view(8, 2), torch.arange(8) % 3
    F.cross_entropy(model(x), y).backward()
    before = cases.weights_of(model)
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()
        model(torch.arange(20).view(10, 2))  # rows that the first pass did not scale
    assert cases.same_bits(before, cases.weights_of(model))


# ---- optimizers with two sets of weights ----------------------------------------------------------------------


def test_train_and_eval_reach_schedule_free_base():
    model, inner = built(schedulefree.AdamWScheduleFree)
    opt = sparsesam.SAM(inner, model, rho=RHO)
    x, y = cases.vectors(dtype=torch.float32)
    for _ in range(3):
        opt.step(cases.closure_for(model, opt, x, y))
    trained = cases.weights_of(model)
    opt.eval()
    assert not cases.same_bits(trained, cases.weights_of(model))
    opt.train()
    torch.testing.assert_close(trained, cases.weights_of(model))


def test_train_and_eval_inside_perturbed_raise():
    model, inner = built(schedulefree.AdamWScheduleFree)
    opt = sparsesam.SAM(inner, model, rho=RHO)
    x, y = cases.vectors(dtype=torch.float32)
    F.cross_entropy(model(x), y).backward()
    with opt.perturbed(), pytest.raises(RuntimeError, match="after the block"):
        opt.eval()


def test_other_bases_have_no_train_and_eval():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=RHO)
    assert not hasattr(opt, "train")
    assert not hasattr(opt, "eval")
