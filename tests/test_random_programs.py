"""Random programs: replayed, they give the bits that two plain passes give.

A program is a sequence of moves on a state: the current activation, a pool of earlier ones, a global list, buffers, a
counter of calls. What a move does is drawn from its own seed, so that both passes do the same, unless it looks at the
counter. Writes go to anything that is at hand; what plain passes refuse is not compared.
"""

from __future__ import annotations

import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from benchmarks.dispatch import LaunchCounter
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sparsesam.replay import Tape
from tests.test_programs import KeepsInContext, bits

ROWS, COLUMNS = 4, 6
KEPT, GENERATOR = [], torch.Generator()
KINDS = ("read", "write", "numpy", "free")


class HalvedInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(0.5)

    @staticmethod
    def backward(ctx, g):
        return g * 0.5


class State:
    """What a move may use; ``pick`` is any activation, ``pick_memory`` anything that can be written to."""

    def __init__(self, model, x):
        self.model, self.h, self.x, self.pool = model, x * 1, x, [x]
        self.even = model.calls % 2 == 0

    def pick(self, draw):
        return draw.choice([self.h, *self.pool])

    def pick_memory(self, draw):
        t = draw.choice([self.h, *self.pool, self.x, self.model.buffer, self.model.other, *KEPT[-3:]]).detach()
        return draw.choice([lambda: t, lambda: t[0], lambda: t.t()[1:3], lambda: t.data, lambda: t.view_as(t)])()


def compute(s, draw, layer):
    h, o = s.h, s.pick(draw)
    s.h = draw.choice(
        [
            *(lambda: layer(h), lambda: torch.tanh(layer(h)), lambda: F.relu(layer(h), inplace=True), lambda: h + o),
            *(lambda: layer(torch.sin(h)) + o, lambda: F.softmax(h, -1), lambda: torch.where(h > 0, h, o * 0.1)),
            *(lambda: h.sort(0)[0], lambda: h[torch.tensor([2, 0, 1, 3])], lambda: h.topk(COLUMNS, 1)[0]),
            *(lambda: F.layer_norm(h, (COLUMNS,)), lambda: h @ h.t() @ o * 0.1, lambda: torch.cat([h[:2], o[2:]])),
            lambda: sum(torch._foreach_mul([h, o], [0.5, 0.25])),
            *(lambda: torch.einsum("bd,bd->b", h, o)[:, None] + h, lambda: torch.complex(h, o).conj().imag + h),
            *(lambda: torch.fft.fft(torch.complex(h, o)).conj().real, lambda: h + h.masked_select(h < 0).sum()),
            *(lambda: (h.bfloat16() * 2).double(), lambda: h.cumsum(0)),
        ]
    )()


def view(s, draw, layer):
    h = s.h
    views = [h.t().contiguous().t(), h[:, :1].expand(ROWS, COLUMNS), h.flip(0), torch.stack(h.unbind(0)), h.view_as(h)]
    s.h = draw.choice([*views, h.unfold(1, 2, 1).sum(-1).repeat(1, 2)[:, :COLUMNS], h.t().reshape(ROWS, COLUMNS)])
    s.pool.append(draw.choice([h, h.detach(), h[draw.randrange(ROWS)].expand(ROWS, COLUMNS), h.data]))


def write(s, draw, layer):
    if draw.random() < 0.5:
        s.h = s.h * 1
    with torch.no_grad() if draw.random() < 0.8 else nullcontext():
        t, o = s.pick_memory(draw), s.pick(draw).detach()
        draw.choice(
            [
                *(lambda: t.mul_(0.9), lambda: t.add_(o.sum() * 0.01), lambda: t.relu_(), lambda: t.clamp_(-1, 1)),
                *(lambda: t.fill_(0.5), lambda: t.copy_(o.mean()), lambda: t.index_fill_(0, torch.tensor([1]), 0.3)),
                *(lambda: t.masked_fill_(t > 0.5, 0.1), lambda: t.lerp_(t * 2, 0.5), lambda: t.zero_()),
                *(lambda: torch.add(t, 1, out=t), lambda: torch._foreach_mul_([t], 0.5), lambda: t.normal_(0, 0.1)),
                *(lambda: t.numpy().__imul__(0.5), lambda: t.numpy().__iadd__(float(s.model.calls))),
            ]
        )()


def write_own(s, draw, layer):
    h = s.h = s.h * 1
    o = s.pick(draw).detach()
    draw.choice(
        [
            *(lambda: h.relu_(), lambda: h[0].add_(1.0), lambda: h.t()[2:4].mul_(2.0)),
            *(lambda: h.addcmul_(o, o, value=0.1), lambda: h.__setitem__((slice(None), slice(1, 3)), o[:, :2])),
            *(lambda: h.data.mul_(0.5), lambda: setattr(h, "data", h.data * 2), lambda: h.unsqueeze_(0).squeeze_(0)),
            lambda: h.transpose_(0, 1).t_(),
        ]
    )()


def noise(s, draw, layer):
    h, like = s.h, {"dtype": torch.float64}
    s.h = draw.choice(
        [
            *(lambda: F.dropout(h, 0.3), lambda: h + torch.randn(ROWS, COLUMNS, **like)),
            *(lambda: h[torch.randperm(ROWS)], lambda: h * torch.rand(ROWS, 1, generator=GENERATOR, **like)),
            *(lambda: F.rrelu(h, training=True), lambda: h * h.new_empty(ROWS, 1).bernoulli_(0.8)),
            lambda: h * (1.0 if torch.rand(()) < 0.5 else 0.5),
            *(lambda: (torch.manual_seed(3), h + torch.rand(()))[1], lambda: h * float(np.random.rand())),  # noqa: NPY002
        ]
    )()


def branch(s, draw, layer):
    h, model = s.h, s.model
    s.h = draw.choice(
        [
            *(lambda: h * 0.5 if s.even else torch.sin(h), lambda: h * (1 + model.calls)),
            *(lambda: h.detach() if s.even else h, lambda: h * 0.5 if h.sum().item() > 0 else layer(h)),
            lambda: h + torch.tensor(-0.0 if s.even else 0.0).sign(),
            lambda: 0.1 / torch.copysign(torch.ones(()), torch.tensor(-0.0 if s.even else 0.0)) + h,
            lambda: h + torch.tensor(float(model.calls % 3)),
            lambda: torch.atan2(h * 0, torch.tensor(-0.0 * s.even)) + h,
        ]
    )()


def gradients(s, draw, layer):
    h, kind = s.h, draw.randrange(8)
    if kind == 0:
        with torch.set_grad_enabled(s.even):
            s.h = h + torch.tanh(layer(h))
    elif kind < 3:
        with torch.enable_grad():
            z = h.detach().requires_grad_()
            value = (
                torch.tanh(layer(z)).pow(2).sum()
                if kind == 1
                else KeepsInContext.apply(z * 1, draw.choice(KINDS)).sum()
            )
            s.h = h - 0.1 * torch.autograd.grad(value, z, create_graph=draw.random() < 0.5)[0]
    elif kind == 3:
        s.h = checkpoint(lambda v: F.dropout(torch.tanh(layer(v)), 0.2) * (1 + s.even), h, use_reentrant=False)
    elif kind == 4:
        s.h = HalvedInPlace.apply(h * 1)
    elif kind == 5 and h.requires_grad:
        s.h = h * 1
        s.h.register_hook(lambda g: g * (1 + 0.1 * s.model.calls))
    elif kind == 6:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().numpy().copy(), torch.from_numpy):
            s.h = torch.sigmoid(torch.tanh(layer(h)).exp() * h)
    else:
        s.h = KeepsInContext.apply(h, draw.choice(KINDS))


def containers(s, draw, layer):
    h, kind = s.h, draw.randrange(6)
    if kind == 0:
        KEPT.append(draw.choice([h, h.detach(), h.detach().clone(), s.pick(draw).detach()]))
    elif kind == 1 and KEPT:
        s.h = h + draw.choice(KEPT).detach() * 0.1
    elif kind == 2 and KEPT:
        s.h = h + KEPT.pop().detach().sum() * 0.1
    elif kind == 3:
        features = {"a": [h * 2, h + 1], "b": torch.sin(h)}
        features["a"].reverse()
        s.h = features["a"].pop() + features.pop("b")
    elif kind == 4:
        s.model.last, last = h.detach() if draw.random() < 0.5 else h.detach().mean(0), s.model.last
        s.h = h + last * 0.1
    else:
        s.h = h + s.pool.pop() * 0.5 if len(s.pool) > 1 else h


def buffers(s, draw, layer):
    model, h = s.model, s.h.detach()
    with torch.no_grad():
        draw.choice(
            [
                *(lambda: model.buffer.mul_(0.9), lambda: model.buffer.lerp_(h, 0.1)),
                lambda: model.buffer.data[0].add_(h[0]),
                lambda: setattr(model, "buffer", model.buffer * 0.9 + 0.1 * h),
                *(lambda: model.other.copy_(model.buffer), lambda: torch.mul(h, 2.0, out=model.other)),
                *(lambda: layer.weight.data.mul_(0.99), lambda: layer.bias.mul_(0.9)),
            ]
        )()
    s.h = s.h + draw.choice([model.buffer, model.other, model.buffer[0], 0.0])


def normalize(s, draw, layer):
    norm = s.model.norms[draw.randrange(3)]
    norm.train(draw.random() < 0.8)
    s.h = norm(s.h)
    if draw.random() < 0.3:
        s.h = s.h + norm.running_mean / (1 + norm.num_batches_tracked)


def unusual(s, draw, layer):
    h, kind = s.h, draw.randrange(6)
    if kind == 0:
        s.h = torch.func.vmap(lambda t: t * t.sum())(h)
    elif kind == 1:
        with torch.inference_mode():
            t = torch.sin(h.detach()) * 2
        s.h = h + t.clone()
    elif kind == 2:
        s.h = h + torch.eye(ROWS, dtype=h.dtype).to_sparse() @ h
    elif kind == 3:
        s.h = h + torch.from_numpy(np.asarray(h.detach()) * 0.5)
    elif kind == 4:
        is_empty = draw.random() < 0.5
        out = torch.empty(ROWS, COLUMNS, dtype=h.dtype) if is_empty else torch.ones_like(h)
        with torch._C.DisableTorchFunction():  # as an extension does
            out.numpy()[:] = h.detach().numpy() * (1 + s.even) + (0 if is_empty else out.numpy())
        s.h = h + torch.sin(out)
    else:
        shared = h.detach().clone()
        torch.empty(0, dtype=h.dtype).set_(shared).mul_(2.0)
        s.h = h + shared


MOVES = [compute] * 6 + [view, write, write, write_own, write_own, noise, noise, branch, gradients, gradients]
MOVES += [containers, containers, buffers, normalize, unusual]


class Program(nn.Module):
    def __init__(self, seed):
        super().__init__()
        draw = random.Random(seed)
        moves = MOVES if draw.random() < 0.5 else [compute, *draw.sample(MOVES, 3)]
        drawn = range(draw.randrange(2, 12))
        self.moves = [(draw.choice(moves), draw.randrange(1 << 30), draw.random()) for _ in drawn]
        self.layers = nn.ModuleList(nn.Linear(COLUMNS, COLUMNS) for _ in self.moves)
        self.norms = nn.ModuleList(nn.BatchNorm1d(COLUMNS, momentum=momentum) for momentum in (0.1, None, 0.1))
        self.register_buffer("buffer", torch.randn(ROWS, COLUMNS) * 0.1)
        self.register_buffer("other", torch.randn(ROWS, COLUMNS) * 0.1)
        self.cut, self.calls, self.last = draw.randrange(len(self.moves) + 1), 0, 0.0
        self.early, self.head = nn.Linear(COLUMNS, COLUMNS), nn.Linear(COLUMNS, 3)

    def forward(self, x):
        self.calls += 1
        s = State(self, x)
        for i, (move, seed, keeps) in enumerate(self.moves):
            if i == self.cut:
                s.h = torch.tanh(self.early(s.h))
            move(s, random.Random(seed), self.layers[i])
            if keeps < 0.3:
                s.pool.append(s.h)
        return self.head(torch.tanh(s.h))


def run(seed, *, make_tape=None):
    """Two steps; how they are taken depends on the seed. Returns the bits of everything, and the reused operations."""
    draw = random.Random(seed + 1)
    narrows, holds, draws_again, clears = (draw.random() < p for p in (0.5, 0.4, 0.3, 0.5))
    torch.manual_seed(seed)
    GENERATOR.manual_seed(seed)
    np.random.seed(seed % 1000)  # noqa: NPY002
    KEPT.clear()
    model = Program(seed).double()
    moved = {name: p for name, p in model.named_parameters() if name.startswith(("early", "head"))}
    results, reused = [], 0
    for _ in range(2):
        x, y = torch.randn(ROWS, COLUMNS, dtype=torch.float64), torch.randint(0, 3, (ROWS,))
        tape = make_tape(moved, between=holds) if make_tape else None
        states = torch.get_rng_state(), GENERATOR.get_state()
        with tape.recording() if tape else nullcontext():
            loss = F.cross_entropy(model(x), y)
            torch.autograd.backward(loss, inputs=list(moved.values()) if narrows else None)
        results.append([loss.detach(), *(p.grad for p in moved.values())])
        if holds:
            KEPT[:1] = [t.mul_(0.9) for t in KEPT[:1] if not t.requires_grad and not t.is_inference()]
        else:
            del loss
        with torch.no_grad():
            for p in moved.values():
                p.add_(0 if p.grad is None else p.grad, alpha=0.1)
        model.zero_grad()
        if not draws_again:
            torch.set_rng_state(states[0])
            GENERATOR.set_state(states[1])
        with tape.replaying() if tape else nullcontext():
            second = F.cross_entropy(model(x), y)
            second.backward()
        results.append([second.detach(), *(p.grad for p in model.parameters()), *model.state_dict().values()])
        reused += tape.reused if tape else 0
        if clears:
            KEPT.clear()
    return bits([results, KEPT, torch.get_rng_state(), GENERATOR.get_state()]), reused


def refused(seed):
    try:
        return run(seed)[0]
    except (RuntimeError, IndexError, ValueError):
        return None


class NoTape:
    """Two plain passes below a mode.

    There torch differentiates views of overwritten tensors by other formulas, which may round otherwise.
    """

    reused = 0

    def __init__(self, *_, **options):
        self.recording = self.replaying = LaunchCounter


def check(seed):
    wanted = refused(seed)
    assume(wanted is not None)
    found, _ = run(seed, make_tape=Tape)
    if found != wanted:
        assert run(seed, make_tape=NoTape)[0] != wanted, seed
        assert all(are_close(a, b) for a, b in zip(leaves(found), leaves(wanted), strict=True)), seed


def leaves(found):
    return [leaf for one in found for leaf in leaves(one)] if isinstance(found, list) else [found]


def are_close(found, wanted):
    if found[:2] != wanted[:2] or found[0] != torch.float64:
        return found == wanted
    return np.allclose(np.frombuffer(found[2]), np.frombuffer(wanted[2]), rtol=1e-11, atol=1e-13, equal_nan=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_random_programs_equal_two_plain_passes(count):
    options = {"deadline": None, "database": None, "derandomize": True, "phases": [Phase.generate]}
    seeds = st.integers(0, 2**40) if count == 500 else st.integers(2**41, 2**60)
    settings(max_examples=count, suppress_health_check=list(HealthCheck), **options)(given(seeds)(check))()


@pytest.mark.filterwarnings("ignore")
def test_random_programs_do_reuse():
    counts = [run(seed, make_tape=Tape)[1] for seed in range(200) if refused(seed) is not None]
    assert len(counts) > 100
    assert sum(count > 0 for count in counts) > len(counts) / 2
