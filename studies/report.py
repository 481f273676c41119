"""Writes the tables and the chart of the studies: ``python -m studies.report``.

Reads the records; writes results.md beside this file, docs/accuracy-cost.svg, and the tables of docs/study.md.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from sparsesam.lab.display import Axis, Figure, Series, assign_styles, write_plot
from studies.plan import HERE, Record, read_task, task_names
from studies.run import read
from studies.statistics import Mean, paired, verdict

DOCS = HERE.parent / "docs"
STRENGTHS = ("rho", "ema")
#: (claim of the paper, the better, the worse, points within which they count as equal)
CLAIMS: list[tuple[str, str, str, float | None]] = [
    ("SAM > SGD", "SAM", "SGD", None),
    ("SSAM-F 50 % = SAM, within 1 point", "SSAM-F 50 %", "SAM", 1.0),
    ("Fisher > random, 50 %", "SSAM-F 50 %", "random 50 %", None),
    ("SSAM-F 90 % > SGD", "SSAM-F 90 %", "SGD", None),
    ("Fisher > random, 90 %", "SSAM-F 90 %", "random 90 %", None),
    ("Fisher > random, 99 %", "SSAM-F 99 %", "random 99 %", None),
    ("drop flattest > random", "SSAM-D 90 %, drop flattest", "SSAM-D 90 %, drop random", None),
    ("drop random > sharpest", "SSAM-D 90 %, drop random", "SSAM-D 90 %, drop sharpest", None),
    ("2:4 = filters, within 1 point", "SSAM-F 2:4", "SSAM-F filters 50 %", 1.0),
    ("implicit = explicit, within 1 point", "SSAM-F 2:4, implicit", "SSAM-F 2:4", 1.0),
]
#: The optimizers whose colors methods have in the chart; other methods have the colors left.
COLORS = {"SGD": "sgd", "SAM": "sam", "SSAM-F 50 %": "ssam-f", "extrapolation": "auto"}


def point(record: Record) -> str:
    """Returns the settings of a run, except for seed and images."""
    return str({name: value for name, value in sorted(record["settings"].items()) if name not in ("seed", "dataset")})


class Method:
    """The runs of a method on a task: its trials on validation images, and the tested runs of the best of them."""

    def __init__(self, records: list[Record]) -> None:
        groups: dict[str, dict[str, list[Record]]] = {"tune": defaultdict(list), "final": defaultdict(list)}
        for record in records:
            groups[record["stage"]][point(record)].append(record)
        self.trials = groups["tune"].values()

        def quality(settings: str) -> tuple[int, float]:
            trials = groups["tune"].get(settings, [])
            return len(trials), fmean(trial["accuracy"] for trial in trials) if trials else 0.0

        # If a search was extended, the best settings of before have been tested too.
        self.runs = groups["final"][max(groups["final"], key=quality)] if groups["final"] else []
        self.accuracy = {run["settings"]["seed"]: 100 * run["accuracy"] for run in self.runs}

    @property
    def mean(self) -> Mean:
        return Mean.of(list(self.accuracy.values()))

    @property
    def passes(self) -> float:
        return fmean(run["passes"] for run in self.runs)

    @property
    def epochs(self) -> float:
        return float(self.runs[0]["settings"]["epochs"])

    @property
    def cost(self) -> float:
        """Forward-backward passes over the training images, in the whole training."""
        return self.passes * self.epochs

    @property
    def tuned(self) -> str:
        settings = self.runs[0]["settings"]
        names = ("epochs", "weight_decay", *STRENGTHS)
        shown = {name: settings[name] for name in names if settings.get(name) is not None}
        return ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in shown.items())

    def best_by(self, name: str) -> str:
        """Returns the highest validation accuracy at each value of a setting, over all others."""
        best: dict[float, float] = defaultdict(float)
        for trials in self.trials:
            value = trials[0]["settings"].get(name)
            if value is not None:
                best[value] = max(best[value], fmean(trial["accuracy"] for trial in trials))
        return ", ".join(f"{value:g}: {100 * best[value]:.1f}" for value in sorted(best))


class Results:
    """The methods of a task whose test is complete, those of least cost first."""

    def __init__(self, name: str, records: list[Record], times: dict[str, float]) -> None:
        self.name, self.times = name, times
        by_method: dict[str, list[Record]] = defaultdict(list)
        for record in records:
            if record["method"]:
                by_method[record["method"]].append(record)
        self.all = {method: Method(own) for method, own in by_method.items()}
        content: Mapping[str, Any] = read_task(name).content if name in task_names() else {"title": name, "seeds": 1}
        tested = [(method, own) for method, own in self.all.items() if len(own.accuracy) >= content["seeds"]]
        self.methods = dict(sorted(tested, key=lambda item: item[1].cost))
        self.title = str(content["title"])

    def against(self, method: str, other: str) -> str:
        if method == other or other not in self.methods:
            return "–"
        return str(paired(self.methods[method].accuracy, self.methods[other].accuracy))

    def cost(self, method: str) -> str:
        """Returns the cost of the whole training in epochs of SGD, counted, and timed if it was."""
        own = self.methods[method]
        timed = f" ({self.times[method] * own.epochs:.0f})" if method in self.times else ""
        return f"{own.cost:.0f}{timed}"

    def time(self, method: str) -> str:
        return f"{self.times[method]:.2f}" if method in self.times else "–"


def load(folder: Path) -> list[Results]:
    times: dict[str, dict[str, float]] = {record["task"]: record["cost"] for record in read(folder / "cost.jsonl")}
    records: dict[str, list[Record]] = defaultdict(list)
    for file in sorted(folder.glob("*.jsonl")):
        if file.stem != "cost":
            records[file.stem.removesuffix("-masks")] += read(file)
    return [
        Results(name, own, {**times.get(name, {}), **times.get(f"{name}-masks", {})}) for name, own in records.items()
    ]


def with_interval(mean: Mean) -> str:
    """Format a percentage with its interval, shown by its ends if it would extend beyond 0 or 100; one run has none."""
    if mean.count == 1:
        return f"{mean.value:.1f}"
    low, high = mean.value - mean.interval, mean.value + mean.interval
    if low < 0 or high > 100:
        return f"{mean.value:.1f} ({max(low, 0):.1f} to {min(high, 100):.1f})"
    return f"{mean.value:.1f} ± {mean.interval:.1f}"


def table(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns a Markdown table; empty without rows."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {headings} |", "|---" * (1 + headings.count("|")) + "|", *lines] if lines else []


def summary_table(every: list[Results]) -> list[str]:
    """Returns accuracy and cost of each method, with two columns for each task."""
    tasks = [results for results in every if results.methods]
    rows = []
    for method in dict.fromkeys(method for results in tasks for method in results.methods):
        row = [method]
        for results in tasks:
            own = results.methods.get(method)
            row += ["–", "–"] if own is None else [with_interval(own.mean), results.cost(method)]
        rows.append(row)
    return table(" | ".join(["method", *(f"{results.title} | cost (time)" for results in tasks)]), rows)


def task_table(results: Results) -> list[str]:
    rows = []
    for method, own in results.methods.items():
        differences = (results.against(method, "SGD"), results.against(method, "SAM"))
        price = (f"{own.cost:.1f}", f"{own.passes:.2f}", results.time(method))
        rows.append((method, with_interval(own.mean), own.mean.count, *differences, *price, own.tuned))
    return table("method | test accuracy | n | - SGD | - SAM | cost | passes | time / SGD | settings", rows)


def search_table(results: Results) -> list[str]:
    def strength(own: Method) -> str:
        return next((found for name in STRENGTHS if (found := own.best_by(name))), "")

    rows = [
        (method, sum(map(len, own.trials)), own.best_by("epochs"), own.best_by("weight_decay"), strength(own))
        for method, own in results.all.items()
        if own.trials
    ]
    return table("method | runs | by epochs | by weight decay | by strength", rows)


def claims_table(every: list[Results]) -> list[str]:
    rows = []
    for claim, better, worse, within in CLAIMS:
        for results in every:
            if {better, worse} <= results.methods.keys():
                difference = paired(results.methods[better].accuracy, results.methods[worse].accuracy)
                rows.append((claim, results.title, difference, difference.count, verdict(difference, within=within)))
    return table("claim | task | difference, points | n | verdict", rows)


def strength_table(every: list[Results]) -> list[str]:
    """Compares the best rho of SAM and of the extrapolation."""
    rows = []
    for results in every:
        if {"SAM", "extrapolation"} <= results.methods.keys():
            sam, ahead = (results.methods[name].runs[0]["settings"]["rho"] for name in ("SAM", "extrapolation"))
            rows.append((results.title, f"{sam:g}", f"{ahead:g}", f"{ahead / sam:.2g}"))
    return table("task | rho of SAM | rho of the extrapolation | ratio", rows)


def old_table(every: list[Results]) -> list[str]:
    rows = [
        (
            results.name,
            method,
            with_interval(own.mean),
            own.mean.count,
            f"{own.passes:.2f}",
            results.time(method),
            own.tuned,
        )
        for results in every
        for method, own in results.methods.items()
    ]
    return table("task | method | test accuracy | n | passes | time / SGD | settings", rows)


def draw_chart(every: list[Results], file: Path) -> None:
    """Draw accuracy against the cost of the whole training, a panel for each task; a line joins the Pareto front.

    Tasks with a single seed are left out. Points whose costs are nearly equal are drawn side by side.
    """
    every = [results for results in every if max((own.mean.count for own in results.methods.values()), default=0) > 1]
    names = list(dict.fromkeys([*COLORS, *(method for results in every for method in results.methods)]))
    styles = dict(zip(names, assign_styles([COLORS.get(name, "") for name in names]), strict=True))
    panels: dict[str, list[Series]] = {}
    for results in every:
        means = {method: (own.cost, own.mean) for method, own in results.methods.items() if own.mean.count > 1}
        places = spread([cost for cost, _ in means.values()])
        panels[results.title] = [
            styles[method].series(
                method,
                [cost],
                [mean.value],
                bars=[(mean.value - mean.interval, mean.value + mean.interval)],
                shift=place - cost,
            )
            for (method, (cost, mean)), place in zip(means.items(), places, strict=True)
        ]
        front: list[tuple[float, float]] = []
        for (cost, mean), place in zip(means.values(), places, strict=True):
            best = max(other.value for other_cost, other in means.values() if other_cost <= cost)
            if mean.value == best:
                front.append((place, mean.value))
        x, y = zip(*front, strict=True)
        panels[results.title].append(Series("Pareto front", "ink", x, y, faint=True))
    x_axis, y_axis = Axis("cost of the training, in epochs of SGD", log=True), Axis("test accuracy, %")
    write_plot([Figure("accuracy-cost", "", "", x_axis, y_axis, panels, "points")], file)


def spread(costs: Sequence[float]) -> list[float]:
    """Move ascending costs as little as possible, so that neighbors are 2.4 % of a logarithmic axis apart.

    The places p minimize sum (p_i - log c_i)^2 with p_i+1 >= p_i + gap: the isotonic regression of log c_i - i gap,
    which is max over j <= i of min over k >= i of its mean from j to k.
    """
    logarithms = np.log(costs)
    steps = 0.024 * max(np.ptp(logarithms), 0.1) * np.arange(len(costs))
    free, count = logarithms - steps, len(costs)
    places = [
        max(min(free[j : k + 1].mean() for k in range(i, count)) for j in range(i + 1)) + steps[i] for i in range(count)
    ]
    return [float(place) for place in np.exp(places)]


def fill(page: str, name: str, lines: list[str]) -> str:
    """Replaces what is between ``<!-- name -->`` and ``<!-- end -->``."""
    replaced: Callable[[re.Match[str]], str] = lambda found: "\n".join([found[1], "", *lines, "", found[2]])  # noqa: E731
    return re.sub(rf"(<!-- {name} -->).*?(<!-- end -->)", replaced, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    parser.add_argument("--docs", type=Path, default=DOCS)
    options = parser.parse_args()
    every = load(options.records)
    new = [results for results in every if results.name in task_names()]
    joint = [results for results in new if results.name.startswith("joint-")]
    lines = ["# Results", "", "Written by `python -m studies.report` from `records/`. ± is a 95 % confidence interval."]
    lines += ["", "*Cost* is that of the whole training, in epochs of SGD: epochs x passes per step, masks included."]
    lines += ["", "## The paper's claims", "", *claims_table(every), ""]
    lines += ["## How strong", "", *strength_table(every), ""]
    for results in new:
        lines += [f"## {results.title}", "", *task_table(results), ""]
        if search := search_table(results):
            lines += ["The search: highest accuracy on validation images, over the other settings.", "", *search, ""]
    lines += ["## Earlier tasks", "", "One number was tuned for each method, at a fixed number of epochs."]
    lines += ["", *old_table([results for results in every if results not in new]), ""]
    options.out.write_text("\n".join(lines))
    page = options.docs / "study.md"
    filled = fill(page.read_text(), "summary", summary_table(joint))
    page.write_text(fill(filled, "claims", claims_table(new)))
    draw_chart(joint, options.docs / "accuracy-cost.svg")


if __name__ == "__main__":
    main()
