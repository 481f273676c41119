"""Masks given by the user, which never change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from sparsesam.masks.mask import MaskRule, Refresh, manual
from sparsesam.masks.scores import ScoreContext
from sparsesam.utils.checks import check_bool, check_like_parameters, nearest

#: Parameters that a mask can be made for.
_PERTURBED = "parameter to perturb (trainable, in a group of the optimizer without perturb=False)"


class _ByNameAndParameters(type):
    def __instancecheck__(cls, module: object) -> bool:
        if not isinstance(module, nn.Module) or "norm" not in type(module).__name__.lower():
            return False
        parameters = list(module.parameters(recurse=False))
        has_parts = next(module.children(), None) is not None
        return bool(parameters) and not has_parts and all(one.dim() == 1 for one in parameters)


class NamedNormalization(nn.Module, metaclass=_ByNameAndParameters):
    """An `isinstance` check for any module without children, with "norm" in its class name and only 1-D parameters.

    Hugging Face's own layers, such as LlamaRMSNorm or T5LayerNorm, have no common base class.
    """


#: Layers whose parameters SAM-ON perturbs.
NORMALIZATION: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
    NamedNormalization,
)


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
        if isinstance(module, NORMALIZATION) and any(True for _ in module.parameters())
    }


@dataclass(frozen=True, eq=False)
class FixedMask(MaskRule):
    """Perturbs the given entries, the parameters whose names match, and the parameters of the given layer types."""

    masks: Mapping[str, Tensor] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    types: tuple[type[nn.Module], ...] = ()
    refresh: Refresh = field(default_factory=manual, init=False)
    seed: int = field(default=0, init=False)
    knows_shards = True

    def __post_init__(self) -> None:
        if not (self.masks or self.names or self.types):
            raise ValueError(
                "masks, names or types must be given, got none of them; "
                'for example fixed_mask("layer4.*", "fc.*") or fixed_mask(types=(torch.nn.LayerNorm,))'
            )
        check_bool("masks", self.masks)

    def make(self, context: ScoreContext) -> dict[str, Tensor]:
        check_like_parameters("masks", self.masks, context.parameters, _PERTURBED)
        names, of_types = _names(context.model), _parameters_of(context.model, self.types)
        perturbed = {id(parameter) for parameter in context.parameters.values()}
        known = [name for one in perturbed for name in names[one]]
        for pattern in self.names:
            if not _matches(known, pattern):
                raise ValueError(f"names has {pattern!r}, which matches no {_PERTURBED}; {nearest(pattern, known)}")
        if self.types and not of_types & perturbed:
            shown = ", ".join(layer.__name__ for layer in self.types)
            raise ValueError(f"types has {shown}, but the model has no such layer with parameters to perturb")
        made = {}
        for name, parameter in context.parameters.items():
            if name in self.masks:
                made[name] = context.part_of(name, self.masks[name])
            else:
                whole = id(parameter) in of_types or any(_matches(names[id(parameter)], one) for one in self.names)
                # A parameter on the meta device still has a mask with values.
                device = None if parameter.is_meta else parameter.device
                made[name] = torch.full(context.local[name].shape, whole, dtype=torch.bool, device=device)
        return made


def fixed_mask(
    masks: Mapping[str, Tensor] | str | None = None, *names: str, types: tuple[type[nn.Module], ...] = ()
) -> FixedMask:
    """Perturbs the given parameters; the mask never changes.

    Args:
        masks: ``{parameter name: bool tensor}``, or the first of ``names``.
        names: parameter names, with wildcards.
        types: layer types whose parameters are perturbed; ``sparsesam.NORMALIZATION`` is SAM-ON.

    Examples:
        >>> mask = sparsesam.fixed_mask("2.*", "4.weight")
        >>> opt = sparsesam.SSAM(base, model, rho=0.1, mask=mask, norm="masked")
    """
    if isinstance(masks, str):
        return FixedMask(names=(masks, *names), types=types)
    if masks is not None and not isinstance(masks, Mapping):
        raise TypeError(
            f'masks must be {{name: bool tensor}} or a name, as in fixed_mask("layer4.*", "fc.*"), got {masks!r}'
        )
    return FixedMask(masks=dict(masks or {}), names=names, types=types)


def _names(model: nn.Module) -> dict[int, list[str]]:
    """Returns all names of each parameter, by id: a tied parameter has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names


def _matches(names: list[str], pattern: str) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)


def _parameters_of(model: nn.Module, types: tuple[type[nn.Module], ...]) -> set[int]:
    return {
        id(parameter) for module in model.modules() if isinstance(module, types) for parameter in module.parameters()
    }
