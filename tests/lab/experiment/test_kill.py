"""A run killed at any moment resumes to the same final weights."""

import os
import random
import subprocess
import sys
import time

from tests.lab.experiment.runs import same, state

SETTINGS = "--train-size 200 --test-size 50 --epochs 25 --optimizer ssam-f --threads 1 --quiet true --logger none"


def start(out, *more):
    command = [sys.executable, "-m", "sparsesam.lab.cli", "train", *SETTINGS.split(), "--out", str(out), *more]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None
        time.sleep(0.02)


def test_a_killed_run_resumes_to_the_same_weights(tmp_path):
    whole, killed = start(tmp_path / "whole"), start(tmp_path / "killed")
    wait_for(tmp_path / "killed" / "last.pt", killed)
    time.sleep(random.Random(time.time()).uniform(0, 1))
    killed.kill()
    killed.wait()
    assert not (tmp_path / "killed" / "result.json").exists()
    assert start(tmp_path / "killed", "--resume").wait(timeout=120) == 0
    assert whole.wait(timeout=120) == 0
    assert same(state(tmp_path / "killed"), state(tmp_path / "whole"))
