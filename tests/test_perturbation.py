"""The perturbation on a host and on a device: both equal the oracle, and weights are restored exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsesam import perturbation as pieces
from sparsesam.masks.packed import PackedMask, positions_of
from sparsesam.perturbation import Perturbation, Target
from tests import cases, oracles

IMPLEMENTATIONS = ("host", "device")
SHAPES = [(6, 4, 3, 3), (7,), (5, 9), ()]


LAYOUTS = {
    "contiguous": lambda t: t,
    "channels last": lambda t: t.to(memory_format=torch.channels_last) if t.dim() == 4 else t,
    "with gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}


def tensors(seed, dtype=torch.float64, layout="contiguous"):
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    return [LAYOUTS[layout](t) for t in found]


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


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("norm", ["full", "masked"])
@pytest.mark.parametrize("eta", [None, 0.1])
@pytest.mark.parametrize("kind", [kind for kind in MASKS if kind != "nothing"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_perturbation_equals_oracle_and_is_undone(implementation, kind, eta, norm, layout):
    weights, directions = tensors(0, layout=layout), tensors(1)
    targets, masks = targets_of(weights, directions, kind, eta=eta)
    before = [weight.clone() for weight in weights]
    expected = oracles.perturbation(
        oracles.flat(directions), oracles.flat(before), oracles.flat(masks).double(), rho=0.3, norm=norm, eta=eta
    )
    perturbation = Perturbation()
    with cases.moved_as_on(implementation):
        perturbation.ascend(targets, norm)
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
            perturbation.ascend(targets, "full")
        results.append([weight.clone() for weight in weights])
    torch.testing.assert_close(*results, rtol=torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)


def test_size_of_the_joined_vectors_does_not_matter(monkeypatch):
    results = []
    for size in (1 << 23, 30, 8):
        monkeypatch.setattr(pieces, "GROUP", size)
        weights, directions = tensors(0), tensors(1)
        targets, _ = targets_of(weights, directions, "mixed")
        with cases.moved_as_on("device"):
            found = [piece.weights for piece in pieces.pieces_of(targets)]
            assert all(len(group) == 1 or sum(map(torch.numel, group)) <= size for group in found)
            Perturbation().ascend(targets, "full")
        results.append(weights)
    assert cases.same_bits(results[0], results[1])
    assert cases.same_bits(results[0], results[2])


@pytest.mark.parametrize(("kind", "searches"), [("few", [1, 1]), ("most", [3, 6])])
def test_device_keeps_positions_of_few_entries_until_masks_change(monkeypatch, kind, searches):
    found = []
    monkeypatch.setattr(pieces, "positions_of", lambda *bits: found.append(1) or positions_of(*bits))
    weights, directions = tensors(0), tensors(1)
    targets, _ = targets_of(weights, directions, kind)
    perturbation = Perturbation()
    with cases.moved_as_on("device"):
        for expected in searches:
            perturbation.ascend(targets, "masked")
            perturbation.undo()
            assert len(found) == expected
        other, _ = targets_of(weights, directions, kind)
        perturbation.ascend(other, "masked")
        perturbation.undo()
    assert len(found) > searches[-1]


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
        assert isinstance(perturbation.ascend(targets, "full"), torch.Tensor)
        assert cases.same_bits(before, weights)


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
                    perturbation.ascend(targets, "full")
                finally:
                    perturbation.undo()
        except KeyboardInterrupt:
            pass
        assert cases.same_bits(before, weights)
        if interrupt.left > 0:
            return
