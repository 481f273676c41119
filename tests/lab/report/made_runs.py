"""Files beside those of runs that `benchmarks.report` writes: of sweeps and analyses."""

import functools
import json
from dataclasses import asdict

import torch
import torch.nn.functional as F
from benchmarks.report import PROVENANCE

from sparsesam import analysis
from sparsesam.lab.experiment.calibration import SweepCalibration, VariantTime
from sparsesam.lab.inspection.bound import BoundResult
from sparsesam.lab.inspection.convergence import ConvergenceAnalysis
from sparsesam.lab.inspection.hessian import HessianResult
from sparsesam.lab.inspection.sharpness import SharpnessResult
from sparsesam.lab.report.read_run import RunRecord


def write_calibration(folder, runs, seconds):
    """The file that a sweep writes beside its runs."""
    measured = zip((RunRecord(run).config.variant.content_hash for run in runs), seconds, strict=True)
    times = {name: VariantTime("", [per_epoch / 10], None, per_epoch, 3) for name, per_epoch in measured}
    (folder / "calibration.json").write_text(json.dumps(asdict(SweepCalibration(times, PROVENANCE))))


def write_analysis(run, name, result):
    (run / "analyses").mkdir(parents=True, exist_ok=True)
    (run / "analyses" / f"{name}.json").write_text(json.dumps({"analysis": name, "result": result}))


def write_every_analysis(run):
    """Everything that `sparsesam analyze` writes."""
    for name, result in analyses().items():
        write_analysis(run, name, result)


@functools.cache
def analyses():
    """The results of all analyses, as their files hold them, of a network of a few weights."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    objective = analysis.Objective(model, [(x, y)], F.cross_entropy)
    masks = [{name: torch.rand(p.shape) < 0.5 for name, p in model.named_parameters()} for _ in range(4)]
    last = masks[-1]
    spectrum = analysis.hessian_eigenvalues(objective)
    other = {name: value + 0.1 for name, value in model.state_dict().items()}
    trace = analysis.hessian_trace(objective, probes=5)
    density = analysis.spectral_density(objective, points=50, steps=10, probes=2)
    masked_sharpness = analysis.sharpness(objective, masks=last)
    masked_bound = analysis.generalization_bound(objective, classes=3, masks=last)
    results = {
        "gradients": analysis.gradient_difference(objective, masks=last),
        "landscape-2d": analysis.loss_landscape(objective, points=9),
        "landscape-1d": analysis.loss_landscape(objective, analysis.random_directions(model, 1), points=9),
        "landscape-eigenvectors": analysis.loss_landscape(objective, spectrum.vectors[:2], points=5),
        "landscape-between": analysis.loss_between(objective, model.state_dict(), other, points=5),
        "masks": analysis.masks_over_time(enumerate(masks)),
        "fisher": analysis.fisher_vs_hessian(objective),
        "hessian": HessianResult(spectrum, trace, density),
        "sharpness": SharpnessResult(analysis.sharpness(objective), masked_sharpness),
        "bound": BoundResult(analysis.generalization_bound(objective, classes=3), masked_bound),
        "convergence": ConvergenceAnalysis(steps=20, runs=2).measure(None, None),
    }
    return {name: result.to_dict() for name, result in results.items()}
