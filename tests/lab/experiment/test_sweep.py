import io
import json
import os
import re
import select
import signal
import subprocess
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from filelock import FileLock
from rich.console import Console

from sparsesam.lab.cli import main
from sparsesam.lab.commands.sweep import overrides, sweep_table
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import RunError
from sparsesam.lab.experiment.sweep import claim_gpu, read_sweep, sweep_jobs
from tests.lab.experiment.runs import result_with

SETTINGS = {"train_size": 64, "test_size": 40, "epochs": 1, "batch_size": 32}


def written(tmp_path, **content):
    file = tmp_path / "sweep.yaml"
    file.write_text(yaml.safe_dump({"settings": SETTINGS, **content}, sort_keys=False))
    return file


def read(tmp_path, **content):
    return read_sweep(written(tmp_path, **content), overrides={}, seeds=None)


def test_sweep_is_variants_times_grid_times_seeds(tmp_path):
    sweep = read(
        tmp_path, variants={"A": {"optimizer": "sgd"}, "B": {"optimizer": "sam"}}, grid={"lr": [0.1, 0.2]}, seeds=3
    )
    assert list(sweep.variants) == ["A lr 0.1", "A lr 0.2", "B lr 0.1", "B lr 0.2"]
    jobs = sweep.jobs(tmp_path)
    assert len(jobs) == len({job.directory for job in jobs}) == 12
    assert [job.config.seed for job in jobs] == [0] * 4 + [1] * 4 + [2] * 4


def rows(jobs):
    """The cells of each variant's row."""
    console = Console(file=io.StringIO(), width=200)
    console.print(sweep_table("", jobs))
    lines = [line.split("│")[1:-1] for line in console.file.getvalue().splitlines() if line.startswith("│")]
    return {label.strip(): [cell.strip() for cell in cells] for label, *cells in lines}


def test_grid_points_that_variant_does_not_use_are_one_run(tmp_path):
    variants = {"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam"}, "fixed": {"optimizer": "sam", "rho": 0.5}}
    sweep = read(tmp_path, variants=variants, grid={"rho": [0.1, 0.2]})
    assert list(sweep.variants) == ["SGD", "SAM rho 0.1", "SAM rho 0.2", "fixed"]


def test_identical_runs_are_trained_once(tmp_path):
    variants = {"SGD": {"optimizer": "sgd"}, "the same": {"optimizer": "sgd", "momentum": 0.9}}
    jobs = read(tmp_path, variants=variants).jobs(tmp_path / "runs")
    ended = []
    sweep_jobs(jobs, RunEnvironment(), workers=1, on_end=lambda job, warnings: ended.append(job.label))
    assert ended == ["SGD"]
    assert rows(jobs)["the same"][-1] == "1"


def test_log_has_line_per_run_with_time_remaining(tmp_path, capsys):
    file = written(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "bad": {"optimizer": "sgd", "lr": 1e30}}, seeds=2)
    assert main(["sweep", str(file), "--out", str(tmp_path / "runs"), "--jobs", "1"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"SGD, seed 1: test [\d.]+%, \d+ s of training; 2 of 4 runs finished, about \d", printed)
    assert "bad, seed 0: failed: DivergedError" in printed
    assert "time / SGD" in printed


def test_warnings_of_runs_are_collected(tmp_path, capsys):
    file = written(tmp_path, settings={**SETTINGS, "model": "tests.lab.experiment.test_sweep:warning_model"}, seeds=2)
    main(["sweep", str(file), "--out", str(tmp_path / "runs"), "--jobs", "1", "--no-calibration"])
    printed = capsys.readouterr().out
    assert printed.count("the model is old") == 1
    assert "warning (2 runs): the model is old" in printed


def warning_model(num_classes):
    warnings.warn("the model is old", stacklevel=1)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, num_classes))


def test_missing_file_lists_available_ones(tmp_path):
    written(tmp_path)
    with pytest.raises(ValueError, match=r"swep\.yaml: does not exist.*did you mean .*sweep\.yaml"):
        read_sweep(tmp_path / "swep.yaml", overrides={}, seeds=None)
    with pytest.raises(ValueError, match=r"nofile\.yaml: does not exist; pass a YAML file or demo"):
        read_sweep(tmp_path / "elsewhere" / "nofile.yaml", overrides={}, seeds=None)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"grid": {"rhoo": [1]}}, "unknown option 'rhoo'; did you mean rho"),
        ({"gird": {"rho": [1]}}, "unknown option 'gird'; did you mean grid"),
        ({"grid": {"rho": 0.1}}, "grid must have a list of values"),
        ({"variants": "sam"}, "variants must contain names and values"),
        ({"variants": {"A": {1: 2}}}, "unknown option '1'"),
        ({"variants": {"A": "sam"}}, "variant A must contain names and values"),
        ({"grid": {"sparsity": []}}, "grid must have a list of values"),
        ({"title": [1]}, "title must be a string"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"grid": {"seed": [0, 1]}}, "seed must be left out, got 1"),
        ({"seeds": [0, 0]}, "seeds must be a number, or a list without repetitions"),
        ({"variants": {"A": {"optimizer": "sam", "sparsity": 0.5}}}, "sparsity has no effect with optimizer sam"),
        ({"variants": {"A": {"optimizer": "sgd"}}, "grid": {"rho": [1, 2]}}, "rho has no effect with optimizer sgd"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_bad_file_is_rejected_with_reason(tmp_path, content, reason):
    with pytest.raises(ValueError, match=rf"sweep\.yaml: {reason}"):
        read(tmp_path, **content)


def test_override_that_no_run_uses_is_rejected(tmp_path):
    file = written(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam"}})
    assert len(read_sweep(file, overrides={"rho": 0.3}, seeds=None).variants) == 2
    with pytest.raises(ValueError, match="sparsity has no effect"):
        read_sweep(file, overrides={"sparsity": 0.3}, seeds=None)
    with pytest.raises(ValueError, match=r"--set rho must have a YAML value, got '\['"):
        overrides(["rho=["])


def test_finished_runs_are_skipped_and_failed_ones_retried_on_request(tmp_path):
    variants = {"good": {"optimizer": "sgd"}, "bad": {"optimizer": "sgd", "lr": 1e30, "epochs": 2}}
    jobs = read(tmp_path, variants=variants).jobs(tmp_path / "runs")
    good, bad = jobs
    sweep_jobs(jobs, RunEnvironment(), workers=1)
    assert good.result is not None
    assert "DivergedError: the loss is" in bad.failure
    assert (rows(jobs)["good"][-1], rows(jobs)["bad"][-1]) == ("1", "0 of 1, 1 failed")

    times = [(job.directory / "records.jsonl").stat().st_mtime_ns for job in jobs]
    sweep_jobs(jobs, RunEnvironment(), workers=1)
    assert times == [(job.directory / "records.jsonl").stat().st_mtime_ns for job in jobs]
    sweep_jobs(jobs, RunEnvironment(), workers=1, retry=True)
    again = [(job.directory / "records.jsonl").stat().st_mtime_ns for job in jobs]
    assert again[0] == times[0]
    assert again[1] > times[1]


def killed(num_classes):
    os.kill(os.getpid(), signal.SIGKILL)


def test_killed_worker_ends_sweep_with_one_line(tmp_path):
    jobs = read(tmp_path, settings={**SETTINGS, "model": f"{__name__}:killed"}, seeds=2).jobs(tmp_path / "runs")
    with pytest.raises(RunError, match=r"a worker process was killed.*run the same command again to continue"):
        sweep_jobs(jobs, RunEnvironment(), workers=2)


def test_workers_end_with_their_sweep(tmp_path):
    pipe = tmp_path / "begun"
    os.mkfifo(pipe)
    settings = {"model": "tests.lab.experiment.networks:blocked", "epochs": 100_000, "train_size": 64}
    file = written(tmp_path, settings={**settings, "optimizer": "sgd"}, grid={"lr": [0.01, 0.02]})
    command = [sys.executable, "-m", "sparsesam.lab.cli", "sweep", str(file), "--jobs", "2", "--no-calibration"]
    command += ["--out", str(tmp_path / "runs")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "BEGUN": str(pipe)}
    sweep = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    workers = [int(pipe.read_text()), int(pipe.read_text())]  # each blocks until a run has built its model
    assert sweep.pid not in workers
    sweep.kill()
    sweep.wait()
    for worker in workers:  # not our children
        with suppress(ProcessLookupError):
            ready, _, _ = select.select([os.pidfd_open(worker)], [], [], 120)
            assert ready, f"worker {worker} is still running"
    for run in filter(Path.is_dir, (tmp_path / "runs").iterdir()):
        with FileLock(run / "running.lock").acquire(timeout=0):
            assert not (run / "result.json").exists()


def write_result(job, **values):
    job.directory.mkdir(exist_ok=True)
    (job.directory / "result.json").write_text(json.dumps({"result": result_with(**values)}))


def test_accuracy_cost_budget_and_seeds_are_summarized(tmp_path):
    jobs = read(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "B": {"budget": 1.2}}, seeds=3).jobs(tmp_path)
    for job, accuracy, passes in zip(jobs, (0.5, 0.8, 0.7, 0.9, 0.6, 0.85), (1.0, 1.17) * 3, strict=True):
        write_result(job, test_accuracy=accuracy, forward_backwards_per_step=passes)
    sgd = ["60.0 ± 24.8 %", "1.00", "–", "–", "3"]
    assert rows(jobs) == {"SGD": sgd, "B": ["85.0 ± 12.4 %", "1.17", "1.2", *sgd[3:]]}


def test_each_run_claims_one_gpu(tmp_path):
    with claim_gpu(2, tmp_path) as first, claim_gpu(2, tmp_path) as second:
        assert {first, second} == {"0,", "1,"}
    with claim_gpu(2, tmp_path) as again:
        assert again == "0,"


def test_packaged_demo_compares_four_optimizers():
    sweep = read_sweep("demo", overrides={"epochs": 1}, seeds=2)
    assert list(sweep.variants) == ["SGD", "recommended", "SAM", "SSAM-F"]
    assert all(config.epochs == 1 and config.label_noise == 0.3 for config in sweep.variants.values())
    assert list(sweep.seeds) == [0, 1]


@pytest.mark.parametrize("backend", ["loky", pytest.param("ray", marks=pytest.mark.slow)])
def test_runs_in_other_processes_give_same_results(tmp_path, backend):
    if backend == "ray":
        pytest.importorskip("ray")
    file = written(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam"}})
    command = ["sweep", str(file), "--out", str(tmp_path / "runs"), "--jobs", "2", "--backend", backend]
    subprocess.run(
        [sys.executable, "-m", "sparsesam.lab.cli", *command],
        # Ray keeps a token of its own in the home directory; "local" starts a cluster for this test alone.
        env={**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path), "RAY_ADDRESS": "local"},
        check=True,
        timeout=300,
    )
    sweep = read(tmp_path, variants={"SGD": {"optimizer": "sgd"}, "SAM": {"optimizer": "sam"}})
    theirs, ours = sweep.jobs(tmp_path / "runs"), sweep.jobs(tmp_path / "ours")
    sweep_jobs(ours, RunEnvironment(), workers=1)
    assert [job.result.test_loss for job in theirs] == [job.result.test_loss for job in ours]
