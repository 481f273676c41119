"""The base class of analyses: options, measurement, and the table and figures of the result."""

from __future__ import annotations

import dataclasses
import json
import time
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from sparsesam.analysis import AnalysisResult
from sparsesam.lab.display import Cell, Figure, Series, SeriesStyle, Table, number_cell, table_of_rows
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_atomically
from sparsesam.lab.inspection.trained_run import EvalSettings, Origin, TrainedRun

Progress = Callable[[int, int], None]
Summary = dict[str, Cell | float | None]
ResultT = TypeVar("ResultT", bound=AnalysisResult)


@dataclass(frozen=True)
class Measured(Generic[ResultT]):
    """A result with the label and style of its run. ``other`` is the label of the second run with ``--between``."""

    label: str
    result: ResultT
    style: SeriesStyle = SeriesStyle()
    other: str = ""

    def series(self, x: Iterable[Any], y: Iterable[Any], *, name: str = "", **options: Any) -> Series:
        """Returns a series in the style of the run, labeled ``name`` or by the run."""
        return self.style.series(name or self.label, x, y, **options)


@dataclass(frozen=True)
class Analysis(ABC, Generic[ResultT]):
    """A dataclass whose fields are the options of ``sparsesam analyze``, generic in the type of its result.

    ``files`` are the possible names of its results in ``RUN/analyses``. With ``uses_checkpoint``, the fields of
    `EvalSettings` are options too.
    """

    help: ClassVar[str]
    title: ClassVar[str]
    caption: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    uses_checkpoint: ClassVar[bool] = True
    argument: ClassVar[tuple[str, str]] = ("RUN", "directory of a run")

    @property
    def name(self) -> str:
        """The name of the result's file."""
        return self.files[0]

    @property
    def options(self) -> dict[str, Any]:
        """The values of the options, by name."""
        return {one.name: getattr(self, one.name) for one in dataclasses.fields(self) if "help" in one.metadata}

    # ---- measuring

    def load_subject(self, path: Path, on: EvalSettings) -> Any:
        """Returns what is measured: by default, the run in a directory."""
        return TrainedRun(path, on)

    def prepare(self, subjects: Sequence[Any]) -> tuple[Analysis[Any], Sequence[Any], Sequence[str]]:
        """Returns the analysis with options shared by all runs, the subjects to measure, and notes on those left out.

        By default all runs use the first one's rho, unless one was given.
        """
        shared = {"rho": subjects[0].config.rho} if getattr(self, "rho", 0.0) is None else {}
        return dataclasses.replace(self, **shared), subjects, ()

    @abstractmethod
    def measure(self, subject: Any, progress: Progress) -> ResultT:
        """Measure one subject; ``progress(done, total)`` is called in between."""

    def measure_and_write(self, subject: Any, progress: Progress = lambda done, total: None) -> ResultT:
        """Measure and write the result with its provenance to ``analyses/NAME.json`` (docs/analyze.md)."""
        start = time.perf_counter()
        result = self.measure(subject, progress)
        seconds, machine = time.perf_counter() - start, provenance()
        made = {"options": self.options, "seconds": seconds, "command": machine["command"], "provenance": machine}
        made = {**self.origin(subject).to_dict(), **made}
        content = {"analysis": self.name, "result": result.to_dict(), "made": made}
        file = subject.path / "analyses" / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content, allow_nan=False) + "\n")
        return result

    def origin(self, subject: Any) -> Origin:
        """Returns the checkpoint and the images that the result was measured on."""
        return subject.origin() if self.uses_checkpoint else Origin(seed=getattr(self, "seed", None))

    # ---- showing

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> ResultT:
        """Build a result from the content of its file; ValueError if the format is wrong."""
        (result_type,) = typing.get_args(cls.__orig_bases__[0])  # type: ignore[attr-defined]
        result: ResultT = result_type.from_dict(content)
        return result

    @classmethod
    @abstractmethod
    def summary(cls, result: ResultT) -> Summary:
        """Returns the values of a result for the table."""

    @classmethod
    def table(cls, name: str, measured: Sequence[Measured[ResultT]]) -> Table:
        rows: dict[str, dict[str, Cell]] = {}
        for one in measured:
            values = cls.summary(one.result).items()
            rows[one.label] = {
                title: value if isinstance(value, Cell) else number_cell(value) for title, value in values
            }
        return table_of_rows(name, cls.caption, rows)

    @classmethod
    @abstractmethod
    def figures(cls, name: str, measured: Sequence[Measured[ResultT]]) -> list[Figure]:
        """Returns figures of all runs together; ``name`` is the name of the results' files."""

    @classmethod
    def notes(cls, measured: Sequence[Measured[ResultT]]) -> list[str]:
        """Returns each note once, with the runs it applies to unless it applies to all."""
        labels: dict[str, dict[str, None]] = {}
        for one in measured:
            for note in one.result.remarks():
                labels.setdefault(note, {})[one.label] = None
        everyone = len({one.label for one in measured})
        return [note if len(of) == everyone else f"{', '.join(of)}: {note}" for note, of in labels.items()]
