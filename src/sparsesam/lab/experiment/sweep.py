"""A sweep: named variants × a grid over any settings × seeds, run on one machine or a Ray cluster.

Each run has a directory named by the hash of the settings it uses, so identical runs are trained once.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock, Timeout

from sparsesam.integrations.extras import required_by
from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig, check_used, from_mapping, unused
from sparsesam.lab.experiment.errors import Interrupted, RunError
from sparsesam.lab.experiment.result import RunResult, read_result
from sparsesam.lab.experiment.run_directory import RunDirectory, read_json, read_records, write_json
from sparsesam.lab.experiment.setting_types import PositiveInt, as_mapping, convert, read_yaml
from sparsesam.lab.experiment.variants import grouped
from sparsesam.lab.names import check_names, suggestion


@dataclass(frozen=True)
class Sweep:
    """Variants by label; each config is run with every seed of ``seeds``."""

    title: str
    variants: Mapping[str, TrainConfig]
    seeds: Sequence[int]

    def jobs(self, out: Path) -> list[Job]:
        """Returns all runs ordered by seed, so that an interrupted sweep has complete comparisons."""
        pairs = itertools.product(self.seeds, self.variants.items())
        configs = [(label, replace(config, seed=seed)) for seed, (label, config) in pairs]
        return [Job(label, config, out / config.content_hash) for label, config in configs]

    def write(self, out: Path) -> None:
        """Write ``sweep.json`` beside the runs: the title and the order of the variants, for the report."""
        order = {label: config.variant.content_hash for label, config in self.variants.items()}
        write_json(out / "sweep.json", {"title": self.title, "variants": order})


@dataclass(frozen=True)
class Job:
    """A run of a sweep and its state, read from its directory."""

    label: str
    config: TrainConfig
    directory: Path

    @property
    def files(self) -> RunDirectory:
        return RunDirectory(self.directory)

    @property
    def seed(self) -> int:
        return self.config.seed

    @property
    def status(self) -> str:
        if self.files.result.exists():
            return "finished"
        return "unfinished" if self.failure is None else "failed"

    @property
    def failure(self) -> str | None:
        """The error of the last attempt, if it failed."""
        content = read_json(self.files.failure)
        return None if content is None else str(content["error"])

    @property
    def result(self) -> RunResult | None:
        return read_result(self.files.result, self.config.content_hash)

    def measured(self, name: str) -> Any:
        return getattr(self.result, name, None)

    @property
    def epochs_done(self) -> int:
        try:
            records = read_records(self.files.records)
        except (OSError, RunError):  # not started, or being written
            return 0
        return sum(record.get("kind") == "epoch" for record in records)


def read_sweep(file: str | Path, *, overrides: Mapping[str, Any], seeds: int | None) -> Sweep:
    """Read a sweep from a YAML file (docs/command-line.md), or the one of that name included in sparsesam.

    ``overrides`` override all settings in the file; ``seeds`` is the number of seeds in place of its own.
    """
    try:
        given = Path(file)
        place = given if given.is_file() else resources.files("sparsesam.lab.experiment") / "sweeps" / f"{file}.yaml"
        if not place.is_file():
            found = suggestion(str(file), [*map(str, given.parent.glob("*.yaml")), "demo"])
            raise ValueError(f"does not exist; pass a YAML file or demo, the sweep included in sparsesam{found}")
        content = as_mapping("the file", read_yaml(place.read_text(encoding="utf-8")))
        check_names(content, ("title", "settings", "variants", "grid", "seeds"))
        title = convert("title", content.get("title", given.stem), str)
        wanted = content.get("seeds", 1) if seeds is None else seeds
        chosen = convert("seeds", wanted, PositiveInt | tuple[int, ...])
        if not isinstance(chosen, int) and (not chosen or len(set(chosen)) < len(chosen)):
            raise ValueError(f"seeds must be a number, or a list without repetitions, got {list(chosen)}")
        return Sweep(title, _variants(content, overrides), range(chosen) if isinstance(chosen, int) else chosen)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from error


def _variants(content: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, TrainConfig]:
    """Returns every variant with every combination of the grid's values, labeled by the values that distinguish it.

    A variant must use its own settings. Those for all variants must be used by at least one.
    """
    settings, grid = (as_mapping(key, content.get(key) or {}) for key in ("settings", "grid"))
    variants = as_mapping("variants", content.get("variants") or {"": {}})
    for name, values in grid.items():
        if not isinstance(values, list) or not values:
            raise ValueError(f"grid must have a list of values for each setting, got {values!r:.100} for {name}")
    axes = [[(name, value) for value in values] for name, values in grid.items()]
    configs: dict[str, TrainConfig] = {}
    shared = {*settings, *grid, *overrides}
    for label, values in variants.items():
        own = as_mapping(f"variant {label}", values or {})
        for point in itertools.product(*axes):
            config = from_mapping({**settings, **dict(point), **own, **overrides})
            if config.seed != 0:
                raise ValueError(f"seed must be left out, got {config.seed}; `seeds: [{config.seed}]` sets it")
            check_used(config, own.keys() - overrides.keys())
            shared &= unused(config).keys()
            without = {*unused(config), *own, *overrides}
            words = [label, *(f"{name} {value}" for name, value in point if name not in without)]
            # Points that differ only in settings that the variant does not use (rho of SGD) are the same run.
            configs.setdefault(" ".join(word for word in words if word) or "run", config)
    check_used(config, sorted(shared))
    return configs


# ---- running ---------------------------------------------------------------------------------------------------------


def sweep_jobs(
    jobs: Iterable[Job],
    environment: RunEnvironment,
    *,
    workers: int,
    backend: Literal["loky", "ray"] = "loky",
    retry: bool = False,
    gpus: int = 0,
    on_end: Callable[[Job, Sequence[str]], None] = lambda job, warnings: None,
) -> None:
    """Run the jobs that are not finished and, unless ``retry``, have not failed; interrupted runs are resumed.

    ``workers`` jobs run in parallel; ``on_end`` is called in this process when one ends, with its warnings. Workers
    save a checkpoint and stop when this process ends. "ray" sends the runs to a Ray cluster, or one started here; its
    machines must share the directory of the runs, and the runs of a lost machine continue on another.
    """
    distinct = [same[0] for same in grouped(jobs, lambda job: job.directory).values()]
    due = [job for job in distinct if job.status == "unfinished" or (retry and job.status == "failed")]
    environment = replace(environment, resume=True, quiet=True, threads=environment.threads or 1, logger="none")
    parent = os.getpid() if backend == "loky" else None
    run = partial(_run_job, environment=environment, gpus=gpus, parent=parent)
    for job, texts in (_on_ray if backend == "ray" else _in_processes)(run, due, workers):
        on_end(job, texts)
    if any(job.status == "unfinished" for job in due):
        raise KeyboardInterrupt


_Ended = tuple[Job, list[str]]


def _run_job(job: Job, environment: RunEnvironment, gpus: int, parent: int | None) -> _Ended:
    """Run a job in a worker process; errors go to failure.json and do not end the sweep. Returns the warnings."""
    from sparsesam.lab.experiment.run import run_training

    def is_orphan() -> bool:
        return parent is not None and parent not in (os.getpid(), os.getppid())

    if job.status == "finished":  # by a machine that was lost before it could report
        return job, []
    job.files.failure.unlink(missing_ok=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        try:
            with claim_gpu(gpus, job.directory.parent) if gpus else nullcontext(environment.devices) as devices:
                mine = replace(environment, name=job.label, out=job.directory, devices=devices)
                run_training(job.config, mine, stop=is_orphan)
        except (Interrupted, KeyboardInterrupt):
            pass  # recognized by having neither a result nor a failure
        except Exception as error:
            job.files.write_failure(error)
    if is_orphan():
        os._exit(1)  # no process is left to receive the result
    return job, list(dict.fromkeys(str(warning.message) for warning in caught))


@contextmanager
def claim_gpu(count: int, folder: Path) -> Iterator[str]:
    """Yield a GPU that no other run of the sweep uses, as a ``devices`` string; the lock ends with the process."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in itertools.cycle(range(count)):
        try:
            lock = FileLock(folder / f"gpu-{number}.lock").acquire(timeout=1.0)
        except Timeout:
            continue
        with lock:
            yield f"{number},"
            return


def _in_processes(run: Callable[[Job], _Ended], jobs: Sequence[Job], workers: int) -> Iterator[_Ended]:
    import joblib
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    parallel = joblib.Parallel(workers, "loky", "generator_unordered", pre_dispatch=workers, batch_size=1)
    try:
        yield from parallel(joblib.delayed(run)(job) for job in jobs)
    except TerminatedWorkerError as error:
        raise RunError(
            "a worker process was killed, perhaps out of memory; run the same command again to continue, perhaps with "
            "fewer --jobs"
        ) from error


def _on_ray(run: Callable[[Job], _Ended], jobs: Sequence[Job], workers: int) -> Iterator[_Ended]:
    """Run one task per job. If a machine is lost, Ray restarts its tasks on another, up to three times; runs resume."""
    with required_by("--backend ray", "'sparsesam[ray]'"):
        import ray
    if not ray.is_initialized():
        ray.init()
    task: Any = ray.remote(lambda job: run(job))
    waiting, running = list(reversed(jobs)), list[Any]()
    while waiting or running:
        while waiting and len(running) < workers:
            running.append(task.remote(waiting.pop()))
        ended, running = ray.wait(running)
        yield from ray.get(ended)
