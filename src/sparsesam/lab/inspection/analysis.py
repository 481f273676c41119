"""The base class of analyses: options, measurement, and the table and figures of the result."""

from __future__ import annotations

import dataclasses
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress

from sparsesam.analysis import AnalysisResult, ProgressCallback
from sparsesam.lab.display import Cell, Figure, Series, SeriesStyle, Table, table_of_rows
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import seal, write_atomically
from sparsesam.lab.experiment.setting_types import option
from sparsesam.lab.experiment.variants import grouped
from sparsesam.lab.inspection.trained_run import TrainedRun

Summary = dict[str, Cell | str | float | None]
#: The analysis with shared options, the runs to measure, and notes on those left out.
Prepared = tuple["Analysis[Any]", Sequence[TrainedRun], Sequence[str]]
ResultT = TypeVar("ResultT", bound=AnalysisResult)
MeasureT = TypeVar("MeasureT")


@dataclass(frozen=True)
class LabeledResult(Generic[ResultT]):
    """A result with the label and style of its run."""

    label: str
    result: ResultT
    style: SeriesStyle = SeriesStyle()

    def series(self, x: Iterable[Any], y: Iterable[Any], *, name: str = "", **options: Any) -> Series:
        """Returns a series in the style of the run, labeled ``name`` or by the run."""
        return self.style.series(name or self.label, x, y, **options)


@dataclass(frozen=True)
class Analysis(ABC, Generic[ResultT]):
    """A dataclass whose fields are the options of ``sparsesam analyze``, generic in the type of its result.

    ``files`` are the possible names of its results in ``RUN/analyses``, ``needs`` is what it measures: the weights of a
    run, only its records, or nothing, so that any directory can hold the result.
    """

    help: ClassVar[str]
    title: ClassVar[str]
    caption: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    result_type: ClassVar[type[AnalysisResult]]
    needs: ClassVar[Literal["weights", "run", "nothing"]] = "weights"

    @property
    def name(self) -> str:
        """The name of the result's file."""
        return self.files[0]

    @property
    def options(self) -> dict[str, Any]:
        """The values of the options, by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.metadata}

    # ---- measuring

    def prepare(self, runs: Sequence[TrainedRun]) -> Prepared:
        return self, runs, ()

    @abstractmethod
    def measure(self, run: TrainedRun, progress: ProgressCallback) -> ResultT:
        """Measure one run; ``progress(done, total)`` is called in between."""

    def origin(self, run: TrainedRun) -> dict[str, Any]:
        """Returns the checkpoint and the images that the result is measured on."""
        return run.origin() if self.needs == "weights" else {}

    def measure_and_write(self, run: TrainedRun) -> ResultT:
        """Measure, with a progress bar in a terminal, and write the result with its provenance to
        ``analyses/NAME.json`` (docs/analyze.md).
        """
        console, start = Console(stderr=True, highlight=False), time.perf_counter()
        with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
            task = bar.add_task(escape(f"{self.name} of {run.path}"), total=None)
            result = self.measure(run, lambda done, total: bar.update(task, completed=done, total=total))
        seconds, machine = time.perf_counter() - start, provenance()
        made = {"options": self.options, "seconds": seconds, "command": machine["command"], "provenance": machine}
        made, identity = {**self.origin(run), **made}, None if self.needs == "nothing" else run.config.identity
        content = {"analysis": self.name, "result": result.to_dict(), "made": made, "run": identity}
        file = run.directory.analyses / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(seal(content), allow_nan=False) + "\n")
        return result

    # ---- showing

    @classmethod
    @abstractmethod
    def summary(cls, result: ResultT) -> Summary:
        """Returns the values of a result for the table."""

    @classmethod
    def table(cls, name: str, results: Sequence[LabeledResult[ResultT]]) -> Table:
        return table_of_rows(name, cls.caption, "run", {run.label: cls.summary(run.result) for run in results})

    @classmethod
    @abstractmethod
    def figures(cls, name: str, results: Sequence[LabeledResult[ResultT]]) -> list[Figure]:
        """Returns figures of all runs together; ``name`` is the name of the results' files."""

    @classmethod
    def notes(cls, results: Sequence[LabeledResult[ResultT]]) -> list[str]:
        """Returns each note once, with the runs it applies to unless it applies to all."""
        pairs = [(note, run.label) for run in results for note in run.result.remarks()]
        labels = {note: [label for _, label in found] for note, found in grouped(pairs, lambda pair: pair[0]).items()}
        return [note if len(of) == len(results) else f"{', '.join(of)}: {note}" for note, of in labels.items()]


@dataclass(frozen=True)
class RadiusAnalysis(Analysis[ResultT]):
    """An analysis within ``rho`` of the weights. All runs use the first one's rho, unless one is given."""

    rho: float | None = option(None, "norm of the perturbation; default the first run's")

    def prepare(self, runs: Sequence[TrainedRun]) -> Prepared:
        rho = runs[0].config.rho if self.rho is None else self.rho
        return dataclasses.replace(self, rho=rho), runs, ()


@dataclass(frozen=True)
class LayerAnalysis(Analysis[ResultT]):
    """An analysis of all parameters or, with ``layers``, of some; the latter's result is ``NAME-layers.json``."""

    layers: str | None = option(None, "only parameters whose names match a pattern, such as 'layer4.*,fc.*'")

    @property
    def name(self) -> str:
        return self.files[0] if self.layers is None else self.files[1]

    @classmethod
    def title_of(cls, title: str, name: str) -> str:
        """Returns the title of a figure of the results in ``NAME.json``."""
        return f"{title}, some layers" if name == cls.files[1] else title


def every_and_masked(
    run: TrainedRun, progress: ProgressCallback, measure: Callable[..., MeasureT]
) -> tuple[MeasureT, MeasureT | None]:
    """Returns ``measure()`` for every weight and ``measure(masks=masks)``, None if the masks keep no weight."""
    every, masks = measure(), run.masks or {}
    progress(1, 2)
    return every, measure(masks=masks) if any(bool(mask.any()) for mask in masks.values()) else None
