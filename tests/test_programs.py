"""Programs that people write: what the optimizer leaves out changes no bit of what they compute, draw or leave.

A program is a function of a model, of which the head is perturbed, and of a batch. It returns what the head reads, or
the loss itself. ``model.calls`` counts its calls, ``GLOBAL`` is what it may keep outside of the model. Writes to any
memory, branches and random numbers are drawn in test_random_programs.py.
"""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import cases

GLOBAL = {}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.key = nn.Linear(6, 6).requires_grad_(False)
        self.embed = nn.Embedding(5, 6, max_norm=0.5)
        self.register_buffer("average", torch.ones(6))
        self.register_buffer("start", torch.zeros(6))
        self.calls = 0

    def features(self, x):
        return torch.tanh(self.body(x))

    def loss(self, h, y):
        return F.cross_entropy(self.head(torch.tanh(h)), y)


# ---- the harness -------------------------------------------------------------------------------------------------


def bits(value):
    if isinstance(value, torch.Tensor):
        plain = value.detach().clone().resolve_conj().resolve_neg().contiguous()
        return value.dtype, tuple(value.shape), plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {name: bits(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [bits(item) for item in value]
    return repr(value)


def train(program, way, *, engine):
    """Three steps. Returns the bits of everything that they compute, draw and leave, and the operations reused."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (what programs draw from)
    GLOBAL.clear()
    model = Model().double()
    opt = cases.ssam(model, engine=engine)
    computed, reused = [], []

    def loss_of(x, y):
        model.calls += 1
        found = program(model, x, y)
        loss = model.loss(found, y) if found.dim() else found
        computed.append(loss.item())
        return loss

    for _ in range(3):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
        cases.WAYS[way](opt, lambda x=x, y=y: loss_of(x, y))
        computed.append(bits([p.grad for p in model.parameters()]))
        reused.append(opt.savings().reused)
    left = [model.state_dict(), GLOBAL, torch.get_rng_state()]
    return [computed, bits(left), random.getstate(), repr(np.random.get_state())], reused  # noqa: NPY002


class KeepsInContext(torch.autograd.Function):
    """Keeps its input, or a copy, outside of what autograd saves; the backward may write to it, and free it."""

    @staticmethod
    def forward(ctx, x, kind):
        ctx.kept, ctx.kind = x.detach() if kind in ("read", "input with numpy") else (x * 2).detach(), kind
        return torch.exp(-x * x)

    @staticmethod
    def backward(ctx, g):
        kept = ctx.kept
        if "numpy" in ctx.kind:
            kept.numpy()[0] *= 2
        elif ctx.kind != "read":
            kept.mul_(0.5)
        if ctx.kind == "free":
            del ctx.kept
        return -kept * g, None


class Tagged(torch.Tensor):
    pass


#: Programs in one expression.
EXPRESSIONS = {
    "plain": lambda m, x, y: m.middle(m.features(x)),
    "counter_changes_the_path": lambda m, x, y: m.middle(m.features(x)) if m.calls % 2 else torch.sin(m.features(x)),
    "embedding_renormalized": lambda m, x, y: m.features(x) + m.embed(y),
    "perturbed_weight_read_first": lambda m, x, y: m.features(x * m.head.weight.norm()),
    # random numbers
    "dropout": lambda m, x, y: F.dropout(m.body(x), 0.5),
    "reparametrized_sample": lambda m, x, y: torch.distributions.Normal(m.body(x), torch.ones_like(x)).rsample(),
    "python_random": lambda m, x, y: (
        (F.dropout(m.features(x), 0.5) if random.random() < 0.5 else m.features(x)) + F.dropout(m.middle(x), 0.5)
    ),
    # statistics
    "batch_norm": lambda m, x, y: m.norm(m.body(x)),
    "batch_norm_scaled_by_its_statistics": lambda m, x, y: F.batch_norm(
        m.body(x), m.average, m.norm.running_var, weight=m.average, training=True
    ),
    "instance_norm_with_statistics": lambda m, x, y: (
        m.middle(x) + F.instance_norm(m.body(x)[:, :, None].expand(8, 6, 2) * 1.5, m.average, m.start + 1).mean(-1)
    ),
    # autograd
    "function_overwrites_and_frees_its_context": lambda m, x, y: KeepsInContext.apply(m.body(x), "free"),
    "checkpoint_with_a_flag": lambda m, x, y: checkpoint(lambda v: m.features(v) * m.calls, x, use_reentrant=False),
    "checkpointed_with_reentrant_autograd": lambda m, x, y: checkpoint(
        lambda v: F.dropout(torch.tanh(m.middle(v)), 0.2), m.features(x), use_reentrant=True
    ),
    "per_sample_gradients": lambda m, x, y: (
        m.features(x) + torch.vmap(torch.func.grad(lambda row: torch.tanh(m.middle(row)).sum()))(m.features(x).detach())
    ),
    "model_under_vmap": lambda m, x, y: F.cross_entropy(torch.vmap(lambda row: m.head(m.features(row)))(x), y),
    "jvp": lambda m, x, y: m.features(x) + torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))[1],
    "tensor_subclass": lambda m, x, y: torch.sin(m.features(x).as_subclass(Tagged)).as_subclass(torch.Tensor),
    "traced_part": lambda m, x, y: torch.jit.trace(nn.Tanh(), x)(m.body(x)),
}
#: Nothing of these can be reused: what they do first is different in the second pass, or unknown.
REUSE_NOTHING = {
    *("numpy_array_made_outside", "perturbed_weight_read_first", "checkpoint_with_a_flag", "model_under_vmap"),
}


class Statements:
    """Programs of several lines."""

    def default_type_changes(model, x, y):
        h = model.features(x)
        torch.set_default_dtype(torch.float64 if model.calls % 2 else torch.float32)
        try:
            return h + torch.linspace(0, 1, 6) / 3
        finally:
            torch.set_default_dtype(torch.float32)

    # random numbers

    def random_numbers_after_the_head(model, x, y):
        out = model.head(model.features(x))
        if int(out[:, 0].sum().item() * 1000) % 2:
            out = F.dropout(out, 0.5)
        return F.cross_entropy(out + model.middle(F.dropout(x, 0.5))[:, :3], y)

    # memory

    def numpy_array_made_outside(model, x, y):
        array = GLOBAL.setdefault("array", np.ones(6))
        weights = torch.from_numpy(array)
        h = torch.tanh(model.body(x) * weights)
        array *= 0.9
        return torch.sin(h) * weights

    def output_overwritten_in_one_branch(model, x, y):
        with torch.no_grad():
            clean = torch.tanh(model.middle(x))
        out = model.head(model.features(x))
        if int(out[:, 0].sum().item() * 1000) % 2:
            clean.mul_(2.0)
        return F.cross_entropy(out + clean[:, :3], y)

    # buffers and weights

    def batch_norm_statistics_listed(model, x, y):
        h = model.norm(model.body(x))
        GLOBAL.setdefault("means", []).append(model.norm.running_mean.tolist())
        return h

    def trained_and_evaluated(model, x, y):
        loss = model.loss(model.norm(model.body(x)), y)
        model.eval()
        loss = loss + model.loss(model.norm(model.body(x)), y)
        model.train()
        return loss

    def momentum_encoder_assigned_and_updated_through_data(model, x, y):
        h, slow, fast = model.features(x), model.key, model.body
        slow.weight.data = slow.weight.data * 0.9 + fast.weight.data * 0.1
        slow.bias.data.mul_(0.9).add_(fast.bias.data, alpha=0.1)
        return h + torch.tanh(slow(x))

    # autograd

    def requires_grad_changes(model, x, y):
        model.middle.weight.requires_grad_(model.calls % 2 == 0)
        return model.middle(model.features(x))

    def backward_writes_activations_with_numpy(model, x, y):
        h = model.features(x)
        gradient = torch.autograd.grad(
            KeepsInContext.apply(h, "input with numpy").sum(), model.body.bias, retain_graph=True
        )[0]
        return torch.sin(h.detach()) + gradient

    def output_detached_in_place(model, x, y):
        h = model.features(x)
        kept = h * 2
        kept.detach_()
        return h + kept

    def penalty_on_gradients(model, x, y):
        loss = model.loss(model.body(x), y)
        gradients = torch.autograd.grad(loss, [model.body.weight, model.head.weight], create_graph=True)
        return loss + 0.1 * sum(g.pow(2).sum() for g in gradients)

    def backward_in_the_closure(model, x, y):
        h = model.body(x)
        h.retain_grad()
        loss = model.loss(h, y)
        loss.backward(retain_graph=True)
        return loss * model.body.weight.grad.norm().detach() * h.grad.norm()

    def selectively_checkpointed(model, x, y):
        contexts = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        return model.middle(
            checkpoint(lambda v: torch.sin(model.features(v)), x, use_reentrant=False, context_fn=contexts)
        )

    def autocast(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            h = torch.tanh(F.linear(x.float(), model.body.weight.float()))
            h = F.linear(h, model.body.weight.float())
        return h.double() + model.middle(x)

    def forward_mode(model, x, y):
        h = model.features(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return h + forward_ad.unpack_dual(torch.sin(dual)).tangent


PROGRAMS = EXPRESSIONS | {name: program for name, program in vars(Statements).items() if not name.startswith("_")}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", cases.WAYS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_program_is_trained_as_by_two_plain_passes(name, way):
    if name.endswith("in_the_closure") and way == "minimize":
        with pytest.raises(RuntimeError, match="must not call backward"):
            train(PROGRAMS[name], way, engine=True)
        return
    (found, reused), (wanted, _) = (train(PROGRAMS[name], way, engine=engine) for engine in (True, False))
    assert found == wanted
    assert all(reused) or name in REUSE_NOTHING
