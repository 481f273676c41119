"""Draw what `benchmarks.engine --json` measured: step cost against the share of weights perturbed, and peak memory.

python -m benchmarks.chart FILE.json -o docs/step-cost.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FAMILIES = {
    "half the filters, explicit": ("engine, filters, explicit", "#1b6ca8", "s"),
    "half the filters, implicit": ("engine, filters, implicit", "#3fa7d6", "D"),
    "a tenth of the filters, implicit": ("engine, filters, implicit", "#3fa7d6", "D"),
    "last block + classifier": ("engine, last layers", "#0b3954", "o"),
    "last stage + classifier": ("engine, last layers", "#0b3954", "o"),
    "last two stages + classifier": ("engine, last layers", "#0b3954", "o"),
    "last stage, a quarter of the batch": ("engine, last stage, 25 % of the batch", "#087e8b", "*"),
    "unstructured 50 %, engine off": ("plain SSAM", "#c81d25", "v"),
    "SAM": ("SAM", "#000000", "x"),
    "pytorch-optimizer SAM": ("pytorch-optimizer SAM", "#8a8a8a", "+"),
    "pytorch-optimizer LookSAM, k=5": ("pytorch-optimizer LookSAM, k=5", "#8a8a8a", "1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path)
    parser.add_argument("-o", "--out", type=Path, default=Path("docs/step-cost.svg"))
    options = parser.parse_args()
    draw(json.loads(options.measured.read_text()), options.out)
    print(options.out)


def draw(measured: dict[str, Any], out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "sparsesam"
    from matplotlib import pyplot

    rows = {row["name"]: row for row in measured["rows"]}
    with_memory = all(row["peak_bytes"] for row in rows.values())
    figure, axes = pyplot.subplots(1, 1 + with_memory, figsize=(6 + 4 * with_memory, 5), squeeze=False)
    _cost(axes[0][0], rows)
    if with_memory:
        _memory(axes[0][1], rows)
    origin = measured["provenance"]
    machine = f"{origin['cpu']}, {origin['threads']} thread(s), torch {origin['torch']}"
    figure.suptitle(f"Cost of a step, one interleaved run: {machine}", fontsize=10)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None} if out.suffix == ".svg" else None)


def _cost(axis: Any, rows: dict[str, Any]) -> None:
    seen = set()
    for name, (label, color, marker) in FAMILIES.items():
        if name in rows:
            row = rows[name]
            spread = [[row["median"] - row["low"]], [row["high"] - row["median"]]]
            axis.errorbar(
                100 * row["perturbed"],
                row["median"],
                yerr=spread,
                fmt=marker,
                color=color,
                capsize=2,
                markersize=8,
                label=None if label in seen else label,
            )
            seen.add(label)
    axis.axhline(1, color="#8a8a8a", linewidth=0.8)
    axis.annotate("SGD", (1, 1.01), fontsize=8, color="#555555")
    axis.set(xlim=(0, 104), ylim=(0.9, 2.3), xlabel="weights perturbed (%)", ylabel="time of a step, x SGD")
    axis.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=2)
    axis.grid(alpha=0.25)


def _memory(axis: Any, rows: dict[str, Any]) -> None:
    names = [name for name in rows if name in FAMILIES]
    base = rows["SGD"]["peak_bytes"]
    axis.barh(names, [rows[name]["peak_bytes"] / base for name in names], color=[FAMILIES[n][1] for n in names])
    axis.axvline(1, color="#ffffff", linewidth=0.8)
    axis.set(xlabel="peak of live bytes, x SGD", xlim=(0, None))
    axis.tick_params(axis="y", labelsize=7)
    axis.invert_yaxis()


if __name__ == "__main__":
    main()
