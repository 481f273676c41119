"""Lemmas 1 to 5 of the paper's supplement, along real steps of SAM and SSAM on stochastic quadratics.

f(w) is the mean over samples of f_i(w) = w' A_i w / 2 + b_i' w, so expectations are means and all constants are known:
L is the largest norm of an A_i, G = ||grad f(w)||, sigma^2 the variance of the samples' gradients at w. Each test also
shows a stronger inequality that some of the problems violate: the lemma's own check could fail.
"""

import itertools
from types import SimpleNamespace

import torch
from torch import nn

import sparsesam

SIZE, KEPT, SAMPLES = 6, 3, 8


def measured(seed, kind, noise, rho, share, is_sparse):
    """Both sides of the inequalities for eta = share / L."""
    draws = torch.Generator().manual_seed(seed)
    drawn = torch.randn(SAMPLES, SIZE, SIZE, generator=draws, dtype=torch.float64)
    identity = torch.eye(SIZE, dtype=torch.float64).expand(SAMPLES, -1, -1)
    A = {"random": drawn + drawn.mT, "convex": 2 * identity, "concave": -2 * identity}[kind]
    b = noise * torch.randn(SAMPLES, SIZE, generator=draws, dtype=torch.float64)
    w = torch.randn(SIZE, generator=draws, dtype=torch.float64)

    def losses(w):
        return 0.5 * torch.einsum("i,nij,j->n", w, A, w) + b @ w

    def after_step(sample):
        model = nn.ParameterDict({"kept": w[:KEPT].clone(), "free": w[KEPT:].clone()})
        base = torch.optim.SGD(model.parameters(), lr=eta)
        optimizer = sparsesam.SAM(base, model, rho=rho)
        if is_sparse:
            optimizer = sparsesam.SSAM(base, model, rho=rho, mask=sparsesam.fixed_mask("kept"), norm="full")
        optimizer.minimize(lambda: losses(torch.cat([model["kept"], model["free"]]))[sample])
        return torch.cat([model["kept"], model["free"]]).detach()

    L = float(torch.linalg.matrix_norm(A, 2).max())
    eta, each = share / L, A @ w + b
    gradient = each.mean(0)
    ahead = A.mean(0) @ (w + rho * gradient / gradient.norm()) + b.mean(0)
    moved = torch.stack([after_step(sample) for sample in range(SAMPLES)])
    left_out = rho * nn.functional.normalize(each)[:, KEPT:]  # e_t, the part of SAM's e that the mask leaves out
    return SimpleNamespace(
        L=L,
        G=float(gradient.norm()),
        rho=rho,
        eta=eta,
        variance=float((each - gradient).square().sum(1).mean()),
        left_out=float(left_out.square().sum(1).mean()) if is_sparse else 0.0,
        along=float(gradient @ ahead),  # <grad f(w), grad f(w + rho grad f / ||grad f||)>
        descent=float(((w - moved) / eta).mean(0) @ gradient),  # E <grad f(w), g(w + e)>, from the steps taken
        fall=float(losses(w).mean() - torch.stack([losses(v).mean() for v in moved]).mean()),  # f(w) - E f(w after it)
    )


CASES = list(itertools.product(range(2), ("random", "convex", "concave"), (0.0, 5.0), (1e-6, 0.3, 3.0), (1.0, 0.3)))
DENSE, SPARSE = ([measured(*case, is_sparse) for case in CASES] for is_sparse in (False, True))


def holds(larger, smaller):
    return larger >= smaller - 1e-8 * max(1.0, abs(larger), abs(smaller))


def points_up(p, factor=1.0):
    """Lemma 1: <grad f(w), grad f(w + rho grad f / ||grad f||)> >= ||grad f||^2 - rho L G."""
    return holds(p.along, p.G**2 - factor * p.rho * p.L * p.G)


def descends(p, factor):
    """Lemmas 2 and 4: E <grad f(w), g(w + e)> >= ||grad f||^2 / 2 - factor L^2 rho^2 - L rho G - L^2 ||e_t||^2."""
    return holds(p.descent, p.G**2 / 2 - factor * (p.L * p.rho) ** 2 - p.L * p.rho * p.G - p.L**2 * p.left_out)


def falls(p, factor, *, noise_sign=1.0, gradient_factor=0.5):
    """Lemmas 3 and 5, for eta <= 1 / L: f(w) - E f(w after the step) >= eta ||grad f||^2 / 2 - L eta^2 sigma^2
    - factor (2 - L eta) eta L^2 rho^2 - (1 - L eta) eta L G rho - (1 + L eta) eta L^2 ||e_t||^2.
    """
    share = p.L * p.eta
    least = gradient_factor * p.eta * p.G**2 - noise_sign * p.L * p.eta**2 * p.variance
    least -= factor * (2 - share) * p.eta * (p.L * p.rho) ** 2 + (1 - share) * p.eta * p.L * p.G * p.rho
    return holds(p.fall, least - (1 + share) * p.eta * p.L**2 * p.left_out)


def test_lemma_1_gradient_at_perturbed_weights_points_up():
    """The concave problems are equal."""
    assert all(points_up(p) for p in DENSE)
    assert not all(points_up(p, factor=0.99) for p in DENSE)


def test_lemma_2_sam_descends():
    assert all(descends(p, 2.0) for p in DENSE)
    assert not all(descends(p, -2.0) for p in DENSE)


def test_lemma_3_loss_falls_with_sam():
    """Equal for the convex problems with eta = 1 / L, no noise and a small rho."""
    assert all(falls(p, 1.0) for p in DENSE)
    assert not all(falls(p, 1.0, gradient_factor=0.51) for p in DENSE)
    assert not all(falls(p, 1.0, noise_sign=-1.0) for p in DENSE)


def test_lemma_4_ssam_descends():
    assert all(descends(p, 4.0) for p in SPARSE)
    assert not all(descends(p, -4.0) for p in SPARSE)


def test_lemma_5_loss_falls_with_ssam():
    assert all(0 < p.left_out < p.rho**2 for p in SPARSE)
    assert all(falls(p, 2.0) for p in SPARSE)
    assert not all(falls(p, 2.0, gradient_factor=0.51) for p in SPARSE)
    assert not all(falls(p, 2.0, noise_sign=-1.0) for p in SPARSE)
