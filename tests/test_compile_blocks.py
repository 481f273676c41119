"""Compiled blocks: the same result, and nothing is recompiled from step to step."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.compile_blocks import COMPILES_WITHIN_MODES
from sparsesam.lab.models import resnet18
from sparsesam.replay import Tape
from sparsesam.utils.restore import Snapshot
from tests import cases
from tests.cases import by_minimize, in_two_phases, with_closure

BACKEND = "aot_eager"
needs_compiling_within_modes = pytest.mark.skipif(not COMPILES_WITHIN_MODES, reason="needs a newer torch")


@pytest.fixture(autouse=True)
def _nothing_compiled():
    # Donated buffers are torch's default: another test may have called compile_blocks.
    with torch._functorch.config.patch(donated_buffer=True):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


class Block(nn.Module):
    """Saves intermediate values of its own, which a compiled backward would overwrite."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.outer = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.outer(torch.tanh(self.norm(self.inner(torch.sin(x)))))


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *(Block() for _ in range(3)), nn.Linear(8, 3)).double()


def with_compile_blocks(model):
    return sparsesam.compile_blocks(model, backend=BACKEND)


def as_children(model):
    torch._functorch.config.donated_buffer = False
    for place in range(1, 4):
        model[place] = torch.compile(model[place], backend=BACKEND)
    return model


def for_single_use(model):
    """The user's own backward ran first, and torch compiled it to overwrite what it saved."""
    for block in model[1:4]:
        block.compile(backend=BACKEND)
    F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1]).backward()
    model.zero_grad()
    return model


def as_a_whole(model):
    return torch.compile(model, backend=BACKEND)


def as_a_whole_in_place(model):
    model.compile(backend=BACKEND)
    return model


def copied(model):
    """torch drops the compiled call from copies."""
    return copy.deepcopy(with_compile_blocks(model))


def graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def train(model, loop, *, mask, norm="masked", engine=True, steps=4):
    opt = sparsesam.SSAM(cases.sgd(model), model, rho=0.3, mask=mask, norm=norm, engine=engine)
    compiled = []
    for seed in range(steps):
        loop(opt, model, *cases.vectors(8, seed=seed))
        compiled.append(graphs())
    return opt, compiled


LAST = sparsesam.fixed_mask("3.*", "4.*")
FILTERS = sparsesam.fixed_mask(cases.every_other_filter(make(), "0.weight", "2.inner.weight"))


@pytest.mark.parametrize(
    ("compile_parts", "loop", "norm", "mask", "is_reused"),
    [
        *(
            (compile_parts, loop, norm, LAST, True)
            for compile_parts in (with_compile_blocks, as_children)
            for loop in (by_minimize, with_closure, in_two_phases)
            for norm in ("masked", "full")
        ),
        (with_compile_blocks, by_minimize, "masked", FILTERS, False),
        (for_single_use, by_minimize, "masked", LAST, None),
        (as_a_whole, by_minimize, "masked", LAST, None),
        (as_a_whole_in_place, by_minimize, "masked", LAST, None),
        (copied, with_closure, "masked", LAST, None),
    ],
)
def test_compiled_model_gives_the_same_result(compile_parts, loop, norm, mask, is_reused):
    plain, model = make(), compile_parts(make())
    train(plain, loop, mask=mask, norm=norm, engine=False)
    opt, compiled = train(model, loop, mask=mask, norm=norm)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(plain), rtol=1e-9, atol=1e-11)
    if is_reused is not None:
        assert (opt.savings().reused > 0) == (is_reused and COMPILES_WITHIN_MODES)
        assert compiled == [compiled[0]] * 4  # nothing is recompiled
        assert compiled[0] > 0


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_step_call_is_correct(backend):
    """The step itself is excluded from the graph; compiled, it would move the weights twice."""
    ends = []
    for is_compiled in (True, False):
        model = make()
        opt = cases.ssam(model, LAST)

        def step(x, y, model=model, opt=opt):
            return opt.step(cases.closure_for(model, opt, x, y))

        run = torch.compile(step, backend=backend) if is_compiled else step
        for seed in range(3):
            run(*cases.vectors(8, seed=seed))
        ends.append(cases.weights_of(model))
    assert cases.same_bits(*ends)


@needs_compiling_within_modes
def test_compiling_unrelated_model_is_unaffected():
    model, other = make(), torch.compile(nn.Linear(6, 3).double(), backend=BACKEND)
    opt = cases.ssam(model, LAST)
    counts = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Guards may run slower")  # torch's own, on Python 3.13.0
        for seed in range(3):
            x, y = cases.vectors(8, seed=seed)
            with_closure(opt, model, x, y)
            in_two_phases(opt, model, x, y)
            F.cross_entropy(other(x), y).backward()
            counts.append(graphs())
    assert counts == [1, 1, 1]


# ---- what the tape sees of compiled code ---------------------------------------------------------------------------


class Kind(Block):
    def __init__(self, kind):
        super().__init__()
        self.norm = nn.BatchNorm1d(16) if kind == "statistics" else nn.LayerNorm(16)
        self.dropout, self.kind = nn.Dropout(0.2 if kind == "dropout" else 0.0), kind

    def forward(self, x):
        if self.kind == "graph break":
            torch._dynamo.graph_break()
        return self.dropout(super().forward(x))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "reused"), [("plain", 3), ("graph break", 3), ("dropout", 1), ("statistics", 3)])
def test_compiled_block_is_one_operation(kind, reused):
    """Blocks that draw random numbers run again; the linear layer before them is reused."""
    found = []
    for engine in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), Kind(kind), Kind(kind), nn.Linear(8, 3)).double()
        opt, _ = train(sparsesam.compile_blocks(model), by_minimize, mask=sparsesam.fixed_mask("3.*"), engine=engine)
        found.append(list(model.state_dict().values()))
        assert opt.savings().reused >= reused - 1 if engine else opt.savings().reused == 0
    assert cases.same_bits(*found)


def ones(dtype=torch.float64):
    return torch.ones(6, dtype=dtype)


STATISTICS = {  # s before the step, and its update by x
    "strided": (lambda: torch.ones(12, dtype=torch.float64)[::2], lambda s, x: s.mul_(0.9).add_(x)),
    "counted": (lambda: ones(torch.int64), lambda s, x: s.add_(1)),
    "rounded once": (lambda: ones(torch.bfloat16), lambda s, x: s.mul_(0.9).add_(x.bfloat16())),
    "truth values": (lambda: ones(torch.bool), lambda s, x: s.add_(x > 0)),
    "infinite factor": (ones, lambda s, x: s.mul_(torch.inf).add_(x)),
}


@pytest.mark.slow
@pytest.mark.parametrize("is_restored", [True, False])
@pytest.mark.parametrize("name", STATISTICS)
def test_statistic_of_compiled_code(name, is_restored):
    """Both passes start from the same running statistics; where others differ, the code runs again."""
    make, update = STATISTICS[name]

    def block(x, s):
        update(s, torch.sin(x).mean(0))
        return torch.cos(x)

    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(block, options={"wrap_inductor_compiled_regions": True})
    ours, plain, weight = make(), make(), nn.Parameter(torch.ones(6, dtype=torch.float64))
    x, tape = torch.randn(8, 6, dtype=torch.float64), Tape({"weight": weight}, between=False)
    before = Snapshot([ours, plain] if is_restored else [])
    for context in (tape.recording, tape.replaying):
        before.restore()
        with context():
            found = compiled(x, ours) * weight
            found.sum().backward()
        assert torch.equal(found, compiled(x, plain) * weight)
        assert torch.equal(ours, plain)
    assert tape.reused == (is_restored or name == "truth values")  # which were all true, and still are


@needs_compiling_within_modes
def test_code_between_compiled_graphs_is_not_compiled_and_is_seen():
    """As without a tape: the layer of torch that breaks the graph, and what is done to memory there."""
    graphs, weight = [], nn.Parameter(torch.ones(6))

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(6, momentum=None)

        def forward(self, x):
            h = torch.sin(self.norm(torch.cos(x)))
            write_in_numpy(h)
            return torch.exp(h)

    def write_in_numpy(h):
        torch._dynamo.graph_break()
        h.numpy()[0] = 1.0

    def backend(graph, _):
        graphs[-1].append([str(node.target) for node in graph.graph.nodes])
        return graph

    x = torch.randn(8, 6)
    for tape in (None, Tape({"weight": weight})):
        torch._dynamo.reset()
        graphs.append([])
        compiled = torch.compile(Broken(), backend=backend)
        for context in (tape.recording, tape.replaying) if tape else (nullcontext, nullcontext):
            with context():
                found = compiled(x) * weight
            assert torch.equal(found[0], torch.full((6,), torch.e))
    assert graphs[0] == graphs[1]


# ---- compile_blocks --------------------------------------------------------------------------------------------


def compiled_in(model):
    return {name for name, module in model.named_modules() if module._compiled_call_impl is not None}


def layers_of_a_transformer():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (resnet18, {f"layer{stage}.{block}" for stage in (1, 2, 3, 4) for block in (0, 1)}),
        (layers_of_a_transformer, {f"layers.{place}" for place in range(3)}),
        (cases.mlp, {"0", "2", "4"}),
    ],
    ids=["repeated blocks", "outermost of nested blocks", "children without repeated blocks"],
)
def test_compiled_parts(model, expected):
    assert compiled_in(sparsesam.compile_blocks(model(), backend="eager")) == expected


def test_second_call_changes_nothing():
    model = sparsesam.compile_blocks(make(), backend="eager")
    before = [module._compiled_call_impl for module in model.modules()]
    assert sparsesam.compile_blocks(model, backend="eager") is model
    assert all(a is b._compiled_call_impl for a, b in zip(before, model.modules(), strict=True))


@pytest.mark.parametrize(
    ("model", "error", "words"),
    [
        (lambda x: x, TypeError, "model must be an nn.Module, got function"),
        (nn.Linear(2, 2), ValueError, "model must have submodules with parameters, got Linear"),
        (torch.compile(make()), ValueError, "must not be compiled as a whole, got a compiled Sequential"),
    ],
)
def test_bad_input(model, error, words):
    with pytest.raises(error, match=words):
        sparsesam.compile_blocks(model)
