"""Common code in models and loops: the engine is active where possible, and never changes a result."""

from __future__ import annotations

import contextlib
import copy
import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sparsesam
from tests import cases


class Net(nn.Module):
    """body, middle and head; ``between`` is what a user does between body and middle."""

    def __init__(self, between=torch.tanh):
        super().__init__()
        self.body, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.between = between

    def forward(self, x):
        return self.head(torch.tanh(self.middle(self.between(self.body(x)))))


def make(between=torch.tanh):
    torch.manual_seed(0)
    return Net(between).double()


def plain_phases(opt, model, x, y):
    cases.both_passes(opt, model, x, y)
    opt.step()


LOOPS = [cases.with_closure, cases.in_two_phases, plain_phases]


def some_filters(model, *prefixes):
    return sparsesam.fixed_mask(cases.every_other_filter(model, *prefixes))


def compare(make_model, mask, loop, *, steps=3, data=cases.vectors, norm="masked", **options):
    """Train with and without the engine, and return the optimizer with it."""
    model = make_model()
    twin = copy.deepcopy(model)
    opts = []
    for one, engine in ((model, True), (twin, False)):
        opt = sparsesam.SSAM(cases.sgd(one), one, rho=0.3, mask=mask, norm=norm, engine=engine, **options)
        torch.manual_seed(7)
        for seed in range(steps):
            loop(opt, one, *data(8, seed=seed))
        opts.append(opt)
    found, wanted = ([v.clone() for v in m.state_dict().values()] for m in (model, twin))
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)
    return opts[0]


def is_reused(opt, name="body.weight"):
    return "used again" in opt.engine_report()[name]


# ---- random numbers --------------------------------------------------------------------------------------------


def drop_path(x):
    """As in timm and torchvision: an empty tensor filled in place."""
    return x * x.new_empty(len(x), 1).bernoulli_(0.7).div_(0.7)


def sampled(x):
    return Normal(x, torch.ones_like(x)).rsample()


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("noise", [drop_path, sampled])
def test_noise_drawn_in_place_before_perturbed_layers(noise, loop):
    """In a two-phase loop each pass draws its own noise, as without the engine."""
    compare(lambda: make(noise), sparsesam.fixed_mask("head.*"), loop)


class Drop(nn.Module):
    def forward(self, x):
        return drop_path(x)


def test_module_noise_is_reused_with_closure():
    opt = compare(lambda: make(Drop()), sparsesam.fixed_mask("head.*"), cases.with_closure)
    assert is_reused(opt)


# ---- filter masks ----------------------------------------------------------------------------------------------


class ThreeDimensional(nn.Module):
    """As in Longformer, Wav2Vec2 and SwinV2: a linear layer with a bias on (batch, length, features), then in place."""

    def __init__(self):
        super().__init__()
        self.project, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = self.project(x.view(len(x), 2, 3))
        hidden /= 2.0
        hidden[:, 0] += 1.0
        return self.head(F.relu_(hidden).mean(1))


@pytest.mark.parametrize("ascent", ["explicit", "implicit"])
@pytest.mark.parametrize("loop", [cases.with_closure, cases.in_two_phases])
def test_three_dimensional_linear_output_modified_in_place(loop, ascent):
    def make_model():
        torch.manual_seed(0)
        return ThreeDimensional().double()

    if ascent == "implicit":  # not equal to the explicit perturbation: only that it trains can be checked here
        model = make_model()
        opt = cases.ssam(model, some_filters(model, "project", "head"), ascent=ascent)
        loop(opt, model, *cases.vectors(8))
    else:
        opt = compare(make_model, some_filters(make_model(), "project", "head"), loop)
    assert opt.engine_report()["engine"] == "on"
    assert "2 of 4 filters" in opt.engine_report()["project.weight"]


def balanced(opt, model, x, y):
    """Two losses weighted by the norms of their gradients with respect to a whole weight, from autograd.grad."""

    def loss_of():
        out = model(x)
        losses = [F.cross_entropy(out, y), out.square().mean()]
        norms = [torch.autograd.grad(one, model.middle.weight, retain_graph=True)[0].norm() for one in losses]
        return sum(one / norm.detach() for one, norm in zip(losses, norms, strict=True))

    cases.take_step(opt, loss_of)


def clipped(opt, model, x, y):
    """Each parameter's gradient clipped by its own norm, in the closure."""

    def clip():
        for parameter in model.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.05)

    opt.step(cases.closure_for(model, opt, x, y, then=clip))


@pytest.mark.parametrize("norm", ["masked", "full"])
@pytest.mark.parametrize("loop", [balanced, clipped])
def test_closure_that_uses_whole_gradients_gets_them(loop, norm):
    for mask in (some_filters(make(), "middle", "head"), sparsesam.fixed_mask("head.*")):
        compare(make, mask, loop, norm=norm)


# ---- torch.cond and activation checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize("loop", LOOPS)
def test_torch_cond_in_forward(loop):
    def conditional(x):
        return torch.cond(x.sum() > 0, lambda v: torch.tanh(v), lambda v: torch.sin(v), (x,))

    compare(lambda: make(conditional), sparsesam.fixed_mask("head.*"), loop)


class Checkpointed(nn.Module):
    """A checkpointed part before the perturbed layer, inside it, or both."""

    def __init__(self, *, reentrant):
        super().__init__()
        self.body, self.middle, self.head = (nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self.last, self.reentrant = nn.Linear(6, 3), reentrant

    def forward(self, x):
        x = self.body(x)
        x = checkpoint(self.middle, x, use_reentrant=self.reentrant)
        return self.last(checkpoint(self.head, x, use_reentrant=self.reentrant))


@pytest.mark.parametrize("perturbed", ["last.*", "head.*", "middle.*"])
@pytest.mark.parametrize("loop", [cases.with_closure, cases.in_two_phases])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, loop, perturbed):
    def make_model():
        torch.manual_seed(0)
        return Checkpointed(reentrant=reentrant).double()

    opt = compare(make_model, sparsesam.fixed_mask(perturbed), loop)
    report = opt.engine_report()
    assert report["engine"].startswith("on")
    if reentrant and perturbed != "last.*":  # torch cannot differentiate part of it
        assert "a reentrant checkpoint cannot be differentiated in part" in report["engine"]
    else:
        assert report["engine"] == "on"
        assert is_reused(opt, "body.0.weight")
        assert report["body.0.weight"].startswith("not perturbed: no weight gradient")


# ---- precision ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loop", [cases.with_closure, cases.in_two_phases])
def test_autocast(loop):
    def in_bfloat16(opt, model, x, y):
        def forward(x):
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)

        loop(opt, forward, x, y)

    def make_model():
        return make().float()

    opt = compare(make_model, sparsesam.fixed_mask("head.*"), in_bfloat16, data=single_precision)
    assert opt.engine_report()["engine"] == "on"
    assert is_reused(opt)


def single_precision(count, seed):
    return cases.vectors(count, dtype=torch.float32, seed=seed)


@pytest.mark.parametrize("two_phases", [False, True])
def test_grad_scaler(two_phases):
    scalers = {}

    def loop(opt, model, x, y):
        scaler = scalers.setdefault(opt, torch.amp.GradScaler("cpu", init_scale=1024.0))
        closure = cases.closure_for(model, opt, x, y, backward=lambda loss: scaler.scale(loss).backward())
        if not two_phases:
            opt.step(closure, scaler=scaler)
        else:
            with opt.first_pass():
                closure()
            with opt.perturbed():
                closure()
            scaler.step(opt)
        scaler.update()

    opt = compare(make, sparsesam.fixed_mask("head.*"), loop)
    assert opt.engine_report()["engine"] == "on"
    assert is_reused(opt)


def test_micro_batches_in_separate_blocks_or_one():
    def loop(opt, model, x, y, one_block):
        opt.zero_grad()
        parts = list(zip(x.chunk(2), y.chunk(2), strict=True))
        with opt.first_pass() if one_block else contextlib.nullcontext():
            for a, b in parts:
                with contextlib.nullcontext() if one_block else opt.first_pass():
                    (F.cross_entropy(model(a), b) / 2).backward()
        with opt.perturbed():
            for a, b in parts:
                (F.cross_entropy(model(a), b) / 2).backward()
        opt.step()

    for one_block in (True, False):
        opt = compare(make, sparsesam.fixed_mask("head.*"), lambda *given, one_block=one_block: loop(*given, one_block))
        report = opt.engine_report()
        assert report["engine"].startswith("on, but the second pass was computed in full: several backward passes")
        assert report["body.weight"] == "not perturbed: no weight gradient in the ascent"


# ---- norm="full" -------------------------------------------------------------------------------------------------


class Counting(nn.Linear):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        return super().forward(x)


@pytest.mark.parametrize("loop", [cases.with_closure, cases.in_two_phases])
def test_full_norm_reuses_second_forward_of_prefix(loop):
    opt = compare(make, sparsesam.fixed_mask("head.*"), loop, norm="full")
    assert is_reused(opt)
    assert opt.engine_report()["body.weight"].startswith("full weight gradient in the ascent")
    model = make()
    model.body = Counting(6, 6).double()
    opt = sparsesam.SSAM(cases.sgd(model), model, mask=sparsesam.fixed_mask("head.*"))  # norm="full" is the default
    Counting.calls = 0
    for _ in range(3):
        loop(opt, model, *cases.vectors(8))
    assert Counting.calls == 3  # once per step


# ---- adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("loop", [cases.with_closure, cases.in_two_phases])
def test_peft_adapters(loop):
    peft = pytest.importorskip("peft")

    def make_model():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["body", "middle"], modules_to_save=["head"])
        model = peft.get_peft_model(make().float(), config).double()
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # peft starts them at zero
                nn.init.normal_(parameter, std=0.1)
        return model

    opt = compare(make_model, sparsesam.fixed_mask("*head*"), loop)
    report = opt.engine_report()
    assert report["engine"] == "on"
    assert [name for name in report if "body.lora_A" in name and "used again" in report[name]]


# ---- C++ operators -----------------------------------------------------------------------------------------------

CPP = """
#include <torch/extension.h>
torch::Tensor doubled(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const double* from = x.contiguous().data_ptr<double>();
  double* to = out.data_ptr<double>();
  for (int64_t i = 0; i < x.numel(); ++i) to[i] = 2 * from[i];
  return out;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("doubled", &doubled); }
"""


@pytest.mark.slow
def test_cpp_op_reads_real_values(tmp_path):
    from torch.utils.cpp_extension import load_inline

    ext = load_inline("sparsesam_doubled", CPP, build_directory=str(tmp_path), with_pytorch_error_handling=False)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return ext.doubled(x)

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    def extended(x):
        return torch.tanh(Doubled.apply(x)) + ext.doubled(x.detach())

    for loop in LOOPS:
        compare(lambda: make(extended), sparsesam.fixed_mask("head.*"), loop)


# ---- torch.func and forward-mode differentiation -----------------------------------------------------------------


def with_vmap(model, x, y):
    return F.cross_entropy(torch.vmap(model)(x), y)


def with_per_sample_gradients(model, x, y):
    def loss_of(weights, one, label):
        return F.cross_entropy(torch.func.functional_call(model, weights, (one[None],)), label[None])

    each = torch.vmap(torch.func.grad(loss_of), (None, 0, 0))(dict(model.named_parameters()), x, y)
    return F.cross_entropy(model(x), y) + 0.1 * sum(gradient.pow(2).mean() for gradient in each.values())


def with_jvp(model, x, y):
    out, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return F.cross_entropy(out, y) + 0.1 * tangent.pow(2).mean()


def with_dual_level(model, x, y):
    with forward_ad.dual_level():
        out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return F.cross_entropy(out, y) + 0.1 * tangent.pow(2).mean()


def with_mixed_rows(model, x, y):
    """Weights stored outside the module, each row a sum of several of its rows."""
    weights = {name: p.cumsum(0) for name, p in model.named_parameters()}
    return F.cross_entropy(torch.func.functional_call(model, weights, (x,)), y)


@pytest.mark.parametrize("mask", ["head", "filters"])
@pytest.mark.parametrize(
    "loss_of",
    [with_vmap, with_per_sample_gradients, with_jvp, with_dual_level, with_mixed_rows],
    ids=lambda f: f.__name__,
)
def test_torch_func_transforms(loss_of, mask):
    def loop(opt, model, x, y):
        cases.take_step(opt, lambda: loss_of(model, x, y))

    masks = some_filters(make(), "middle", "head") if mask == "filters" else sparsesam.fixed_mask("head.*")
    compare(make, masks, loop)


# ---- old versions of torch ---------------------------------------------------------------------------------------

#: private names of torch that the library uses; each was looked up in the wheel of torch 2.6.0, the oldest we declare
PRIVATE = {
    "torch._C.DisableTorchFunction",
    "torch._C._current_graph_task_id",
    "torch._C._is_alias_of",
    "torch._C._set_grad_enabled",
    "torch._C._functorch.is_functorch_wrapped_tensor",
    "torch._C._functorch.peek_interpreter_stack",
    "torch._compile",
    "torch._dynamo",
    "torch._functorch.config",
    "torch._functorch.config.donated_buffer",
    "torch.autograd._get_sequence_nr",
    "torch.autograd.forward_ad._current_level",
    "torch.ops.aten._unsafe_view",
    "torch.overrides._get_current_function_mode",
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
}


def test_private_names_of_torch_are_listed():
    library = Path(sparsesam.__file__).parent
    found = set()
    for file in library.rglob("*.py"):
        if "lab" not in file.relative_to(library).parts:
            found |= set(re.findall(r"\btorch(?:\.\w+)*\._(?!_version__)\w+(?:\.\w+)*", file.read_text()))
    found = {name for name in found if not name.startswith("torch._foreach_")}  # in torch 2.6.0 too
    assert found <= PRIVATE
