"""The paper's figures, each as a matplotlib figure from plain numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[np.float64]
#: A matplotlib Figure; matplotlib is imported only when a picture is wanted.
Figure = Any

COLORS = {"SGD": "tab:gray", "SAM": "tab:blue", "SSAM-F": "tab:orange", "SSAM-D": "tab:green"}
_SIDE = 3.4


class Point(NamedTuple):
    x: float
    y: float
    bar: tuple[float, float] | None


#: Points by method.
Lines = Mapping[str, list[Point]]


def gradients(panels: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Figure:
    """The distribution of r for each network, one line for each optimizer it was trained with."""
    columns = min(len(panels), 2 if len(panels) == 4 else 3)
    figure, axes = _grid(columns, -(-len(panels) // columns))
    for one, (title, lines) in zip(axes, panels.items(), strict=False):
        for label, found in lines.items():
            counts = np.array(found["every"]["histogram"]) / max(found["every"]["weights"], 1)
            share = found["every"]["share_below_zero"]
            one.stairs(counts, found["edges"], fill=True, alpha=0.35, color=COLORS.get(label))
            one.stairs(counts, found["edges"], color=COLORS.get(label), label=f"{label}: {share:.0%} below 0")
        one.axvline(0, color="black", linewidth=0.8, linestyle="--")
        one.set(title=title, xlabel="r = log |(g_SAM − g_SGD) / g_SGD|", ylabel="share of weights", xlim=(-5, 4))
        one.legend(fontsize="small", loc="upper left")
    for unused in axes[len(panels) :]:
        unused.set_visible(False)
    return figure


def curves(panels: Mapping[str, Mapping[str, Mapping[str, Array]]]) -> Figure:
    """A column for each network: training loss above, test accuracy below, over the epochs."""
    figure, axes = _grid(len(panels), 2)
    for place, (title, lines) in enumerate(panels.items()):
        for row, (name, label) in enumerate((("train_loss", "training loss"), ("test_accuracy", "test accuracy (%)"))):
            one = axes[row * len(panels) + place]
            for method, found in lines.items():
                values = found[name] * (100 if name == "test_accuracy" else 1)
                epochs = np.arange(1, values.shape[1] + 1)
                one.plot(epochs, values.mean(0), label=method, color=COLORS.get(method), linewidth=1.2)
                if len(values) > 1:
                    one.fill_between(
                        epochs, values.min(0), values.max(0), alpha=0.2, color=COLORS.get(method), linewidth=0
                    )
            one.set(ylabel=label, xlabel="epoch")
            if row == 0:
                one.set_title(title)
                one.legend(fontsize="small")
    return figure


def sparsity(
    panels: Mapping[str, Mapping[str, list[Point]]], theirs: Mapping[str, Mapping[str, list[Point]]]
) -> Figure:
    """Accuracy over sparsity, SAM as a line across; the paper's own numbers dotted."""
    figure, axes = _grid(len(panels), 1)
    for one, (title, methods) in zip(axes, panels.items(), strict=True):
        for method, points in methods.items():
            _points(one, method, points, label=method, linestyle="-")
        for method, points in theirs.get(title, {}).items():
            _points(one, method, points, label=f"{method}, paper", linestyle=":")
        one.set(title=title, xlabel="sparsity (%)", ylabel="test accuracy (%)")
        one.legend(fontsize="small")
    return figure


def _points(axes: Any, method: str, points: list[Point], *, label: str, linestyle: str) -> None:
    color = COLORS.get(method)
    if method == "SAM":
        axes.axhline(points[0].y, color=color, linestyle="--" if linestyle == "-" else linestyle, label=label)
        return
    x, y = [100 * point.x for point in points], [point.y for point in points]
    axes.plot(x, y, marker="o", markersize=3, color=color, linestyle=linestyle, label=label)
    for point in points:
        if point.bar is not None:
            lengths = [[point.y - point.bar[0]], [point.bar[1] - point.y]]
            axes.errorbar(100 * point.x, point.y, lengths, fmt="none", color=color, capsize=2)


def landscapes(found: Mapping[str, Mapping[str, Any]]) -> Figure:
    """A surface of the training loss for each optimizer, all on one scale, low losses blue."""
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.figure import Figure as Canvas

    losses = {label: np.array(one["loss"], dtype=np.float64) for label, one in found.items()}
    finite = np.concatenate([loss[np.isfinite(loss)] for loss in losses.values()])
    low, high = float(finite.min()), float(finite.max())
    # A bowl is a small part of a wide range: equal ratios of the loss then have equal steps of the color.
    colors = LogNorm(low, high) if low > 0 and high > 10 * low else Normalize(low, high)
    figure = Canvas(figsize=(_SIDE * len(found), _SIDE * 1.1))
    figure.subplots_adjust(left=0.01, right=0.96, bottom=0.06, top=0.9, wspace=0.12)
    for place, (label, one) in enumerate(found.items(), start=1):
        axes = figure.add_subplot(1, len(found), place, projection="3d")
        x, y = np.meshgrid(np.array(one["x"]), np.array(one["y"]))
        loss = np.ma.masked_invalid(losses[label])
        axes.plot_surface(x, y, loss, cmap="coolwarm", norm=colors, rcount=60, ccount=60, linewidth=0)
        axes.set(title=label, zlim=(low, high), xticks=(-1, 0, 1), yticks=(-1, 0, 1))
        axes.tick_params(labelsize="small", pad=0)
        axes.view_init(elev=28, azim=-55)
    return figure


def spectra(found: Mapping[str, Mapping[str, Any]]) -> Figure:
    """The density of the eigenvalues for each optimizer on one scale, with lambda_1 and lambda_1 / lambda_5."""
    figure, axes = _grid(len(found), 1, sharex=True, sharey=True)
    for one, (label, result) in zip(axes, found.items(), strict=True):
        grid, density = np.array(result["density"]["grid"]), np.array(result["density"]["density"])
        one.semilogy(grid, np.maximum(density, density.max() * 1e-7), color=COLORS.get(label))
        values, ratio = result["eigenvalues"]["eigenvalues"], result["eigenvalues"]["ratio"]
        one.axvline(values[0], color="tab:red", linewidth=0.8, linestyle="--")
        text = f"$\\lambda_1$ = {values[0]:.4g}\n$\\lambda_1 / \\lambda_5$ = " + (
            "–" if ratio is None else f"{ratio:.3g}"
        )
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.9}
        one.text(0.97, 0.95, text, transform=one.transAxes, ha="right", va="top", bbox=box)
        one.set(title=f"{label} H-spectrum", xlabel="eigenvalue")
    axes[0].set_ylabel("density")
    return figure


def speedup(lines: Mapping[str, Array]) -> Figure:
    """Running time over training iterations."""
    figure, (axes,) = _grid(1, 1, side=4.2)
    for label, seconds in lines.items():
        steps = np.arange(len(seconds) + 1)
        axes.plot(steps, np.concatenate([[0.0], seconds]), label=label)
    axes.set(xlabel="training iteration", ylabel="running time (s)", xlim=(0, None), ylim=(0, None))
    axes.legend(fontsize="small")
    return figure


def corruptions(titles: Sequence[str], rows: Sequence[Sequence[Tensor]]) -> Figure:
    """A column for each corruption, a row for each image, (c, h, w) uint8."""
    figure, axes = _grid(len(titles), len(rows), side=1.4)
    for place, (row, column) in enumerate(np.ndindex(len(rows), len(titles))):
        pixels = rows[row][column].expand(3, -1, -1).permute(1, 2, 0).numpy()
        axes[place].imshow(pixels, interpolation="nearest")
        axes[place].set_axis_off()
        if row == 0:
            axes[place].set_title(titles[column], fontsize="small")
    return figure


def _grid(columns: int, rows: int, *, side: float = _SIDE, **options: Any) -> tuple[Figure, list[Any]]:
    from matplotlib.figure import Figure as Canvas

    figure = Canvas(figsize=(side * columns * 1.15, side * rows), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)
