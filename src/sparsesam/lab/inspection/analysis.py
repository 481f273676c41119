"""The base of all analyses: one class each, from options and measurement to the table and figures of the result."""

from __future__ import annotations

import dataclasses
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

from sparsesam.analysis import AnalysisResult
from sparsesam.lab.display import Cell, Figure, Series, SeriesStyle, Table, table_of_rows
from sparsesam.lab.experiment.provenance import provenance
from sparsesam.lab.experiment.run_directory import write_atomically
from sparsesam.lab.inspection.trained_run import EvalSettings, Origin, TrainedRun

Progress = Callable[[int, int], None]
ResultT = TypeVar("ResultT", bound=AnalysisResult)


@dataclass(frozen=True)
class Measured(Generic[ResultT]):
    """A result with the label and style of its run. ``other`` labels the second run of a line between two."""

    label: str
    result: ResultT
    style: SeriesStyle = SeriesStyle()
    other: str = ""

    def series(self, x: Iterable[Any], y: Iterable[Any], *, name: str = "", **options: Any) -> Series:
        """In the style of its run, under its label unless another ``name`` is given."""
        return self.style.series(name or self.label, x, y, **options)


class Prepared(NamedTuple):
    """The analysis with what its runs must share, what to measure, and why something was left out."""

    analysis: Analysis[Any]
    subjects: Sequence[Any]
    notes: Sequence[str] = ()


class Analysis(ABC, Generic[ResultT]):
    """A dataclass whose fields are the options of ``sparsesam analyze``.

    ``files`` are the names that its results may have in ``RUN/analyses``. With ``uses_checkpoint``, the fields of
    `EvalSettings` are options too.
    """

    help: ClassVar[str]
    title: ClassVar[str]
    caption: ClassVar[str]
    files: ClassVar[tuple[str, ...]]
    result_type: ClassVar[type[AnalysisResult]]
    uses_checkpoint: ClassVar[bool] = True
    argument: ClassVar[tuple[str, str]] = ("RUN", "directory of a run")

    @property
    def name(self) -> str:
        """The name of the result's file."""
        return self.files[0]

    # ---- measuring

    def load_subject(self, path: Path, on: EvalSettings) -> Any:
        """What is measured: by default, the run in a directory."""
        return TrainedRun(path, on)

    def prepare(self, subjects: Sequence[Any]) -> Prepared:
        """Runs are compared at one rho: that of the first, unless one was given."""
        analysis: Any = self
        if getattr(analysis, "rho", 0.0) is None:
            analysis = dataclasses.replace(analysis, rho=subjects[0].config.rho)
        return Prepared(analysis, subjects)

    @abstractmethod
    def measure(self, subject: Any, progress: Progress) -> ResultT:
        """The result for one subject; ``progress(done, total)`` is called in between."""

    def measure_and_write(self, subject: Any, progress: Progress = lambda done, total: None) -> ResultT:
        """Measure, and write the result with its provenance to ``analyses/NAME.json`` (docs/analyze.md)."""
        start = time.perf_counter()
        result = self.measure(subject, progress)
        seconds, machine = time.perf_counter() - start, provenance()
        made = {
            **self.origin(subject).to_dict(),
            "options": options_of(self),
            "seconds": seconds,
            "command": machine["command"],
            "provenance": machine,
        }
        content = {"analysis": self.name, "result": result.to_dict(), "made": made}
        file = subject.path / "analyses" / f"{self.name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, json.dumps(content, allow_nan=False) + "\n")
        return result

    def origin(self, subject: Any) -> Origin:
        """Which checkpoint and which images the result was measured on."""
        return subject.origin() if self.uses_checkpoint else Origin(seed=getattr(self, "seed", None))

    # ---- showing

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> ResultT:
        """A result from its file; ValueError if it has another shape."""
        return cast(ResultT, cls.result_type.from_dict(content))

    @classmethod
    @abstractmethod
    def summary(cls, result: ResultT) -> dict[str, Cell]:
        """The few values of a result that the table shows."""

    @classmethod
    def table(cls, name: str, measured: Sequence[Measured[ResultT]]) -> Table:
        return table_of_rows(name, cls.caption, {one.label: cls.summary(one.result) for one in measured})

    @classmethod
    @abstractmethod
    def figures(cls, name: str, measured: Sequence[Measured[ResultT]]) -> list[Figure]:
        """All runs together; ``name`` is that of the results' files."""

    @classmethod
    def notes(cls, measured: Sequence[Measured[ResultT]]) -> list[str]:
        """What a reader must know, each note once, with the runs that it is about unless it is about all."""
        labels: dict[str, dict[str, None]] = {}
        for one in measured:
            for note in one.result.remarks():
                labels.setdefault(note, {})[one.label] = None
        everyone = len({one.label for one in measured})
        return [note if len(of) == everyone else f"{', '.join(of)}: {note}" for note, of in labels.items()]


def options_of(settings: Any) -> dict[str, Any]:
    """The values of an analysis's options, by name."""
    return {one.name: getattr(settings, one.name) for one in dataclasses.fields(settings) if "help" in one.metadata}
