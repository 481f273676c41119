"""Perturbs along the base optimizer's momentum, without an extra pass.

    e = -rho * m ⊙ T² v / ||T v||          Momentum-SAM (Becker, Altrock, Risse 2024), with T = 1 and m = 1

v is the momentum buffer of the base: an average of gradients, so the perturbation goes *ahead*, in the direction of the
next steps. For Adam and its variants it is the first moment, not divided by the root of the second.
"momentum-climbing" has the opposite sign, an ablation: SAM's ascent with a stale gradient.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.optim import Optimizer

#: State keys of the momentum in torch's optimizers: SGD, RMSprop, Muon; Adam and its variants.
_KEYS = ("momentum_buffer", "exp_avg")
_REMEDY = (
    "give the base a momentum (SGD, RMSprop and Muon: momentum=0.9; Adam and its variants have one), or use "
    "ExtrapolatedSAM, which works with every base"
)


def momentum_of(base: Optimizer, parameter: Tensor) -> Tensor | None:
    """Returns the momentum of one parameter; None before its first step."""
    state = base.state.get(parameter, {})
    found: Tensor | None = next((state[key] for key in _KEYS if state.get(key) is not None), None)
    return found


def require_momentum_setting(base: Optimizer) -> None:
    """Raise ValueError for a base with momentum=0; needs no step."""
    values = [group["momentum"] for group in base.param_groups if "momentum" in group]
    if values and not any(values):
        raise ValueError(f"base must have a momentum, got {type(base).__name__} with momentum=0; {_REMEDY}")


def require_momentum(base: Optimizer, parameters: Iterable[Tensor]) -> None:
    """Raise ValueError for a base whose state holds no momentum."""
    kept = sorted({str(key) for parameter in parameters for key in base.state.get(parameter, {})})
    if kept and not set(kept) & set(_KEYS):
        raise ValueError(
            f"base must have a momentum, but {type(base).__name__} keeps only {', '.join(kept)} for its parameters; "
            f"{_REMEDY}"
        )
