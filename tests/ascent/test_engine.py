"""The engine may change the cost of a step, never its result: random models, random masks, unusual loops."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import sparsesam
from sparsesam.ascent import engine, prefix
from tests import cases
from tests.cases import in_two_phases, with_closure

WIDTH = 6


class Layer(nn.Module):
    """One of many ways to map (batch, WIDTH) to (batch, WIDTH)."""

    KINDS = (
        "linear", "linear_relu_inplace", "residual", "residual_iadd", "norm", "dropout", "twice", "functional",
        "setitem", "view_inplace", "noise", "branch", "split", "conv", "gate", "attention", "alias", "constant",
    )  # fmt: skip

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if kind == "norm":
            self.norm = nn.BatchNorm1d(WIDTH)
        if kind == "conv":
            self.conv = nn.Conv1d(2, 4, 3, padding=1)
        if kind == "attention":
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.register_buffer("table", torch.linspace(-1, 1, WIDTH, dtype=torch.float64))

    def forward(self, x):
        match self.kind:
            case "linear":
                return torch.tanh(self.a(x))
            case "linear_relu_inplace":
                return F.relu(self.a(x), inplace=True)
            case "residual":
                return x + self.b(torch.tanh(self.a(x)))
            case "residual_iadd":
                out = self.b(torch.tanh(self.a(x)))
                out += x
                return F.relu_(out)
            case "norm":
                return self.norm(self.a(x))
            case "dropout":
                return F.dropout(self.a(x), 0.4, self.training)
            case "twice":
                return self.a(torch.tanh(self.a(x)))
            case "functional":
                return F.linear(x, self.a.weight.t() @ self.b.weight, self.b.bias)
            case "setitem":
                out = self.a(x)
                out[:, 0] = self.b(x)[:, 1]
                return out
            case "view_inplace":
                out = self.a(x)
                part = out[:, :3]
                part.mul_(2.0)
                return out
            case "noise":
                return self.a(x) + 0.1 * torch.randn_like(x)
            case "branch":
                return self.a(x) if x.sum() > 0 else self.b(x)
            case "split":
                left, right = self.a(x).chunk(2, dim=-1)
                return torch.cat([torch.tanh(right), left * 2], dim=-1)
            case "conv":
                folded = x.view(len(x), 2, WIDTH // 2)
                return torch.tanh(self.conv(folded)).reshape(len(x), 2, WIDTH).sum(1)
            case "gate":
                keep = torch.sigmoid(self.a(x))
                x = self.b(x)
                x *= keep
                return x
            case "attention":
                return self.attention(x[:, None], x[:, None], x[:, None])[0][:, 0]
            case "alias":
                out = self.a(x)
                same = out.view(-1)
                out.add_(1.0)
                return torch.tanh(same.view_as(out)) + out
            case "constant":
                out = self.a(x) * self.table
                return out + torch.arange(WIDTH, dtype=x.dtype)


class Net(nn.Module):
    def __init__(self, kinds, skip):
        super().__init__()
        self.layers = nn.ModuleList(Layer(kind) for kind in kinds)
        self.head = nn.Linear(WIDTH, 3)
        self.skip = skip

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = layer(x)
        return self.head(x + first if self.skip else x)


def make(kinds, skip=False, seed=0):
    torch.manual_seed(seed)
    return Net(kinds, skip).double()


def masks_for(model, choices):
    """For each parameter in turn: none, all, some rows, or some entries."""
    generator = torch.Generator().manual_seed(7)
    masks = {}
    for (name, p), choice in zip(model.named_parameters(), choices, strict=False):
        mask = torch.zeros_like(p, dtype=torch.bool)
        if choice == "all":
            mask[:] = True
        elif choice == "rows":
            mask[torch.rand(len(p), generator=generator) < 0.5] = True
        elif choice == "entries":
            mask = torch.rand(p.shape, generator=generator) < 0.5
        masks[name] = mask
    if not any(mask.any() for mask in masks.values()):
        masks["head.weight"][0] = True
    return masks


def train(model, masks, *, engine, loop, steps=3, adaptive=False):
    opt = cases.ssam(model, masks, engine=engine, adaptive=adaptive)
    torch.manual_seed(11)
    for seed in range(steps):
        x, y = cases.vectors(8, seed=seed)
        loop(opt, model, x, y)
    return opt


def state_values(model):
    return [value.clone() for value in model.state_dict().values()]


def compare(model, masks, loop=with_closure, twin=None, **options):
    twin = twin or copy.deepcopy(model)
    opt = train(model, masks, engine=True, loop=loop, **options)
    train(twin, masks, engine=False, loop=loop, **options)
    torch.testing.assert_close(state_values(model), state_values(twin), rtol=1e-9, atol=1e-11)
    return opt


CHOICES = st.lists(st.sampled_from(["none", "none", "all", "rows", "entries"]), min_size=40, max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.sampled_from(Layer.KINDS), min_size=1, max_size=4),
    st.booleans(),
    CHOICES,
    st.sampled_from([with_closure, in_two_phases]),
)
def test_random_models_and_random_masks(kinds, skip, choices, loop):
    model = make(kinds, skip)
    compare(model, masks_for(model, choices), loop)


@pytest.mark.parametrize("loop", [with_closure, in_two_phases])
@pytest.mark.parametrize("kind", Layer.KINDS)
def test_each_kind_of_layer_before_and_after_frontier(kind, loop):
    for place in range(3):
        model = make([kind, kind])
        frontier = ("layers.0.", "layers.1.", "head.")[place]
        compare(model, head_only(model, frontier), loop)


def head_only(model, prefix="head"):
    return {name: torch.full_like(p, name.startswith(prefix), dtype=torch.bool) for name, p in model.named_parameters()}


class CountingCalls(torch.overrides.TorchFunctionMode):
    """Counts how often a function really runs in a step, both passes together."""

    def __init__(self, func):
        super().__init__()
        self.func, self.calls = func, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls += func is self.func
        return func(*args, **(kwargs or {}))


def linear_calls(model, masks, engine):
    x, y = cases.vectors(8)
    opt = cases.ssam(model, masks, engine=engine)
    with_closure(opt, model, x, y)
    with CountingCalls(F.linear) as counter:
        with_closure(opt, model, x, y)
    return counter.calls


@pytest.mark.parametrize(
    "kind", ["linear", "linear_relu_inplace", "residual", "residual_iadd", "norm", "dropout", "gate"]
)
def test_unperturbed_prefix_runs_once(kind):
    model = make([kind] * 3)
    plain = linear_calls(copy.deepcopy(model), head_only(model), engine=False)
    ours = linear_calls(model, head_only(model), engine=True)
    assert plain % 2 == 0
    assert ours == plain // 2 + 1  # only the head runs twice


def test_report_lists_what_was_skipped():
    model = make(["linear", "norm"])
    masks = head_only(model)
    masks["layers.1.a.weight"][:2] = True
    opt = compare(model, masks)
    report = opt.engine_report()
    assert report["engine"] == "on"
    assert "used again" in report["layers.0.a.weight"]
    assert "2 of 6 filters" in report["layers.1.a.weight"]
    assert "used again" not in report["layers.1.norm.weight"]
    assert "perturbed: full" in report["head.weight"]


def test_report_explains_why_engine_is_off():
    model = make(["linear"])
    opt = cases.ssam(model, engine=False)
    with_closure(opt, model, *cases.vectors())
    assert "switched off" in opt.engine_report()["engine"]
    every_other = {name: torch.arange(p.numel()).view(p.shape) % 2 == 0 for name, p in model.named_parameters()}
    opt = cases.ssam(model, every_other)
    with_closure(opt, model, *cases.vectors())
    assert "no mask is made of whole filters" in opt.engine_report()["engine"]
    for opt in (
        sparsesam.ExtrapolatedSAM(cases.sgd(model), model),
        sparsesam.SAM(cases.sgd(model), model, ascent="momentum"),
    ):
        with_closure(opt, model, *cases.vectors())
        assert opt.engine_report() == {"engine": "off: a step has only one pass"}


def test_accumulation_over_micro_batches():
    def loop(opt, model, x, y):
        opt.zero_grad()
        with opt.first_pass():
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.cross_entropy(model(a), b) / 2).backward()
        with opt.perturbed():
            for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
                (F.cross_entropy(model(a), b) / 2).backward()
        opt.step()

    model = make(["residual", "norm", "linear"])
    compare(model, head_only(model), loop)


def test_model_called_twice_for_one_loss():
    def loop(opt, model, x, y):
        cases.take_step(opt, lambda: F.cross_entropy(model(x) + model(x.flip(0)), y))

    model = make(["residual", "linear"])
    compare(model, head_only(model), loop)


def test_batch_copied_in_each_pass_is_recognized():
    model = make(["linear", "linear"])
    x, y = cases.vectors(8)
    opt = cases.ssam(model)
    for _ in range(2):
        cases.take_step(opt, lambda: F.cross_entropy(model(x.clone()), y))
    assert "used again" in opt.engine_report()["layers.0.a.weight"]


class Unusual(nn.Module):
    """Code that the engine must recognize and leave alone."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.body, self.middle, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.rnn = nn.LSTM(6, 6, batch_first=True) if kind == "lstm" else nn.Identity()
        self.scripted = torch.jit.script(nn.Linear(6, 6).double()) if kind == "scripted" else nn.Identity()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        h = torch.tanh(self.body(x))
        if self.kind == "checkpoint":
            h = checkpoint(lambda v: torch.tanh(self.middle(v)), h, use_reentrant=False)
        elif self.kind == "reentrant":
            h = checkpoint(lambda v: torch.tanh(self.middle(v)), h, use_reentrant=True)
        elif self.kind == "checkpoint head":
            return checkpoint(lambda v: self.head(torch.tanh(self.middle(v))), h, use_reentrant=False)
        elif self.kind == "lstm":
            h = self.rnn(torch.stack([h, h * 2], 1))[0][:, -1]
        elif self.kind == "rnn loop":
            for _ in range(3):
                h = torch.tanh(self.middle(h) + x)
        elif self.kind == "custom":
            h = Double.apply(self.middle(h))
        elif self.kind == "scripted":
            h = self.scripted(h)
        elif self.kind == "leak":
            self.features = self.middle(h)
        elif self.kind == "average":
            with torch.no_grad():
                self.average.mul_(0.9).add_(0.1 * h.mean(0))
            h = h + self.average
        elif self.kind == "numpy":
            h = h + torch.from_numpy(h.detach().numpy() ** 2)
        elif self.kind == "data":
            h.data.mul_(1.5)
        elif self.kind == "loss depends":
            out = self.head(h)
            return out if int(out[:, 0].sum().item() * 1000) % 2 else out + self.middle(h)[:, :3]
        elif self.kind == "gradient":
            energy = self.middle(h).pow(2).sum()
            h = h + torch.autograd.grad(energy, h, create_graph=True)[0]
        elif self.kind == "vmap":
            h = torch.vmap(lambda v: torch.tanh(self.middle(v).mul_(2.0)))(h)
        elif self.kind == "dict":
            return {"logits": self.head(h), "hidden": h}
        elif self.kind == "features":
            self.seen = {}
            with torch.no_grad():
                self.seen["teacher"] = torch.sin(self.middle(x) * 2)
        elif self.kind == "late branch":
            g = torch.sin(torch.cos(h))
            out = self.head(h)
            odd = int(out[:, 0].sum().item() * 1000) % 2
            return out * (torch.exp(g) if odd else torch.cos(g)).mean()
        elif self.kind == "custom without gradient":
            with torch.no_grad():
                extra = Double.apply(torch.tanh(self.middle(x) + 1))
            h = h + extra
        return self.head(h)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, g):
        return g * 2


def unusual_loss(model, x, y):
    out = model(x)
    if isinstance(out, dict):
        return F.cross_entropy(out["logits"], y) + out["hidden"].pow(2).mean()
    extra = model.features.pow(2).mean() if model.kind == "leak" else 0.0
    if model.kind == "features":
        extra = (out.mean(1) * model.seen["teacher"].mean(1)).mean()
    return F.cross_entropy(out, y) + extra


UNUSUAL = (
    "checkpoint", "reentrant", "checkpoint head", "lstm", "rnn loop", "custom", "scripted", "leak", "average", "numpy",
    "data", "loss depends", "gradient", "dict", "vmap", "features", "late branch", "custom without gradient",
)  # fmt: skip


@pytest.mark.parametrize("kind", UNUSUAL)
@pytest.mark.parametrize("perturbed", ["head", "middle", "body"])
@pytest.mark.parametrize("two_phases", [False, True])
def test_unusual_models_give_same_result(kind, perturbed, two_phases):
    def loop(opt, model, x, y):
        cases.take_step(opt, lambda: unusual_loss(model, x, y), two_phases=two_phases)

    torch.manual_seed(0)
    model, twin = Unusual(kind).double(), Unusual(kind).double()
    twin.load_state_dict(model.state_dict())
    compare(model, head_only(model, perturbed), loop, twin)


def test_values_stored_by_model_are_real():
    torch.manual_seed(0)
    model = Unusual("features").double()
    x, y = cases.vectors(8)
    opt = cases.ssam(model)
    cases.take_step(opt, lambda: unusual_loss(model, x, y))
    assert opt.engine_report()["engine"] == "on"
    assert "used again" in opt.engine_report()["body.weight"]
    assert model.seen["teacher"].mean() != 0  # a value, not a placeholder


def test_evaluation_between_steps_changes_nothing():
    def loop(opt, model, x, y):
        with_closure(opt, model, x, y)
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()

    model = make(["norm", "linear"])
    compare(model, head_only(model), loop)


def footprint(model):
    """Everything that a step could leave behind: on the model, on torch's mode stacks, in global hooks."""
    hooks = nn.modules.module
    return (
        [dict(module.__dict__) for module in model.modules()],
        torch.overrides._get_current_function_mode_stack(),
        *(len(getattr(hooks, name)) for name in vars(hooks) if name.startswith("_global_") and "hooks" in name),
    )


@pytest.mark.parametrize("loop", [with_closure, in_two_phases])
def test_step_leaves_no_state(loop):
    model = make(["linear", "norm"])
    masks = head_only(model)
    masks["layers.1.a.weight"][:2] = True
    opt = cases.ssam(model, masks)
    before = footprint(model)
    for _ in range(2):
        loop(opt, model, *cases.vectors())
    assert "used again" in opt.engine_report()["layers.0.a.weight"]
    after = footprint(model)
    assert [list(held) for held in before[0]] == [list(held) for held in after[0]]
    assert before[1:] == after[1:]


@pytest.mark.parametrize("where", ["first forward", "second forward", "first backward"])
@pytest.mark.parametrize("loop", [with_closure, in_two_phases])
def test_interruption_leaves_no_state(loop, where):
    """KeyboardInterrupt at any point."""

    class Interrupted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            if armed and where == "first backward":
                raise KeyboardInterrupt
            return g

    class Interrupting(Net):
        def forward(self, x):
            self.calls = getattr(self, "calls", 0) + 1
            out = Interrupted.apply(super().forward(x))
            if armed and self.calls == {"first forward": 1, "second forward": 2}.get(where):
                raise KeyboardInterrupt
            return out

    torch.manual_seed(0)
    model = Interrupting(["linear", "norm"], skip=False).double()
    twin = copy.deepcopy(model)
    opt, plain = cases.ssam(model), cases.ssam(twin, engine=False)
    weights, armed = cases.weights_of(model), True
    before = footprint(model)
    with pytest.raises(KeyboardInterrupt):
        loop(opt, model, *cases.vectors())
    armed = False
    after = footprint(model)
    assert [set(held) - {"calls"} for held in before[0]] == [set(held) - {"calls"} for held in after[0]]
    assert before[1:] == after[1:]
    assert cases.same_bits(weights, cases.weights_of(model))
    other = make(["linear"])
    other(cases.vectors()[0]).sum().backward()  # any other model is unaffected
    twin.load_state_dict(model.state_dict())
    for m, o in ((model, opt), (twin, plain)):
        loop(o, m, *cases.vectors())
    torch.testing.assert_close(state_values(model), state_values(twin), rtol=1e-9, atol=1e-11)


def test_adaptive_and_normalization_only():
    model = make(["norm", "residual", "norm"])
    masks = {name: torch.full_like(p, ".norm." in name, dtype=torch.bool) for name, p in model.named_parameters()}
    compare(model, masks, adaptive=True)


class RemembersItsOutputs(nn.Linear):
    """Holds weak references, which keep nothing alive."""

    def forward(self, x):
        output = super().forward(x)
        OUTPUTS.append(weakref.ref(output))
        return output


OUTPUTS: list[weakref.ref] = []


def test_first_pass_on_part_of_batch_frees_its_activations():
    OUTPUTS.clear()
    torch.manual_seed(0)
    model = nn.Sequential(RemembersItsOutputs(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    opt = cases.ssam(model, "2.*", ascent_fraction=0.5)
    alive = []

    def closure(batch):
        opt.zero_grad()
        alive.append(sum(output() is not None for output in OUTPUTS))
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    opt.step(closure, batch=cases.vectors())
    assert opt.engine_report()["engine"].startswith("on")
    assert alive == [0, 0]


@pytest.mark.parametrize("norm", ["masked", "full"])
@pytest.mark.parametrize("loop", [with_closure, in_two_phases])
def test_engine_is_off_where_it_cannot_pay(monkeypatch, loop, norm):
    """A model so small that the checks take longer; a larger batch turns the engine on again after a while."""
    monkeypatch.setattr(prefix, "SMALLEST_WORK", 3_000_000)
    monkeypatch.setattr(engine, "_STEPS_WITHOUT", 2)
    model = cases.mlp()
    twin = copy.deepcopy(model)
    opt = cases.ssam(model, "4.*", norm=norm)
    other = cases.ssam(twin, "4.*", norm=norm, engine=False)
    states = []
    for count in (8, 8, 8, 8, 65536, 65536):
        loop(opt, model, *cases.vectors(count))
        loop(other, twin, *cases.vectors(count))
        states.append(opt.engine_report()["engine"])
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(twin), rtol=1e-9, atol=1e-11)
    off = f"off: {engine.TOO_SMALL}"
    assert [state == off for state in states] == [False, True, True, False, True, True]
    for _ in range(2):
        loop(opt, model, *cases.vectors(65536))
        assert "used again" in opt.engine_report()["0.weight"]


def test_large_layer_without_a_module_is_not_small(monkeypatch):
    """Its gradient is left out, although no module before the perturbed one is worth a check."""
    monkeypatch.setattr(prefix, "SMALLEST_WORK", 3_000_000)

    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(torch.tanh(F.linear(self.first(x), self.weight)))

    model = Functional().double()
    opt = cases.ssam(model)
    for _ in range(3):
        with_closure(opt, model, *cases.vectors())
        assert opt.engine_report()["weight"].startswith("not perturbed: no weight gradient")
