"""The Hessian's largest eigenvalues, trace and spectral density."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsesam.analysis import hessian_eigenvalues, hessian_trace, spectral_density
from sparsesam.lab.inspection.base import Analysis, Progress, number, patterns
from sparsesam.lab.inspection.options import option
from sparsesam.lab.inspection.run import Run


@dataclass(frozen=True)
class Hessian(Analysis):
    help = "the Hessian's largest eigenvalues, trace and spectral density"

    count: int = option(5, "how many eigenvalues; the ratio lambda_1 / lambda_5 needs five")
    tolerance: float = option(1e-3, "relative error of the eigenvalues")
    trace_probes: int = option(100, "random vectors for the trace; fewer are taken once its error is below 1 %")
    density_probes: int = option(4, "random vectors for the density")
    density_steps: int = option(80, "Lanczos steps from each of them")
    keep_graph: bool = option(False, "half the time for several times the memory")
    layers: str | None = option(None, "only parameters whose names fit a pattern, such as 'layer4.*,fc.*'")

    @property
    def name(self) -> str:
        return "hessian" if self.layers is None else "hessian-layers"

    def measure(self, run: Run, progress: Progress) -> dict[str, Any]:
        common: dict[str, Any] = {
            "parameters": patterns(self.layers, run),
            "keep_graph": self.keep_graph,
            "seed": run.on.seed,
        }
        eigenvalues = hessian_eigenvalues(run.objective, self.count, tolerance=self.tolerance, **common)
        progress(1, 3)
        trace = hessian_trace(run.objective, probes=self.trace_probes, tolerance=0.01, **common)
        progress(2, 3)
        density = spectral_density(run.objective, steps=self.density_steps, probes=self.density_probes, **common)
        progress(3, 3)
        return {"eigenvalues": eigenvalues.to_dict(), "trace": trace.to_dict(), "density": density.to_dict()}

    def summary(self, result: dict[str, Any]) -> dict[str, str]:
        spectrum, trace = result["eigenvalues"], result["trace"]
        return {
            "largest eigenvalues": "\n".join(number(value) for value in spectrum["eigenvalues"]),
            "lambda_1 / lambda_5": number(spectrum["ratio"]),
            "trace": f"{number(trace['trace'])} ± {number(trace['standard_error'])}",
            "smallest Ritz value": number(min(min(nodes) for nodes in result["density"]["nodes"])),
            "weights": f"{spectrum['size']:,}",
            "products": str(spectrum["products"] + trace["products"] + result["density"]["products"]),
        }
