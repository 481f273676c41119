"""Draws the results of `benchmarks.engine --json`: step cost against the share of perturbed weights, and peak memory.

python -m benchmarks.chart FILE.json -o docs/step-cost.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sparsesam.lab.display import Axis, Figure, assign_styles, write_plot

#: The cases of each family, and the optimizer whose color it has.
FAMILIES = {
    "engine, last layers": (
        ("last block + classifier", "last stage + classifier", "last two stages + classifier"),
        "auto",
    ),
    "engine, last stage, 25 % of the batch": (("last stage, a quarter of the batch",), ""),
    "engine, filters, explicit": (("half the filters, explicit",), "ssam-f"),
    "engine, filters, implicit": (("half the filters, implicit", "a tenth of the filters, implicit"), "ssam-d"),
    "plain SSAM": (("unstructured 50 %, engine off",), ""),
    "SGD": (("SGD",), "sgd"),
    "SAM": (("SAM",), "sam"),
    "pytorch-optimizer SAM": (("pytorch-optimizer SAM",), ""),
    "pytorch-optimizer LookSAM, k=5": (("pytorch-optimizer LookSAM, k=5",), ""),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/step-cost.svg"))
    options = parser.parse_args()
    draw(json.loads(options.measured.read_text()), options.out)
    print(options.out)


def draw(measured: dict[str, Any], out: Path) -> None:
    rows = {row["name"]: row for row in measured["rows"]}
    cost, memory = [], []
    styles = assign_styles([optimizer for _, optimizer in FAMILIES.values()])
    for (label, (names, _)), style in zip(FAMILIES.items(), styles, strict=True):
        family = [rows[name] for name in names if name in rows]
        if not family:
            continue
        x, y = [100 * row["perturbed"] for row in family], [row["median"] for row in family]
        cost.append(style.series(label, x, y, bars=[(row["low"], row["high"]) for row in family]))
        peaks = [row["peak_bytes"] and row["peak_bytes"] / rows["SGD"]["peak_bytes"] for row in family]
        memory.append(style.series(label, x, peaks))
    origin = measured["provenance"]
    title = f"Cost of a step: {origin['cpu']}, {origin['threads']} thread(s), torch {origin['torch']}"
    share, peak = Axis("weights perturbed (%)"), Axis("peak of live bytes, x SGD")
    figures = [
        Figure("step-cost", title, "", share, Axis("time of a step, x SGD"), {"": cost}, "points"),
        Figure("step-memory", "", "", share, peak, {"": memory}, "points"),
    ]
    write_plot(figures, out)


if __name__ == "__main__":
    main()
