"""Pictures of the analyses' results, for ``--plot``; all runs side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

FORMATS = (".png", ".svg", ".pdf")

Result = dict[str, Any]
#: A matplotlib SubFigure; matplotlib is imported only when a picture is wanted.
Canvas = Any


def check_plot(file: Path) -> None:
    """Before hours of measurement: the picture can be written."""
    if file.suffix.lower() not in FORMATS:
        raise ValueError(f"plot must end in {', '.join(FORMATS)}, got {str(file)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install matplotlib, or leave out --plot") from error


def draw(kind: str, results: Mapping[str, Result], file: Path) -> None:
    """Draw results of one kind, by label, next to each other."""
    from matplotlib.figure import Figure

    one = next(iter(results.values()))
    paint, width, height = _PAINTERS["line" if kind == "landscape" and not one["y"] else kind]
    if paint is _plane:
        paint = partial(_plane, limits=_range([result["loss"] for result in results.values()]))
    figure = Figure(figsize=(width * len(results), height), layout="constrained")
    parts = figure.subfigures(1, len(results), squeeze=False)
    for part, (label, result) in zip(parts.flat, results.items(), strict=True):
        part.suptitle(label, fontsize="medium")
        paint(part, result)
    _same_scales(figure)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)


def _same_scales(figure: Any) -> None:
    """Pictures next to each other compare only if their axes do."""
    groups: dict[str, list[Any]] = {}
    for axes in figure.get_axes():
        if axes.get_label() in _SHARED:
            groups.setdefault(axes.get_label(), []).append(axes)
    for members in groups.values():
        for get, change in (("get_xlim", "set_xlim"), ("get_ylim", "set_ylim")):
            limits = [getattr(axes, get)() for axes in members]
            for axes in members:
                getattr(axes, change)(min(low for low, _ in limits), max(high for _, high in limits))


_SHARED = ("histogram", "line", "climb", "bound")


def _gradients(part: Canvas, result: Result) -> None:
    axes = part.subplots()
    axes.set_label("histogram")
    edges = np.array(result["edges"])
    groups = {"every weight": result["every"], "inside the mask": result["inside"], "outside": result["outside"]}
    for label, group in groups.items():
        if group is not None:
            counts = np.array(group["histogram"])
            share = f"{group['share_below_zero']:.0%} below 0" if group["share_below_zero"] is not None else "no r"
            axes.stairs(counts / max(group["weights"], 1), edges, label=f"{label}: {share}")
    axes.axvline(0, color="gray", linewidth=0.8)
    axes.set(xlabel=f"r, {result['logarithm']}", ylabel="share of weights per bin")
    axes.legend(fontsize="small")


def _line(part: Canvas, result: Result) -> None:
    axes = part.subplots()
    axes.set_label("line")
    axes.plot(result["x"], _numbers(result["loss"]))
    between = "between" in result["kind"]
    axes.set(xlabel="from the first run (0) to the second (1)" if between else "position", ylabel="loss")


def _range(losses: list[Any]) -> tuple[float, float]:
    """The smallest and the largest finite loss of all landscapes."""
    finite = np.concatenate([_numbers(loss).reshape(-1) for loss in losses])
    finite = finite[np.isfinite(finite)]
    return (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)


def _plane(part: Canvas, result: Result, limits: tuple[float, float]) -> None:
    x, y = np.array(result["x"]), np.array(result["y"])
    loss = np.ma.masked_invalid(_numbers(result["loss"]))
    low, high = limits
    # The bowl is a small part of the range: levels equally far apart in the logarithm show it.
    levels = low + np.geomspace(max((high - low) * 1e-3, 1e-12), max(high - low, 1e-11), 20)
    above, below = part.subfigures(2, 1, height_ratios=(1, 1.1))
    axes = above.subplots()
    lines = axes.contour(x, y, loss, levels=levels, norm="log")
    axes.clabel(lines, levels[::3], fontsize="x-small", fmt="%.3g")
    axes.set(xlabel="first direction", ylabel="second direction", aspect="equal")
    surface = below.add_subplot(projection="3d")
    surface.plot_surface(*np.meshgrid(x, y), loss, cmap="viridis", vmin=low, vmax=high, rcount=60, ccount=60)
    surface.set(xlabel="first", ylabel="second", zlabel="loss", zlim=(low, high))


def _hessian(part: Canvas, result: Result) -> None:
    axes = part.subplots()
    grid, density = np.array(result["density"]["grid"]), np.array(result["density"]["density"])
    axes.semilogy(grid, np.maximum(density, density.max() * 1e-8))
    for value in result["eigenvalues"]["eigenvalues"]:
        axes.axvline(value, color="tab:red", linewidth=0.6)
    trace = result["trace"]
    axes.set(xlabel="eigenvalue (red: the largest)", ylabel="density")
    axes.set_title(f"trace {trace['trace']:.4g} ± {trace['standard_error']:.2g}", fontsize="small")


def _sharpness(part: Canvas, result: Result) -> None:
    axes = part.subplots()
    axes.set_label("climb")
    for label, key in (("every weight", "every"), ("mask only", "masked")):
        if result[key] is not None:
            axes.plot(_numbers(result[key]["path"]), marker=".", label=label)
    axes.set(xlabel="gradients of the ascent", ylabel=f"largest loss within {result['every']['rho']:g}")
    axes.legend(fontsize="small")


def _masks(part: Canvas, result: Result) -> None:
    upper, lower = part.subplots(2, 1, height_ratios=(2, 1))
    names = list(result["density_by_layer"])
    densities = np.stack([_numbers(result["density_by_layer"][name]) for name in names])
    image = upper.pcolormesh(np.arange(densities.shape[1] + 1), np.arange(len(names) + 1), densities, vmin=0, vmax=1)
    upper.set_yticks(np.arange(len(names)) + 0.5, names, fontsize="x-small")
    upper.invert_yaxis()
    upper.set(xlabel="mask", title="density")
    upper.xaxis.get_major_locator().set_params(integer=True)
    part.colorbar(image, ax=upper)
    lower.plot(result["steps"][1:], _numbers(result["overlap"]), marker=".", label="overlap with the one before")
    lower.plot(result["steps"][1:], _numbers(result["overlap_by_chance"]), linestyle="--", label="by chance")
    lower.set(xlabel="step", ylim=(0, 1.02))
    lower.legend(fontsize="small")


def _fisher(part: Canvas, result: Result) -> None:
    axes = part.subplots()
    scatter = np.array(result["scatter"])
    fisher, hessian = scatter[:, 0], np.abs(scatter[:, 1])
    shown = (fisher > 0) & (hessian > 0)
    axes.loglog(fisher[shown], hessian[shown], ".", markersize=2)
    axes.set(xlabel="Fisher information", ylabel="|Hessian's diagonal|")
    axes.set_title(f"Spearman {result['spearman_magnitude'] or float('nan'):.3f}", fontsize="small")


def _bound(part: Canvas, result: Result) -> None:
    axes = part.subplots()
    axes.set_label("bound")
    shown = {"every weight": result["every"], "mask only": result["masked"]}
    shown = {label: one for label, one in shown.items() if one is not None}
    largest = [one["max_loss"] for one in shown.values()]
    axes.barh(list(shown), largest, color="tab:blue", label="largest loss within rho")
    axes.barh(
        list(shown), [one["complexity"] for one in shown.values()], left=largest, color="tab:orange", label="complexity"
    )
    axes.axvline(result["every"]["threshold"], color="black", linestyle="--", label="loss of a guess")
    axes.set(xlabel="loss", ylim=(-0.6, 1.6))
    part.legend(loc="outside lower center", ncols=3, fontsize="small")


def _convergence(part: Canvas, result: Result) -> None:
    for axes, (method, found) in zip(part.subplots(1, 2, sharey=True), result.items(), strict=True):
        at, measured = found["T"], _numbers(found["measured"])
        axes.loglog(at, measured, label="measured")
        axes.loglog(at, _numbers(found["bound"]), linestyle="--", label="bound as printed")
        axes.loglog(at, _numbers(found["bound_harmonic"]), linestyle=":", label="with sum 1/t for log T")
        axes.set(xlabel="T", title=f"{method}, slope {found['slope'] or float('nan'):.2f}")
        axes.legend(fontsize="small")


def _numbers(values: Any) -> npt.NDArray[np.float64]:
    """JSON's null as NaN."""
    return np.array(values, dtype=np.float64)


_PAINTERS: dict[str, tuple[Callable[..., None], float, float]] = {
    "gradients": (_gradients, 5, 3.6),
    "landscape": (_plane, 4.5, 7),
    "line": (_line, 5, 3.6),
    "hessian": (_hessian, 5, 3.6),
    "sharpness": (_sharpness, 5, 3.6),
    "masks": (_masks, 6, 6),
    "fisher": (_fisher, 4.5, 4),
    "bound": (_bound, 5, 2.6),
    "convergence": (_convergence, 9, 4),
}
