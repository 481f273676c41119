"""Metrics that the trainers log arrive in TensorBoard, MLflow and Weights & Biases, where installed."""

from __future__ import annotations

from pathlib import Path

import pytest

import sparsesam
from sparsesam.integrations.metrics import step_metrics
from tests import cases

EXPECTED = {"sam/rho", "sam/sparsity", "sam/ascent_norm", "sam/skipped_ascents", "sam/skipped_steps"}


class TensorBoard:
    """Curves as {name: [(step, value), …]}, from the files below a directory."""

    def __init__(self, folder):
        self.folder = folder

    def lightning(self, loggers):
        return loggers.TensorBoardLogger(self.folder, name="", version="")

    def curves(self):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        found = {}
        for file in self.folder.rglob("events.out.tfevents.*"):
            events = EventAccumulator(str(file)).Reload()
            for name in events.Tags()["scalars"]:
                found[name] = [(event.step, event.value) for event in events.Scalars(name)]
        return found


class MLflow:
    def __init__(self, folder):
        import mlflow

        self.uri = f"sqlite:///{folder / 'mlflow.db'}"
        mlflow.set_tracking_uri(self.uri)

    def lightning(self, loggers):
        return loggers.MLFlowLogger("sam", tracking_uri=self.uri)

    def curves(self):
        import mlflow

        client = mlflow.tracking.MlflowClient(self.uri)
        (run,) = client.search_runs([one.experiment_id for one in client.search_experiments()])
        histories = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
        return {name: [(one.step, one.value) for one in history] for name, history in histories.items()}


class Wandb:
    """Offline; the last value of each curve, which is all that a run knows without its server."""

    def __init__(self, folder):
        self.folder = folder

    def lightning(self, loggers):
        return loggers.WandbLogger(project="sam", save_dir=self.folder, offline=True)

    def curves(self):
        import wandb

        summary, folder = dict(wandb.run.summary), Path(wandb.run.dir).parent
        wandb.finish()
        assert folder.name.startswith("offline-run-")
        assert list(folder.glob("*.wandb"))
        return {name: [(None, value)] for name, value in summary.items() if isinstance(value, int | float)}


LOGGERS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": Wandb}


@pytest.fixture(params=LOGGERS)
def tracker(request, tmp_path, monkeypatch):
    pytest.importorskip(request.param)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    return LOGGERS[request.param](tmp_path)


def options():
    return {"rho_schedule": sparsesam.Warmup(10), "mask": sparsesam.dynamic_mask(sparsity=0.5, refresh=2)}


def check(curves, opt):
    assert curves.keys() >= EXPECTED
    for name, value in step_metrics(opt).items():
        assert curves[name][-1][1] == pytest.approx(value), name
    first = curves["sam/rho"][0]
    assert first[0] is None or (len(curves["sam/rho"]) == 2 and first[1] == pytest.approx(0.15))


@pytest.mark.filterwarnings("ignore")
def test_lightning(tracker, tmp_path):
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    from tests.integrations.test_lightning import Configured, SharpnessAwareMonitor, fit

    module, logger = Configured(cases.mlp(), **options()), tracker.lightning(pytorch_lightning.loggers)
    trainer = fit(module, tmp_path, logger=logger, log_every_n_steps=5, callbacks=[SharpnessAwareMonitor()])
    curves = tracker.curves()
    check(curves, trainer.optimizers[0])
    assert curves["sam/gradient_norm"][-1][1] > 0


@pytest.mark.filterwarnings("ignore")
def test_hugging_face(tracker, tmp_path, request):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from tests.integrations.test_hugging_face import arguments, language_model, masked, train

    model = language_model()
    opt = masked(model, **options())
    report_to = request.node.callspec.params["tracker"]
    train(model, opt, arguments(tmp_path / "run", logging_steps=5, report_to=report_to))
    # Hugging Face calls what is measured in training train/NAME; its MLflow reporter keeps the bare name.
    check({name.removeprefix("train/"): curve for name, curve in tracker.curves().items()}, opt)
