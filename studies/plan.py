"""The plan of a study: its tasks and methods from YAML, and their runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml
from torch.quasirandom import SobolEngine

from sparsesam.lab.experiment.config import TrainConfig, from_mapping

HERE = Path(__file__).parent
Record = dict[str, Any]
#: Values of the tuned settings, as (name, value) pairs, and the validation accuracy of each seed.
Point = tuple[tuple[str, Any], ...]
Trials = dict[Point, dict[int, float]]


@dataclass(frozen=True)
class Job:
    """One run. ``stage`` is "tune", judged on validation images, or "final", judged on test images."""

    task: str
    method: str
    stage: str
    settings: Mapping[str, Any]
    part: str | None = None  # a name in `parts.py`

    @property
    def config(self) -> TrainConfig:
        return from_mapping(self.settings)

    @property
    def identity(self) -> Record:
        """The entries of a record that tell which run it is of."""
        return {"task": self.task, "method": self.method, "stage": self.stage, "settings": dict(self.settings)}


@dataclass(frozen=True)
class Task:
    name: str
    content: Mapping[str, Any]
    parts: Mapping[str, Mapping[str, Any]]  # of methods: settings and parts that are the same in every task

    @property
    def methods(self) -> list[str]:
        return list(self.content["methods"])

    def axes(self, method: str) -> dict[str, list[Any]]:
        """Returns the values of each tuned setting: epochs and weight decay, as for all methods, and the strength."""
        own = {name: values for name, values in self.content["methods"][method].items() if isinstance(values, list)}
        return {**self.content.get("axes", {}), **own}

    def points(self, method: str) -> Iterator[Point]:
        """Returns distinct points of the grid in a quasi-random order, the same for all methods."""
        axes, seen = self.axes(method), set()
        for row in SobolEngine(3, scramble=True, seed=0).draw(4096).tolist():
            point = tuple((name, values[int(place * len(values))]) for place, (name, values) in zip(row, axes.items()))  # noqa: B905
            if point not in seen:
                seen.add(point)
                yield point

    def plan(self, method: str, records: Iterable[Record]) -> list[list[Job]]:
        """Returns the runs of each round of the search, and of the test, as far as the records determine them.

        A method that is ``like`` another has no search, and is tested with the settings that the other has found.
        """
        if "like" in self.content["methods"][method]:
            *rounds, last = self.plan(self.content["methods"][method]["like"], records)
            found = [job for job in last if job.stage == "final"]
            points = [tuple((name, job.settings[name]) for name in self.axes(job.method)) for job in found]
            finals = [self.job(method, "final", point, seed) for seed, point in enumerate(points)]
            return [*([] for _ in rounds), finals]
        known = {(str(r["settings"]), r["stage"]): r["accuracy"] for r in records if r["method"] == method}
        plan, trials = [], Trials()
        for rule in self.content.get("rounds", []):
            points, seeds = self.chosen(rule, method, trials), rule.get("seeds", [100])
            plan.append([self.job(method, "tune", point, seed) for seed in seeds for point in points])
            for job, point in zip(plan[-1], [*points] * len(seeds), strict=True):
                accuracy = known.get((str(job.settings), "tune"))
                if accuracy is None:
                    return plan
                trials.setdefault(point, {})[job.settings["seed"]] = accuracy
        best = best_first(trials)[0] if trials else ()
        return [*plan, [self.job(method, "final", best, seed) for seed in range(self.content["seeds"])]]

    def chosen(self, rule: Mapping[str, Any], method: str, trials: Trials) -> list[Point]:
        """Returns the points of a round: ``draw`` new ones, ``near`` the best, or the ``best`` again."""
        if "best" in rule:
            found = best_first(trials)
        elif "near" in rule:
            axes, center = self.axes(method), dict(best_first(trials)[0])
            found = [
                point
                for point in self.points(method)
                if point not in trials
                and all(abs(axes[name].index(value) - axes[name].index(center[name])) <= 1 for name, value in point)
            ]
        else:
            found = list(self.points(method))
        if "epochs" in rule:  # of the whole round, in place of tuned ones
            found = [tuple({**dict(point), "epochs": rule["epochs"]}.items()) for point in found]
        count = rule.get("best") or rule.get("near") or rule["draw"]
        return list(dict.fromkeys(found))[:count]

    def job(self, method: str, stage: str, point: Point, seed: int) -> Job:
        rule, own = self.parts[method], self.content["methods"][method]
        fixed = {name: value for name, value in own.items() if not isinstance(value, list) and name != "like"}
        data = self.content["data"] + ("_validation" if stage == "tune" else "_test")
        settings = {**self.content["settings"], "dataset": data, **rule["settings"], **fixed, **dict(point)}
        return Job(self.name, method, stage, {**settings, "seed": seed}, rule.get("part"))


def best_first(trials: Trials) -> list[Point]:
    """Sorts points: tried with the most seeds first, then by mean accuracy; of equals, the one with fewer epochs."""

    def quality(point: Point) -> tuple[int, float, float]:
        return len(trials[point]), fmean(trials[point].values()), -dict(point).get("epochs", 0)

    return sorted(trials, key=quality, reverse=True)


def read_task(name: str) -> Task:
    methods = yaml.safe_load((HERE / "methods.yaml").read_text())
    content = yaml.safe_load((HERE / "tasks" / f"{name}.yaml").read_text())
    return Task(name, content, methods)


def task_names() -> list[str]:
    return sorted(path.stem for path in (HERE / "tasks").glob("*.yaml"))
