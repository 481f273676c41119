"""The definition of the diagonal Fisher information, sample by sample, to be checked by eye."""

import copy

import torch


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
