"""A picture of images with their titles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from os import PathLike

import torch
from torch import Tensor

TILE = 96
"""Small images are enlarged by a whole factor to about this many pixels."""
GAP = 8
LINE = 16


def contact_sheet(
    images: Tensor, titles: Sequence[str], path: str | PathLike[str], *, columns: int | None = None
) -> None:
    """Draw (n, c, h, w) uint8 images, c being 1 or 3, in a grid as a PNG, each with its title below.

    Normalized images must be turned back first (`sparsesam.lab.data.augment.denormalize`). A title may have several
    lines; one too long for its tile ends in "…".
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[1] not in (1, 3) or not len(images):
        raise ValueError(
            f"images must be uint8 of shape (n, 1 or 3, height, width), got {images.dtype} {tuple(images.shape)}; "
            "denormalize them first"
        )
    if len(titles) != len(images):
        raise ValueError(f"titles must be one per image, {len(images)}, got {len(titles)}")
    if columns is not None and columns < 1:
        raise ValueError(f"columns must be at least 1, got {columns}")
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError as error:
        raise ImportError("contact sheets need Pillow: pip install 'sparsesam[data]'") from error

    count, _, height, width = images.shape
    across = min(count, columns or math.ceil(math.sqrt(count * 1.5)))
    down = math.ceil(count / across)
    factor = max(1, round(TILE / max(height, width)))
    lines = max(title.count("\n") + 1 for title in titles)
    step_x, step_y = width * factor + GAP, height * factor + LINE * lines + GAP
    sheet = Image.new("RGB", (across * step_x + GAP, down * step_y + GAP), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=11)
    for place, (pixels, title) in enumerate(zip(images.cpu().expand(-1, 3, -1, -1), titles, strict=True)):
        x, y = GAP + place % across * step_x, GAP + place // across * step_y
        tile = Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
        sheet.paste(tile.resize((width * factor, height * factor), Image.Resampling.NEAREST), (x, y))
        for number, line in enumerate(title.split("\n")):
            text = _fit(line, width * factor, font.getlength)
            draw.text((x, y + height * factor + 2 + LINE * number), text, fill="black", font=font)
    sheet.save(path, format="PNG")


def _fit(line: str, width: int, length: Callable[[str], float]) -> str:
    if length(line) <= width:
        return line
    while line and length(f"{line}…") > width:
        line = line[:-1]
    return f"{line}…"
