"""The loss of one sample, from what the user gives: a loss of outputs and targets, or one of the model and a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparsesam.masks.batches import call_model, scalar_loss
from sparsesam.masks.checks import check_choice

LossFn = Callable[[Any, Any], Tensor]
ModelLoss = Callable[[nn.Module, Any], Tensor]
SampleLabels = Callable[[Any, torch.Generator | None], Any]


def sample_loss_of(
    loss_fn: LossFn | None,
    model_loss: ModelLoss | None,
    labels: str,
    sample_labels: SampleLabels | None,
    generator: torch.Generator | None,
) -> ModelLoss:
    """``loss(model, batch)`` of a batch of one, with its own labels or those drawn from the model's output."""
    if (loss_fn is None) == (model_loss is None):
        raise ValueError("exactly one of loss_fn and model_loss must be given")
    check_choice("labels", labels, ("data", "sampled"))
    is_sampled = labels == "sampled"
    if is_sampled and model_loss is not None:
        raise ValueError("labels='sampled' needs the model's output; use loss_fn instead of model_loss")
    if is_sampled and sample_labels is None and generator is None:
        raise ValueError("labels='sampled' needs a generator, got None; give a torch.Generator")
    draw = sample_labels or sample_categorical

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if loss_fn is None:
            assert model_loss is not None
            return scalar_loss(model_loss(model, batch), "model_loss")
        inputs, targets = _pair(batch, is_sampled)
        output = call_model(model, inputs)
        if is_sampled:
            with torch.no_grad():
                targets = draw(tree_map_only(Tensor, Tensor.detach, output), generator)
        return scalar_loss(loss_fn(output, targets), "loss_fn")

    return loss


def _pair(batch: Any, is_sampled: bool) -> tuple[Any, Any]:
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if is_sampled:
        return batch, None
    raise ValueError(
        f"with loss_fn a batch must be a pair (inputs, targets), got {type(batch).__name__}; "
        "use model_loss=lambda model, batch: ... for anything else"
    )


def sample_categorical(output: Any, generator: torch.Generator | None) -> Tensor:
    """Class labels (N, ...) drawn from softmax(output), output (N, C, ...) holding logits."""
    if not isinstance(output, Tensor) or output.dim() < 2:
        raise ValueError(
            "labels='sampled' draws classes from an output tensor of shape (N, C, ...), got "
            f"{tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__}; "
            "give sample_labels=lambda output, generator: ... for other outputs"
        )
    assert generator is not None
    probabilities = output.to(torch.promote_types(output.dtype, torch.float32)).softmax(1).movedim(1, -1)
    flat = probabilities.reshape(-1, probabilities.shape[-1]).to(generator.device)
    return flat.multinomial(1, generator=generator).view(probabilities.shape[:-1]).to(output.device)
