"""Which weights are perturbed: density per layer over time, and how much of a mask stays in the next."""

from __future__ import annotations

from sparsesam.lab.report.figure import Axis, Figure, Series
from sparsesam.lab.report.names import percent
from sparsesam.lab.report.numbers import Number, number, numbers
from sparsesam.lab.report.section import AnalysisRecord, Cell, ReportData, Section, Table, cells, value


def build(material: ReportData) -> Section:
    rows = material.each("masks", _row)
    blocks: list[Table | Figure] = []
    if rows:
        columns = ["run", "masks", "density", "ever perturbed", "always perturbed", "overlap", "overlap by chance"]
        caption = "Shares of all weights. The overlap is the mean Jaccard index of a mask with the one before."
        blocks.append(Table("masks", caption, columns, rows))
    densities = material.each("masks", _density)
    if densities:
        blocks.append(
            Figure(
                name="mask-density",
                title="Density per layer",
                caption="The share of each parameter’s weights that is perturbed, mask by mask.",
                kind="heatmap",
                x=Axis("step"),
                y=Axis("parameter"),
                z=Axis("density"),
                panels={one.name: [one] for one in densities},
                range_z=(0.0, 1.0),
            )
        )
    overlaps = [one for pair in material.each("masks", _overlap) for one in pair]
    if overlaps:
        caption = (
            "Jaccard index of each mask with the one before; dotted: masks drawn at random with the same densities."
        )
        x, y = Axis("step"), Axis("overlap")
        blocks.append(Figure("mask-overlap", "Overlap", caption, "lines", x, y, {"": overlaps}))
    return Section("masks", "Masks over time", "sparsesam analyze masks RUN… (of runs with masks recorded)", blocks)


def _row(found: AnalysisRecord) -> list[Cell]:
    result = found.result
    densities = numbers(result["density"])
    last = densities[-1] if densities else None
    ever, always = number(result.get("ever")), number(result.get("always"))
    overlap, chance = _mean(numbers(result["overlap"])), _mean(numbers(result["overlap_by_chance"]))
    shares = [value(share, percent(share)) for share in (last, ever, always)]
    shown = [value(one, "–" if one is None else f"{one:.3f}") for one in (overlap, chance)]
    return cells(found.name, value(len(densities), str(len(densities))), *shares, *shown)


def _density(found: AnalysisRecord) -> Series:
    layers = found.result["density_by_layer"]
    steps = numbers(found.result["steps"])
    z = [numbers(line) for line in layers.values()]
    if any(len(line) != len(steps) for line in z):
        raise ValueError(f"density_by_layer must have {len(steps)} numbers per layer, one per mask")
    # Steps are names here: masks are not made at even distances, and each should be as wide as the next.
    names = [f"{step:.0f}" if step is not None else "?" for step in steps]
    return Series(found.name, found.color, names, list(layers), found.number, z=z)


def _overlap(found: AnalysisRecord) -> list[Series]:
    steps = numbers(found.result["steps"])[1:]
    if not steps:
        return []
    overlap, chance = numbers(found.result["overlap"]), numbers(found.result["overlap_by_chance"])
    if not len(steps) == len(overlap) == len(chance):
        raise ValueError(f"{len(overlap)} overlaps and {len(chance)} by chance do not fit {len(steps)} changes of mask")
    return [
        Series(found.name, found.color, steps, overlap, found.number),
        Series(f"{found.name}, by chance", found.color, steps, chance, found.number, faint=True),
    ]


def _mean(values: list[Number]) -> Number:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None
