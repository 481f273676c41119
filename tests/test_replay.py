"""The rules of the tape, one by one: what is reused, what runs again, and what must be noticed."""

from __future__ import annotations

import copy
import itertools
import weakref

import pytest
import torch
from benchmarks.dispatch import LaunchCounter
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam import replay
from sparsesam.replay import Tape
from sparsesam.utils.restore import Snapshot, statistics_of
from tests import cases
from tests.torture.optimizers import interrupted_at_line

W = nn.Parameter(torch.full((3,), 2.0, dtype=torch.float64))


def passes(function, *, moved=None, between=False, gap=lambda: None, start=None, hold=False):
    """Both passes of a function that returns a tensor. Returns the results, the tape, and what the second computed."""
    tape = Tape({"w": W} if moved is None else moved, start=start, between=between)
    with tape.recording():
        first = function()
    one = first.detach().clone()
    if not hold:
        del first
    gap()
    with LaunchCounter() as computed, tape.replaying():  # a mode below the tape's sees only what is computed
        second = function()
    return one, second.detach(), tape, computed.names


X = torch.arange(3.0, dtype=torch.float64).requires_grad_()


@torch.library.custom_op("sparsesam_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def inference_tensor():
    with torch.inference_mode():
        return torch.ones(3, dtype=torch.float64)


def filled_outside_of_torch(value, zeros=torch.zeros):
    filled = zeros(3, dtype=torch.float64)
    with torch._C.DisableTorchFunction():  # as an extension does
        filled.numpy().fill(value)
    return filled


def body_weight():
    return nn.Parameter(torch.ones(3, dtype=torch.float64))


def scaled_by(first, second, read):
    """A function whose calls read these values."""
    values = iter([first, second])
    return lambda: read(next(values)) * W


def with_body(write):
    """A function that reads a weight which is not perturbed, and then writes to it."""
    body = body_weight()
    return lambda: (torch.exp(torch.sin(X) * body) * W, write(body))[0]


READS, OTHER = "aten.mul.Tensor reads w, which is perturbed", "aten.mul.Tensor has another input"
PLAIN = "is not a plain operation of aten or prims"
#: functions, the operations of the first pass that the second reuses, and where that ends
FUNCTIONS = {
    "output that died": (lambda: torch.exp(torch.sin(X.detach())) * W, 1, READS),
    "view of a perturbed weight": (lambda: (W[:2], torch.exp(X) * W)[1], 1, READS),
    "memory shared with a perturbed weight": (lambda: torch.exp(X) * W.detach().view(3), 1, READS),
    "equal input in other memory": (lambda: torch.exp(X * torch.tensor([1.0, 2.0, 3.0])) * W, 1, READS),
    "-0.0 after 0.0": (
        *(scaled_by(0.0, -0.0, lambda v: torch.exp(1 / torch.tensor(v))), 0),
        "aten.reciprocal.default has another input",
    ),
    **{
        f"alpha {pair}": (
            *(scaled_by(*pair, lambda v: torch.add(torch.exp(X), X, alpha=v)), 1),
            "aten.add.Tensor has other arguments, another random state or other settings of torch",
        )
        for pair in ((0.0, -0.0), (2, 2.0))
    },
    "filled outside of torch": (scaled_by(1, 2, lambda v: torch.exp(X * filled_outside_of_torch(v))), 0, OTHER),
    "weight with another version": (with_body(lambda body: body.detach().mul_(2)), 1, OTHER),
    "weight written through data": (with_body(lambda body: body.data.mul_(2)), 1, OTHER),
    "custom operator": (lambda: doubled(torch.exp(X).detach()), 0, f"sparsesam_tests.doubled.default {PLAIN}"),
    "function transform": (lambda: torch.vmap(torch.sin)(torch.exp(X)) * W, 1, "a function transform"),
    "sparse tensor": (
        *(lambda: torch.exp(X).detach().to_sparse().to_dense() * W, 0),
        "aten._to_dense.default reads a tensor that is not plain",
    ),
    "set_": (lambda: X.new_empty(0).set_(torch.exp(X.detach())) * W, 1, f"aten.set_.source_Tensor {PLAIN}"),
    "inference tensor": (
        *(lambda: torch.exp(X).detach() * inference_tensor() + W.detach(), 1),
        "aten.mul.Tensor reads a tensor that is not plain",
    ),
}


CHANGING = {"-0.0 after 0.0", "filled outside of torch", "weight with another version", "weight written through data"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_reused_and_where_it_ends(name):
    function, reused, ended = FUNCTIONS[name]
    first, second, tape, _ = passes(function)
    assert (tape.reused, tape.ended) == (reused, ended)
    assert torch.equal(first, second) == (name not in CHANGING)


@pytest.mark.parametrize("write", [lambda h: h.mul_(2), lambda h: h.data.mul_(2), lambda h: h.detach()[:1].zero_()])
def test_output_written_after_the_frontier_is_computed_again(write):
    def function():
        h = torch.exp(X)
        out = h.detach() * W
        with torch.no_grad():
            write(h)
        return out

    first, second, tape, seen = passes(function)
    assert torch.equal(first, second)
    assert tape.reused == 0
    assert "exp" in seen


@pytest.mark.parametrize(
    "give", [lambda h: h.numpy(), lambda h: h.data_ptr(), lambda h: h.untyped_storage(), lambda h: h.__dlpack__()]
)
def test_memory_given_away_is_not_reused(give):
    first, second, tape, seen = passes(lambda: (lambda h: (give(h.detach()), torch.sin(h) * W)[1])(torch.exp(X)))
    assert torch.equal(first, second)
    assert "exp" in seen
    assert "sin" not in seen
    assert tape.reused == 1


WRITES = {
    "in place": lambda h: h.mul_(2),
    "through data": lambda h: h.data.mul_(2),
    "with numpy": lambda h: h.numpy()[:2].fill(0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_memory_that_somebody_holds_is_copied(write):
    """What is written there between the passes is not read, and what is written to the copy is not seen there."""
    held = []

    def function():
        h = torch.exp(X)
        held.append(h.detach())
        return h * W

    first, second, tape, _ = passes(function, between=True, gap=lambda: write(held[0]))
    assert torch.equal(first, second)
    assert tape.reused == 1
    before = held[0].clone()
    held[1].zero_()
    assert torch.equal(held[0], before)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_weight_written_between_the_passes_is_noticed(write):
    body = body_weight()
    first, second, tape, _ = passes(
        lambda: torch.exp(X) * body.sin() * W, between=True, gap=lambda: write(body.detach())
    )
    assert not torch.equal(first, second)
    assert (tape.reused, tape.ended) == (1, "aten.sin.default has another input")


def test_write_in_the_second_pass_through_memory_given_away_after_the_frontier_is_noticed():
    arrays = []

    def function():
        if arrays:
            arrays[0] *= 2
        h = torch.exp(X)
        out = h * W
        arrays.append(h.detach().numpy())
        return out

    first, second, _, _ = passes(function)
    assert torch.equal(first, second)


@pytest.mark.parametrize("draws_again", [True, False])
def test_random_operation_needs_its_state_and_leaves_the_state_it_left(draws_again):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    gap = (lambda: None) if draws_again else lambda: torch.set_rng_state(state)
    first, second, tape, seen = passes(lambda: torch.exp(torch.rand(3, dtype=torch.float64) * X) * W, gap=gap)
    assert tape.reused == (0 if draws_again else 2)
    assert ("rand" in seen) == draws_again == (not torch.equal(first, second))
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in range(2 if draws_again else 1):
        torch.rand(3, dtype=torch.float64)
    assert torch.equal(after, torch.get_rng_state())


def test_tape_starts_with_the_forward_of_the_given_module():
    inner = nn.Tanh()
    _, _, tape, seen = passes(lambda: inner(torch.exp(X)) * W, start=inner)
    assert (tape.operations, tape.reused) == (1, 1)
    assert "exp" in seen
    assert not inner._forward_pre_hooks


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fails_in", [1, 2])
def test_nothing_is_left_after_an_error(error, fails_in):
    calls, inner, memory = [0], nn.Tanh(), []

    def function():
        calls[0] += 1
        h = inner(torch.exp(X))
        memory.append(weakref.ref(h))
        out = h * W
        if calls[0] == fails_in:
            raise error
        return out

    tape = Tape({"w": W}, start=inner)
    try:
        with tape.recording():
            function()
        with tape.replaying():
            function()
    except error:
        pass
    assert calls[0] == fails_in
    assert cases.modes() == 0
    assert not tape.entries
    assert not inner._forward_pre_hooks
    assert not any(reference() for reference in memory)


def test_modes_of_the_user_around_and_inside():
    with LaunchCounter() as outer:

        def function():
            with LaunchCounter() as inner:
                out = torch.exp(X) * W
            assert inner.names == {"exp": 1, "mul": 1}
            return out

        first, second, _, _ = passes(function)
    assert torch.equal(first, second)
    assert (outer.names["exp"], outer.names["mul"]) == (1, 2)


def test_memory_of_reused_outputs_is_handed_over():
    """After the second pass only its own graph holds them, and nothing does when that is gone."""
    tape = Tape({"w": W}, between=False)
    with tape.recording():
        F.mse_loss(torch.exp(X) * W, X.detach()).backward(inputs=[W])
    with tape.replaying():
        h = torch.exp(X)
        loss = F.mse_loss(h * W, X.detach())
    assert tape.reused == 1
    reference = weakref.ref(h)
    loss.backward(inputs=[W])
    del h, loss
    assert reference() is None
    W.grad = None


def test_reused_operations_are_those_of_a_plain_network():
    """What autograd saves is alive: inputs of SiLU, not of ReLU, whose batch norm runs again."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)),
        *(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.SiLU()),
        *(nn.Flatten(), nn.Linear(4 * 16, 2)),
    )
    x, moved = torch.randn(2, 3, 8, 8), dict(model[7].named_parameters())
    restore = Snapshot(statistics_of(model.modules())).restore
    first, second, tape, seen = passes(lambda: model(x), moved=moved, gap=restore, hold=True)
    assert torch.equal(first, second)
    assert {"convolution", "relu", "silu"}.isdisjoint(seen)
    assert seen["native_batch_norm"] == 1
    assert tape.reused == 4


def test_statistics_of_a_reused_batch_norm_are_updated():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.SiLU()).double()
    statistics, x = statistics_of(model.modules()), torch.randn(4, 3, dtype=torch.float64)
    once = copy.deepcopy(model)
    once(x)
    *_, seen = passes(lambda: model(x) * W, gap=Snapshot(statistics).restore, hold=True)
    assert "native_batch_norm" not in seen
    assert all(map(torch.equal, statistics, statistics_of(once.modules())))


@pytest.mark.parametrize(("width", "recorded"), [(8, [0, 101]), (512, range(102))], ids=["small", "large"])
def test_small_operations_are_recorded_only_once_in_a_hundred_steps(monkeypatch, width, recorded):
    monkeypatch.setattr(replay, "OPERATION", 1 << 16)
    model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 2))
    base = torch.optim.SGD(model.parameters(), lr=1e-4)
    opt = sparsesam.SSAM(base, model, mask=sparsesam.fixed_mask("2.*"), norm="masked")
    found = []
    for step in range(102):
        opt.minimize(lambda: model(torch.ones(1, width)).square().sum())
        found += [step] if opt.savings().reused else []
    assert found == list(recorded)


def test_interruption_at_any_line_leaves_no_mode_on_torchs_stacks():
    x = torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    base = torch.optim.SGD(model.parameters(), lr=0.1)
    opt = sparsesam.SSAM(base, model, mask=sparsesam.fixed_mask("2.*"), norm="masked")
    for line in itertools.count(1):
        try:
            with interrupted_at_line(line, files=("replay.py", "savings.py", "filters.py")):
                opt.minimize(lambda: model(x).square().sum())
        except KeyboardInterrupt:
            assert cases.modes() == 0, line
        else:
            break  # a step has fewer lines
    assert line > 200
