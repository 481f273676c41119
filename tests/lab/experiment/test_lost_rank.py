"""A killed rank: the others end with one line that names it, and the run resumes."""

import os
import signal
import subprocess
import sys

import pytest

from tests.lab.experiment.runs import words

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
MODEL = "tests.lab.experiment.networks:killed"
OPTIONS = [
    *words(model=MODEL, optimizer="sam", train_size=64, test_size=40, epochs=6, batch_size=16),
    *words(threads=1, logger="none", accelerator="cpu", devices=2),
]


def run(out, *options, kill="no"):
    command = [sys.executable, "-m", "sparsesam", "train", "--out", str(out), *options]
    environment = {**ENVIRONMENT, "KILL": kill, "TORCHELASTIC_RESTART_COUNT": "0"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


@pytest.mark.xdist_group("ranks")
def test_lost_rank_is_named_and_run_resumes(tmp_path):
    killed = run(tmp_path / "killed", *OPTIONS, kill="yes")
    assert killed.returncode in (1, -signal.SIGKILL)
    assert "Traceback" not in killed.stderr
    (line,) = [line for line in killed.stderr.splitlines() if line.startswith("sparsesam: ")]
    assert line.startswith("sparsesam: rank 1 (process ")
    assert "continue with: sparsesam train --resume --out" in line
    assert not (tmp_path / "killed" / "failure.json").exists()
    assert run(tmp_path / "killed", "--resume").returncode == 0
