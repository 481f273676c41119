"""The settings of a run: `TrainConfig` determines its result, `RunEnvironment` where and how it runs.

Both dataclasses define the options of the command line and the keys of the YAML files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import sparsesam
from sparsesam.lab.data import DATASETS
from sparsesam.lab.experiment.setting_types import (
    Fraction,
    FractionAbove0,
    FractionBelow1,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    check_settings,
    option,
)
from sparsesam.lab.models import MODELS
from sparsesam.lab.names import check_names

#: Optimizers that take one pass per step.
PLAIN = ("sgd", "adam", "adamw")
ConfigT = TypeVar("ConfigT", "TrainConfig", "RunEnvironment")
Magnitude = Annotated[float, Range("in [0, 10]", lambda value: 0 <= value <= 10)]

#: Part of every hash; increase it when the default of a setting changes.
_HASH_VERSION = 3


@dataclass(frozen=True)
class TrainConfig:
    """Everything the result depends on. Two runs of one config produce the same weights on the same machine."""

    dataset: str = option("digits", f"{', '.join(DATASETS)}, hf/NAME (Hugging Face) or module:function", group="data")
    train_size: PositiveInt | None = option(None, "train on this many images only, the same for every seed")
    val_size: PositiveInt | None = option(
        None, "hold out this many training images, the same for every seed, and choose best.pt on them"
    )
    test_size: PositiveInt | None = option(None, "test on this many images only")
    image_size: PositiveInt | None = option(None, "side in pixels of images from folders; default 224")
    test_resize: Literal["shorter-side", "square"] = option(
        "shorter-side",
        "the side, or both, of test images from folders resized to 256 / 224 of image_size",
    )
    augment: Literal["standard", "no-cutout", "none"] = option(
        "standard", "crop, flip and cutout as in the paper; its noise experiments use no-cutout"
    )
    randaugment: NonNegativeInt = option(0, "number of RandAugment operations per image; 0 turns it off")
    randaugment_magnitude: Magnitude = option(9.0, "strength of the RandAugment operations, from 0 to 10")
    mixup: NonNegativeFloat = option(0.0, "alpha of mixup's Beta(alpha, alpha) distribution; 0 turns it off")
    label_noise: Fraction = option(0.0, "fraction of training labels changed to another class")
    corruption: Literal["mixed", "gaussian-noise", "resolution", "fog", "occlusion"] = option(
        "mixed", "corruption of training images; mixed: all of the others in equal parts"
    )
    corruption_rate: Fraction = option(0.0, "fraction of training images that are corrupted")
    model: str = option("small-cnn", f"{', '.join(MODELS)}, timm/NAME or module:function", group="model")
    init_from: str | None = option(
        None, "initial weights: a run, checkpoint, state_dict (.pt) or .safetensors; a resized classifier stays random"
    )
    compile: bool = option(False, "torch.compile the model")
    optimizer: Literal[
        "sgd", "adam", "adamw", "sam", "asam", "sam-on", "ssam-f", "ssam-d", "ssam-g", "ssam-random", "auto"
    ] = option(
        "ssam-f",
        "sgd, adam and adamw do not perturb; the others wrap `base`; auto: sparsesam.recommended",
        group="optimizer",
    )
    base: Literal["sgd", "adam", "adamw"] = option("sgd", "base optimizer of SAM and SSAM")
    lr: NonNegativeFloat = option(0.05, "largest learning rate")
    momentum: float = option(0.9, "momentum of SGD")
    nesterov: bool = option(False, "Nesterov momentum of SGD")
    betas: tuple[float, float] = option((0.9, 0.999), "betas of Adam and AdamW")
    eps: PositiveFloat = option(1e-8, "epsilon of Adam and AdamW")
    weight_decay: NonNegativeFloat = option(5e-4, "weight decay; the paper uses 5e-4 for SGD, 1e-3 for SAM and SSAM")
    lr_schedule: Literal["cosine", "step", "constant"] = option(
        "cosine",
        "cosine: to `lr_final`, updated every step; step: times `lr_gamma` at each of `lr_milestones`",
    )
    lr_final: Fraction = option(0.0, "final fraction of the learning rate for the cosine schedule")
    lr_milestones: tuple[float, ...] = option((), "epochs at which the step schedule lowers the learning rate")
    lr_gamma: Fraction = option(0.1, "factor of the step schedule")
    warmup_epochs: NonNegativeFloat = option(0.0, "epochs of linear warm-up of the learning rate")
    warmup_first: Fraction | None = option(
        None, "fraction of the learning rate in the first step of the warm-up; null: one divided by its steps"
    )
    clip_grad_norm: PositiveFloat | None = option(None, "clip the norm of the gradient used for the update")
    rho: NonNegativeFloat = option(0.1, "radius of the perturbation", group="perturbation")
    rho_schedule: Literal["constant", "warmup", "cosine", "inverse-sqrt"] = option("constant", "schedule of rho")
    rho_warmup_epochs: NonNegativeFloat = option(1.0, "epochs of the warm-up of rho")
    rho_final: NonNegativeFloat = option(0.0, "final fraction of rho for the cosine schedule")
    adaptive: bool | Literal["all"] = option(False, "scale the perturbation by the weights; asam is sam with this on")
    eta: float = option(0.01, "eta of the adaptive perturbation")
    sparsity: Fraction | None = option(None, "fraction of unperturbed weights; default 0.5 or implied by the pattern")
    pattern: str = option(
        "unstructured", "unstructured, tensor, filter, column, 'tensor reach', 2:4, '2:4 input' or '2:4 filters'"
    )
    norm: Literal["full", "masked"] = option("full", "divide by the norm of the whole gradient, or of its masked part")
    ascent: Literal["explicit", "implicit", "implicit-dense", "momentum", "momentum-climbing", "extrapolation"] = (
        option("explicit", "form of the ascent; momentum and extrapolation need no pass of their own")
    )
    steps_ahead: NonNegativeFloat | None = option(
        None, "multiple of the last update that extrapolation looks ahead; null: 10, or the default of auto"
    )
    ascent_fraction: FractionAbove0 = option(1.0, "fraction of each batch used to compute the perturbation")
    ascent_every: PositiveInt = option(1, "perturb only every k-th step")
    ascent_off_steps: Literal["skip", "reuse"] = option(
        "skip", "steps in between: plain steps, or reuse the last perturbation"
    )
    ascent_start: NonNegativeFloat = option(0.0, "perturb from this epoch on, counted from 0")
    engine: bool = option(True, "skip computations of the ascent that the perturbation does not need")
    mask_epochs: PositiveInt | None = option(1, "T_m: epochs between mask refreshes; null: keep the first mask")
    mask_steps: PositiveInt | None = option(None, "steps between mask refreshes, instead of epochs")
    fisher_samples: PositiveInt = option(128, "N_F: number of images for the Fisher information")
    fisher_labels: Literal["data", "sampled"] = option("data", "labels of the Fisher information")
    fisher_augment: bool = option(False, "augment the images of the Fisher information")
    drop: Literal["flattest", "random", "sharpest", "weight"] = option(
        "flattest", "which weights ssam-d drops: by gradient, at random, or the smallest (weight)"
    )
    drop_ratio: Fraction = option(0.5, "initial fraction of the kept weights that ssam-d drops")
    growth: Literal["random", "gradient", "weight"] = option(
        "random", "which weights ssam-d grows: at random, with the largest gradient, or the largest (weight)"
    )
    epochs: PositiveInt = option(30, "passes over the training images", group="training")
    max_steps: PositiveInt | None = option(None, "stop after this many steps; schedules still follow `epochs`")
    batch_size: PositiveInt = option(64, "images per step, over all devices together")
    drop_last: bool = option(False, "leave out the last batch of an epoch if it is smaller than the others")
    accumulate: PositiveInt = option(1, "number of micro-batches per step, to save memory")
    label_smoothing: FractionBelow1 = option(0.0, "label smoothing of the training loss")
    ema: FractionBelow1 | None = option(None, "evaluate an exponential moving average of the weights with this decay")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = option(
        "fp32", "tf32: products of float32 may use TF32; bf16 and fp16 are mixed: weights stay float32"
    )
    seed: NonNegativeInt = option(0, "seed of initial weights, batches, augmentation, noise and masks")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.lr_schedule == "step" and not self.lr_milestones:
            raise ValueError("lr_milestones must be given with lr_schedule step, for example [60, 120, 160], got none")
        if list(self.lr_milestones) != sorted(set(self.lr_milestones)):
            raise ValueError(
                f"lr_milestones must be epochs in increasing order, got {list(self.lr_milestones)}; sort them"
            )
        if self.batch_size < self.accumulate:
            raise ValueError(f"accumulate must be at most batch_size, {self.batch_size}, got {self.accumulate}")
        sparsesam.as_pattern(self.pattern)

    @property
    def is_plain(self) -> bool:
        """Whether the optimizer takes plain steps, without a perturbation."""
        return self.optimizer in PLAIN

    def total_steps(self, steps_per_epoch: int) -> int:
        """Returns the number of steps of the whole run."""
        whole = self.epochs * steps_per_epoch
        return min(whole, self.max_steps or whole)

    def steps_between_masks(self, steps_per_epoch: int) -> int:
        """Returns the steps between mask refreshes: those of all ``epochs`` if the first mask is kept."""
        return self.mask_steps or (self.mask_epochs or self.epochs) * steps_per_epoch

    @property
    def content_hash(self) -> str:
        """Twelve hexadecimal digits, equal for two configs that describe the same run.

        Only settings that the run uses and that differ from their default count, so that settings added by a later
        version do not change the hashes of existing runs.
        """
        used = dataclasses.asdict(self.canonical)
        chosen = {name: value for name, value in used.items() if value != DEFAULTS[name]}
        text = json.dumps({"version": _HASH_VERSION, **chosen}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def canonical(self) -> TrainConfig:
        """The same run with unused settings (rho of SGD, for example) at their defaults."""
        return dataclasses.replace(self, **{name: DEFAULTS[name] for name in unused(self)})


@dataclass(frozen=True)
class RunEnvironment:
    """Where and how a run is executed; nothing here changes its result beyond rounding."""

    name: str | None = option(
        None, "name of the run in tables and reports, and of its directory, runs/NAME", group="files and machine"
    )
    out: Path | None = option(None, "directory of the run; default runs/NAME or runs/DATASET-MODEL-OPTIMIZER-HASH")
    resume: bool = option(False, "continue the run in `out` with its own settings; a larger --epochs extends it")
    data_dir: Path | None = option(None, "directory of the data set's files; default the user's cache")
    download: bool = option(True, "download a data set that is missing")
    workers: NonNegativeInt | None = option(None, "processes for decoding image files; default one per core, at most 4")
    accelerator: str = option("auto", "cpu, cuda, mps or auto")
    devices: int | str = option(1, "number of devices, or auto for all; several use distributed data parallel")
    num_nodes: PositiveInt = option(1, "machines; start the command on each, with MASTER_ADDR and NODE_RANK set")
    threads: PositiveInt | None = option(None, "torch threads per process; default torch's own")
    checkpoint_steps: PositiveInt | None = option(None, "steps between checkpoints, in addition to one per epoch")
    logger: Literal["tensorboard", "wandb", "mlflow", "none"] = option(
        "tensorboard", "logger of the curves, in `out`; wandb logs offline unless WANDB_MODE says otherwise"
    )
    record_masks: bool | None = option(None, "write each mask to `out`; null: if all masks take at most 16 MB")
    record_times: bool = option(False, "record the seconds of each step")
    quiet: bool = option(False, "print nothing but the result")

    def __post_init__(self) -> None:
        check_settings(self)

    def directory(self, config: TrainConfig) -> Path:
        if self.out is not None:
            return self.out
        words = [self.name] if self.name else [config.dataset, config.model, config.optimizer, config.content_hash]
        return Path("runs") / "-".join(word.replace(":", ".").replace("/", ".") for word in words)

    def resume_command(self, path: Path) -> str:
        """Returns the command that resumes the run in ``path``, with ``data_dir``, which the run does not record."""
        data = [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        return shlex.join(["sparsesam", "train", "--resume", "--out", str(path), *data])


#: The default of every setting of a run.
DEFAULTS: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(TrainConfig)}


_FISHER = ("fisher_samples", "fisher_labels", "fisher_augment")
_DYNAMIC = ("drop", "drop_ratio", "growth")
_MASK = ("sparsity", "pattern", "norm", "mask_epochs", "mask_steps", *_FISHER, *_DYNAMIC)
_ASCENT = (
    *("base", "rho", "rho_schedule", "rho_warmup_epochs", "rho_final", "adaptive", "eta", "engine"),
    *("ascent", "steps_ahead", "ascent_fraction", "ascent_every", "ascent_off_steps", "ascent_start"),
)


def unused(config: TrainConfig) -> set[str]:
    """Returns the settings that do not affect a run: two runs that differ only in these are the same run."""
    kind = config.optimizer
    rules: list[tuple[bool, tuple[str, ...]]] = [
        (config.is_plain or kind in ("auto", "sam", "asam"), _MASK),
        (kind != "ssam-f", _FISHER),
        (kind != "ssam-d", _DYNAMIC),
        (kind == "sam-on", ("sparsity", "pattern", "mask_epochs", "mask_steps")),
        (config.mask_steps is not None, ("mask_epochs",)),
        (not config.adaptive and kind != "asam", ("eta",)),
        (config.rho_schedule != "warmup", ("rho_warmup_epochs",)),
        (config.rho_schedule != "cosine", ("rho_final",)),
        (config.ascent_every == 1, ("ascent_off_steps",)),
        (
            config.ascent == "extrapolation",
            ("rho", "adaptive", "eta", "norm", "ascent_fraction", "ascent_off_steps", "engine"),
        ),
        (config.ascent != "extrapolation" and kind != "auto", ("steps_ahead",)),
        (kind == "auto", tuple(name for name in _ASCENT if name not in ("base", "steps_ahead"))),
        (config.is_plain, _ASCENT),
        ((kind if config.is_plain else config.base) == "sgd", ("betas", "eps")),
        ((kind if config.is_plain else config.base) != "sgd", ("momentum", "nesterov")),
        (config.lr_schedule != "step", ("lr_milestones", "lr_gamma")),
        (config.lr_schedule != "cosine", ("lr_final",)),
        (not config.warmup_epochs, ("warmup_first",)),
        (not config.corruption_rate, ("corruption",)),
        (not config.randaugment, ("randaugment_magnitude",)),
    ]
    return {name for applies, names in rules if applies for name in names}


def names_of(kind: type[TrainConfig] | type[RunEnvironment]) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]


def from_mapping(kind: type[ConfigT], values: Mapping[str, Any]) -> ConfigT:
    """Build settings from the content of a YAML file; ValueError suggests names for an unknown one."""
    check_names(values, names_of(kind))
    return kind(**values)


def differences(old: TrainConfig, new: TrainConfig) -> str:
    """Describe the settings that differ: old value, new value."""
    changed = [name for name in DEFAULTS if getattr(old, name) != getattr(new, name)]
    return "; ".join(f"{name}: {getattr(old, name)}, now {getattr(new, name)}" for name in changed)
