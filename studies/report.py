"""Writes the tables and the chart of the studies: ``python -m studies.report``.

Reads the records; writes results.md beside this file, and docs/accuracy-cost.svg.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from sparsesam.lab.display import Axis, Figure, Series, assign_styles, write_plot
from studies.plan import HERE, Record, Task, read_task, task_names
from studies.run import read
from studies.statistics import Mean, paired, verdict

ONE_PASS = "extrapolation"
UNTUNED = "extrapolation, 10 and 60 steps"
BY_LENGTH = "extrapolation, by length"
#: (claim of the paper, the better, the worse, points within which they count as equal, or the first as not worse)
ORDERINGS: list[tuple[str, str, str, float | None]] = [
    ("SAM > SGD", "SAM", "SGD", None),
    ("SSAM-F 50 % = SAM, within 1 point", "SSAM-F 50 %", "SAM", 1.0),
    ("SSAM-F 90 % > SGD", "SSAM-F 90 %", "SGD", None),
    ("SSAM-F 99 % > SGD", "SSAM-F 99 %", "SGD", None),
    ("Fisher > random, 50 %", "SSAM-F 50 %", "random 50 %", None),
    ("Fisher > random, 90 %", "SSAM-F 90 %", "random 90 %", None),
    ("Fisher > random, 99 %", "SSAM-F 99 %", "random 99 %", None),
    ("drop flattest > random", "SSAM-D 90 %, drop flattest", "SSAM-D 90 %, drop random", None),
    ("drop random > sharpest", "SSAM-D 90 %, drop random", "SSAM-D 90 %, drop sharpest", None),
    ("2:4 >= filters, within 1 point", "SSAM-F 2:4", "SSAM-F filters 50 %", 1.0),
    ("implicit = explicit, within 1 point", "SSAM-F 2:4, implicit", "SSAM-F 2:4", 1.0),
    ("a quarter of the batch = all of it, within 1 point", "SAM, 1/4 of the batch", "SAM", 1.0),
    ("in one pass: Fisher > random, 90 %", "extrapolation, Fisher 90 %", "extrapolation, random 90 %", None),
    ("in one pass: extrapolation > Momentum-SAM", "extrapolation", "Momentum-SAM", None),
    ("in one pass: ahead > climbing", "Momentum-SAM", "momentum, climbing", None),
]


#: The same network, batches and methods.
SAME_COST = {
    "digits-0": "digits-30",
    "digits-50": "digits-30",
    "fashion-0": "fashion-30",
    "cifar-0-decay": "cifar-0-augmented",
}


class Results:
    """All records of one data set and setting, from all task files that share it."""

    def __init__(self, tasks: list[Task], records: list[Record], costs: dict[str, dict[str, float]]) -> None:
        self.tasks, self.records = tasks, records
        self.cost = {name: ratio for task in tasks for name, ratio in costs.get(task.name, {}).items()}
        self.accuracy: dict[str, dict[int, float]] = defaultdict(dict)
        self.chosen = list(filter(self._is_chosen, records))
        for record in self.chosen:
            self.accuracy[record["method"]][record["settings"]["seed"]] = 100 * record["accuracy"]

    def _is_chosen(self, record: Record) -> bool:
        """Whether a run was tested with the strength that is best in the current tuning records."""
        if record["stage"] != "final":
            return False
        task = next(task for task in self.tasks if task.name == record["task"])
        name, _ = task.axis(record["method"])
        return bool(record["settings"][name] == task.best(record["method"], self.records))

    @property
    def title(self) -> str:
        return str(self.tasks[0].content["title"])

    def mean(self, method: str) -> Mean:
        return Mean.of(list(self.accuracy[method].values()))

    def task_of(self, method: str) -> Task:
        return next(task for task in self.tasks if method in task.names)

    def best(self, method: str) -> float | None:
        """Returns the best strength of the tuning; None without tuning."""
        found = [task.best(method, self.records) for task in self.tasks if method in task.names]
        return found[0] if found else None

    def strength(self, method: str) -> str:
        best = self.best(method)
        return "" if best is None else f"{self.task_of(method).axis(method)[0].replace('_', ' ')} {best:g}"

    def passes(self, method: str) -> float:
        own = [r for r in self.chosen if r["method"] == method]
        factor = self.task_of(method).methods[method].get("epochs", 1)
        return fmean(float(r["passes"]) for r in own) * float(factor)

    def shown_cost(self, method: str) -> str:
        return f"{self.cost[method]:.2f}" if method in self.cost else "–"

    def methods(self) -> list[str]:
        """Returns the methods with finished runs, the cheapest first."""
        return sorted((m for m in self.accuracy if len(self.accuracy[m]) > 1), key=self.passes)


def load_results(folder: Path) -> list[Results]:
    costs: dict[str, dict[str, float]] = {r["task"]: r["cost"] for r in read(folder / "cost.jsonl")}
    for same, measured in SAME_COST.items():
        costs.setdefault(same, costs.get(measured, {}))
    groups: dict[str, list[Task]] = defaultdict(list)
    for name in task_names():
        groups[name.removesuffix("-masks")].append(read_task(name))
    found = []
    for tasks in groups.values():
        records = [record for task in tasks for record in read(folder / f"{task.name}.jsonl")]
        results = Results(tasks, records, costs)
        if len(results.methods()) > 1:
            found.append(results)
    return found


def share_with_interval(mean: Mean) -> str:
    """Format a percentage with its interval, shown by its ends if it would extend beyond 0 or 100."""
    low, high = mean.value - mean.interval, mean.value + mean.interval
    if low < 0 or high > 100:
        return f"{mean.value:.1f} ({max(low, 0):.1f} to {min(high, 100):.1f})"
    return f"{mean.value:.1f} ± {mean.interval:.1f}"


def table(headings: str, rows: Iterable[Sequence[object]]) -> list[str]:
    """Returns a Markdown table; empty without rows."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return [f"| {headings} |", "|---" * (1 + headings.count("|")) + "|", *lines] if lines else []


def accuracy_table(results: Results) -> list[str]:
    rows = []
    for method in results.methods():
        mean, passes = results.mean(method), f"{results.passes(method):.2f}"
        accuracy, cost = share_with_interval(mean), results.shown_cost(method)
        rows.append((method, accuracy, mean.count, results.strength(method), passes, cost))
    return table("method | test accuracy | n | tuned | passes | time / SGD", rows)


def bar_table(every: list[Results]) -> list[str]:
    """Compares one pass with SAM, against SAM's standard error."""
    rows = []
    for results in every:
        if not {"SGD", "SAM", ONE_PASS} <= set(results.methods()):
            continue
        means = [results.mean(name) for name in ("SGD", "SAM", ONE_PASS)]
        sgd, sam, ours = means
        gain, share = sam.value - sgd.value, "no gain to share"
        if gain > 2 * sam.standard_error:
            share = f"{100 * (ours.value - sgd.value) / gain:.0f} %"
        rows.append(
            (
                *(results.title, ours.count, *(f"{mean.value:.1f}" for mean in means), f"{sam.standard_error:.2f}"),
                *(paired(results.accuracy[ONE_PASS], results.accuracy["SAM"]), share, results.shown_cost(ONE_PASS)),
                "yes" if ours.value >= sam.value - sam.standard_error else "no",
            )
        )
    return table(
        "task | n | SGD | SAM | one pass | SAM's standard error | one pass - SAM, seed by seed | share of SAM's gain "
        "| time / SGD | within one standard error",
        rows,
    )


def ordering_table(every: list[Results]) -> list[str]:
    rows = []
    for claim, better, worse, equal_within in ORDERINGS:
        for results in every:
            if min(len(results.accuracy[better]), len(results.accuracy[worse])) < 5:
                continue
            difference = paired(results.accuracy[better], results.accuracy[worse])
            judgment = verdict(difference, within=equal_within, one_sided=">=" in claim)
            rows.append((results.tasks[0].name, claim, difference, difference.count, judgment))
    return table("task | claim | difference, points | n | verdict", rows)


def by_value(accuracies: Mapping[float, float]) -> str:
    return ", ".join(f"{value:g}: {100 * accuracy:.1f}" for value, accuracy in accuracies.items())


def strength_table(results: Results) -> list[str]:
    """Validation accuracy by strength."""
    rows = []
    for task in results.tasks:
        for method in task.names:
            found = task.tuned(method, results.records)
            if found is not None:
                rows.append((method, task.axis(method)[0].replace("_", " "), by_value(found)))
    return table("method | tuned | validation accuracy by value", rows)


def length_table(every: list[Results]) -> list[str]:
    """The perturbation norm of the best extrapolation, beside the best rho of the other methods."""
    rows = []
    for results in every:
        if not {"SAM", ONE_PASS} <= set(results.methods()):
            continue
        best = {name: results.best(name) for name in ("SAM", "Momentum-SAM", ONE_PASS)}
        chosen = [r["perturbation"] for r in results.chosen if r["method"] == ONE_PASS]
        early = fmean(fmean(lengths[: max(1, len(lengths) // 3)]) for lengths in chosen)
        shown = ["–" if value is None else f"{value:g}" for value in best.values()]
        rho = best["SAM"]
        assert rho is not None
        rows.append((results.title, *shown, f"{early:.2g}", f"{early / rho:.0f}"))
    return table(
        "task | SAM's rho | Momentum-SAM's rho | steps ahead | length, first third of training | length / SAM's rho",
        rows,
    )


def one_pass_tasks(folder: Path) -> Iterator[tuple[str, Task, list[Record], dict[float, float]]]:
    """Returns title, task, records, and validation accuracy by the number of steps ahead."""
    for name in task_names():
        task, records = read_task(name), read(folder / f"{name}.jsonl")
        found = task.tuned(ONE_PASS, records) if ONE_PASS in task.names else None
        if found is not None:
            yield task.content["title"].replace("how far ahead", "digits, 30 % wrong"), task, records, found


def ahead_table(folder: Path) -> list[str]:
    """Validation accuracy by the number of steps ahead, with one change of the training at a time."""
    rows = [
        (title, f"{max(steps, key=steps.__getitem__):g}", by_value(steps))
        for title, _, _, steps in one_pass_tasks(folder)
    ]
    return table("training | best | validation accuracy by steps ahead", rows)


def default_table(folder: Path) -> list[str]:
    """Validation accuracy of untuned strengths, against the best number of steps."""
    rows = []
    for title, task, records, steps in one_pass_tasks(folder):
        untuned, by_length = (task.tuned(method, records) or {} for method in (UNTUNED, BY_LENGTH))
        if not (untuned or by_length or 60 in steps):
            continue
        best = max(steps, key=steps.__getitem__)
        every = {**steps, **untuned}
        found = [*(every.get(number) for number in (10, 40, 60)), *(by_length.get(length) for length in (3, 4.5))]
        shown = ["–" if value is None else f"{100 * (value - steps[best]):+.1f}" for value in found]
        rows.append((title, f"{best:g}: {100 * steps[best]:.1f}", *shown))
    return table("task | best number of steps | 10 steps | 40 steps | 60 steps | length 3 | length 4.5", rows)


def flatness_table(results: Results) -> list[str]:
    rows = []
    for method in results.methods():
        own = [r for r in results.chosen if r["method"] == method and "lambda_1" in r]
        if own:
            columns = [Mean.of([r[key] for r in own]) for key in ("lambda_1", "sharpness", "train_loss_at_w")]
            rows.append((method, *(f"{column.value:.3g} ± {column.interval:.2g}" for column in columns), len(own)))
    return table("method | λ₁ | rise of the loss within 0.5 | training loss | n", rows)


#: The methods of the chart, and the optimizers whose colors they have.
_DRAWN = {
    "SGD": "sgd",
    "SGD, 2 x epochs": "",
    "SAM": "sam",
    "SSAM-F 50 %": "ssam-f",
    "Momentum-SAM": "",
    ONE_PASS: "auto",
}


def _frontier(results: Results) -> Series:
    points = sorted(
        (results.cost.get(name, results.passes(name)), results.mean(name).value) for name in results.methods()
    )
    best = [point for place, point in enumerate(points) if all(point[1] > other for _, other in points[:place])]
    costs, accuracies = zip(*best, strict=True)
    return Series("Pareto front", "ink", costs, accuracies, faint=True)


def draw_chart(every: list[Results], file: Path) -> None:
    """Draw accuracy against cost, a panel for each task, two in a row; a line joins the Pareto-optimal methods."""
    styles = dict(zip(_DRAWN, assign_styles(list(_DRAWN.values())), strict=True))
    panels = {}
    for results in every:
        means = {name: results.mean(name) for name in _DRAWN if name in results.methods()}
        panels[results.title] = [
            styles[name].series(
                name,
                [results.cost.get(name, results.passes(name))],
                [mean.value],
                bars=[(mean.value - mean.interval, mean.value + mean.interval)],
            )
            for name, mean in means.items()
        ]
        panels[results.title].append(_frontier(results))
    titles, x, y = list(panels), Axis("time of a step / SGD"), Axis("test accuracy, %")
    rows = [{title: panels[title] for title in titles[start : start + 2]} for start in range(0, len(titles), 2)]
    write_plot([Figure("accuracy-cost", "", "", x, y, row, "points") for row in rows], file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--records", type=Path, default=HERE / "records")
    parser.add_argument("--out", type=Path, default=HERE / "results.md")
    parser.add_argument("--chart", type=Path, default=HERE.parent / "docs" / "accuracy-cost.svg")
    options = parser.parse_args()
    every = load_results(options.records)
    lines = [
        "# Results",
        "",
        "Written by `python -m studies.report` from `records/`. ± is a 95 % confidence interval.",
        "",
    ]
    lines += ["## Against SAM", "", *bar_table(every), "", "## Orderings", "", *ordering_table(every), ""]
    lines += ["## How strong", "", *length_table(every), "", *ahead_table(options.records), ""]
    lines += ["## Untuned", "", *default_table(options.records), ""]
    for results in every:
        lines += [f"## {results.title}", "", *accuracy_table(results), ""]
        if flatness := flatness_table(results):
            lines += ["Flatness of the training loss at the end:", "", *flatness, ""]
        lines += ["<details><summary>Tuning</summary>", "", *strength_table(results), "", "</details>", ""]
    options.out.write_text("\n".join(lines))
    draw_chart(every, options.chart)


if __name__ == "__main__":
    main()
