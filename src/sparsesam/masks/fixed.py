"""Masks given by the user, which never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import ClassVar

import torch
from torch import Tensor, nn

from sparsesam.distributed.shards import Shards
from sparsesam.masks.mask import MaskRule
from sparsesam.masks.scores import ScoreContext
from sparsesam.utils.checks import check_bool, check_like_parameters, nearest

LayerType = type[nn.Module] | Callable[[nn.Module], bool]
#: Parameters that a mask can be made for.
_PERTURBED = "parameter to perturb (trainable, in a group of the optimizer without perturb=False)"


def has_normalization_name(module: nn.Module) -> bool:
    """Whether "norm" is in the class name, and the module has only 1-D parameters, at least one, and no children."""
    is_norm = "norm" in type(module).__name__.lower() and not list(module.children())
    return is_norm and {parameter.dim() for parameter in module.parameters()} == {1}


#: Layers whose parameters SAM-ON perturbs.
NORMALIZATION: tuple[LayerType, ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    has_normalization_name,
)


def is_layer_of(module: nn.Module, types: tuple[LayerType, ...]) -> bool:
    return any(isinstance(module, kind) if isinstance(kind, type) else kind(module) for kind in types)


def normalization_layers(model: nn.Module) -> dict[str, str]:
    """Lists the layers with parameters that ``fixed_mask(types=NORMALIZATION)`` perturbs, ``{name: type}``.

    These are torch's normalization layers, and modules without children that have "norm" in their class name and only
    1-D parameters, such as Hugging Face's LlamaRMSNorm or T5LayerNorm.

    Examples:
        >>> sparsesam.normalization_layers(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.LayerNorm(4)))
        {'1': 'LayerNorm'}
    """
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if is_layer_of(module, NORMALIZATION) and any(True for _ in module.parameters())
    }


@dataclass(frozen=True, eq=False)
class FixedMask(MaskRule):
    """The rule of `fixed_mask`."""

    masks: Mapping[str, Tensor]
    names: tuple[str, ...]
    types: tuple[LayerType, ...]
    refresh = None
    seed = 0
    knows_shards: ClassVar[bool] = True

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        check_like_parameters("masks", self.masks, context.parameters, _PERTURBED)
        perturbed = set(context.parameters.values())
        layers = [module for module in context.model.modules() if is_layer_of(module, self.types)]
        whole = perturbed & {p for layer in layers for p in layer.parameters()}
        if self.types and not whole:
            shown = ", ".join(kind.__name__ for kind in self.types)
            raise ValueError(f"types has {shown}, but the model has no such layer with parameters to perturb")
        every = context.model.named_parameters(remove_duplicate=False)  # a tied parameter has several names
        names = {name: p for name, p in every if p in perturbed}
        for pattern in self.names:
            matching = {p for name, p in names.items() if fnmatchcase(name, pattern)}
            if not matching:
                raise ValueError(f"names has {pattern!r}, which matches no {_PERTURBED}; {nearest(pattern, names)}")
            whole |= matching
        flags = {name: torch.tensor(p in whole, device="cpu") for name, p in context.parameters.items()}
        uniform = {name: flag.expand(context.parameters[name].shape) for name, flag in flags.items()}
        parts = (context.shards or Shards.whole(uniform)).parts
        return {name: parts[name].of(mask) for name, mask in {**uniform, **self.masks}.items()}


def fixed_mask(
    masks: Mapping[str, Tensor] | str | None = None, *names: str, types: tuple[LayerType, ...] = ()
) -> FixedMask:
    """Perturbs the given parameters; the mask never changes.

    Args:
        masks: ``{parameter name: bool tensor}``, or the first of ``names``.
        names: parameter names, with wildcards.
        types: layer types, or functions of a module that return whether it is meant, whose parameters are perturbed;
            ``sparsesam.NORMALIZATION`` is SAM-ON.

    Examples:
        >>> mask = sparsesam.fixed_mask("2.*", "4.weight")
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask, norm="masked")
    """
    if isinstance(masks, str):
        names, masks = (masks, *names), None
    if masks is not None and not isinstance(masks, Mapping):
        raise TypeError(
            f'masks must be {{name: bool tensor}} or a name, as in fixed_mask("layer4.*", "fc.*"), got {masks!r}'
        )
    if not (masks or names or types):
        raise ValueError(
            "masks, names or types must be given, got none of them; "
            'for example fixed_mask("layer4.*", "fc.*") or fixed_mask(types=(torch.nn.LayerNorm,))'
        )
    check_bool("masks", masks or {})
    return FixedMask(dict(masks or {}), names, types)
