"""Draw training images as the network sees them, with noise, corruption and augmentation."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from sparsesam.lab.commands.parser import Namespace, Parser, add_settings, settings_from
from sparsesam.lab.data.augment import denormalize
from sparsesam.lab.display import check_plot, plural, write_images
from sparsesam.lab.experiment.batches import Batches, load_splits
from sparsesam.lab.experiment.setting_types import PositiveInt


def add_arguments(parser: Parser) -> None:
    parser.usage = "%(prog)s show [--out FILE.png] [--images 24] [--OPTION VALUE …]"
    parser.add_argument("action", type=Literal["show"], help="draw the contact sheet")
    parser.add_argument("--out", type=Path, default=Path("data.png"), help="FILE.png, .svg or .pdf")
    parser.add_argument("--images", type=PositiveInt, default=24, help="number of images")
    add_settings(parser, leave_out=("out", "resume", "batch_size"))


def run(options: Namespace) -> None:
    check_plot(options.out, "--out")
    config, environment = settings_from(options)
    config = replace(config, batch_size=options.images)
    splits = load_splits(config, environment)
    clean = replace(config, label_noise=0.0)
    batches = [next(Batches(settings, splits, torch.device("cpu")).train(epoch=0)) for settings in (config, clean)]
    labels = [batch.labels if batch.labels.dim() == 1 else batch.labels.argmax(1) for batch in batches]  # as in mixup
    names = [[splits.classes[label] for label in part.tolist()] for part in labels]
    titles = [name if name == true else f"{name}, was {true}" for name, true in zip(*names, strict=True)]
    images = list(denormalize(batches[0].images, splits.mean, splits.std))
    write_images(images, titles, options.out, columns=math.ceil(math.sqrt(1.5 * len(images))))
    print(f"{plural(len(titles), 'image')} of {splits.name}: {options.out}")
