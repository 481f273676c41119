"""Naive float64 versions that a reader can compare with the paper by eye."""

from __future__ import annotations

import copy

import torch
from torch.nn import functional as F


def flat(tensors):
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(vector, like):
    pieces, at = [], 0
    for tensor in like:
        pieces.append(vector[at : at + tensor.numel()].view_as(tensor))
        at += tensor.numel()
    return pieces


def perturbation(gradient, weight, mask, *, rho, norm="full", eta=None):
    """e = rho * m ⊙ T² g / ||T g||, all flat vectors; ``eta`` None means T = 1."""
    scale = torch.ones_like(weight) if eta is None else weight.abs() + eta
    length = (scale * gradient).norm() if norm == "full" else (mask * scale * gradient).norm()
    return rho * mask * scale**2 * gradient / length


class Naive:
    """A model whose weights, gradients and mask are flat float64 vectors; ``kept`` is what a method remembers."""

    def __init__(self, model, base, mask, norm):
        self.parameters, self.model, self.base, self.norm, self.kept = list(model.parameters()), model, base, norm, {}
        self.mask = torch.ones_like(self.w) if mask is None else flat([m.double() for m in mask])

    @property
    def w(self):
        return flat([p.detach() for p in self.parameters])

    def set(self, vector):
        with torch.no_grad():
            for p, value in zip(self.parameters, unflat(vector, self.parameters), strict=True):
                p.copy_(value)

    def loss(self):
        return F.cross_entropy(self.model(self.x), self.y)

    def gradient(self, at):
        here = self.w
        self.set(at)
        found = torch.autograd.grad(self.loss(), self.parameters)
        self.set(here)
        return flat(found)

    def e(self, direction, rho, mask=1.0):
        return perturbation(direction, self.w, mask * self.mask, rho=rho, norm=self.norm)

    def update(self, gradient):
        for p, value in zip(self.parameters, unflat(gradient, self.parameters), strict=True):
            p.grad = value.clone()
        self.base.step()

    def by_tensor(self, function, *vectors):
        parts = zip(*(unflat(vector, self.parameters) for vector in vectors), strict=True)
        return flat([function(*one) for one in parts])


def ssam_step(model, base, loss_of, *, rho, masks=None, norm="full", eta=None):
    """w <- base's update of w with the gradient at w + e; returns the loss at w."""
    n = Naive(model, base, masks, norm)
    n.loss = lambda: loss_of(model)
    loss = n.loss().detach()
    n.update(n.gradient(n.w + perturbation(n.gradient(n.w), n.w, n.mask, rho=rho, norm=norm, eta=eta)))
    return loss


def fisher_by_definition(model, x, y, loss_fn):
    """F = 1/N sum_i (grad_w loss(w; x_i, y_i))^2 with the model in evaluation mode."""
    model = copy.deepcopy(model).eval()
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in parameters.items()}
    for i in range(len(y)):
        output = model(*(part[i : i + 1] for part in x)) if isinstance(x, tuple) else model(x[i : i + 1])
        loss = loss_fn(output, y[i : i + 1]).squeeze()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for name, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient.to_dense().abs() ** 2
    return {name: value / len(y) for name, value in total.items()}
