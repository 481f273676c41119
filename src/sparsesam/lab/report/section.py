"""What the page is made of: sections of tables and figures, built from the runs and their analyses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from sparsesam.lab.report.figure import Figure
from sparsesam.lab.report.names import color_of
from sparsesam.lab.report.read_run import Run
from sparsesam.lab.report.variants import Variant

Made = TypeVar("Made")


@dataclass(frozen=True)
class Cell:
    """``order`` is what the column is sorted by, the text itself if there is none. ``status`` gives it a colour."""

    text: str
    order: float | str | None = None
    status: str = ""


@dataclass(frozen=True)
class Table:
    """The first column names the row; columns in ``words`` hold text, all others numbers."""

    name: str
    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Section:
    """Left out if it has no blocks; ``hint`` then says how to have it."""

    name: str
    title: str
    hint: str
    blocks: Sequence[Table | Figure]
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class AnalysisRecord:
    """An analysis of a run, under the name and in the colour that the run has in every figure."""

    run: Run
    name: str
    color: str
    number: int
    result: dict[str, Any]
    made: dict[str, Any]


@dataclass
class ReportData:
    """All that was read. ``problems`` grows by what turns out to be unreadable while sections are built."""

    runs: list[Run]
    variants: list[Variant]
    problems: list[tuple[str, str]] = field(default_factory=list)

    def each(self, analysis: str, make: Callable[[AnalysisRecord], Made]) -> list[Made]:
        """What ``make`` makes of each file of that name; one in another shape is noted, and the others are used."""
        made = []
        for found in self._analyses(analysis):
            try:
                made.append(make(found))
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                told = f"analyses/{analysis}.json is not as docs/analyses.md says: {type(error).__name__}: {error}"
                if (str(found.run.path), told) not in self.problems:
                    self.problems.append((str(found.run.path), told))
        return made

    def name_at(self, path: str) -> str:
        """What the run in that directory is called, or the directory if it is not in this report."""
        for variant in self.variants:
            for run in variant.runs:
                if run.path.resolve() == Path(path).resolve():
                    return variant.name_of(run, self.runs)
        return Path(path).name

    def _analyses(self, analysis: str) -> Iterator[AnalysisRecord]:
        of_run = {run: variant for variant in self.variants for run in variant.runs}
        having = [run for run in dict.fromkeys([*of_run, *self.runs]) if analysis in run.analyses]
        tasks = {of_run[run].task for run in having if run in of_run}
        for run in having:
            variant, content = of_run.get(run), run.analyses[analysis]
            name = run.path.name if variant is None else variant.name_of(run, having)
            if variant is not None and len(tasks) > 1:
                name = f"{name} ({variant.task})"
            made = content.get("made")
            yield AnalysisRecord(
                run=run,
                name=name,
                color=color_of(variant.optimizer if variant else ""),
                number=variant.number if variant else 0,
                result=content["result"],
                made=made if isinstance(made, dict) else {},
            )


def cells(*texts: str | Cell) -> list[Cell]:
    return [text if isinstance(text, Cell) else Cell(text) for text in texts]


def value(number: float | None, text: str) -> Cell:
    """A cell that sorts by its number, the missing ones last."""
    return Cell(text, order=number)
