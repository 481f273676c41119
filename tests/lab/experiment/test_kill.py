"""Killed processes: a run resumes to the same weights, and a sweep's workers end with it."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

from tests.lab.experiment.runs import same, state, train

SETTINGS = {"optimizer": "ssam-f", "mask_steps": 3}
#: A run that kills itself after some steps.
KILLED = f"""
import pathlib, signal, sys
from tests.lab.experiment.runs import InterruptAt, train
train(pathlib.Path(sys.argv[1]), InterruptAt(int(sys.argv[2]), signal.SIGKILL), **{SETTINGS})
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    train(out, **SETTINGS)
    return state(out)


@pytest.mark.parametrize("step", [2, 5, 8])  # before the first checkpoint, at the end of an epoch, within one
def test_killed_run_resumes_to_same_weights(tmp_path, whole, step):
    command = [sys.executable, "-c", KILLED, str(tmp_path), str(step)]
    assert subprocess.run(command, env=ENVIRONMENT).returncode == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    train(tmp_path, resume=True, **SETTINGS)
    assert same(state(tmp_path), whole)


def test_workers_end_with_their_sweep(tmp_path):
    pipe = tmp_path / "begun"
    os.mkfifo(pipe)
    settings = {"model": "tests.lab.experiment.networks:blocked", "epochs": 100_000, "train_size": 64}
    (tmp_path / "sweep.yaml").write_text(
        yaml.safe_dump({"settings": {**settings, "optimizer": "sgd"}, "grid": {"lr": [0.01, 0.02]}})
    )
    command = [sys.executable, "-m", "sparsesam.lab.cli", "sweep", str(tmp_path / "sweep.yaml"), "--jobs", "2"]
    command += ["--out", str(tmp_path / "runs"), "--no-calibration"]
    sweep = subprocess.Popen(command, env={**ENVIRONMENT, "BEGUN": str(pipe)}, stdout=subprocess.DEVNULL)
    workers = [int(pipe.read_text()), int(pipe.read_text())]  # each blocks until a run has built its model
    assert sweep.pid not in workers
    sweep.kill()
    sweep.wait()
    for worker in workers:
        wait_for_end(worker)
    for run in filter(Path.is_dir, (tmp_path / "runs").iterdir()):
        with FileLock(run / "running.lock").acquire(timeout=0):
            assert not (run / "result.json").exists()


def wait_for_end(pid):
    """Block until a process that is not our child has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([descriptor], [], [], 120)
    assert ready, f"worker {pid} is still running"
