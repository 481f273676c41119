"""Numbers at the ends of their range: what a step promises in docs/reliability.md."""

from __future__ import annotations

import warnings
from collections import Counter

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from sparsesam.distributed.shards import Shards
from sparsesam.masks.packed import PackedMask
from sparsesam.masks.patterns.structured import fill_greedily
from sparsesam.masks.select import kth_largest_by_digits
from sparsesam.perturbation import Perturbation, Target, pieces_of
from tests import cases, oracles
from tests.torture.optimizers import METHODS, RULES

DTYPES = {torch.float16: (-8, 5), torch.bfloat16: (-42, 36), torch.float32: (-46, 36), torch.float64: (-60, 60)}


def survive(count: int, seed: int = 0) -> Counter[str]:
    draw = np.random.default_rng(seed)
    found = Counter(one_ascent(draw) for _ in range(count))
    for check in (combined_gradients, tiny_parameters, empty_batches, huge_selection):
        check()
        found[check.__name__.replace("_", " ")] += 1
    return found


def one_ascent(draw: np.random.Generator) -> str:
    """e of a random gradient, against the equation in float64."""
    dtype = list(DTYPES)[draw.integers(len(DTYPES))]
    eta, norm = [None, 0.01][draw.integers(2)], ["full", "masked"][draw.integers(2)]
    shapes = [(draw.integers(1, 9), draw.integers(1, 9)) for _ in range(draw.integers(1, 4))]
    model = nn.ParameterList(torch.from_numpy(draw.normal(size=shape)).to(dtype) for shape in shapes)
    masks = {name: torch.from_numpy(draw.random(p.shape) < 0.6) for name, p in model.named_parameters()}
    masks["0"][:] = draw.random() < 0.7
    scale, spread = 10.0 ** draw.uniform(*DTYPES[dtype]), draw.uniform(0, 8)
    drawn = [draw.normal(size=shape) * scale * 10 ** draw.uniform(-spread, 0, shape) for shape in shapes]
    gradients = [torch.from_numpy(gradient).to(dtype) for gradient in drawn]
    rho = float(10 ** draw.uniform(-2, 1))
    opt = cases.ssam(model, masks, rho=rho, norm=norm, adaptive=False if eta is None else "all")
    before = cases.weights_of(model)
    set_gradients(model, gradients)
    with warnings.catch_warnings(action="ignore"), opt.perturbed():
        moved = oracles.flat(cases.weights_of(model))
        set_gradients(model, gradients)
    assert cases.same_bits(before, cases.weights_of(model))
    weight, gradient = oracles.flat(before).double(), oracles.flat(gradients).double()
    mask = oracles.flat(list(masks.values())).double()
    if norm == "masked":  # what the mask leaves out may also be infinite
        gradient = torch.where(mask > 0, gradient, 0.0)
    scaled = (1 if eta is None else weight.abs() + eta) * gradient
    length = float((scaled * (1 if norm == "full" else mask)).norm())
    case = f"{dtype}, rho {rho}, norm {norm}, eta {eta}, ||g|| {length}"
    if mask.sum() == 0 or not 1e-30 <= length < np.inf:
        assert torch.equal(moved, oracles.flat(before)), case
        # Where there is nothing to move, nothing is skipped.
        assert opt.skipped_ascents == (mask.sum() > 0), case
        why = "a norm below 1e-30" if length < 1e-30 else "a norm of NaN or inf"
        return f"not perturbed, {why if mask.sum() else 'an empty mask'}"
    expected = weight + oracles.perturbation(gradient, weight, mask, rho=rho, norm=norm, eta=eta)
    fits = expected.abs() < torch.finfo(dtype).max
    rounding = torch.finfo(dtype).eps * torch.maximum(expected.abs(), weight.abs()) + 4 * torch.finfo(dtype).tiny
    rounding += 1e-12 if dtype == torch.float64 else 1e-5 * (expected - weight).abs()
    rounding += 8 * rho / length * 1e-45  # T² g may be a subnormal float32
    assert ((moved.double() - expected).abs() <= rounding)[fits].all(), case
    assert opt.skipped_ascents == 0, case
    return f"as the equation, {dtype}"


def set_gradients(model: nn.Module, gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()


def combined_gradients() -> None:
    """GSAM's scalar products are in at least float32; where they overflow, the step is SAM's."""
    scales = {torch.float16: (1e-4, 1, 1e3), **dict.fromkeys((torch.bfloat16, torch.float32), (1e-4, 1, 1e3, 1e25))}
    for dtype, scale in ((kind, scale) for kind, those in scales.items() for scale in those):
        model = nn.ParameterList([torch.ones(64).to(dtype)])
        first, second = ((torch.arange(64) * step % 7 * scale).to(dtype) for step in (2, 3))
        opt = sparsesam.GSAM(cases.sgd(model), model, alpha=0.4)
        set_gradients(model, [first])
        with opt.perturbed():
            set_gradients(model, [second])
        g, s = first.double(), second.double()
        expected = s if scale > 1e18 else s - 0.4 * (g - (g @ s) / (s @ s) * s)
        error = (model[0].grad.double() - expected).norm() / expected.norm()
        assert error < 2 * torch.finfo(dtype).eps, (dtype, scale, error)


class Tiny(nn.Module):
    """Parameters without an entry, with one, and without a dimension, besides an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"empty": (0,), "no_rows": (0, 3), "no_columns": (3, 0), "one": (1,), "scalar": (), "plain": (4, 3)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.ones(shape, dtype=torch.float64)))

    def forward(self) -> torch.Tensor:
        return sum((p - 3).square().sum() for p in self.parameters())


def tiny_parameters() -> None:
    rules = [*RULES.values(), sparsesam.random_mask(pattern="2:4")]
    for (name, (_, make)), rule in ((method, rule) for method in METHODS.items() for rule in rules):
        model = Tiny()
        opt = make(cases.sgd(model, lr=0.01), model, mask=rule, norm="full")
        losses = [float(opt.minimize(model)) for _ in range(4)]
        assert losses[-1] < losses[0], (name, rule)
        assert opt.steps == 4
        again = make(cases.sgd(model, lr=0.01), model, mask=rule, norm="full")
        again.load_state_dict(opt.state_dict())
        again.minimize(model)


def empty_batches() -> None:
    x, y = cases.vectors(0)
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model)
    before = cases.weights_of(model)
    for number, reduction in enumerate(("mean", "sum"), start=1):
        loss = opt.minimize(lambda how=reduction: F.cross_entropy(model(x), y, reduction=how))
        assert loss.isnan() == (reduction == "mean")
        assert cases.same_bits(before, cases.weights_of(model))
        assert (opt.steps, opt.skipped_ascents, opt.skipped_steps) == (number, number, 0)
    part = sparsesam.SAM(cases.sgd(model), model, ascent_fraction=0.5)
    part.minimize(lambda batch: F.cross_entropy(model(batch[0]), batch[1], reduction="sum"), batch=(x, y))
    assert part.skipped_ascents == 1


def huge_selection() -> None:
    """More than 2^31 entries: positions, sizes and counts; no memory is taken for the entries."""
    positions = torch.tensor([3, 2**31 + 5, 2**40 + 1, 2**33])
    assert [kth_largest_by_digits(positions, k, Shards.whole({})) for k in (1, 2, 3)] == [2**40 + 1, 2**33, 2**31 + 5]
    scores, sizes = torch.tensor([4.0, 0.0, 3.0, 2.0]), torch.tensor([2**31 + 7, 2**31 + 7, 2**32, 5])
    assert fill_greedily(scores, sizes, 2**31 + 2**32 + 20).tolist() == [True, False, True, True]
    size = 2**31 + 16
    weight, bits = (
        torch.empty(count, dtype=dtype, device="meta") for count, dtype in ((size, None), (size // 8, torch.uint8))
    )
    for kept in (4, 2**31):
        target = Target("w", weight, weight, PackedMask(torch.Size([size]), kept, bits), 0.1, None)
        (piece,) = pieces_of([target])
        perturbation = Perturbation()
        found = perturbation._positions(piece)
        assert (found.dtype, len(found)) == (torch.int64, kept)
        perturbation.move([target], perturbation.norm([target], "masked"))
        perturbation.undo()
