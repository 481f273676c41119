import sys

import pytest

from tests.lab.experiment.runs import train


def test_tensorboard_has_curves_of_run(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tmp_path, logger="tensorboard", optimizer="ssam-f")
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss", "test/accuracy", "lr", "rho"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3]


def test_wandb_logs_offline(tmp_path):
    pytest.importorskip("wandb")
    train(tmp_path, logger="wandb")
    assert list((tmp_path / "wandb").glob("offline-run-*"))


def test_mlflow_logs_into_run_directory(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    train(tmp_path, logger="mlflow")
    client = mlflow.tracking.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("sparsesam").experiment_id])
    assert len(client.get_metric_history(run.info.run_id, "train/loss")) == 3


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_missing_logger_is_reported_before_anything_is_written(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=f"--logger {name} needs {name}: pip install pytorch-lightning {name}"):
        train(tmp_path / "run", logger=name)
    assert not (tmp_path / "run").exists()
