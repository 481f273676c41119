"""Draws the figures of docs/analyze.md with the commands shown on that page.

    python tools/gallery.py                    # a few minutes; writes docs/gallery/NAME.png

Runs and measurements are kept in build/gallery and not repeated. Each image is one of the figures of ``--plot``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from sparsesam.lab import cli
from sparsesam.lab.display import assign_styles, write_plot
from sparsesam.lab.inspection import ANALYSES, LabeledResult

ROOT = Path(__file__).parents[1]
PAGE, PICTURES, WORK = ROOT / "docs" / "analyze.md", ROOT / "docs" / "gallery", ROOT / "build" / "gallery"
WIDTH, COLORS = 1400, 256  # of a picture, so that all of them take less than 300 KB
#: By the name of a result's file: the figure that is shown, and its panel, None for all.
SHOWN: dict[str, tuple[str, str | None]] = {
    "gradients": ("gradient-difference", "every weight"),
    "landscape-2d": ("landscape-2d-contours", None),
    "landscape-between": ("landscape-between-line", None),
    "hessian": ("hessian-density", None),
    "sharpness": ("sharpness-path", "every weight"),
    "masks": ("mask-density", None),
    "fisher": ("fisher-kept", None),
    "bound": ("bound-terms", None),
    "convergence": ("convergence", None),
}


def main() -> None:
    WORK.mkdir(parents=True, exist_ok=True)
    os.chdir(WORK)
    for command in commands():
        run(command)
    for name in SHOWN:
        draw(name, PICTURES / f"{name}.png")


def commands() -> list[list[str]]:
    """Returns the arguments of the `sparsesam` commands on the page that train and analyze."""
    text = PAGE.read_text().replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^    sparsesam ((?:train|analyze) .*)$", text, re.MULTILINE)]


def run(command: Sequence[str], *more: str) -> None:
    """Train or analyze, unless that was done before."""
    if command[0] == "train" and Path(command[command.index("--out") + 1], "last.pt").exists():
        return
    if cli.main([*command, *more]) != 0:
        raise RuntimeError(f"sparsesam {shlex.join(command)} failed")


def draw(name: str, file: Path) -> None:
    """One figure of the results ``runs/*/analyses/NAME.json``."""
    (kind,) = [analysis for analysis in ANALYSES.values() if name in analysis.files]
    files = {run: Path("runs", run, "analyses", f"{name}.json") for run in ("sgd", "sam", "ssam-f", "")}
    found = {run: json.loads(path.read_text()) for run, path in files.items() if path.exists()}
    results = []
    for (run, content), style in zip(found.items(), assign_styles(list(found)), strict=True):
        results.append(LabeledResult(run.upper(), kind.result_type.from_dict(content["result"]), style))
    shown, panel = SHOWN[name]
    (figure,) = [figure for figure in kind.figures(name, results) if figure.name == shown]
    if panel is not None:
        figure = dataclasses.replace(figure, panels={"": figure.panels[panel]})
    write_plot([figure], file)
    picture = Image.open(file).convert("RGB")
    picture.thumbnail((WIDTH, WIDTH))
    picture.quantize(COLORS).save(file, optimize=True)


if __name__ == "__main__":
    main()
