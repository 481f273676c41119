"""Analyses of trained runs: from a run's directory to the result in ``RUN/analyses/NAME.json``.

An analysis is a module here with one dataclass, whose fields are the options of ``sparsesam analyze``, and a line in
`ANALYSES`.

>>> run = load_run("runs/a", samples=256)  # run.model, run.objective, run.masks, run.config
"""

from sparsesam.lab.inspection.base import Analysis
from sparsesam.lab.inspection.bound import Bound
from sparsesam.lab.inspection.convergence import Convergence
from sparsesam.lab.inspection.fisher import Fisher
from sparsesam.lab.inspection.gradients import Gradients
from sparsesam.lab.inspection.hessian import Hessian
from sparsesam.lab.inspection.landscape import Landscape
from sparsesam.lab.inspection.masks import Masks
from sparsesam.lab.inspection.run import MeasuredOn, Run, load_run
from sparsesam.lab.inspection.sharpness import Sharpness
from sparsesam.lab.inspection.store import write_analysis

ANALYSES: dict[str, type[Analysis]] = {
    "gradients": Gradients,
    "landscape": Landscape,
    "hessian": Hessian,
    "sharpness": Sharpness,
    "masks": Masks,
    "fisher": Fisher,
    "bound": Bound,
    "convergence": Convergence,
}

__all__ = ["ANALYSES", "Analysis", "MeasuredOn", "Run", "load_run", "write_analysis"]
