"""What the analyses measure in the tests, and naive float64 versions of what they compute."""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional as F

from sparsesam.analysis import Objective
from tests.cases import vectors
from tests.oracles import flat


def batches():
    return [vectors(12), vectors(5, seed=2)]


def objective_of(model, **options):
    return Objective(model, batches(), F.cross_entropy, **options)


def mean_loss(model, batches):
    """The mean over all samples, one at a time."""
    losses = [F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]) for x, y in batches for i in range(len(x))]
    return torch.stack(losses).mean()


def dense_hessian(model, batches, names=None):
    """Row by row, by differentiating each entry of the gradient."""
    parameters = [p for name, p in model.named_parameters() if names is None or name in names]
    gradient = flat(torch.autograd.grad(mean_loss(model, batches), parameters, create_graph=True))
    rows = [flat(torch.autograd.grad(entry, parameters, retain_graph=True)) for entry in gradient]
    return torch.stack(rows).detach().numpy()


def best_in_ball(gradient, hessian, rho):
    """max_{||e|| <= rho} g'e + e'He/2 by the secular equation: (mu - H) e = g with mu >= lambda_1, ||e|| = rho."""
    values, vectors = np.linalg.eigh(hessian)
    g = vectors.T @ gradient
    low, high = max(values[-1], 0.0), max(values[-1], 0.0) + 10 * np.linalg.norm(g) / rho + 1
    for _ in range(200):
        mu = (low + high) / 2
        low, high = (mu, high) if np.linalg.norm(g / (mu - values)) > rho else (low, mu)
    e = g / (high - values)
    return float(g @ e + e @ (values * e) / 2)
