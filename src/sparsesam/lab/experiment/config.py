"""What a run is: every choice that its result depends on, and apart from them where and how it runs.

Both dataclasses are the one source of the command line's options and of the YAML files' keys.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import shlex
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from sparsesam.lab.experiment.setting_types import fitted

#: Optimizers that take one pass per step, and what `base` they are.
PLAIN = ("sgd", "adam", "adamw")
Settings = TypeVar("Settings", "TrainConfig", "RunEnvironment")


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainConfig:
    """Everything the result depends on. Two runs of one config reach the same weights on the same machine."""

    # ---- data and model
    dataset: str = _option("digits", "digits, fashion-mnist, cifar10, cifar100, imagenet or module:function")
    train_size: int | None = _option(None, "train on so many images only, the same for every seed")
    test_size: int | None = _option(None, "test on so many images only")
    augment: Literal["standard", "no-cutout", "none"] = _option(
        "standard", "crop, flip and cutout as in the paper; its noise experiments go without cutout"
    )
    label_noise: float = _option(0.0, "share of training labels changed to another class")
    corruption: str = _option("mixed", "gaussian-noise, resolution, fog, occlusion, or mixed: all four")
    corruption_rate: float = _option(0.0, "share of training images that are corrupted")
    model: str = _option("small-cnn", "a model of sparsesam.lab.models or module:function")
    compile: bool = _option(False, "torch.compile the model")
    # ---- descent
    optimizer: Literal["sgd", "adam", "adamw", "sam", "asam", "sam-on", "ssam-f", "ssam-d", "ssam-g", "ssam-random"] = (
        _option("ssam-f", "the first three take plain steps; the others perturb, around `base`")
    )
    base: Literal["sgd", "adam", "adamw"] = _option("sgd", "what SAM and SSAM descend with")
    lr: float = _option(0.05, "largest learning rate")
    momentum: float = _option(0.9, "of SGD")
    nesterov: bool = _option(False, "SGD with Nesterov's momentum")
    betas: tuple[float, float] = _option((0.9, 0.999), "of Adam and AdamW")
    weight_decay: float = _option(5e-4, "the paper's: 5e-4 for SGD, 1e-3 for SAM and SSAM")
    lr_schedule: Literal["cosine", "constant"] = _option("cosine", "to 0 along half a cosine, step by step; or not")
    warmup_epochs: float = _option(0.0, "the learning rate rises linearly over so many epochs first")
    # ---- ascent
    rho: float = _option(0.1, "length of the perturbation")
    rho_schedule: Literal["constant", "warmup", "cosine", "inverse-sqrt"] = _option("constant", "of rho over the steps")
    rho_warmup_epochs: float = _option(1.0, "for the warmup of rho")
    rho_final: float = _option(0.0, "share of rho left at the end of its cosine")
    adaptive: bool | Literal["all"] = _option(False, "perturb in proportion to the weight; asam is sam with it")
    eta: float = _option(0.01, "of the adaptive perturbation")
    sparsity: float | None = _option(None, "share of weights not perturbed; 0.5 unless the pattern implies another")
    pattern: str = _option("unstructured", "unstructured, tensor, filter, column, 2:4, '2:4 input' or '2:4 filters'")
    norm: Literal["full", "masked"] = _option("full", "divide by the norm of the whole gradient, or of its masked part")
    ascent: Literal["explicit", "implicit", "implicit-dense", "momentum", "momentum-climbing", "extrapolation"] = (
        _option("explicit", "what the mask is applied to; momentum and extrapolation take no pass of their own")
    )
    steps_ahead: float = _option(60.0, "of the extrapolation: so many times the last update")
    ascent_fraction: float = _option(1.0, "share of each batch that the perturbation is computed from")
    ascent_every: int = _option(1, "perturb in every so many steps only")
    ascent_off_steps: Literal["skip", "reuse"] = _option("skip", "in between, take plain steps or use the last again")
    ascent_start: float = _option(0.0, "perturb from this epoch on, counted from 0")
    engine: bool = _option(True, "leave out of the ascent what no perturbation needs")
    mask_epochs: int | None = _option(1, "T_m: make the mask anew every so many epochs; null: never")
    mask_steps: int | None = _option(None, "make the mask anew every so many steps instead")
    fisher_samples: int = _option(128, "N_F: images that the Fisher information is measured on")
    fisher_batch: int = _option(128, "so many of them at a time, less memory for fewer")
    fisher_labels: Literal["data", "sampled"] = _option("data", "labels of the Fisher information")
    drop: Literal["flattest", "random", "sharpest"] = _option("flattest", "what ssam-d drops")
    drop_ratio: float = _option(0.5, "share of the kept weights that ssam-d drops at first")
    growth: Literal["random", "gradient"] = _option("random", "what ssam-d grows")
    # ---- training
    epochs: int = _option(30, "times through the training images")
    max_steps: int | None = _option(None, "stop after so many steps; schedules still follow `epochs`")
    batch_size: int = _option(64, "images per step, over all devices together")
    label_smoothing: float = _option(0.0, "of the training loss")
    ema: float | None = _option(None, "test an exponential moving average of the weights, with this decay")
    precision: Literal["fp32", "bf16", "fp16"] = _option("fp32", "bf16 and fp16 are mixed: weights stay float32")
    seed: int = _option(0, "of the first weights, the batches, the augmentation, the noise and the masks")

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            object.__setattr__(self, name, fitted(name, getattr(self, name), hint))
        for name in ("epochs", "batch_size", "fisher_samples", "fisher_batch", "ascent_every"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("train_size", "test_size", "mask_epochs", "mask_steps", "max_steps"):
            value = getattr(self, name)
            _check(name, value, value is None or value >= 1, "at least 1, or null")
        for name in ("label_noise", "corruption_rate", "drop_ratio"):
            _check(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "in [0, 1]")
        for name in (
            "lr",
            "weight_decay",
            "rho",
            "steps_ahead",
            "warmup_epochs",
            "rho_warmup_epochs",
            "rho_final",
            "ascent_start",
            "seed",
        ):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        _check("sparsity", self.sparsity, self.sparsity is None or 0 <= self.sparsity <= 1, "in [0, 1], or null")
        _check("label_smoothing", self.label_smoothing, 0 <= self.label_smoothing < 1, "in [0, 1)")
        _check("ascent_fraction", self.ascent_fraction, 0 < self.ascent_fraction <= 1, "in (0, 1]")
        _check("ema", self.ema, self.ema is None or 0 <= self.ema < 1, "in [0, 1), or null")

    @property
    def is_plain(self) -> bool:
        """Whether steps are plain ones of `base`, without a perturbation."""
        return self.optimizer in PLAIN

    @property
    def content_hash(self) -> str:
        """Twelve hexadecimal digits of all that the result depends on."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(TrainConfig)


@dataclass(frozen=True)
class RunEnvironment:
    """Where and how a run happens; nothing here changes its result beyond rounding."""

    out: Path | None = _option(None, "directory of the run; default runs/DATASET-MODEL-OPTIMIZER-HASH")
    resume: bool = _option(False, "go on with the run in `out`; its own settings need not be given again")
    data_dir: Path | None = _option(None, "where the data set's files are; default the user's cache, else a download")
    download: bool = _option(True, "fetch a data set that is not there")
    workers: int | None = _option(None, "processes that decode images from folders; default one per core, at most 4")
    accelerator: str = _option("auto", "cpu, cuda, mps or auto")
    devices: int | str = _option(1, "how many, or auto for all; several run as distributed data parallel")
    num_nodes: int = _option(1, "machines; start the command on each, with MASTER_ADDR and NODE_RANK set")
    threads: int | None = _option(None, "torch threads per process; default torch's own")
    checkpoint_steps: int | None = _option(None, "save every so many steps too, not only after each epoch")
    tensorboard: bool = _option(True, "write curves for TensorBoard into `out`")
    record_masks: bool | None = _option(None, "write each mask into `out`; null: if they take at most 16 MB together")
    record_times: bool = _option(False, "write the seconds of each step into the records")
    quiet: bool = _option(False, "print nothing but the result")

    def __post_init__(self) -> None:
        for name in ("out", "data_dir"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, Path(getattr(self, name)))
        for name in ("threads", "checkpoint_steps"):
            _check(name, getattr(self, name), getattr(self, name) is None or getattr(self, name) >= 1, "at least 1")
        _check("workers", self.workers, self.workers is None or self.workers >= 0, "at least 0")

    def directory(self, config: TrainConfig) -> Path:
        if self.out is not None:
            return self.out
        words = (config.dataset, config.model, config.optimizer, config.content_hash)
        return Path("runs") / "-".join(word.replace(":", ".").replace("/", ".") for word in words)

    def resume_command(self, path: Path) -> str:
        """What to type to go on with the run in ``path``; its settings are there, where the data are is not."""
        data = [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        return shlex.join(["sparsesam", "train", "--resume", "--out", str(path), *data])


def names_of(kind: type[TrainConfig] | type[RunEnvironment]) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]


def from_mapping(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """The settings of a YAML file; an unknown name is refused with the nearest ones."""
    check_names(values, names_of(kind))
    return kind(**values)


def check_names(given: Iterable[str], known: Iterable[str]) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            raise ValueError(f"unknown option {name!r}; {nearest(name, known)}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A sentence with the most similar names."""
    found = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    return f"did you mean {' or '.join(found)}?" if found else "--help lists all"


def differences(old: TrainConfig, new: TrainConfig) -> str:
    """What each setting that differs was and is now."""
    before, after = dataclasses.asdict(old), dataclasses.asdict(new)
    return "; ".join(f"{name}: {before[name]}, now {after[name]}" for name in before if before[name] != after[name])


def _check(name: str, value: Any, right: bool, rule: str) -> None:
    if not right:
        raise ValueError(f"{name} must be {rule}, got {value}")
