"""The names of tasks and variants on the page: their settings, without those that are the same for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsesam.lab.display.figure import OPTIMIZERS
from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig

#: Settings that define a task, besides data set and model: accuracies are compared only if these agree.
TASK = ("train_size", "val_size", "test_size", "image_size", "label_noise", "corruption", "corruption_rate")
#: Runs are ranked only if these agree too.
LENGTH = ("epochs", "max_steps")


def task_label(config: TrainConfig) -> str:
    changed = changed_settings(config)
    others = [setting_name(name, changed[name]) for name in TASK if name in changed]
    return ", ".join([config.dataset, config.model, *others])


def variant_label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the optimizer with its length, if others differ in it, and every non-default setting that is not shared
    by its other variants.
    """
    lengths = [name for name in differing_settings(others) if name in LENGTH]
    differing = differing_settings([other for other in others if other.optimizer == config.optimizer])
    named = {name: getattr(config, name) for name in lengths if getattr(config, name) is not None}
    named |= {name: value for name, value in changed_settings(config).items() if name in differing}
    return ", ".join([OPTIMIZERS[config.optimizer][0], *(setting_name(*setting) for setting in named.items())])


def length_label(config: TrainConfig) -> str:
    known = {name: value for name in LENGTH if (value := getattr(config, name)) is not None}
    return ", ".join(setting_name(*setting) for setting in known.items()).capitalize()


def unique(names: Sequence[str], separator: str) -> list[str]:
    """Number repeated names; two sweeps may use the same name."""
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}{separator}{count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


def differing_settings(configs: Sequence[TrainConfig]) -> list[str]:
    """Returns the settings that are not the same in all configs."""
    return [name for name in DEFAULTS if name != "seed" and len({getattr(config, name) for config in configs}) > 1]


def changed_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that are not at their defaults."""
    settings = {name: getattr(config, name) for name in DEFAULTS if name != "seed"}
    return {name: value for name, value in settings.items() if value != DEFAULTS[name]}


def setting_name(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show_setting(value)}"


def show_setting(value: Any) -> str:
    """Format a setting's value briefly."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (tuple, list)):
        return ", ".join(map(show_setting, value))
    return "none" if value is None else str(value)
