"""The generalization bound of theorem 3 for a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sparsesam.analysis import generalization_bound
from sparsesam.lab.inspection.base import Analysis, Progress, number, usable_masks, with_shared_rho
from sparsesam.lab.inspection.options import option
from sparsesam.lab.inspection.run import Run


@dataclass(frozen=True)
class Bound(Analysis):
    help = "the bound of theorem 3 with every term, over every weight and over those of the mask"

    rho: float | None = option(None, "radius; default the first run's")
    delta: float = option(0.05, "the bound holds with probability 1 - delta")
    steps: int = option(20, "gradients of the ascent that finds the largest loss")

    @property
    def name(self) -> str:
        return "bound"

    def prepare(self, runs: Sequence[Run]) -> tuple[Bound, Sequence[Run]]:
        return with_shared_rho(self, runs)

    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        if run.on.split != "train":
            raise ValueError(
                f"split must be train for the bound, which is made of the training loss, got {run.on.split}"
            )
        masks = usable_masks(run)
        every = self._bound(run, None)
        progress(1, 2)
        masked = None if masks is None else self._bound(run, masks)
        progress(2, 2)
        return {"every": every, "masked": masked}

    def _bound(self, run: Run, masks: Any) -> dict[str, Any]:
        assert self.rho is not None
        n = run.batches.count
        found = generalization_bound(
            run.objective,
            self.rho,
            n=n,
            delta=self.delta,
            classes=run.splits.num_classes,
            masks=masks,
            steps=self.steps,
        )
        if run.objective.samples < n:
            word = f"the training loss is that of {run.objective.samples} of the {n} images (--samples null: of all)"
            found = dataclasses.replace(found, words=[*found.words, word])
        return found.to_dict()

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        every, masked = result["every"], result["masked"]
        rows = {
            "bound": number(every["bound"]),
            "= largest loss within rho": number(every["max_loss"]),
            "+ complexity": number(every["complexity"]),
            "  dimension term": number(every["dimension_term"]),
            "  confidence term": number(every["confidence_term"]),
            "  remainder": number(every["remainder"]),
            "loss of a guess": number(every["threshold"]),
            "says something": "no, vacuous" if every["vacuous"] else "yes",
            "k, n, delta, rho": ", ".join(number(every[key]) for key in ("k", "n", "delta", "rho")),
            "||w||²": number(every["squared_norm"]),
        }
        return rows | {"bound, mask only": "–" if masked is None else number(masked["bound"])}
