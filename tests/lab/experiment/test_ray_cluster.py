"""A sweep on a Ray cluster of two machines, one of which is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sparsesam.lab.experiment.run_directory import read_records

SCRIPT = """
import os, select, sys, threading
from pathlib import Path
import ray
from ray.cluster_utils import Cluster

from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig
from sparsesam.lab.experiment.sweep import Sweep, sweep_jobs

out = Path(sys.argv[1])
for name in ("WAITING", "LOST"):
    os.environ[name] = f"{out.parent}/{name}"
    os.mkfifo(os.environ[name])
waiting = os.fdopen(os.open(os.environ["WAITING"], os.O_RDWR))
config = TrainConfig(model="tests.lab.experiment.networks:waiting", train_size=72, test_size=40, epochs=6,
                     batch_size=16, optimizer="sam", rho=0.1)
jobs = Sweep("lost", {"SAM": config}, [0, 1, 2, 3]).jobs(out)
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
other = cluster.add_node(num_cpus=1)
ray.init(address=cluster.address)


def lose_a_machine():
    # Two runs wait in their second epoch, one on each machine.
    runs = [os.pidfd_open(int(waiting.readline())) for _ in range(2)]
    assert all((job.directory / "last.pt").exists() for job in jobs[:2])
    cluster.remove_node(other, allow_graceful=False)
    select.select(runs, [], [])  # one of them has ended
    (out / "lost").touch()
    os.open(os.environ["LOST"], os.O_RDWR)


threading.Thread(target=lose_a_machine, daemon=True).start()
ended = []
sweep_jobs(jobs, RunEnvironment(accelerator="cpu"), workers=2, backend="ray",
           on_end=lambda job, warnings: ended.append(job))
assert (out / "lost").exists()
assert sorted(job.config.seed for job in ended) == [0, 1, 2, 3], ended
assert all(job.status == "finished" for job in ended), ended
ray.shutdown()
cluster.shutdown()
"""


@pytest.mark.slow
def test_runs_of_lost_machine_are_repeated_and_counted_once(tmp_path):
    pytest.importorskip("ray")
    root = Path(__file__).parents[3]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    environment["PYTHONPATH"] = f"{root / 'src'}:{root}"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")]
    done = subprocess.run(command, env=environment, check=False, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = [read_records(file) for file in (tmp_path / "runs").glob("*/records.jsonl")]
    assert len(runs) == 4
    for records in runs:
        kinds = [record["kind"] for record in records]
        assert kinds.count("result") == 1
        assert [record["epoch"] for record in records if record["kind"] == "epoch"] == [1, 2, 3, 4, 5, 6]
    assert any(record["kind"] == "resume" for records in runs for record in records)
