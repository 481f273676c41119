"""Programs that people write: what the optimizer leaves out changes no bit of what they compute, draw or leave.

A program is a function of a model, of which the head is perturbed, and of a batch. It returns what the head reads, or
the loss itself. ``model.calls`` counts its calls, ``GLOBAL`` is what it may keep outside of the model.
"""

from __future__ import annotations

import copy
import io
import random
import threading
import types
from collections import OrderedDict
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests import cases

GLOBAL, GENERATOR = {}, torch.Generator()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)
        self.key = nn.Linear(6, 6).requires_grad_(False)
        self.embed = nn.Embedding(5, 6, max_norm=0.5)
        self.register_buffer("average", torch.ones(6))
        self.register_buffer("start", torch.zeros(6))
        self.calls, self.kept = 0, []

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
    GENERATOR.manual_seed(0)
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
    left = [model.state_dict(), GLOBAL, model.kept, torch.get_rng_state(), GENERATOR.get_state()]
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


@torch.library.custom_op("sparsesam_tests::counted", mutates_args=())
def counted(x: torch.Tensor) -> torch.Tensor:
    GLOBAL["count"] = GLOBAL.get("count", 0) + 1
    return x * (1 + GLOBAL["count"] % 2)


#: Programs in one expression.
EXPRESSIONS = {
    "plain": lambda m, x, y: m.middle(m.features(x)),
    "tied_weights": lambda m, x, y: m.features(m.features(x)),
    "embedding_renormalized": lambda m, x, y: m.features(x) + m.embed(y),
    "counter_changes_the_path": lambda m, x, y: m.middle(m.features(x)) if m.calls % 2 else torch.sin(m.features(x)),
    "counter_scales": lambda m, x, y: m.features(x) / m.calls,
    "branch_on_a_value": lambda m, x, y: m.middle(h) if (h := m.features(x)).sum().item() > 0 else h * 2,
    "branch_detached_in_one_pass": lambda m, x, y: m.middle(m.features(x).detach() if m.calls % 2 else m.features(x)),
    "perturbed_weight_read_first": lambda m, x, y: m.features(x * m.head.weight.norm()),
    # random numbers
    "dropout": lambda m, x, y: F.dropout(m.body(x), 0.5),
    "drop_path": lambda m, x, y: m.features(x) * x.new_empty(len(x), 1).bernoulli_(0.7).div_(0.7),
    "reparametrized_sample": lambda m, x, y: torch.distributions.Normal(m.body(x), torch.ones_like(x)).rsample(),
    "generator_of_its_own": lambda m, x, y: torch.sin(
        m.features(x) * torch.rand(8, 1, generator=GENERATOR, dtype=x.dtype)
    ),
    "python_random": lambda m, x, y: (
        (F.dropout(m.features(x), 0.5) if random.random() < 0.5 else m.features(x)) + F.dropout(m.middle(x), 0.5)
    ),
    "seed_set_in_the_pass": lambda m, x, y: torch.sin(
        m.features(x) + (torch.manual_seed(3), torch.randn(6, dtype=x.dtype))[1]
    ),
    # statistics
    "batch_norm": lambda m, x, y: m.norm(m.body(x)),
    "batch_norm_statistics_read": lambda m, x, y: m.norm(m.body(x)) - m.norm.running_mean / m.norm.num_batches_tracked,
    "batch_norm_scaled_by_its_statistics": lambda m, x, y: F.batch_norm(
        m.body(x), m.average, m.norm.running_var, weight=m.average, training=True
    ),
    "instance_norm_with_statistics": lambda m, x, y: (
        m.middle(x) + F.instance_norm(m.body(x)[:, :, None].expand(8, 6, 2) * 1.5, m.average, m.start + 1).mean(-1)
    ),
    # autograd
    "function_overwrites_and_frees_its_context": lambda m, x, y: KeepsInContext.apply(m.body(x), "free"),
    "function_writes_in_place": lambda m, x, y: cases.HalvedInPlace.apply(m.body(x) + 1),
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
    "operator_of_the_user": lambda m, x, y: m.features(x) + counted(m.features(x).detach()),
}
#: Nothing of these can be reused: what they do first is different in the second pass, or unknown.
REUSE_NOTHING = {
    *("list_kept_for_the_next_forward", "global_written_in_place", "model_saved_in_the_pass", "error_swallowed"),
    *("numpy_generator", "batch_written_in_place", "batch_written_after_its_view", "memory_written_with_numpy"),
    *("numpy_array_made_outside", "storage_exchanged", "sparse_matrix", "weight_clamped_through_data"),
    *("perturbed_weight_read_first", "checkpoint_with_a_flag", "model_under_vmap", "operator_of_the_user"),
}


class Statements:
    """Programs of several lines."""

    # containers and Python state

    def containers_changed_by_their_user(model, x, y):
        def decode(skips):
            return model.middle(skips.pop()) + skips.pop()

        features = [model.features(x), torch.sin(x), x * 2]
        out = OrderedDict(pooled=features.pop(), last=decode(features[::-1]))
        out["pooled"] = out["pooled"] * 2 + out.pop("last")
        features.reverse()
        return out["pooled"] + features[0]

    def list_emptied_in_each_forward(model, x, y):
        model.kept = []
        model.kept.append((model.middle(x) + 1).detach())
        return model.body(x) + 1

    def list_kept_for_the_next_forward(model, x, y):
        last = model.kept[-1].mean() if model.kept else 0.0
        model.kept = [torch.sin(model.middle(x) + 1).detach()]
        return model.loss(torch.tanh(model.body(x) + 1), y) * (1 + last)

    def detached_statistics_in_a_global(model, x, y):
        h = model.features(x)
        GLOBAL["mean"] = 0.9 * GLOBAL.get("mean", 0.0) + 0.1 * h.detach().mean(0)
        return h - GLOBAL["mean"]

    def global_written_in_place(model, x, y):
        h = model.features(x) + 1
        GLOBAL.setdefault("seen", []).append(h.detach())
        GLOBAL["seen"][0].mul_(0.9)
        return model.middle(h.clone()) + GLOBAL["seen"][0].mean()

    def attribute_of_an_activation(model, x, y):
        h = model.features(x)
        h.seen = getattr(h, "seen", 0) + 1
        return model.loss(h, y) * h.seen

    def forward_and_hook_changed_in_the_pass(model, x, y):
        model.body.forward = types.MethodType(lambda module, v: nn.Linear.forward(module, v) * 3, model.body)
        with model.middle.register_forward_hook(lambda module, args, out: out * 2):
            return model.middle(model.body(x))

    def model_copied_in_the_pass(model, x, y):
        with torch.no_grad():
            other = copy.deepcopy(model.middle)(x)
        return model.features(x) + other

    def model_saved_in_the_pass(model, x, y):
        h, file = model.features(x), io.BytesIO()
        torch.save(model.state_dict(), file)
        GLOBAL["size"] = len(file.getvalue())
        return h

    def error_swallowed(model, x, y):
        try:
            if model.calls % 2 == 0:
                torch.ones(2) @ torch.ones(3)
        except RuntimeError:
            x = x * 2
        return model.features(x)

    def thread_computes_a_part(model, x, y):
        h, parts = model.features(x), []
        worker = threading.Thread(target=lambda: parts.append(torch.sin(h.detach())))
        worker.start()
        worker.join()
        return h + parts[0]

    def default_type_changes(model, x, y):
        h = model.features(x)
        torch.set_default_dtype(torch.float64 if model.calls % 2 else torch.float32)
        try:
            return h + torch.linspace(0, 1, 6) / 3
        finally:
            torch.set_default_dtype(torch.float32)

    # random numbers

    def numpy_generator(model, x, y):
        model.generator = getattr(model, "generator", np.random.default_rng(0))
        scale, model.kept = float(model.generator.random()), model.generator.bit_generator.state["state"]
        return torch.sin(model.features(x) * scale)

    def random_numbers_after_the_head(model, x, y):
        out = model.head(model.features(x))
        if int(out[:, 0].sum().item() * 1000) % 2:
            out = F.dropout(out, 0.5)
        return F.cross_entropy(out + model.middle(F.dropout(x, 0.5))[:, :3], y)

    def buffer_drawn_in_place(model, x, y):
        with torch.no_grad():
            model.average.normal_()
        return model.features(x) + model.average

    # memory

    def activations_written_in_place(model, x, y):
        h = model.body(x)
        h[:, 0] += 1.0
        h /= 2.0
        return F.relu_(model.middle(F.relu_(h)))

    def written_through_data_and_data_replaced(model, x, y):
        h, k = model.features(x) * 1, model.middle(x) * 1
        h.data.mul_(0.5)
        k.data = k.data * 2
        return torch.sin(h) + torch.sin(k)

    def batch_written_in_place(model, x, y):
        h = model.features(x.clone())
        x.mul_(0.9)
        return h + torch.sin(x)

    def batch_written_after_its_view(model, x, y):
        view, h = x[:, 1:], model.features(x.clone())
        x.data.mul_(0.9)
        return h + view.sum(1, keepdim=True)

    def memory_written_with_numpy(model, x, y):
        h = model.features(x)
        h.detach().numpy()[0] *= model.calls
        return torch.sin(torch.tanh(h.detach())) + h

    def numpy_array_made_outside(model, x, y):
        array = GLOBAL.setdefault("array", np.ones(6))
        weights = torch.from_numpy(array)
        h = torch.tanh(model.body(x) * weights)
        array *= 0.9
        return torch.sin(h) * weights

    def filled_outside_of_torch(model, x, y):
        h = model.features(x)
        out = torch.empty_like(h)
        with torch._C.DisableTorchFunction():
            out.numpy()[:] = h.detach().numpy() * model.calls
        return h + torch.sin(out)

    def storage_exchanged(model, x, y):
        h = model.features(x).detach()
        torch.empty(0, dtype=h.dtype).set_(h).mul_(2.0)
        return model.middle(h)

    def result_written_to_out(model, x, y):
        with torch.no_grad():
            out = torch.empty(8, 6, dtype=x.dtype)
            torch.mul(model.key(x), 2.0, out=out)
            torch.add(out[0], 1, out=model.average)
        return model.features(x) + out * model.average

    def output_overwritten_in_one_branch(model, x, y):
        with torch.no_grad():
            clean = torch.tanh(model.middle(x))
        out = model.head(model.features(x))
        if int(out[:, 0].sum().item() * 1000) % 2:
            clean.mul_(2.0)
        return F.cross_entropy(out + clean[:, :3], y)

    def negative_zero(model, x, y):
        sign = torch.tensor(-0.0 if model.calls % 2 else 0.0, dtype=x.dtype)
        return model.features(x) + torch.copysign(torch.ones_like(sign), sign)

    def complex_numbers(model, x, y):
        z = torch.complex(model.body(x), torch.tanh(model.middle(x)))
        return (z * z.conj()).real + torch.fft.fft(z).conj().imag + z.conj().imag.neg()

    def sparse_matrix(model, x, y):
        places = torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]])
        neighbors = torch.sparse_coo_tensor(places, torch.ones(4, dtype=x.dtype), (8, 8)).coalesce()
        return torch.sparse.mm(neighbors, model.features(x))

    def inference_mode_inside(model, x, y):
        h = model.features(x)
        with torch.inference_mode():
            extra = torch.tanh(model.middle(x))
        return h + extra.clone()

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

    def own_statistic(model, x, y):
        h = model.features(x)
        with torch.no_grad():
            model.average.mul_(0.7).add_(0.3 * (h + 1).mean(0))
        return h - model.average

    def buffers_replaced_and_swapped(model, x, y):
        h = model.features(x)
        model.average, model.start = model.start, 0.9 * model.average + 0.1 * h.detach().mean(0)
        return h * model.average + model.start

    def momentum_encoder_assigned_and_updated_through_data(model, x, y):
        h, slow, fast = model.features(x), model.key, model.body
        slow.weight.data = slow.weight.data * 0.9 + fast.weight.data * 0.1
        slow.bias.data.mul_(0.9).add_(fast.bias.data, alpha=0.1)
        return h + torch.tanh(slow(x))

    def weight_clamped_through_data(model, x, y):
        model.body.weight.data.clamp_(-0.2, 0.2).mul_(0.99)
        return model.features(x)

    def view_of_perturbed_weight_kept(model, x, y):
        view = model.head.weight[:, :3]
        return model.loss(model.features(x), y) + view.square().mean()

    # autograd

    def requires_grad_changes(model, x, y):
        model.middle.weight.requires_grad_(model.calls % 2 == 0)
        return model.middle(model.features(x))

    def gradient_mode_changes(model, x, y):
        with torch.set_grad_enabled(model.calls % 2 == 0):
            extra = torch.tanh(model.middle(x))
        return model.features(x) + extra

    def backward_writes_activations_with_numpy(model, x, y):
        h = model.features(x)
        gradient = torch.autograd.grad(
            KeepsInContext.apply(h, "input with numpy").sum(), model.body.bias, retain_graph=True
        )[0]
        return torch.sin(h.detach()) + gradient

    def hooks_on_activations_and_nodes(model, x, y):
        h = model.body(x)
        h.register_hook(lambda gradient: gradient * 0.5)
        h.grad_fn.register_hook(lambda inputs, outputs: tuple(None if g is None else g * 0.5 for g in inputs))
        node = model.middle.bias.view_as(model.middle.bias).grad_fn.next_functions[0][0]
        GLOBAL["hook"] = node.register_hook(lambda *_: None) and None
        return model.middle(torch.tanh(h))

    def output_detached_in_place(model, x, y):
        h = model.features(x)
        kept = h * 2
        kept.detach_()
        return h + kept

    def penalty_on_gradients(model, x, y):
        loss = model.loss(model.body(x), y)
        gradients = torch.autograd.grad(loss, [model.body.weight, model.head.weight], create_graph=True)
        return loss + 0.1 * sum(g.pow(2).sum() for g in gradients)

    def inner_gradient_before_the_head(model, x, y):
        z = model.features(x).detach().requires_grad_()
        gradient = torch.autograd.grad(torch.tanh(model.middle(z)).pow(2).sum(), z, create_graph=True)[0]
        return z - 0.1 * gradient

    def backward_in_the_closure(model, x, y):
        h = model.body(x)
        h.retain_grad()
        loss = model.loss(h, y)
        loss.backward(retain_graph=True)
        return loss * model.body.weight.grad.norm().detach() * h.grad.norm()

    def saved_tensors_packed_and_on_the_host(model, x, y):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            h = torch.sigmoid(model.features(x).exp())
        with torch.autograd.graph.save_on_cpu():
            return model.loss(h, y)

    def checkpointed(model, x, y):
        h = checkpoint(lambda v: F.dropout(model.features(v), 0.2), x, use_reentrant=False)
        return checkpoint(lambda v: torch.tanh(model.middle(v)), h, use_reentrant=False)

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
