"""Curvature: leading eigenvalues, trace, and the density of the whole spectrum."""

from __future__ import annotations

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import significant
from sparsesam.lab.report.numbers import Number, number, numbers
from sparsesam.lab.report.section import AnalysisRecord, Cell, ReportData, Section, Table, cells, value

#: Below this share of its peak the density is that of the Gaussians it is drawn with.
_FLOOR = 1e-6


def build(material: ReportData) -> Section:
    blocks: list[Table | Figure] = []
    for analysis, where in (("hessian", ""), ("hessian-layers", " of some layers")):
        rows = material.each(analysis, _row)
        if rows:
            caption = f"Curvature{where}: a smaller lambda_1 and trace mean a flatter minimum. ± is the standard error."
            columns = ["run", "lambda_1", "lambda_1 / lambda_5", "trace", "weights", "products", "converged"]
            blocks.append(Table(analysis, caption, columns, rows, words=("converged",)))
        eigenvalues = [one for one in material.each(analysis, _eigenvalues) if one.x]
        if eigenvalues:
            caption = f"The largest eigenvalues of the Hessian{where}; bars are estimates of their error."
            x, y = Axis("rank"), Axis("eigenvalue")
            blocks.append(Figure(f"{analysis}-eigenvalues", "Eigenvalues", caption, "points", x, y, {"": eigenvalues}))
        densities = [one for one in material.each(analysis, _density) if one.x]
        if densities:
            caption = (
                f"Density of the eigenvalues{where} by stochastic Lanczos; the further right it reaches, the sharper."
            )
            x, y = Axis("eigenvalue"), Axis("share per unit", log=True)
            blocks.append(Figure(f"{analysis}-density", "Spectral density", caption, "lines", x, y, {"": densities}))
    return Section("hessian", "Hessian", "sparsesam analyze hessian RUN…", blocks)


def _row(found: AnalysisRecord) -> list[Cell]:
    spectrum, trace = found.result.get("eigenvalues") or {}, found.result.get("trace") or {}
    first = next(iter(numbers(spectrum.get("eigenvalues") or [])), None)
    ratio, total, error = number(spectrum.get("ratio")), number(trace.get("trace")), number(trace.get("standard_error"))
    products, converged = number(spectrum.get("products")), spectrum.get("converged")
    size = number(spectrum.get("size") or trace.get("size"))
    return cells(
        found.name,
        value(first, significant(first)),
        value(ratio, significant(ratio)),
        value(total, significant(total) + (f" ± {error:.2g}" if error is not None else "")),
        value(size, "–" if size is None else f"{size:,.0f}"),
        value(products, "–" if products is None else f"{products:.0f}"),
        "–" if converged is None else "yes" if converged else "no",
    )


def _eigenvalues(found: AnalysisRecord) -> Series:
    spectrum = found.result.get("eigenvalues") or {}
    values, errors = numbers(spectrum.get("eigenvalues") or []), numbers(spectrum.get("error_bounds") or [])
    ranks = list(range(1, len(values) + 1))
    return Series(
        found.name, found.color, ranks, values, found.number, error=errors if len(errors) == len(values) else None
    )


def _density(found: AnalysisRecord) -> Series:
    density = found.result.get("density") or {}
    grid, shares = numbers(density.get("grid") or []), numbers(density.get("density") or [])
    if len(grid) != len(shares):
        raise ValueError(f"grid has {len(grid)} points, but density {len(shares)}")
    floor = _FLOOR * max((one for one in shares if one is not None), default=0.0)
    shown: list[Number] = [one if one is not None and one > floor else None for one in shares]
    return Series(found.name, found.color, grid, shown, found.number)
