"""Lemmas 1 to 5 of the paper's supplement, along real steps of SAM and SSAM on stochastic quadratics.

f(w) is the mean over samples of f_i(w) = w' A_i w / 2 + b_i' w, so expectations are means and all constants are known:
L is the largest norm of an A_i, G = ||grad f(w)||, sigma^2 the variance of the samples' gradients at w. Each test also
shows a stronger inequality that some of the problems violate: the lemma's own check could fail.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

import sparsesam

SIZE, KEPT, SAMPLES = 6, 3, 8


class Weights(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.kept, self.free = nn.Parameter(w[:KEPT].clone()), nn.Parameter(w[KEPT:].clone())

    def forward(self):
        return torch.cat([self.kept, self.free])


@dataclass
class Problem:
    matrices: Tensor
    offsets: Tensor
    w: Tensor
    rho: float
    share: float
    is_sparse: bool

    def losses(self, w):
        return 0.5 * torch.einsum("i,nij,j->n", w, self.matrices, w) + self.offsets @ w

    def gradients(self, w):
        return self.matrices @ w + self.offsets

    @cached_property
    def smoothness(self):
        return float(torch.linalg.matrix_norm(self.matrices, 2).max())

    @property
    def eta(self):
        return self.share / self.smoothness

    @cached_property
    def gradient(self):
        return self.gradients(self.w).mean(0)

    @property
    def squared(self):
        return float(self.gradient.square().sum())

    @property
    def bound(self):
        return self.squared**0.5

    @property
    def variance(self):
        return float((self.gradients(self.w) - self.gradient).square().sum(1).mean())

    @property
    def left_out(self):
        """The mean of ||e_t||^2: the part of SAM's perturbation that the mask leaves out."""
        units = nn.functional.normalize(self.gradients(self.w))
        return float((self.rho * units[:, KEPT:]).square().sum(1).mean()) if self.is_sparse else 0.0

    @cached_property
    def moved(self):
        """The weights after a step with each sample, (samples, weights)."""
        return torch.stack([self._step(sample) for sample in range(SAMPLES)])

    def _step(self, sample):
        model = Weights(self.w)
        base = torch.optim.SGD(model.parameters(), lr=self.eta)
        if self.is_sparse:
            mask = sparsesam.fixed_mask("kept")
            optimizer = sparsesam.SSAM(base, model, rho=self.rho, mask=mask, norm="full")
        else:
            optimizer = sparsesam.SAM(base, model, rho=self.rho)

        def closure():
            optimizer.zero_grad()
            loss = self.losses(model())[sample]
            loss.backward()
            return loss

        optimizer.step(closure)
        return model().detach()

    @property
    def descent(self):
        """E <grad f(w), g(w + e)>, with g from the steps taken."""
        return float(((self.w - self.moved) / self.eta).mean(0) @ self.gradient)

    @property
    def fall(self):
        """f(w) - E f(w after the step)."""
        after = torch.stack([self.losses(w).mean() for w in self.moved]).mean()
        return float(self.losses(self.w).mean() - after)


def made(seed, kind, noise, rho, share, is_sparse):
    draws = torch.Generator().manual_seed(seed)
    drawn = torch.randn(SAMPLES, SIZE, SIZE, generator=draws, dtype=torch.float64)
    identity = torch.eye(SIZE, dtype=torch.float64).expand(SAMPLES, -1, -1)
    matrices = {"random": drawn + drawn.mT, "convex": 2 * identity, "concave": -2 * identity}[kind]
    offsets = noise * torch.randn(SAMPLES, SIZE, generator=draws, dtype=torch.float64)
    w = torch.randn(SIZE, generator=draws, dtype=torch.float64)
    return Problem(matrices, offsets, w, rho, share, is_sparse)


def problems(*, is_sparse):
    return [
        made(seed, kind, noise, rho, share, is_sparse)
        for seed in range(2)
        for kind in ("random", "convex", "concave")
        for noise in (0.0, 5.0)
        for rho in (1e-6, 0.3, 3.0)
        for share in (1.0, 0.3)
    ]


DENSE, SPARSE = problems(is_sparse=False), problems(is_sparse=True)


def holds(larger, smaller):
    return larger >= smaller - 1e-8 * max(1.0, abs(larger), abs(smaller))


def test_lemma_1_gradient_at_perturbed_weights_points_up():
    """<grad f(w), grad f(w + rho grad f / ||grad f||)> >= ||grad f||^2 - rho L G; the concave ones are equal."""

    def inequality(one, factor=1.0):
        ahead = one.gradients(one.w + one.rho * one.gradient / one.bound).mean(0)
        return holds(float(one.gradient @ ahead), one.squared - factor * one.rho * one.smoothness * one.bound)

    assert all(inequality(one) for one in DENSE)
    assert not all(inequality(one, factor=0.99) for one in DENSE)


def descends(one, factor):
    """Lemmas 2 and 4: E <grad f(w), g(w + e)> >= ||grad f||^2 / 2 - factor L^2 rho^2 - L rho G - L^2 ||e_t||^2."""
    slope, reach = one.smoothness * one.rho * one.bound, (one.smoothness * one.rho) ** 2
    return holds(one.descent, 0.5 * one.squared - factor * reach - slope - one.smoothness**2 * one.left_out)


def test_lemma_2_sam_descends():
    assert all(descends(one, 2.0) for one in DENSE)
    assert not all(descends(one, -2.0) for one in DENSE)


def test_lemma_4_ssam_descends():
    assert all(descends(one, 4.0) for one in SPARSE)
    assert not all(descends(one, -4.0) for one in SPARSE)


def falls(one, factor, *, noise_sign=1.0, gradient_factor=0.5):
    """Lemmas 3 and 5, for eta <= 1 / L: f(w) - E f(w after the step) >= eta ||grad f||^2 / 2 - L eta^2 sigma^2
    - factor (2 - L eta) eta L^2 rho^2 - (1 - L eta) eta L G rho - (1 + L eta) eta L^2 ||e_t||^2.
    """
    smooth, eta, share = one.smoothness, one.eta, one.share
    noise = noise_sign * smooth * eta**2 * one.variance
    reach = factor * (2 - share) * eta * (smooth * one.rho) ** 2
    slope = (1 - share) * eta * smooth * one.bound * one.rho
    masked = (1 + share) * eta * smooth**2 * one.left_out
    return holds(one.fall, gradient_factor * eta * one.squared - noise - reach - slope - masked)


def test_lemma_3_loss_falls_with_sam():
    """Equal for the convex ones with eta = 1 / L, no noise and a small rho."""
    assert all(falls(one, 1.0) for one in DENSE)
    assert not all(falls(one, 1.0, gradient_factor=0.51) for one in DENSE)
    assert not all(falls(one, 1.0, noise_sign=-1.0) for one in DENSE)


def test_lemma_5_loss_falls_with_ssam():
    assert all(0 < one.left_out < one.rho**2 for one in SPARSE)
    assert all(falls(one, 2.0) for one in SPARSE)
    assert not all(falls(one, 2.0, gradient_factor=0.51) for one in SPARSE)
    assert not all(falls(one, 2.0, noise_sign=-1.0) for one in SPARSE)
