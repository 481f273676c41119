"""Many runs: named variants, times a grid over any settings, times seeds; each in a directory named by its content."""

from __future__ import annotations

import itertools
import json
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import joblib
import yaml
from filelock import FileLock, Timeout

from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig, from_mapping, names_of
from sparsesam.lab.experiment.errors import Interrupted
from sparsesam.lab.experiment.names import check_names, nearest
from sparsesam.lab.experiment.run_directory import RunDirectory, write_whole

Backend = Literal["loky", "ray"]
_KEYS = ("title", "settings", "variants", "grid", "seeds")


@dataclass(frozen=True)
class Sweep:
    """Variants by label, each a config whose seed is replaced by every one of ``seeds``."""

    title: str
    variants: Mapping[str, TrainConfig]
    seeds: Sequence[int]

    def jobs(self, out: Path) -> list[Job]:
        """Every run, seed by seed, so that a sweep cut short has whole comparisons."""
        configs = [
            (label, replace(config, seed=seed)) for seed in self.seeds for label, config in self.variants.items()
        ]
        return [Job(label, config, out / config.content_hash) for label, config in configs]


@dataclass(frozen=True)
class Job:
    label: str
    config: TrainConfig
    directory: Path

    @property
    def is_finished(self) -> bool:
        return RunDirectory(self.directory).result.exists()

    @property
    def failure(self) -> str | None:
        """What the last attempt died of."""
        try:
            return str(json.loads((self.directory / "failure.json").read_text())["error"])
        except FileNotFoundError:
            return None

    @property
    def result(self) -> dict[str, Any] | None:
        try:
            result: dict[str, Any] = json.loads(RunDirectory(self.directory).result.read_text())["result"]
        except FileNotFoundError:
            return None
        return result


def read_sweep(file: str | Path, *, overrides: Mapping[str, Any], seeds: int | None) -> Sweep:
    """The sweep in a YAML file, or the one of that name that comes with sparsesam.

        title: SGD and SAM on digits
        settings: {dataset: digits, epochs: 10}         # of all runs
        variants: {SGD: {optimizer: sgd}, SAM: {optimizer: sam}}
        grid: {rho: [0.1, 0.2], batch_size: [32, 64]}   # every combination
        seeds: 3                                        # 0, 1, 2; or a list

    ``overrides`` win over everything in the file; ``seeds`` over its seeds.
    """
    text, name = _read(file)
    try:
        content = yaml.safe_load(text)
        if not isinstance(content, dict):
            raise ValueError("it must hold keys and values, such as `grid: {rho: [0.1, 0.2]}`")
        check_names(content, _KEYS)
        variants = expand(content.get("settings"), content.get("variants"), content.get("grid"), overrides)
        return Sweep(content.get("title", name), variants, _seeds(seeds or content.get("seeds", 1)))
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"{file}: {error}") from error


def expand(
    settings: Mapping[str, Any] | None,
    variants: Mapping[str, Mapping[str, Any]] | None,
    grid: Mapping[str, Sequence[Any]] | None,
    overrides: Mapping[str, Any],
) -> dict[str, TrainConfig]:
    """Every variant with every combination of the grid's values, labelled by what tells it from the others."""
    for source in (settings, *(variants or {}).values(), grid, overrides):
        check_names(source or {}, names_of(TrainConfig))
    for name, values in (grid or {}).items():
        if not isinstance(values, list):
            raise ValueError(f"grid must have a list of values for each setting, got {values!r} for {name}")
    axes = [[(name, value) for value in values] for name, values in (grid or {}).items()]
    configs = {}
    for label, own in (variants or {"": {}}).items():
        for point in itertools.product(*axes):
            words = [label, *(f"{name} {value}" for name, value in point)]
            merged = {**(settings or {}), **dict(point), **own, **overrides}
            configs[" ".join(word for word in words if word) or "run"] = from_mapping(TrainConfig, merged)
    return configs


def sweep_jobs(
    jobs: Iterable[Job],
    place: RunEnvironment,
    *,
    workers: int,
    backend: Backend = "loky",
    retry: bool = False,
    gpus: int = 0,
) -> None:
    """Run what is neither finished nor, unless ``retry``, failed before; a run cut short goes on where it was.

    ``workers`` runs at a time. "ray" sends them to the Ray cluster this process can reach, or to one started here;
    its machines must share the directory that the runs go to.
    """
    due = [job for job in jobs if not job.is_finished and (retry or job.failure is None)]
    place = replace(place, resume=True, quiet=True, threads=place.threads or 1, logger="none")
    with _on(backend), joblib.parallel_config(backend=backend, n_jobs=workers):
        parallel = joblib.Parallel(batch_size=1, pre_dispatch=workers)
        done = parallel(joblib.delayed(_run_job)(job, place, gpus) for job in due)
    if "interrupted" in done:
        raise KeyboardInterrupt


def _run_job(job: Job, place: RunEnvironment, gpus: int) -> str:
    """In a worker process: a run's failure is written down, and does not end the sweep."""
    from sparsesam.lab.experiment.provenance import provenance
    from sparsesam.lab.experiment.run import run

    failure = job.directory / "failure.json"
    failure.unlink(missing_ok=True)
    try:
        with _claimed(gpus, job.directory.parent) if gpus else nullcontext(place.devices) as devices:
            run(job.config, replace(place, out=job.directory, devices=devices))
        return "finished"
    except (Interrupted, KeyboardInterrupt):
        return "interrupted"
    except Exception as error:
        job.directory.mkdir(parents=True, exist_ok=True)
        told = {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
        write_whole(failure, json.dumps({**told, "provenance": provenance()}, indent=1))
        return "failed"


@contextmanager
def _claimed(count: int, folder: Path) -> Iterator[str]:
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


@contextmanager
def _on(backend: Backend) -> Iterator[None]:
    if backend == "ray":
        try:
            from ray.util.joblib import register_ray
        except ImportError as error:
            raise ImportError("sweeps on a Ray cluster need ray: pip install 'sparsesam[ray]'") from error
        register_ray()
    yield


def default_workers(gpus: int) -> int:
    return gpus or int(joblib.cpu_count())


def _read(file: str | Path) -> tuple[str, str]:
    path = Path(file)
    if path.is_file():
        return path.read_text(), path.stem
    packaged = {one.name.removesuffix(".yaml"): one for one in _packaged().iterdir() if one.name.endswith(".yaml")}
    if str(file) in packaged:
        return packaged[str(file)].read_text(), str(file)
    raise ValueError(
        f"sweep must be a YAML file or one of {', '.join(packaged)}, got {str(file)!r}; {nearest(str(file), packaged)}"
    )


def _packaged() -> Any:
    return resources.files("sparsesam.lab.experiment") / "sweeps"


def _seeds(value: int | list[int]) -> list[int]:
    seeds = list(range(value)) if isinstance(value, int) else list(value)
    if not seeds:
        raise ValueError(f"seeds must be at least 1, or a list of seeds, got {value}")
    return seeds
