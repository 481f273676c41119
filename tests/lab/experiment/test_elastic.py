"""A killed rank: alone, the others name it and the run resumes; under torchrun all start again, to the same weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sparsesam.lab.commands.train import under_torchrun
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.run_directory import read_records
from tests.lab.experiment.runs import same, state, words

TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}
SETTINGS = {"optimizer": "ssam-f", "mask_steps": 3, "model": "tests.lab.experiment.networks:killed"}
SETTINGS |= {"train_size": 72, "test_size": 40, "epochs": 4, "batch_size": 16, "fisher_samples": 8, "rho": 0.1}
SETTINGS |= {"checkpoint_steps": 2, "logger": "none", "threads": 1, "accelerator": "cpu", "quiet": "true"}


def test_torchrun_sets_equal_numbers_of_processes_and_a_restart_resumes():
    place = under_torchrun(RunEnvironment(), TORCHRUN)
    assert (place.devices, place.num_nodes, place.resume) == (4, 2, False)
    assert under_torchrun(RunEnvironment(), {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).resume
    assert under_torchrun(RunEnvironment(devices=3), {}) == RunEnvironment(devices=3)
    with pytest.raises(ValueError, match="nproc-per-node"):
        under_torchrun(RunEnvironment(), {**TORCHRUN, "WORLD_SIZE": "6"})


def run(*command, kill="no", **variables):
    root = Path(__file__).parents[3]
    variables |= {"KILL": kill, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    command = [sys.executable, "-m", *map(str, command)]
    return subprocess.run(
        command, env={**os.environ, **variables}, check=False, timeout=300, capture_output=True, text=True
    )


@pytest.mark.xdist_group("ranks")  # one rendezvous at a time
def test_lost_rank_is_named_and_run_resumes(tmp_path):
    two_ranks, variables = words(devices=2), {"TORCHELASTIC_RESTART_COUNT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    killed = run("sparsesam", "train", "--out", tmp_path, *words(**SETTINGS), *two_ranks, kill="yes", **variables)
    assert killed.returncode in (1, -signal.SIGKILL)
    assert "Traceback" not in killed.stderr
    (line,) = [line for line in killed.stderr.splitlines() if line.startswith("sparsesam: ")]
    assert line.startswith("sparsesam: rank 1 (process ")
    assert "continue with: sparsesam train --resume --out" in line
    assert not (tmp_path / "failure.json").exists()
    resumed = run("sparsesam", "train", "--resume", "--out", tmp_path, **variables)
    assert (resumed.returncode, resumed.stdout.count("test accuracy")) == (0, 1)
    assert "Traceback" not in resumed.stderr  # of rank 1, which has no result to print


@pytest.mark.slow
def test_killed_rank_restarts_and_weights_equal_uninterrupted(tmp_path):
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    # Otherwise torch's restarted processes look for each other at the old addresses.
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    for name, kill in (("whole", "no"), ("killed", "yes")):
        command = ["-m", "sparsesam", "train", *words(**SETTINGS, out=tmp_path / name)]
        done = run(*torchrun, *command, kill=kill, **fresh_store)
        assert done.returncode == 0, done.stderr
        kinds = [record["kind"] for record in read_records(tmp_path / name / "records.jsonl")]
        assert ("resume" in kinds) == (name == "killed")
    assert same(state(tmp_path / "killed")["training"]["model"], state(tmp_path / "whole")["training"]["model"])
    assert same(state(tmp_path / "killed")["training"]["optimizer"], state(tmp_path / "whole")["training"]["optimizer"])
