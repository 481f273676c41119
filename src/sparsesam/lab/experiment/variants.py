"""Variants, runs that differ only in their seed: means with intervals, significant differences, curves and costs."""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from sparsesam.lab.display import Cell, Number, Series, SeriesStyle, Table, number_cell, percent, ratio, table_of_rows
from sparsesam.lab.experiment.config import TrainConfig

if TYPE_CHECKING:
    from sparsesam.lab.experiment.calibration import SweepCalibration

#: Two seeds give an interval of 12.7 standard errors, which says nothing; they have none here and are not ranked.
MIN_SEEDS = 3
Key = TypeVar("Key")
Item = TypeVar("Item")


class Run(Protocol):
    """A run of a sweep, or one that was read for the report; ``measured`` is a number of its result, if it has one."""

    @property
    def seed(self) -> int | None: ...
    @property
    def status(self) -> str: ...
    def measured(self, name: str) -> Number: ...


RunT = TypeVar("RunT", bound=Run)


def grouped(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Returns the items of each key, in their order."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


@dataclass(frozen=True, eq=False)
class Variant(Generic[RunT]):
    """``runs`` have distinct seeds; ``style`` is the same in every figure."""

    label: str
    config: TrainConfig
    runs: Sequence[RunT]
    style: SeriesStyle = field(default_factory=SeriesStyle)

    @property
    def finished(self) -> list[RunT]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def seeds(self) -> str:
        """How many of its runs are finished: "3", or "2 of 3, 1 failed"."""
        finished, failed = len(self.finished), sum(run.status == "failed" for run in self.runs)
        done = str(finished) if finished == len(self.runs) else f"{finished} of {len(self.runs)}"
        return f"{done}, {failed} failed" if failed else done

    @property
    def accuracy(self) -> Number:
        return self.mean("test_accuracy")

    @property
    def accuracies(self) -> dict[int, float]:
        return self.by_seed("test_accuracy")

    @property
    def accuracy_text(self) -> str:
        return percent(self.accuracy, half_width(list(self.accuracies.values())))

    def mean(self, measure: str) -> Number:
        values = self.by_seed(measure).values()
        return statistics.fmean(values) if values else None

    def by_seed(self, measure: str) -> dict[int, float]:
        known = {run.seed: run.measured(measure) for run in self.runs}
        return {seed: value for seed, value in known.items() if seed is not None and value is not None}


def half_width(values: Sequence[float]) -> float | None:
    """Returns half the width of the 95 % interval of the mean, t_{n-1} s / √n; None for fewer than three values."""
    if len(values) < MIN_SEEDS:
        return None
    from scipy.special import stdtrit  # takes a tenth of a second, which `--help` should not

    return float(stdtrit(len(values) - 1, 0.975)) * statistics.stdev(values) / math.sqrt(len(values))


def confidence_interval(values: Sequence[float], highest: float) -> tuple[float, float] | None:
    """Returns the 95 % interval of the mean, clipped to the possible values, from 0 to ``highest``."""
    if (width := half_width(values)) is None:
        return None
    mean = statistics.fmean(values)
    return max(0.0, mean - width), min(highest, mean + width)


def differ(first: Mapping[int, float], second: Mapping[int, float]) -> bool | None:
    """Whether the 95 % interval of the difference of the means excludes 0; None for fewer than three seeds.

    Runs with the same seed share initial weights, batches and noise, so differences are taken seed by seed; with fewer
    than three common seeds, by Welch's test over all seeds.
    """
    differences = [first[seed] - second[seed] for seed in first if seed in second]
    if (width := half_width(differences)) is not None:
        return abs(statistics.fmean(differences)) > width
    if min(len(first), len(second)) < MIN_SEEDS:
        return None
    from scipy import stats

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # for a variance of 0
        return bool(stats.ttest_ind(list(first.values()), list(second.values()), equal_var=False).pvalue < 0.05)


def rank(values: Mapping[Key, Mapping[int, float]], *, highest: bool = True) -> list[Key]:
    """Returns the variant with the best mean over its seeds, then those that do not differ significantly from it.

    Nothing unless two variants have at least three seeds.
    """
    means = {key: statistics.fmean(of.values()) for key, of in values.items() if len(of) >= MIN_SEEDS}
    if len(means) < 2:
        return []
    best = (max if highest else min)(means, key=means.__getitem__)
    return [best, *(key for key in means if key != best and not differ(values[key], values[best]))]


def mean_curve(
    style: SeriesStyle, name: str, curves: Sequence[Mapping[Any, float]], *, highest: float = math.inf
) -> Series:
    """Returns the mean over the runs that have a value at each x, with its 95 % interval from three runs on."""
    places = sorted({x for curve in curves for x in curve})
    values = [[curve[x] for curve in curves if x in curve] for x in places]
    bars = [confidence_interval(at_x, highest) for at_x in values]
    return style.series(name, places, map(statistics.fmean, values), bars=bars if any(bars) else None)


@dataclass(frozen=True)
class Costs:
    """``values`` are the costs of a run in units of ``reference``; ``explanation`` says how they were measured."""

    measure: Literal["time", "passes"]
    reference: str
    explanation: str
    values: Mapping[Variant[Any], Number]

    def show(self, variant: Variant[Any]) -> str:
        return f"{ratio(self.values[variant])} × {self.reference}’s {self.measure}"


def costs_of(variants: Sequence[Variant[Any]], calibrations: Iterable[SweepCalibration]) -> Costs:
    """Returns times if one calibration measured all finished variants; otherwise forward-backward passes."""
    for calibration in calibrations:
        seconds = {variant: calibration.seconds_per_epoch(variant.config) for variant in variants}
        has_plain = any(variant.config.is_plain and seconds[variant] for variant in variants)
        if has_plain and all(seconds[variant] for variant in variants if variant.finished):
            where = f" on {cpu}" if (cpu := calibration.provenance.get("cpu")) else ""
            how = f"Cost is time, including masks: all variants were measured together, interleaved{where}."
            return _relative("time", how, seconds)
    counted = {variant: variant.by_seed("forward_backwards_per_step").values() for variant in variants}
    passes = {variant: statistics.median(values) if values else None for variant, values in counted.items()}
    how = "Cost is counted in forward-backward passes, including masks, not in time: these runs were not measured"
    return _relative("passes", f"{how} together.", passes)


def _relative(measure: Literal["time", "passes"], explanation: str, costs: Mapping[Variant[Any], Number]) -> Costs:
    """Convert costs per epoch or step to costs of whole runs, in units of the first plain variant's.

    Without one, passes are counted in those of a plain run as long as the shortest.
    """
    plain = next((variant for variant, cost in costs.items() if variant.config.is_plain and cost), None)
    epochs = {variant: variant.mean("epochs") or variant.config.epochs for variant in costs}
    unit = min(epochs.values(), default=1.0) if plain is None else (costs[plain] or 1.0) * epochs[plain]
    values = {variant: cost and cost * epochs[variant] / unit for variant, cost in costs.items()}
    return Costs(measure, "a plain run" if plain is None else plain.label, explanation, values)


def results_table(variants: Sequence[Variant[Any]], costs: Costs) -> Table:
    """Returns a row per variant: means over its finished seeds, and its cost, beside its budget if any has one."""
    has_budget, rows = any(variant.config.has_budget for variant in variants), {}
    for variant in variants:
        budget = variant.config.budget if variant.config.has_budget else None
        rows[variant.label] = {
            "test accuracy": Cell(variant.accuracy_text, order=variant.accuracy),
            f"{costs.measure} / {costs.reference}": number_cell(costs.values[variant], ratio),
            **({"budget": budget} if has_budget else {}),
            "sparsity": variant.mean("sparsity"),
            "seeds": Cell(variant.seeds, order=len(variant.finished)),
        }
    caption = "Means over the finished seeds, in the last epoch; ±: 95 % interval of the mean, from three seeds on."
    return table_of_rows("accuracy", caption, "variant", rows)
