"""Compiled blocks are operations of the tape, and two ranks agree without talking about it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn import functional as F

from sparsesam.compile_blocks import compile_blocks
from sparsesam.replay import Tape
from tests.distributed.processes import run_ranks
from tests.test_programs import bits


@pytest.fixture(autouse=True)
def _nothing_compiled():
    donated = torch._functorch.config.donated_buffer
    torch._dynamo.reset()
    yield
    torch._functorch.config.donated_buffer = donated
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6) if kind == "statistics" else nn.LayerNorm(6)
        self.dropout, self.kind = nn.Dropout(0.2 if kind == "dropout" else 0.0), kind

    def forward(self, x):
        h = torch.sin(self.norm(self.layer(x)))
        if self.kind == "graph break":
            torch._dynamo.graph_break()
        return x + self.dropout(h * torch.tanh(h))


def train(kind, *, taped, compiled=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), Block(kind), Block(kind), nn.Linear(6, 3)).double()
    if compiled:
        compile_blocks(model)
    return steps(model, model, taped=taped, start=None)


def steps(model, called, *, taped, start, seed=0):
    """SAM on the last layer; returns the bits of the losses, gradients and buffers, and the reused operations."""
    moved = {name: p for name, p in model.named_parameters() if name.startswith("3")}
    found, reused = [], []
    for step in range(3):
        torch.manual_seed(100 * seed + step)
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))
        tape = Tape(moved, start=start, between=False)
        for context in (tape.recording, tape.replaying):
            torch.manual_seed(step)
            model.zero_grad()
            if taped:
                with context():
                    F.cross_entropy(called(x), y).backward()
            else:
                F.cross_entropy(called(x), y).backward()
            found.append(bits([*(p.grad for p in model.parameters()), *model.buffers()]))
            with torch.no_grad():
                for p in moved.values():
                    p.add_(p.grad, alpha=0.1)
        reused.append((tape.reused, tape.ended))
    return found, reused


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "reused"), [("plain", 3), ("graph break", 3), ("dropout", 1), ("statistics", 3)], ids=lambda v: str(v)
)
def test_compiled_block_is_one_operation(kind, reused):
    """Blocks that draw random numbers run again; the linear layer before them is reused."""
    wanted, _ = train(kind, taped=False)
    torch._dynamo.reset()
    found, counts = train(kind, taped=True)
    assert found == wanted
    assert [count for count, _ in counts][-1] >= reused - 1


def ones(dtype=torch.float64):
    return torch.ones(6, dtype=dtype)


STATISTICS = {  # s before the first step, its update by x, and whether the compiled code is reused
    "strided": (lambda: torch.ones(12, dtype=torch.float64)[::2], lambda s, x: s.mul_(0.9).add_(x), True),
    "counted": (lambda: ones(torch.int64), lambda s, x: s.add_(1), True),
    "rounded once": (lambda: ones(torch.bfloat16), lambda s, x: s.mul_(0.9).add_(x.bfloat16()), False),
    "truth values": (lambda: ones(torch.bool), lambda s, x: s.add_(x > 0), False),
    "infinite factor": (ones, lambda s, x: s.mul_(torch.inf).add_(x), False),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STATISTICS)
def test_statistic_of_compiled_code(name):
    make, update, is_reused = STATISTICS[name]

    def block(x, s):
        update(s, torch.sin(x).mean(0))
        return torch.cos(x)

    torch._functorch.config.donated_buffer = False
    compiled = torch.compile(block, options={"wrap_inductor_compiled_regions": True})
    ours, plain, weight = make(), make(), nn.Parameter(torch.ones(6, dtype=torch.float64))
    x, tape = torch.randn(8, 6, dtype=torch.float64), Tape({"weight": weight}, between=False)
    for context in (tape.recording, tape.replaying):
        with context():
            found = compiled(x, ours) * weight
            found.sum().backward()
        assert torch.equal(found, compiled(x, plain) * weight)
        assert bits(ours) == bits(plain)
    assert tape.reused == is_reused


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


def on_rank(rank, taped):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    ddp = nn.parallel.DistributedDataParallel(model)
    return steps(model, ddp, taped=taped, start=model, seed=rank)


def test_two_ranks_of_a_ddp():
    wanted, found = (run_ranks(on_rank, 2, taped) for taped in (False, True))
    assert [bits for bits, _ in found] == [bits for bits, _ in wanted]
    for _, counts in found:
        assert all(count > 0 and "3.bias, which is perturbed" in ended for count, ended in counts)


def with_collective(rank):
    x = torch.ones(2, requires_grad=True)
    weight = nn.Parameter(torch.ones(2))
    tape, results = Tape({"weight": weight}), []
    for context in (tape.recording, tape.replaying):
        with context():
            h = torch.exp(x)
            shared = h.detach() * (rank + 1 + len(results))
            dist.all_reduce(shared)
            results.append((h + shared * weight).detach())
    return results, tape.reused, tape.ended


def test_collectives_always_run():
    for results, _, ended in run_ranks(with_collective, 2):
        e = torch.exp(torch.ones(2))
        assert torch.equal(results[0], e + e * 3)
        assert torch.equal(results[1], e + (e * 2 + e * 3))
        assert "c10d" in ended or "other arguments" in ended
