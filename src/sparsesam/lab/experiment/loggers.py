"""Curves of a run through Lightning's loggers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsesam.integrations.extras import required_by
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.result import EpochRecord

_PACKAGES = {
    "none": (),
    "tensorboard": ("tensorboard",),
    "wandb": ("pytorch-lightning", "wandb"),
    "mlflow": ("pytorch-lightning", "mlflow"),
}

LogEpoch = Callable[[EpochRecord], None]


@contextmanager
def open_logger(config: TrainConfig, environment: RunEnvironment, folder: Path) -> Iterator[LogEpoch]:
    """A function that logs an epoch's record; it does nothing with ``logger="none"``."""
    if environment.logger == "none":
        yield lambda record: None
        return
    logger = _logger(environment.logger, folder, name=environment.name or folder.name)
    logger.log_hyperparams(asdict(config))

    def log(record: EpochRecord) -> None:
        curves = {name: value for name, value in asdict(record).items() if isinstance(value, float)}
        grouped = {re.sub("^(train|val|test)_", r"\1/", name): value for name, value in curves.items()}
        logger.log_metrics(grouped, step=record.epoch)

    status = "failed"
    try:
        yield log
        status = "success"
    finally:
        logger.finalize(status)


def check_logger(name: str) -> None:
    """Refuse a logger that is not installed before a run writes anything."""
    with required_by(f"--logger {name}", f"{' '.join(_PACKAGES[name])}; or --logger none"):
        for package in _PACKAGES[name]:
            importlib.import_module(package.replace("-", "_"))


def _logger(kind: str, folder: Path, name: str) -> Any:
    if kind == "tensorboard":
        from lightning_fabric.loggers.tensorboard import TensorBoardLogger

        return TensorBoardLogger(root_dir=folder, name="tensorboard", version="")
    if kind == "wandb":
        from pytorch_lightning.loggers import WandbLogger

        offline = os.environ.get("WANDB_MODE", "offline") == "offline"
        return WandbLogger(name=name, save_dir=folder, project="sparsesam", offline=offline)
    from pytorch_lightning.loggers import MLFlowLogger

    tracking = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder / 'mlflow.db').resolve()}"
    return MLFlowLogger("sparsesam", run_name=name, tracking_uri=tracking)
