"""The perturbation on a host and on a device: both equal the oracle, and weights are restored exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import sparsesam
from sparsesam import perturbation as pieces
from sparsesam.masks.kept_entries import positions_of
from sparsesam.masks.packed import PackedMask
from sparsesam.perturbation import (
    Perturbation,
    Target,
    norm_of,
    perturbation_of,
    scaled_direction,
    usable_or_inf,
)
from tests import cases, oracles

IMPLEMENTATIONS = ("host", "device")
SHAPES = [(6, 4, 3, 3), (7,), (5, 9), ()]


def tensors(seed, dtype=torch.float64, memory_format=torch.contiguous_format):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    return [t.to(memory_format=memory_format) if t.dim() == 4 else t for t in found]


def some_rows(shape):
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[::2] = True
    return mask


def random_entries(share):
    return lambda shape: torch.rand(shape, generator=torch.Generator().manual_seed(3)) < share


MASKS = {
    "none": lambda shape: None,
    "few": random_entries(0.3),
    "most": random_entries(0.7),
    "rows": lambda shape: some_rows(shape) if len(shape) > 1 else None,
    "all": lambda shape: torch.ones(shape, dtype=torch.bool),
    "nothing": lambda shape: torch.zeros(shape, dtype=torch.bool),
    "mixed": lambda shape: random_entries(0.3)(shape) if len(shape) != 2 else some_rows(shape),
}


def targets_of(weights, directions, kind="none", rho=0.3, eta=None):
    masks = [MASKS[kind](tuple(weight.shape)) for weight in weights]
    return [
        Target(f"w{i}", weight, direction, None if mask is None else PackedMask.pack(mask), rho, eta)
        for i, (weight, direction, mask) in enumerate(zip(weights, directions, masks, strict=True))
    ], [torch.ones_like(w, dtype=torch.bool) if m is None else m for w, m in zip(weights, masks, strict=True)]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("eta", [None, 0.1])
@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "nothing"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_perturbation_equals_oracle_and_is_undone(implementation, kind, eta, norm, memory_format):
    weights, directions = tensors(0, memory_format=memory_format), tensors(1)
    targets, masks = targets_of(weights, directions, kind, eta=eta)
    before = [weight.clone() for weight in weights]
    expected = oracles.perturbation(
        oracles.flat(directions), oracles.flat(before), oracles.flat(masks).double(), rho=0.3, norm=norm, eta=eta
    )
    perturbation = Perturbation()
    with cases.moved_as_on(implementation):
        perturbation.move(targets, perturbation.norm(targets, norm))
        moves = oracles.flat(weights) - oracles.flat(before)
        perturbation.undo()
    torch.testing.assert_close(moves, expected, rtol=1e-9, atol=1e-12)
    assert (moves[~oracles.flat(masks)] == 0).all()
    assert cases.same_bits(before, weights)


@pytest.mark.parametrize("kind", ["none", "few", "most", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_host_and_device_agree_to_rounding_in_low_precision(dtype, kind):
    results = []
    for implementation in IMPLEMENTATIONS:
        weights, directions = tensors(0, dtype), tensors(1, dtype)
        targets, _ = targets_of(weights, directions, kind)
        perturbation = Perturbation()
        with cases.moved_as_on(implementation):
            perturbation.move(targets, perturbation.norm(targets, "full"))
        results.append([weight.clone() for weight in weights])
    torch.testing.assert_close(*results, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_tensors_in_several_groups(monkeypatch):
    weights, directions = tensors(0), tensors(1)
    whole, _ = targets_of([w.clone() for w in weights], directions, "mixed")
    parts, _ = targets_of(weights, directions, "mixed")
    with cases.moved_as_on("device"):
        one, many = Perturbation(), Perturbation()
        one.move(whole, one.norm(whole, "full"))
        monkeypatch.setattr(pieces, "GROUP", 8)
        many.move(parts, many.norm(parts, "full"))
    assert cases.same_bits([t.weight for t in whole], weights)


@pytest.mark.parametrize(("kind", "searches"), [("few", [1, 1]), ("most", [3, 6])])
def test_device_keeps_positions_of_few_entries_until_masks_change(monkeypatch, kind, searches):
    found = []
    monkeypatch.setattr(pieces, "positions_of", lambda *bits: found.append(1) or positions_of(*bits))
    weights, directions = tensors(0), tensors(1)
    targets, _ = targets_of(weights, directions, kind)
    perturbation = Perturbation()
    with cases.moved_as_on("device"):
        for expected in searches:
            perturbation.move(targets, perturbation.norm(targets, "masked"))
            perturbation.undo()
            assert len(found) == expected
        other, _ = targets_of(weights, directions, kind)
        perturbation.move(other, perturbation.norm(other, "masked"))
        perturbation.undo()
    assert len(found) > searches[-1]


def test_positions_of_unused_weights_are_dropped():
    weights, directions = tensors(0), tensors(1)
    targets = [target for target in targets_of(weights, directions, "few")[0] if not target.is_unmoved]
    perturbation = Perturbation()
    with cases.moved_as_on("device"):
        for some in (targets[:1], targets[1:], targets[:2], targets, targets):
            perturbation.move(some, perturbation.norm(some, "masked"))
            perturbation.undo()
    assert len(perturbation.index) == 1


def test_large_tensor_is_not_concatenated_with_others(monkeypatch):
    weights, directions = (sorted(tensors(seed), key=torch.numel) for seed in (0, 1))
    targets, _ = targets_of(weights, directions, "none")
    monkeypatch.setattr(pieces, "GROUP", weights[-1].numel() - 1)
    with cases.moved_as_on("device"):
        groups = [piece.weights for piece in pieces.pieces_of(targets)]
    assert all(len(group) == 1 or sum(one.numel() for one in group) <= pieces.GROUP for group in groups)
    assert sum(map(len, groups)) == len(targets)


@pytest.mark.parametrize("kind", ["none", "few", "most"])
@pytest.mark.parametrize("bad", [0.0, torch.nan, torch.inf])
def test_device_skips_perturbation_for_zero_or_non_finite_norm(bad, kind):
    weights, directions = tensors(0), tensors(1)
    for direction in directions:
        direction.mul_(0) if bad == 0 else direction.fill_(bad)
    before = [weight.clone() for weight in weights]
    targets, _ = targets_of(weights, directions, kind)
    perturbation = Perturbation()
    with cases.moved_as_on("device"):
        norm = perturbation.norm(targets, "full")
        assert isinstance(norm, torch.Tensor)
        perturbation.move(targets, norm)
        assert cases.same_bits(before, weights)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_device_counts_skipped_ascents(bad):
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    x, y = cases.vectors()
    with cases.moved_as_on("device"):
        for poisoned in (True, False, True):
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            before = cases.weights_of(model)
            if poisoned:
                model[0].weight.grad[0, 0] = bad
            with opt.perturbed():
                assert cases.same_bits(before, cases.weights_of(model)) == poisoned
                nn.functional.cross_entropy(model(x), y).backward()
            opt.step()
    assert opt.skipped_ascents == 2
    resumed = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    resumed.load_state_dict(opt.state_dict())
    assert resumed.skipped_ascents == opt.skipped_ascents == 2


class InterruptAt(TorchDispatchMode):
    """Raises KeyboardInterrupt at the n-th operation."""

    def __init__(self, number):
        super().__init__()
        self.left = number

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["none", "few", "most", "rows"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_interruption_at_any_operation_restores_weights(implementation, kind):
    for number in itertools.count(1):
        weights, directions = tensors(0), tensors(1)
        before = [weight.clone() for weight in weights]
        targets, _ = targets_of(weights, directions, kind)
        perturbation = Perturbation()
        interrupt = InterruptAt(number)
        try:
            with cases.moved_as_on(implementation), interrupt:
                try:
                    perturbation.move(targets, perturbation.norm(targets, "full"))
                finally:
                    perturbation.undo()
        except KeyboardInterrupt:
            pass
        assert cases.same_bits(before, weights)
        if interrupt.left > 0:
            return


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_non_dense_weights(implementation):
    weight = torch.randn(6, 8, dtype=torch.float64)[:, ::2]
    before, direction = weight.clone(), torch.randn(6, 4, dtype=torch.float64)
    targets, masks = targets_of([weight], [direction], "few")
    perturbation = Perturbation()
    with cases.moved_as_on(implementation):
        perturbation.move(targets, perturbation.norm(targets, "full"))
        expected = 0.3 * direction * masks[0] / direction.norm()
        torch.testing.assert_close(weight - before, expected)
        perturbation.undo()
    assert torch.equal(weight, before)


@pytest.mark.parametrize("eta", [None, 0.1])
def test_perturbation_compiles_as_one_graph(eta):
    torch._dynamo.reset()

    def moved(weight, direction, rho):
        norm = usable_or_inf(norm_of(direction, weight, eta=eta))
        scaled = scaled_direction(direction, weight, eta=eta, times=2)
        return weight + perturbation_of(scaled, rho, norm, weight.dtype)

    weight, direction = torch.randn(5, 9), torch.randn(5, 9)
    compiled = torch.compile(moved, fullgraph=True, backend="eager")
    rho = torch.tensor(0.3)
    torch.testing.assert_close(compiled(weight, direction, rho), moved(weight, direction, rho))
