"""The settings of a run: those that its result depends on, and those that say where and how it runs.

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
Settings = TypeVar("Settings", "TrainConfig", "RunEnvironment")
Magnitude = Annotated[float, Range("in [0, 10]", lambda value: 0 <= value <= 10)]

#: Part of every hash; to be raised when the default of a setting changes.
_HASH_VERSION = 3


@dataclass(frozen=True)
class TrainConfig:
    """Everything the result depends on. Two runs of one config reach the same weights on the same machine."""

    dataset: str = option("digits", f"{', '.join(DATASETS)}, hf/NAME (Hugging Face) or module:function", group="data")
    train_size: PositiveInt | None = option(None, "train on this many images only, the same for every seed")
    val_size: PositiveInt | None = option(
        None, "hold out this many training images, the same for every seed, and choose best.pt on them"
    )
    test_size: PositiveInt | None = option(None, "test on this many images only")
    image_size: PositiveInt | None = option(None, "side in pixels of images from folders; default 224")
    augment: Literal["standard", "no-cutout", "none"] = option(
        "standard", "crop, flip and cutout as in the paper; its noise experiments use no-cutout"
    )
    randaugment: NonNegativeInt = option(0, "number of RandAugment operations per image; 0 turns it off")
    randaugment_magnitude: Magnitude = option(9.0, "strength of the RandAugment operations, from 0 to 10")
    mixup: NonNegativeFloat = option(0.0, "alpha of mixup's Beta(alpha, alpha) distribution; 0 turns it off")
    label_noise: Fraction = option(0.0, "fraction of training labels changed to another class")
    corruption: Literal["mixed", "gaussian-noise", "resolution", "fog", "occlusion"] = option(
        "mixed", "of training images; mixed: all of the others in equal parts"
    )
    corruption_rate: Fraction = option(0.0, "fraction of training images that are corrupted")
    model: str = option("small-cnn", f"{', '.join(MODELS)}, timm/NAME or module:function", group="model")
    init_from: str | None = option(
        None, "initial weights: a checkpoint of ours, a state_dict (.pt) or .safetensors; a head of other size is new"
    )
    compile: bool = option(False, "torch.compile the model")
    optimizer: Literal[
        "sgd", "adam", "adamw", "sam", "asam", "sam-on", "ssam-f", "ssam-d", "ssam-g", "ssam-random", "auto"
    ] = option(
        "ssam-f",
        "the first three take plain steps; the others perturb, around `base`; auto: as the study recommends",
        group="optimizer",
    )
    base: Literal["sgd", "adam", "adamw"] = option("sgd", "base optimizer of SAM and SSAM")
    lr: NonNegativeFloat = option(0.05, "largest learning rate")
    momentum: float = option(0.9, "of SGD")
    nesterov: bool = option(False, "SGD with Nesterov's momentum")
    betas: tuple[float, float] = option((0.9, 0.999), "of Adam and AdamW")
    weight_decay: NonNegativeFloat = option(5e-4, "the paper's: 5e-4 for SGD, 1e-3 for SAM and SSAM")
    lr_schedule: Literal["cosine", "step", "constant"] = option(
        "cosine", "cosine: to 0 over the whole run, at every step; step: times `lr_gamma` at each of `lr_milestones`"
    )
    lr_milestones: tuple[float, ...] = option((), "epochs at which the step schedule lowers the learning rate")
    lr_gamma: Fraction = option(0.1, "factor of the step schedule")
    warmup_epochs: NonNegativeFloat = option(0.0, "epochs of linear warm-up of the learning rate")
    clip_grad_norm: PositiveFloat | None = option(None, "clip the norm of the gradient that the optimizer steps with")
    rho: NonNegativeFloat = option(0.1, "length of the perturbation", group="perturbation")
    rho_schedule: Literal["constant", "warmup", "cosine", "inverse-sqrt"] = option("constant", "schedule of rho")
    rho_warmup_epochs: NonNegativeFloat = option(1.0, "epochs of the warm-up of rho")
    rho_final: NonNegativeFloat = option(0.0, "fraction of rho at the end of its cosine")
    adaptive: bool | Literal["all"] = option(False, "perturb in proportion to the weight; asam is sam with it")
    eta: float = option(0.01, "of the adaptive perturbation")
    sparsity: Fraction | None = option(None, "fraction of unperturbed weights; 0.5 unless the pattern implies another")
    pattern: str = option("unstructured", "unstructured, tensor, filter, column, 2:4, '2:4 input' or '2:4 filters'")
    norm: Literal["full", "masked"] = option("full", "divide by the norm of the whole gradient, or of its masked part")
    ascent: Literal["explicit", "implicit", "implicit-dense", "momentum", "momentum-climbing", "extrapolation"] = (
        option("explicit", "what the mask is applied to; momentum and extrapolation take no pass of their own")
    )
    steps_ahead: NonNegativeFloat | None = option(
        None, "of the extrapolation: how many times the last update; null: 10, with auto as `recommended` has it"
    )
    ascent_fraction: FractionAbove0 = option(1.0, "fraction of each batch that the perturbation is computed from")
    ascent_every: PositiveInt = option(1, "perturb in every k-th step only")
    ascent_off_steps: Literal["skip", "reuse"] = option("skip", "in between: plain steps, or the last perturbation")
    ascent_start: NonNegativeFloat = option(0.0, "perturb from this epoch on, counted from 0")
    engine: bool = option(True, "skip computations of the ascent that the perturbation does not need")
    mask_epochs: PositiveInt | None = option(1, "T_m: epochs between two masks; null: the first mask is kept")
    mask_steps: PositiveInt | None = option(None, "steps between two masks, instead of epochs")
    fisher_samples: PositiveInt = option(128, "N_F: images that the Fisher information is measured on")
    fisher_batch: PositiveInt | None = option(None, "how many at a time; null: up to 128, fewer if memory is short")
    fisher_labels: Literal["data", "sampled"] = option("data", "labels of the Fisher information")
    drop: Literal["flattest", "random", "sharpest"] = option("flattest", "what ssam-d drops")
    drop_ratio: Fraction = option(0.5, "fraction of the kept weights that ssam-d drops at first")
    growth: Literal["random", "gradient"] = option("random", "what ssam-d grows")
    epochs: PositiveInt = option(30, "passes over the training images", group="training")
    max_steps: PositiveInt | None = option(None, "stop after this many steps; schedules still follow `epochs`")
    batch_size: PositiveInt = option(64, "images per step, over all devices together")
    accumulate: PositiveInt = option(1, "compute the gradient of a step in this many parts, to save memory")
    label_smoothing: FractionBelow1 = option(0.0, "of the training loss")
    ema: FractionBelow1 | None = option(None, "test an exponential moving average of the weights, with this decay")
    precision: Literal["fp32", "bf16", "fp16"] = option("fp32", "bf16 and fp16 are mixed: weights stay float32")
    seed: NonNegativeInt = option(0, "of the first weights, the batches, the augmentation, the noise and the masks")

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
        """Whether steps are plain ones of `base`, without a perturbation."""
        return self.optimizer in PLAIN

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run."""
        whole = self.epochs * steps_per_epoch
        return min(whole, self.max_steps or whole)

    def steps_between_masks(self, steps_per_epoch: int) -> int:
        """As many as ``epochs`` have if the first mask is kept."""
        return self.mask_steps or (self.mask_epochs or self.epochs) * steps_per_epoch

    @property
    def content_hash(self) -> str:
        """Twelve hexadecimal digits that are equal for two configs if and only if their results are.

        Only settings that have an influence and are not at their default count, so that a setting that a later
        version adds leaves the hashes of existing runs alone.
        """
        used = dataclasses.asdict(self.canonical)
        chosen = {name: value for name, value in used.items() if value != DEFAULTS[name]}
        text = json.dumps({"version": _HASH_VERSION, **chosen}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def canonical(self) -> TrainConfig:
        """The same run with every setting that it does not use at its default (rho of SGD, for example)."""
        return dataclasses.replace(self, **{name: DEFAULTS[name] for name in unused(self)})


@dataclass(frozen=True)
class RunEnvironment:
    """Where and how a run happens; nothing here changes its result beyond rounding."""

    name: str | None = option(
        None, "name of the run in tables and reports, and of its directory runs/NAME", group="files and machine"
    )
    out: Path | None = option(None, "directory of the run; default runs/NAME or runs/DATASET-MODEL-OPTIMIZER-HASH")
    resume: bool = option(False, "continue the run in `out` with its own settings; a larger --epochs extends it")
    data_dir: Path | None = option(None, "where the data set's files are; default the user's cache, else a download")
    download: bool = option(True, "download a data set that is missing")
    workers: NonNegativeInt | None = option(None, "processes that decode image files; default one per core, at most 4")
    accelerator: str = option("auto", "cpu, cuda, mps or auto")
    devices: int | str = option(1, "how many, or auto for all; several run as distributed data parallel")
    num_nodes: PositiveInt = option(1, "machines; start the command on each, with MASTER_ADDR and NODE_RANK set")
    threads: PositiveInt | None = option(None, "torch threads per process; default torch's own")
    checkpoint_steps: PositiveInt | None = option(None, "steps between two checkpoints, beside those after each epoch")
    logger: Literal["tensorboard", "wandb", "mlflow", "none"] = option(
        "tensorboard", "where curves are logged, in `out`; wandb logs offline unless WANDB_MODE says otherwise"
    )
    record_masks: bool | None = option(None, "write each mask into `out`; null: if all of them take at most 16 MB")
    record_times: bool = option(False, "write the seconds of each step into the records")
    quiet: bool = option(False, "print nothing but the result")

    def __post_init__(self) -> None:
        check_settings(self)

    def directory(self, config: TrainConfig) -> Path:
        if self.out is not None:
            return self.out
        words = [self.name] if self.name else [config.dataset, config.model, config.optimizer, config.content_hash]
        return Path("runs") / "-".join(word.replace(":", ".").replace("/", ".") for word in words)

    def resume_command(self, path: Path) -> str:
        """The command that resumes the run in ``path``; it needs ``data_dir``, which the run does not record."""
        data = [] if self.data_dir is None else ["--data-dir", str(self.data_dir)]
        return shlex.join(["sparsesam", "train", "--resume", "--out", str(path), *data])


#: Of every setting of a run.
DEFAULTS: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(TrainConfig)}


_FISHER = ("fisher_samples", "fisher_batch", "fisher_labels")
_DYNAMIC = ("drop", "drop_ratio", "growth")
_MASK = ("sparsity", "pattern", "norm", "mask_epochs", "mask_steps", *_FISHER, *_DYNAMIC)
_ASCENT = (
    *("base", "rho", "rho_schedule", "rho_warmup_epochs", "rho_final", "adaptive", "eta", "engine"),
    *("ascent", "steps_ahead", "ascent_fraction", "ascent_every", "ascent_off_steps", "ascent_start"),
)


def unused(config: TrainConfig) -> set[str]:
    """The settings that have no influence on a run: two runs that differ only in those are the same run."""
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
        ((kind if config.is_plain else config.base) == "sgd", ("betas",)),
        ((kind if config.is_plain else config.base) != "sgd", ("momentum", "nesterov")),
        (config.lr_schedule != "step", ("lr_milestones", "lr_gamma")),
        (not config.corruption_rate, ("corruption",)),
        (not config.randaugment, ("randaugment_magnitude",)),
    ]
    return {name for applies, names in rules if applies for name in names}


def names_of(kind: type[TrainConfig] | type[RunEnvironment]) -> list[str]:
    return [one.name for one in dataclasses.fields(kind)]


def from_mapping(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """The settings of a YAML file; an unknown name is refused with the nearest ones."""
    check_names(values, names_of(kind))
    return kind(**values)


def differences(old: TrainConfig, new: TrainConfig) -> str:
    """What each setting that differs was and is now."""
    changed = [name for name in DEFAULTS if getattr(old, name) != getattr(new, name)]
    return "; ".join(f"{name}: {getattr(old, name)}, now {getattr(new, name)}" for name in changed)
