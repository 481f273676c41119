"""Loads image data sets of the Hugging Face hub into memory with the ``datasets`` package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsesam.integrations.extras import required_by
from sparsesam.lab.data.splits import DataError, Labelled, Splits


def load_hugging_face(
    name: str, data_dir: Path | None = None, download: bool = True, image_size: int | None = None
) -> Splits:
    """Load the splits "train" and "test" (or "validation") of a data set with an image and a class-label column.

    ``data_dir`` is a directory written by ``DatasetDict.save_to_disk``; otherwise the data set comes from the hub or
    its cache. ``image_size`` resizes the images, which must otherwise all have the same size.
    """
    with required_by(f"hf/{name}", "datasets pillow"):
        import datasets
    mode = None if download else datasets.DownloadConfig(local_files_only=True)
    try:
        found: Any = (
            datasets.load_from_disk(data_dir) if data_dir else datasets.load_dataset(name, download_config=mode)
        )
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"hf/{name}: expected a data set that can be loaded, found none ({reason})") from error
    test = next((split for split in ("test", "validation", "valid", "val") if split in found), None)
    if "train" not in found or test is None:
        raise DataError(f"hf/{name}: expected the splits train and test (or validation), found {', '.join(found)}")
    features = found["train"].features
    kinds = {type(feature).__name__: column for column, feature in reversed(features.items())}
    if not {"Image", "ClassLabel"} <= kinds.keys():
        raise DataError(f"hf/{name}: expected an Image and a ClassLabel column, found {features}")
    image, label = kinds["Image"], kinds["ClassLabel"]
    train = _labelled(f"hf/{name}: train", found["train"], image, label, image_size)
    sample = train.images[:: max(1, len(train.images) // 5000)].float() / 255
    return Splits(
        train=train,
        test=_labelled(f"hf/{name}: {test}", found[test], image, label, image_size),
        name=f"hf/{name}",
        classes=tuple(features[label].names),
        mean=tuple(sample.mean((0, 2, 3)).tolist()),
        std=tuple(sample.std((0, 2, 3)).clamp_min(1e-3).tolist()),
    )


def _labelled(what: str, split: Any, image: str, label: str, size: int | None) -> Labelled:
    images = []
    for picture in split[image]:
        picture = picture if picture.mode == "L" else picture.convert("RGB")
        if size is not None:
            picture = picture.resize((size, size))
        images.append(np.array(picture))
    shapes = {array.shape for array in images}
    if len(shapes) > 1:
        raise DataError(f"{what}: expected images of one size and mode, found {len(shapes)}; pass image_size")
    pixels = torch.from_numpy(np.stack(images))
    pixels = pixels[:, None] if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Labelled(pixels, torch.tensor(list(split[label])))
