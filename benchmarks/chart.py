"""Draw what `benchmarks.engine --json` measured: step cost against the share of weights perturbed, and peak memory.

python -m benchmarks.chart FILE.json -o docs/step-cost.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sparsesam.lab.display import Axis, Figure, SeriesStyle, assign_styles, check_plot, write_plot

FAMILIES = {
    "engine, filters, explicit": ["half the filters, explicit"],
    "engine, filters, implicit": ["half the filters, implicit", "a tenth of the filters, implicit"],
    "engine, last layers": ["last block + classifier", "last stage + classifier", "last two stages + classifier"],
    "engine, last stage, 25 % of the batch": ["last stage, a quarter of the batch"],
    "plain SSAM": ["unstructured 50 %, engine off"],
    "SAM": ["SAM"],
    "pytorch-optimizer SAM": ["pytorch-optimizer SAM"],
    "pytorch-optimizer LookSAM, k=5": ["pytorch-optimizer LookSAM, k=5"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/step-cost.svg"))
    options = parser.parse_args()
    check_plot(options.out)
    write_plot(figures(json.loads(options.measured.read_text())), options.out)
    print(options.out)


def figures(measured: dict[str, Any]) -> list[Figure]:
    """The memory only where it was measured."""
    rows = {row["name"]: row for row in measured["rows"]}
    series = [SeriesStyle("ink").series("SGD", [0, 100], [1, 1], faint=True)]
    for (label, names), style in zip(FAMILIES.items(), assign_styles([""] * len(FAMILIES)), strict=True):
        found = [rows[name] for name in names if name in rows]
        x, bars = [100 * row["perturbed"] for row in found], [(row["low"], row["high"]) for row in found]
        series += [style.series(label, x, [row["median"] for row in found], bars=bars)] if found else []
    origin = measured["provenance"]
    machine = f"{origin['cpu']}, {origin['threads']} thread(s), torch {origin['torch']}"
    title = f"Cost of a step, one interleaved run: {machine}"
    cost = Figure(
        "cost", title, "", Axis("weights perturbed (%)"), Axis("time of a step, x SGD"), {"": series}, "points"
    )
    if not all(row["peak_bytes"] for row in rows.values()):
        return [cost]
    shown = [name for names in FAMILIES.values() for name in names if name in rows]
    peaks = [rows[name]["peak_bytes"] / rows["SGD"]["peak_bytes"] for name in shown]
    panels = {"": [SeriesStyle().series("", shown, peaks)]}
    return [cost, Figure("memory", "Peak memory", "", Axis(""), Axis("peak of live bytes, x SGD"), panels, "bars")]


if __name__ == "__main__":
    main()
