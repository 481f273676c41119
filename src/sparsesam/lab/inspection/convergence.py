"""Theorems 1 and 2 against measured runs of a smooth problem; this one looks at no run of ours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from sparsesam.analysis import SmoothProblem, measure_convergence, nonconvex_logistic, tanh_network
from sparsesam.lab.inspection.base import Analysis, Progress, number
from sparsesam.lab.inspection.options import option

_PROBLEMS: dict[str, Callable[..., SmoothProblem]] = {"logistic": nonconvex_logistic, "tanh-network": tanh_network}


@dataclass(frozen=True)
class Convergence(Analysis):
    help = "theorems 1 and 2 against measured runs of a smooth problem; needs no run"

    problem: Literal["logistic", "tanh-network"] = option("logistic", "smooth and not convex")
    steps: int = option(1000, "of each run")
    repeats: int = option(4, "runs that the expectation is a mean of")
    sigma: float = option(0.5, "standard deviation of the gradient's noise")
    sparsity: float = option(0.5, "share of weights that SSAM does not perturb")
    eta_0: float | None = option(None, "first learning rate; default 1 / L")
    rho_0: float | None = option(None, "first rho; default the largest that the theorem allows")
    seed: int = option(0, "of the problem, the noise and the mask")

    @property
    def name(self) -> str:
        return "convergence"

    def measure(self, run: object, progress: Progress) -> dict[str, Any]:
        results = {}
        for done, method in enumerate(("SAM", "SSAM")):
            progress(done, 2)
            results[method] = measure_convergence(
                method,  # type: ignore[arg-type]
                problem=_PROBLEMS[self.problem](seed=self.seed),
                steps=self.steps,
                runs=self.repeats,
                sigma=self.sigma,
                sparsity=self.sparsity,
                eta_0=self.eta_0,
                rho_0=self.rho_0,
                seed=self.seed,
            ).to_dict()
        progress(2, 2)
        return results

    def made(self, run: object) -> dict[str, Any]:
        return {"seed": self.seed}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        rows: dict[str, str] = {}
        for method, found in result.items():
            failed = [one["text"] for one in found["assumptions"] if not one["holds"]]
            names = [name for name in found["constants"] if name.startswith(("C_", "L", "G", "sigma"))]
            constants = ", ".join(f"{name} {number(found['constants'][name])}" for name in names if " " not in name)
            rows |= {
                f"{method}: mean ||∇f||² at T = {found['T'][-1]}": number(found["measured"][-1]),
                f"{method}: bound as printed": number(found["bound"][-1]),
                f"{method}: bound with sum 1/t": number(found["bound_harmonic"][-1]),
                f"{method}: slope in log T": number(found["slope"]),
                f"{method}: constants": constants,
                f"{method}: assumptions": f"not satisfied: {'; '.join(failed)}" if failed else "all satisfied",
            }
        return rows
