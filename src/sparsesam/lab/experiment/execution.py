"""The runs of a sweep in other processes, on one machine or a Ray cluster."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import joblib
from filelock import FileLock, Timeout
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sparsesam.integrations.extras import required_by
from sparsesam.lab.experiment.config import RunEnvironment
from sparsesam.lab.experiment.errors import Interrupted, RunError
from sparsesam.lab.experiment.run_directory import RunDirectory
from sparsesam.lab.experiment.sweep import Job

_Context = tuple[RunEnvironment, int, int | None]

#: How many machines a run on a Ray cluster may lose.
LOST_MACHINES = 3


@dataclass(frozen=True)
class Outcome:
    """How a run ended, and the warnings that it raised."""

    job: Job
    status: Literal["finished", "failed", "interrupted"]
    warnings: tuple[str, ...] = ()


def sweep_jobs(
    jobs: Iterable[Job],
    environment: RunEnvironment,
    *,
    workers: int,
    backend: Literal["loky", "ray"] = "loky",
    retry: bool = False,
    gpus: int = 0,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
) -> None:
    """Run those that are not finished and, unless ``retry``, have not failed; an interrupted run is resumed.

    ``workers`` runs at a time; ``on_end`` is called here when one ends. Workers stop, with a checkpoint, when this
    process ends. "ray" sends the runs to the Ray cluster that this process can reach, or to one started here; its
    machines must share the directory that the runs are in, and the runs of a machine that is lost go on elsewhere.
    """
    distinct: dict[Path, Job] = {}
    for job in jobs:
        distinct.setdefault(job.directory, job)
    due = [job for job in distinct.values() if not job.is_finished and (retry or job.failure is None)]
    environment = replace(environment, resume=True, quiet=True, threads=environment.threads or 1, logger="none")
    start, parent = (_on_ray, None) if backend == "ray" else (_here, os.getpid())
    statuses = set()
    for outcome in start(due, (environment, gpus, parent), workers):
        statuses.add(outcome.status)
        on_end(outcome)
    if "interrupted" in statuses:
        raise KeyboardInterrupt


def _run_job(job: Job, environment: RunEnvironment, gpus: int, parent: int | None) -> Outcome:
    """In a worker process: an error is written to failure.json and does not end the sweep."""
    from sparsesam.lab.experiment.run import run_training

    def is_orphan() -> bool:
        return parent is not None and parent not in (os.getpid(), os.getppid())

    if job.is_finished:  # on a machine that was lost before it could report
        return Outcome(job, "finished")
    RunDirectory(job.directory).failure.unlink(missing_ok=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            with claimed_gpu(gpus, job.directory.parent) if gpus else nullcontext(environment.devices) as devices:
                mine = replace(environment, name=job.label, out=job.directory, devices=devices)
                run_training(job.config, mine, stop=is_orphan)
            status: Literal["finished", "failed", "interrupted"] = "finished"
        except (Interrupted, KeyboardInterrupt):
            status = "interrupted"
        except Exception as error:
            RunDirectory(job.directory).write_failure(error)
            status = "failed"
    if is_orphan():
        os._exit(1)  # no process receives the outcome
    return Outcome(job, status, tuple(dict.fromkeys(str(one.message) for one in caught)))


@contextmanager
def claimed_gpu(count: int, folder: Path) -> Iterator[str]:
    """The number of a GPU that no other run of the sweep uses; the claim ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    while True:
        for number in range(count):
            lock = FileLock(folder / f"gpu-{number}.lock")
            try:
                lock.acquire(timeout=0)
            except Timeout:
                continue
            with lock:
                yield f"{number},"
            return
        time.sleep(1.0)


def _here(jobs: Sequence[Job], context: _Context, workers: int) -> Iterator[Outcome]:
    parallel = joblib.Parallel(
        workers, backend="loky", batch_size=1, pre_dispatch=workers, return_as="generator_unordered"
    )
    try:
        yield from parallel(joblib.delayed(_run_job)(job, *context) for job in jobs)
    except TerminatedWorkerError as error:
        raise RunError(
            "a worker process was killed, perhaps because memory ran out; run the same command again to continue, "
            "with fewer --jobs to need less memory"
        ) from error


def _on_ray(jobs: Sequence[Job], context: _Context, workers: int) -> Iterator[Outcome]:
    """One task per run. Ray starts a task again, on another machine, when its own is lost; the run then resumes."""
    with required_by("--backend ray", "'sparsesam[ray]'"):
        import ray
    if not ray.is_initialized():
        ray.init()
    task = ray.remote(num_cpus=1, max_retries=LOST_MACHINES)(_run_job)
    waiting, running = list(reversed(jobs)), list[Any]()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(task.remote(waiting.pop(), *context))
        ended, running = ray.wait(running)
        yield from ray.get(ended)
