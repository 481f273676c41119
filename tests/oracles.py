"""Naive float64 versions that a reader can compare with the paper by eye."""

from __future__ import annotations

import torch


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


def ssam_step(model, base, loss_of, *, rho, masks=None, norm="full", eta=None):
    """w <- base's update of w with the gradient at w + e; returns the loss at w."""
    parameters = list(model.parameters())
    loss = loss_of(model)
    gradient = flat(torch.autograd.grad(loss, parameters))
    weight = flat([p.detach() for p in parameters])
    mask = torch.ones_like(weight) if masks is None else flat([m.to(weight.dtype) for m in masks])
    moved = weight + perturbation(gradient, weight, mask, rho=rho, norm=norm, eta=eta)
    with torch.no_grad():
        for parameter, value in zip(parameters, unflat(moved, parameters), strict=True):
            parameter.copy_(value)
    there = torch.autograd.grad(loss_of(model), parameters)
    with torch.no_grad():
        for parameter, value, g in zip(parameters, unflat(weight, parameters), there, strict=True):
            parameter.copy_(value)
            parameter.grad = g
    base.step()
    return loss.detach()
