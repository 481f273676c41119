"""Curves of a run through Lightning's loggers: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsesam.integrations.extras import required_by
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.result import EpochRecord

METRICS = (
    *("train_loss", "train_accuracy", "val_loss", "val_accuracy", "test_loss", "test_accuracy"),
    *("lr", "rho", "sparsity", "forward_backwards"),
)
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
    plain = (bool, int, float)
    logger.log_hyperparams({name: one if isinstance(one, plain) else str(one) for name, one in vars(config).items()})

    def log(record: EpochRecord) -> None:
        metrics = {name.replace("_", "/", 1): value for name in METRICS if (value := getattr(record, name)) is not None}
        logger.log_metrics(metrics, step=record.epoch)

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
