"""The parameters that take part in an ascent, and what is found out about them once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from sparsesam.ascent.statistics import renormalized_in_forward
from sparsesam.distributed import Shards
from sparsesam.parameters import is_on_accelerator, option_keys


class PerturbedParam(NamedTuple):
    """A parameter that takes part in the ascent, with its group; ``keys`` are the base's `option_keys`.

    ``maximize``: the base optimizer maximizes the loss, so that the sharpest direction is downhill.
    """

    name: str
    parameter: Tensor
    group: dict[str, Any]
    keys: Mapping[str, str]
    maximize: bool

    @property
    def rho(self) -> float | Tensor:
        """A tensor where the group holds one on an accelerator (for CUDA graphs); the host does not read it."""
        rho = self.group[self.keys["rho"]]
        return rho if is_on_accelerator(rho) else float(rho)

    @property
    def eta(self) -> float | None:
        """ASAM's eta where T = |w| + eta applies, None where T = 1. Biases keep T = 1, as in its paper."""
        adaptive = self.group[self.keys["adaptive"]]
        is_bias = self.name.rpartition(".")[2].endswith("bias")
        if adaptive == "all" or (adaptive and not is_bias):
            return float(self.group[self.keys["eta"]])
        return None


class PerturbedParams:
    """The trainable parameters of the groups that are perturbed; the same object until `is_current` is False.

    ``shards`` says how they are spread over ranks; None: every rank has them whole. ``renormalized`` are weights that
    a forward writes to.
    """

    def __init__(self, model: nn.Module, base: Optimizer, names: Mapping[Tensor, str]) -> None:
        self._base, self._groups = base, list(base.param_groups)  # held, so that their ids stay theirs
        self._depends_on = _what_it_depends_on(base)
        self._params = list(_listed(base, names))
        self.shards = Shards.of({one.name: one.parameter for one in self})
        self.renormalized = renormalized_in_forward(model.modules())
        self.smallest = min((one.parameter for one in self), key=Tensor.numel, default=None)

    @property
    def is_current(self) -> bool:
        """Whether groups, their options and what is trainable are as they were."""
        return _what_it_depends_on(self._base) == self._depends_on

    def __iter__(self) -> Iterator[PerturbedParam]:
        return iter(self._params)


def _listed(base: Optimizer, names: Mapping[Tensor, str]) -> Iterator[PerturbedParam]:
    keys = option_keys(base)
    # torch's optimizers have it in their groups, others (pytorch-optimizer's) as an attribute.
    maximize = getattr(base, "maximize", False)
    for group in base.param_groups:
        if group[keys["perturb"]]:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    is_maximized = bool(group.get("maximize", maximize))
                    yield PerturbedParam(names[parameter], parameter, group, keys, is_maximized)


def _what_it_depends_on(base: Optimizer) -> list[Any]:
    options = (*option_keys(base).values(), "maximize")
    return [
        (
            id(group),
            [group.get(key) for key in options],
            list(map(id, group["params"])),
            [parameter.requires_grad for parameter in group["params"]],
        )
        for group in base.param_groups
    ]
