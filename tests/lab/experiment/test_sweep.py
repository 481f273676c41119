import json
import os
import subprocess
import sys

import pytest
import yaml

from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.summary import summarize
from sparsesam.lab.experiment.sweep import _claimed, read_sweep, sweep_jobs

SETTINGS = {"train_size": 64, "test_size": 40, "epochs": 1, "batch_size": 32, "fisher_samples": 8}


def written(tmp_path, **content):
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"settings": SETTINGS, **content}, sort_keys=False))
    return file


def read(tmp_path, **content):
    return read_sweep(written(tmp_path, **content), overrides={}, seeds=None)


def test_a_sweep_is_variants_times_grid_times_seeds(tmp_path):
    sweep = read(
        tmp_path, variants={"A": {"optimizer": "sgd"}, "B": {"optimizer": "sam"}}, grid={"lr": [0.1, 0.2]}, seeds=3
    )
    assert list(sweep.variants) == ["A lr 0.1", "A lr 0.2", "B lr 0.1", "B lr 0.2"]
    jobs = sweep.jobs(tmp_path)
    assert len(jobs) == len({job.directory for job in jobs}) == 12
    assert [job.config.seed for job in jobs] == [0] * 4 + [1] * 4 + [2] * 4


def test_unknown_settings_are_refused_with_the_nearest(tmp_path):
    with pytest.raises(ValueError, match=r"sweep.yaml: unknown option 'rhoo'; did you mean rho"):
        read(tmp_path, grid={"rhoo": [1]})
    with pytest.raises(ValueError, match=r"unknown option 'gird'; did you mean grid"):
        read(tmp_path, gird={"rho": [1]})
    with pytest.raises(ValueError, match="grid must have a list of values"):
        read(tmp_path, grid={"rho": 0.1})


def test_finished_runs_are_skipped_and_failed_ones_retried_on_request(tmp_path):
    variants = {"good": {"optimizer": "sgd"}, "bad": {"optimizer": "sgd", "lr": 1e30, "epochs": 2}}
    jobs = read(tmp_path, variants=variants).jobs(tmp_path / "runs")
    good, bad = jobs
    sweep_jobs(jobs, RunEnvironment(), workers=1)
    assert good.result is not None
    assert "DivergedError: the loss is" in bad.failure
    row = {row.label: row for row in summarize(jobs)}
    assert (row["good"].finished, row["bad"].failed) == (1, 1)

    times = [(job.directory / "records.jsonl").stat().st_mtime_ns for job in jobs]
    sweep_jobs(jobs, RunEnvironment(), workers=1)
    assert times == [(job.directory / "records.jsonl").stat().st_mtime_ns for job in jobs]
    sweep_jobs(jobs, RunEnvironment(), workers=1, retry=True)
    again = [(job.directory / "records.jsonl").stat().st_mtime_ns for job in jobs]
    assert again[0] == times[0]
    assert again[1] > times[1]


def test_accuracy_time_and_seeds_are_summed_up(tmp_path):
    jobs = read(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam"}}, seeds=2).jobs(tmp_path)
    for job, accuracy, seconds in zip(jobs, (0.5, 0.8, 0.7, 0.9), (1.0, 2.0, 1.0, 2.0), strict=True):
        job.directory.mkdir(exist_ok=True)
        result = {"test_accuracy": accuracy, "seconds_per_epoch": seconds, "sparsity": None}
        (job.directory / "result.json").write_text(json.dumps({"result": result}))
    sgd, sam = summarize(jobs)
    assert sgd.relative_time == 1
    assert sam.relative_time == 2
    assert sam.accuracy == pytest.approx(0.85)
    assert sam.spread == pytest.approx(0.1 / 2**0.5)


def test_gpus_are_claimed_one_each(tmp_path):
    with _claimed(2, tmp_path) as first, _claimed(2, tmp_path) as second:
        assert {first, second} == {"0,", "1,"}
    with _claimed(2, tmp_path) as again:
        assert again == "0,"


def test_the_packaged_demo_compares_four_optimizers():
    sweep = read_sweep("demo", overrides={"epochs": 1}, seeds=2)
    assert list(sweep.variants) == ["SGD", "SAM", "SSAM-F", "SSAM-D"]
    assert all(config.epochs == 1 and config.label_noise == 0.3 for config in sweep.variants.values())
    assert list(sweep.seeds) == [0, 1]


@pytest.mark.parametrize("backend", ["loky", "ray"])
def test_runs_in_other_processes_leave_the_same_results(tmp_path, backend):
    if backend == "ray":
        pytest.importorskip("ray")
    file = written(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam"}})
    command = ["sweep", str(file), "--out", str(tmp_path / "runs"), "--jobs", "2", "--backend", backend]
    subprocess.run(
        [sys.executable, "-m", "sparsesam.lab.cli", *command],
        # Ray keeps a token of its own in the home directory.
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)},
        check=True,
        timeout=120,
    )
    here = read(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam"}})
    there, mine = here.jobs(tmp_path / "runs"), here.jobs(tmp_path / "mine")
    sweep_jobs(mine, RunEnvironment(), workers=1)
    assert [job.result["test_loss"] for job in there] == [job.result["test_loss"] for job in mine]
