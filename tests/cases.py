"""Small models and batches shared by the tests."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam import perturbation
from sparsesam.filters import are_saved_tensors_hooked

#: earlier versions fail in torch itself (2.6, 2.7), or train plain SGD differently from one process (2.8)
needs_fsdp2_on_a_cpu = pytest.mark.skipif(torch.__version__ < "2.9", reason="fully_shard on a CPU needs torch 2.9")


def mlp(dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def convnet(dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3)
    ).to(dtype)


def vectors(count=16, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (count,), generator=generator)


def images(count=16, dtype=torch.float32, seed=1):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, 3, (count,), generator=generator)


def closure_of(opt, loss_of, *, backward=torch.Tensor.backward, then=lambda: None):
    """A closure that clears the gradients and computes the loss and its backward; ``then`` runs after it."""

    def closure():
        opt.zero_grad()
        loss = loss_of()
        backward(loss)
        then()
        return loss

    return closure


def closure_for(model, optimizer, x, y, **options):
    return closure_of(optimizer, lambda: F.cross_entropy(model(x), y), **options)


def take_step(opt, loss_of):
    """One step with a closure; ``opt`` may be a bare base optimizer."""
    return opt.step(closure_of(opt, loss_of))


def in_phases(opt, loss_of, *, narrows=True):
    """One step in two phases. ``narrows``: the first backward is the optimizer's, and its graph is kept."""
    opt.zero_grad()
    first = None
    if opt.needs_first_pass:
        with opt.first_pass():
            first = loss_of()
            opt.backward(first) if narrows else first.backward()
    first = first if narrows or first is None else first.detach()
    with opt.perturbed():
        second = loss_of()
        second.backward()
    opt.step()
    return (second if first is None else first).detach()


#: The ways to take a step on a function that returns the loss, which is returned.
WAYS = {
    "minimize": lambda opt, loss_of: opt.minimize(loss_of),
    "closure": take_step,
    "two phases": in_phases,
    "two phases, every gradient": partial(in_phases, narrows=False),
}


def by_minimize(opt, model, x, y):
    return opt.minimize(lambda: F.cross_entropy(model(x), y))


def with_closure(opt, model, x, y):
    return take_step(opt, lambda: F.cross_entropy(model(x), y))


def in_two_phases(opt, model, x, y, *, narrows=False):
    return in_phases(opt, lambda: F.cross_entropy(model(x), y), narrows=narrows)


def train(model, opt, seeds, *, step=with_closure, batch=vectors, **options):
    """A step on the batch of each seed; with a closure, ``opt`` may be a bare base optimizer."""
    for seed in seeds:
        step(opt, model, *batch(seed=seed, **options))


def both_passes(opt, model, x, y):
    """Both passes of a step, the first one without first_pass()."""
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()


def gradients_of(model, x, y):
    """The gradients of the loss on the batch, in the order of the parameters."""
    return torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters()))


def over_micro_batches(opt, losses, *, then=lambda: None):
    """One step in two phases over functions that return the loss of a micro-batch; ``then`` runs before the update."""
    opt.zero_grad()
    for loss in losses:
        loss().backward()
    with opt.perturbed():
        for loss in losses:
            loss().backward()
    then()
    opt.step()


def perturbation_of(opt, model, x, y):
    """e of an ascent on the batch, tensor by tensor; no second pass follows."""
    opt.zero_grad()
    F.cross_entropy(model(x), y).backward()
    before = weights_of(model)
    with opt.perturbed():
        moved = weights_of(model)
    assert same_bits(before, weights_of(model))
    return [now - then for now, then in zip(moved, before, strict=True)]


def sgd(model, lr=0.1, momentum=0.9, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, **options)


def made(kind, *values, **options):
    """A model and its optimizer."""
    model = mlp()
    return model, kind(sgd(model), model, *values, **options)


def ssam(model, mask="head.*", **options):
    """SSAM with a mask rule, or with what `fixed_mask` accepts: names, or a mask for each name."""
    rule = mask if isinstance(mask, sparsesam.MaskRule) else sparsesam.fixed_mask(mask)
    return sparsesam.SSAM(sgd(model), model, **{"rho": 0.3, "mask": rule, "norm": "masked", **options})


def weights_of(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


def same_bits(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def snapshot(model):
    """What a measurement leaves as it was."""
    return (
        [module.training for module in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()],
        [value.clone() for value in model.state_dict().values()],
        torch.random.get_rng_state(),
        torch.backends.mha.get_fastpath_enabled(),
    )


def modes():
    """The number of torch's modes that are active: functions, dispatch, saved tensors, no functions."""
    stacks = torch._C._len_torch_function_stack() + torch._C._len_torch_dispatch_stack()
    return stacks + are_saved_tensors_hooked() + (not torch._C._is_torch_function_enabled())


def hooks_of(model):
    """The number of hooks of the modules, and of the parameters and their accumulators."""
    attributes = [item for module in model.modules() for item in vars(module).items()]
    of_modules = sum(len(hooks) for name, hooks in attributes if name.endswith("_hooks"))
    names = "_backward_hooks", "_post_accumulate_grad_hooks"
    return of_modules + sum(len(getattr(p, name) or ()) for p in model.parameters() for name in names)


def same_state(model, twin):
    return same_bits(model.state_dict().values(), twin.state_dict().values())


def assert_close(model, twin, *, rtol=1e-9, atol=1e-12):
    torch.testing.assert_close(weights_of(model), weights_of(twin), rtol=rtol, atol=atol)


def assert_same_masks(opt, other):
    assert opt.masks.keys() == other.masks.keys()
    assert all(torch.equal(mask, other.masks[name]) for name, mask in opt.masks.items())


def assert_resumes(make, *, build=mlp, batch=vectors, at=4, end=9):
    """A run that was saved to a file, copied or pickled continues as if it had not been."""
    model, again = build(), build(seed=99)
    opt = make(model)
    torch.optim.lr_scheduler.StepLR(opt, 100)  # replaces opt.step by a function that cannot be pickled
    train(model, opt, range(at), batch=batch)
    file = io.BytesIO()
    torch.save((model.state_dict(), opt.state_dict()), file)
    copies = [copy.deepcopy((model, opt)), pickle.loads(pickle.dumps((model, opt)))]
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again.load_state_dict(weights)
    resumed = make(again)
    resumed.load_state_dict(state)
    train(model, opt, range(at, end), batch=batch)
    for twin, other in ((again, resumed), *copies):
        train(twin, other, range(at, end), batch=batch)
        assert same_state(model, twin)
        assert_same_masks(opt, other)
        assert other.steps == opt.steps == end
        assert [group["rho"] for group in other.param_groups] == [group["rho"] for group in opt.param_groups]


def moved_as_on(implementation):
    """Within the block, weights on a CPU are moved tensor by tensor ("host") or batched, as on an accelerator."""
    return mock.patch.object(perturbation, "HOSTS", ("cpu",) if implementation == "host" else ())


def every_other_filter(model, *prefixes):
    """A mask of every other filter of the trainable parameters, or of those whose names start so, by name."""
    masks = {name: torch.zeros(p.shape, dtype=torch.bool) for name, p in model.named_parameters() if p.requires_grad}
    for name, mask in masks.items():
        mask[::2] = name.startswith(prefixes or ("",))
    return masks


def half_masks(model, seed=5):
    """A fixed random mask of about half of the weights, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.rand(p.shape, generator=generator) < 0.5 for name, p in model.named_parameters()}
