"""A sweep's runs: named variants, times a grid over any settings, times seeds.

Each run has a directory named by the hash of the settings it uses, so that identical runs are trained once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from sparsesam.lab.experiment.config import TrainConfig, from_mapping, names_of, unused
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.names import check_names, suggestion

_KEYS = ("title", "settings", "variants", "grid", "seeds")


@dataclass(frozen=True)
class Sweep:
    """Variants by label, each a config whose seed is replaced by every one of ``seeds``."""

    title: str
    variants: Mapping[str, TrainConfig]
    seeds: Sequence[int]

    def jobs(self, out: Path) -> list[Job]:
        """Every run, seed by seed, so that an interrupted sweep has complete comparisons."""
        configs = [
            (label, replace(config, seed=seed)) for seed in self.seeds for label, config in self.variants.items()
        ]
        return [Job(label, config, out / config.content_hash) for label, config in configs]


@dataclass(frozen=True)
class Job:
    label: str
    config: TrainConfig
    directory: Path

    @property
    def is_finished(self) -> bool:
        return RunDirectory(self.directory).result.exists()

    @property
    def failure(self) -> str | None:
        """The error of the last attempt."""
        try:
            return str(json.loads((self.directory / "failure.json").read_text())["error"])
        except FileNotFoundError:
            return None

    @property
    def result(self) -> dict[str, Any] | None:
        try:
            result: dict[str, Any] = json.loads(RunDirectory(self.directory).result.read_text())["result"]
        except FileNotFoundError:
            return None
        return result


def read_sweep(file: str | Path, *, overrides: Mapping[str, Any], seeds: int | None) -> Sweep:
    """The sweep in a YAML file, or the one of that name that comes with sparsesam.

        title: SGD and SAM on digits
        settings: {dataset: digits, epochs: 10}         # of all runs
        variants: {SGD: {optimizer: sgd}, SAM: {optimizer: sam}}
        grid: {rho: [0.1, 0.2], batch_size: [32, 64]}   # every combination
        seeds: 3                                        # 0, 1, 2; or a list

    ``overrides`` win over everything in the file; ``seeds`` over its seeds.
    """
    text, name = _read(file)
    try:
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise ValueError("it must contain keys and values, such as `grid: {rho: [0.1, 0.2]}`")
        check_names(content, _KEYS)
        asked = content.get("seeds", 1) if seeds is None else seeds
        chosen = list(range(asked)) if isinstance(asked, int) else list(asked)
        if not chosen:
            raise ValueError(f"seeds must be at least 1, or a list of seeds, got {asked}")
        return Sweep(content.get("title", name), _variants(content, overrides), chosen)
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def _variants(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, TrainConfig]:
    """Every variant with every combination of the grid's values, labelled by the values that distinguish it."""
    settings, grid = content.get("settings") or {}, content.get("grid") or {}
    variants = content.get("variants") or {"": {}}
    for source in (settings, *variants.values(), grid, overrides):
        check_names(source, names_of(TrainConfig))
    for name, values in grid.items():
        if not isinstance(values, list):
            raise ValueError(f"grid must have a list of values for each setting, got {values!r} for {name}")
    axes = [[(name, value) for value in values] for name, values in grid.items()]
    configs: dict[str, TrainConfig] = {}
    for label, own in variants.items():
        for point in itertools.product(*axes):
            config = from_mapping(TrainConfig, {**settings, **dict(point), **own, **overrides})
            without = {*unused(config), *own, *overrides}
            words = [label, *(f"{name} {value}" for name, value in point if name not in without)]
            # Points that differ only in settings which the variant does not use (rho of SGD) are one.
            configs.setdefault(" ".join(word for word in words if word) or "run", config)
    return configs


def _read(file: str | Path) -> tuple[str, str]:
    path = Path(file)
    if path.is_file():
        return path.read_text(), path.stem
    files = (resources.files("sparsesam.lab.experiment") / "sweeps").iterdir()
    packaged = {one.name.removesuffix(".yaml"): one for one in files if one.name.endswith(".yaml")}
    if str(file) in packaged:
        return packaged[str(file)].read_text(), str(file)
    folder = path.parent if path.parent.is_dir() else Path()
    here = sorted(str(one) for suffix in ("*.yaml", "*.yml") for one in folder.glob(suffix))
    raise ValueError(
        f"{file} does not exist: pass a YAML file or a sweep that comes with sparsesam ({', '.join(packaged)})"
        f"{suggestion(str(file), [*here, *packaged])}"
    )
