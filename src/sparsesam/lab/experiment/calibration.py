"""Comparable times for the variants of a sweep, whose runs take place at different times and in parallel: before it,
the variants take a few steps each, interleaved, for several rounds; the times are in ``calibration.json`` beside the
runs.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from sparsesam.lab.data import FolderSplits, Splits
from sparsesam.lab.experiment.batches import load_splits
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.errors import DivergedError, RunError
from sparsesam.lab.experiment.process import torch_settings
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.result import Sums
from sparsesam.lab.experiment.run_directory import read_json, write_json
from sparsesam.lab.experiment.sweep import Job
from sparsesam.lab.experiment.variants import grouped

FILE = "calibration.json"
ROUNDS = 5
#: The round of one variant ends after this many steps or seconds.
ROUND_STEPS, ROUND_SECONDS = 20, 0.15


@dataclass(frozen=True)
class VariantTime:
    """``seconds_per_step`` has one value per round, without mask refreshes; ``seconds_per_epoch`` is from the medians,
    including mask refreshes and averaged with the epochs before ``ascent_start``.
    """

    label: str
    seconds_per_step: list[float]
    seconds_per_mask: float | None
    seconds_per_epoch: float
    epochs: int


@dataclass(frozen=True)
class SweepCalibration:
    """Times by the ``content_hash`` of the config with seed 0."""

    variants: Mapping[str, VariantTime]
    provenance: Mapping[str, Any]

    def seconds_per_epoch(self, config: TrainConfig) -> float | None:
        return getattr(self.variants.get(config.variant.content_hash), "seconds_per_epoch", None)

    def fits(self, configs: Sequence[TrainConfig]) -> bool:
        """Whether it contains all configs, measured on the same kind of machine with the same versions."""
        current = provenance()
        same = all(self.provenance.get(name) == current[name] for name in ("cpu", "machine", "torch", "sparsesam"))
        return same and all(config.variant.content_hash in self.variants for config in configs)


def read_calibration(folder: Path) -> SweepCalibration | None:
    """Read the calibration beside the runs in ``folder``; None if there is none, ValueError if it cannot be read."""
    try:
        content = read_json(folder / FILE)
        if content is None:
            return None
        variants = {name: VariantTime(**values) for name, values in content["variants"].items()}
        return SweepCalibration(variants, dict(content["provenance"]))
    except (AttributeError, KeyError, TypeError, ValueError, RunError) as error:
        raise ValueError(f"{FILE} is not a calibration of this version of sparsesam ({error}); delete it") from error


def calibrate(jobs: Sequence[Job], environment: RunEnvironment, folder: Path) -> SweepCalibration:
    """Measure every variant of the jobs and write ``calibration.json``; invalid settings of a variant raise here."""
    load = cache(partial(load_splits, environment=environment))
    variants = {name: same[0] for name, same in grouped(jobs, lambda job: job.config.variant.content_hash).items()}
    steppers: dict[str, list[_Stepper]] = {}
    with torch_settings(environment.threads or 1):
        for name, job in variants.items():
            config = replace(job.config, seed=0)
            # Before `ascent_start` a variant takes plain steps.
            phases = [config, replace(config, optimizer=config.base)] if config.canonical.ascent_start else [config]
            try:
                splits = load(TrainConfig(dataset=config.dataset, image_size=config.image_size))
                steppers[name] = [_Stepper(phase, splits, environment) for phase in phases]
            except (ImportError, TypeError, ValueError) as error:
                raise type(error)(f"{job.label}: {error}") from error
        for _ in range(1 + ROUNDS):
            for name in list(steppers):
                try:
                    for stepper in steppers[name]:
                        stepper.take_round()
                except DivergedError:  # its run will report it
                    del steppers[name]
        times = {name: _time_of(variants[name], *phases) for name, phases in steppers.items()}
        found = SweepCalibration(times, provenance())
    write_json(folder / FILE, {"kind": "calibration", **asdict(found)})
    return found


class _Stepper:
    """Takes the steps of one variant, a round at a time."""

    def __init__(self, config: TrainConfig, splits: Splits | FolderSplits, environment: RunEnvironment) -> None:
        from sparsesam.lab.experiment.run import make_fabric, make_training

        # No mask refreshes after the first, except where `take_round` requests them.
        endless = replace(config, epochs=10**6, max_steps=None, ascent_start=0.0, mask_epochs=10**6, mask_steps=None)
        self.training = make_training(endless, splits, make_fabric(endless, environment), environment)
        if self.training.fabric.device.type == "cpu" and torch.get_num_threads() == 1:
            self.training.clock = time.process_time  # excludes time taken by other processes
        self.every = 1 if config.is_plain else config.ascent_every
        self.rounds: list[float] = []
        self.masks: list[float] = []

    def take_round(self) -> None:
        """Take a round of steps, then the steps with a mask refresh."""
        seconds, steps = self._take(ROUND_STEPS, ROUND_SECONDS)
        self.rounds.append(seconds / steps)
        if getattr(self.training.optimizer, "mask", None) is not None:
            self.training.optimizer.refresh_mask()  # type: ignore[attr-defined]
            seconds, steps = self._take(1)
            self.masks.append(max(0.0, seconds - steps * self.rounds[-1]))

    def _take(self, count: int, limit: float = math.inf) -> tuple[float, int]:
        """Take ``count`` times ``every`` steps, fewer after ``limit`` seconds; returns seconds and number of steps."""
        training, first = self.training, self.training.steps_taken
        training.sums = Sums()

        def done() -> bool:
            taken = training.steps_taken - first
            is_enough = taken >= count * self.every or training.sums.seconds >= limit
            return taken > 0 and taken % self.every == 0 and is_enough

        while not done():
            training.advance(done)  # reads the loss at the end, which synchronizes with a GPU
        return training.sums.seconds, training.steps_taken - first


def _time_of(job: Job, stepper: _Stepper, plain: _Stepper | None = None) -> VariantTime:
    config, steps, rounds = job.config, stepper.training.batches.steps, stepper.rounds[1:]  # the first is a warm-up
    per_mask = statistics.median(stepper.masks[1:]) if stepper.masks else None
    whole = steps * statistics.median(rounds) + (per_mask or 0.0) * steps / config.steps_between_masks(steps)
    if plain is not None:
        share = min(1.0, config.ascent_start / config.epochs)
        whole = share * steps * statistics.median(plain.rounds[1:]) + (1 - share) * whole
    return VariantTime(job.label, rounds, per_mask, whole, config.epochs)
