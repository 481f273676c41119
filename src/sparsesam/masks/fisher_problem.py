"""The loss and the labels of a Fisher measurement."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from sparsesam.utils.batches import call_model, scalar_loss
from sparsesam.utils.checks import check_choice

LossFn = Callable[[Any, Any], Tensor]
ModelLoss = Callable[[nn.Module, Any], Tensor]
SampleLabels = Callable[[Any, torch.Generator | None], Any]


@dataclass(frozen=True)
class Problem:
    """Computes the loss of samples, with their own labels or labels drawn from the model's output."""

    loss_fn: LossFn | None
    model_loss: ModelLoss | None
    labels: str
    sample_labels: SampleLabels | None
    generator: torch.Generator | None

    def __post_init__(self) -> None:
        if (self.loss_fn is None) == (self.model_loss is None):
            raise ValueError("exactly one of loss_fn and model_loss must be given")
        check_choice("labels", self.labels, ("data", "sampled"))
        if self.is_sampled and self.model_loss is not None:
            raise ValueError("labels='sampled' needs the model's output; use loss_fn instead of model_loss")
        if self.is_sampled and self.sample_labels is None and self.generator is None:
            raise ValueError("labels='sampled' needs a generator, got None; give a torch.Generator")

    @property
    def is_sampled(self) -> bool:
        return self.labels == "sampled"

    def inputs(self, batch: Any) -> Any:
        """Returns the part of a batch by which samples are counted: the model's inputs."""
        return batch if self.model_loss is not None else self._pair(batch)[0]

    def sample_loss(self, model: nn.Module, sample: Any) -> Tensor:
        """Returns the loss of a batch, which is a single sample if its label is drawn."""
        if self.model_loss is not None:
            return scalar_loss(self.model_loss(model, sample), "model_loss")
        assert self.loss_fn is not None
        inputs, targets = self._pair(sample)
        output = call_model(model, inputs)
        if self.is_sampled:
            draw = self.sample_labels or sample_categorical
            with torch.no_grad():
                targets = draw(tree_map_only(Tensor, Tensor.detach, output), self.generator)
        return scalar_loss(self.loss_fn(output, targets), "loss_fn")

    def _pair(self, batch: Any) -> tuple[Any, Any]:
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        if self.is_sampled:
            return batch, None
        raise ValueError(
            f"with loss_fn a batch must be a pair (inputs, targets), got {type(batch).__name__}; "
            "use model_loss=lambda model, batch: ... for anything else"
        )


def sample_categorical(output: Any, generator: torch.Generator | None) -> Tensor:
    """Draw class labels (N, ...) from softmax(output) of logits (N, C, ...)."""
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
