"""A wrapper that torch takes for an optimizer: groups, state, hooks and checkpoints are the base optimizer's."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sparsesam.parameters import PerturbedParam, check_base, check_group, named, option_keys, perturbed_params, unwrap


class OptimizerWrapper(Optimizer):
    """Around any optimizer, with options of its own in the parameter groups and state of its own in checkpoints.

    ``param_groups`` and ``state`` are the base optimizer's own, so a scheduler may drive either of the two.
    """

    def __init__(self, base: Optimizer, model: nn.Module, options: dict[str, Any]) -> None:
        check_base(base)
        if isinstance(base, OptimizerWrapper):
            raise TypeError(f"base must be a plain optimizer, got {type(base).__name__}; wrap its base instead")
        self.base = base
        self.model = unwrap(model)
        keys = option_keys(base)
        self.defaults = {**base.defaults, **{keys[option]: value for option, value in options.items()}}
        super().__setstate__({})  # torch's own hooks; its __init__ would make a second set of parameter groups
        for group in base.param_groups:
            self._complete(group)
        self._names = named(self.model, base)

    @abstractmethod
    def _own_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the base optimizer's state."""

    @abstractmethod
    def _check_own_state(self, own: dict[str, Any]) -> None:
        """Refuse a state that does not fit, before anything changes."""

    @abstractmethod
    def _load_own_state(self, own: dict[str, Any] | None) -> None:
        """Take over a checked state; None: the checkpoint was the bare base optimizer's."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return self.base.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.base.state

    @property
    def train(self) -> Callable[[], None]:
        """The base optimizer's own ``train()``, where it has one (schedule-free optimizers)."""
        return self._mode("train")

    @property
    def eval(self) -> Callable[[], None]:
        """The base optimizer's own ``eval()``, where it has one (schedule-free optimizers)."""
        return self._mode("eval")

    def _mode(self, name: str) -> Callable[[], None]:
        switch: Callable[[], None] = getattr(self.base, name)  # hasattr(opt, "train") is that of the base
        return switch

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.base.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.base.add_param_group(param_group)
        try:
            self._names = named(self.model, self.base)
            self._complete(self.base.param_groups[-1])
        except ValueError:
            self.base.param_groups.pop()
            raise

    def state_dict(self) -> dict[str, Any]:
        """The base optimizer's checkpoint with one more entry, ``"sparsesam"``; safe for ``weights_only=True``."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = {**self.base.state_dict(), "sparsesam": self._own_state()}
        for after in self._optimizer_state_dict_post_hooks.values():
            state = after(self, state) or state
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer, or of the bare base optimizer (a run that began without SAM)."""
        state_dict = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        own = state_dict.pop("sparsesam", None)
        if own is None:
            warnings.warn(
                "the checkpoint is of a bare base optimizer: its state is loaded, step counters and masks start anew",
                stacklevel=2,
            )
        else:
            self._check_own_state(own)
        # A scheduled rho begins again where it began.
        keys = option_keys(self.base).values()
        options = [{key: group.get(f"initial_{key}", group[key]) for key in keys} for group in self.param_groups]
        self.base.load_state_dict(state_dict)
        for group, mine in zip(self.param_groups, options, strict=True):
            for key, value in mine.items():
                group.setdefault(key, value)
        self._names = named(self.model, self.base)
        self._load_own_state(own)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _perturbed_params(self) -> list[PerturbedParam]:
        """The parameters that take part in an ascent now, their groups completed and checked."""
        for group in self.param_groups:
            self._complete(group)
        if any(parameter not in self._names for group in self.param_groups for parameter in group["params"]):
            self._names = named(self.model, self.base)
        return list(perturbed_params(self.base, self._names))

    def _complete(self, group: dict[str, Any]) -> None:
        keys = option_keys(self.base)
        for key in keys.values():
            group.setdefault(key, self.defaults[key])
        check_group(group, keys)
