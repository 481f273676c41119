"""The names of tasks and variants on the page: their settings, without those that are the same for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparsesam.lab.display.figure import OPTIMIZERS
from sparsesam.lab.experiment.config import DEFAULTS, TrainConfig

#: Settings that define a task, besides data set and model: accuracies are compared only if these agree.
TASK = ("train_size", "val_size", "test_size", "image_size", "label_noise", "corruption", "corruption_rate")


def task_label(config: TrainConfig) -> str:
    changed = changed_settings(config)
    return ", ".join([config.dataset, config.model, *(_named(name, changed[name]) for name in TASK if name in changed)])


def variant_label(config: TrainConfig, others: Sequence[TrainConfig]) -> str:
    """Returns the optimizer and every non-default setting that is not shared by its other variants."""
    differing = differing_settings([other for other in others if other.optimizer == config.optimizer])
    named = [_named(name, value) for name, value in changed_settings(config).items() if name in differing]
    return ", ".join([OPTIMIZERS[config.optimizer][0], *named])


def unique(names: Sequence[str]) -> list[str]:
    """Number repeated names; two sweeps may use the same name."""
    counts = [names[:place].count(name) for place, name in enumerate(names)]
    return [f"{name}, {count + 1}" if count else name for name, count in zip(names, counts, strict=True)]


def differing_settings(configs: Sequence[TrainConfig]) -> list[str]:
    """Returns the settings that are not the same in all configs."""
    return [name for name in DEFAULTS if name != "seed" and len({getattr(config, name) for config in configs}) > 1]


def changed_settings(config: TrainConfig) -> dict[str, Any]:
    """Returns the settings that are not at their defaults."""
    settings = {name: getattr(config, name) for name in DEFAULTS if name != "seed"}
    return {name: value for name, value in settings.items() if value != DEFAULTS[name]}


def show_setting(value: Any) -> str:
    """Format a setting's value briefly."""
    if isinstance(value, (tuple, list)):
        return ", ".join(map(show_setting, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _named(name: str, value: Any) -> str:
    return f"{name.replace('_', ' ')} {show_setting(value)}"
