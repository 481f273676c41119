"""torchrun -m sparsesam train: a lost rank, a restart, the same weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sparsesam.lab.commands.train import under_torchrun
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.run_directory import read_records
from tests.lab.experiment.runs import same, state, words

TORCHRUN = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "0", "LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8"}


def test_torchrun_sets_equal_numbers_of_processes_and_a_restart_resumes():
    place = under_torchrun(RunEnvironment(), TORCHRUN)
    assert (place.devices, place.num_nodes, place.resume) == (4, 2, False)
    assert under_torchrun(RunEnvironment(), {**TORCHRUN, "TORCHELASTIC_RESTART_COUNT": "1"}).resume
    assert under_torchrun(RunEnvironment(devices=3), {}) == RunEnvironment(devices=3)
    with pytest.raises(ValueError, match="nproc-per-node"):
        under_torchrun(RunEnvironment(), {**TORCHRUN, "WORLD_SIZE": "6"})


def torchrun(out, *, kill):
    settings = {"optimizer": "ssam-f", "mask_steps": 3, "model": "tests.lab.experiment.networks:killed"}
    settings |= {"train_size": 72, "test_size": 40, "epochs": 4, "batch_size": 16, "fisher_samples": 8, "rho": 0.1}
    settings |= {"checkpoint_steps": 2, "logger": "none", "threads": 1, "accelerator": "cpu", "quiet": "true"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["-m", "sparsesam", "train", *words(**settings, out=out)]
    root = Path(__file__).parents[3]
    # Otherwise torch's restarted processes look for each other at the old addresses.
    fresh_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    environment = {**os.environ, **fresh_store, "KILL": kill, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    return subprocess.run(command, env=environment, check=False, timeout=240, capture_output=True, text=True)


@pytest.mark.slow
def test_killed_rank_restarts_and_weights_equal_uninterrupted(tmp_path):
    for name, kill in (("whole", "no"), ("killed", "yes")):
        done = torchrun(tmp_path / name, kill=kill)
        assert done.returncode == 0, done.stderr
    kinds = [record["kind"] for record in read_records(tmp_path / "killed" / "records.jsonl")]
    assert "resume" in kinds
    assert "resume" not in [record["kind"] for record in read_records(tmp_path / "whole" / "records.jsonl")]
    assert same(state(tmp_path / "killed")["training"]["model"], state(tmp_path / "whole")["training"]["model"])
    assert same(state(tmp_path / "killed")["training"]["optimizer"], state(tmp_path / "whole")["training"]["optimizer"])
