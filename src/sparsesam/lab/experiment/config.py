"""The settings of a run: `TrainConfig` determines its result, `RunEnvironment` where and how it runs.

Both dataclasses define the options of the command line and the keys of the YAML files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

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
    Rule,
    check_settings,
    option,
    when,
)
from sparsesam.lab.models import MODELS
from sparsesam.lab.names import check_names
from sparsesam.masks.patterns import as_pattern

#: Part of every hash; increase it when the default of a setting changes.
_HASH_VERSION = 3

Above1 = Annotated[float, Rule("above 1", lambda value: value > 1)]
Method = Literal[
    "sgd", "adam", "adamw", "sam", "asam", "gsam", "wsam", "friendly-sam", "look-sam", "esam", "zsharp", "sam-on",
    "ssam", "ssam-f", "ssam-d", "ssam-g", "ssam-random", "auto",
]  # fmt: skip
#: Methods without a mask that have settings of their own.
VARIANTS: dict[str, type[sparsesam.SharpnessAware]] = {
    "gsam": sparsesam.GSAM,
    "wsam": sparsesam.WSAM,
    "friendly-sam": sparsesam.FriendlySAM,
    "look-sam": sparsesam.LookSAM,
    "esam": sparsesam.ESAM,
    "zsharp": sparsesam.ZSharp,
}
_MASKED = ("ssam-f", "ssam-d", "ssam-g", "ssam-random")
_PERTURBS = Rule("an optimizer that perturbs", lambda config: not config.is_plain)
_TUNABLE = _PERTURBS & Rule("optimizer other than auto", lambda config: config.optimizer != "auto")
_BY_GRADIENT = _TUNABLE & Rule("ascent other than extrapolation", lambda config: config.ascent != "extrapolation")
_REFRESHED = Rule(
    f"optimizer {' or '.join(_MASKED)}, or with budget", lambda config: config.optimizer in _MASKED or config.has_budget
)
_BY_EPOCHS = _REFRESHED & when("mask_steps", None)
_FISHER_SAMPLES = Rule("optimizer ssam-f or budget", lambda config: config.optimizer == "ssam-f" or config.has_budget)
_GIVEN, _PRICED = when("optimizer", "ssam"), when("optimizer", "ssam", "auto")
_CHOSEN = when("optimizer", *_MASKED)
_NORMED = _BY_GRADIENT & _CHOSEN
_FISHER, _DYNAMIC = when("optimizer", "ssam-f"), when("optimizer", "ssam-d")
_WSAM, _FRIENDLY = when("optimizer", "wsam"), when("optimizer", "friendly-sam")
_ORTHOGONAL = when("optimizer", "gsam", "look-sam")
_ESAM, _ZSHARP = when("optimizer", "esam"), when("optimizer", "zsharp")
_ADAPTIVE = _BY_GRADIENT & Rule("adaptive or asam", lambda config: config.adaptive or config.optimizer == "asam")
_OF_SGD = Rule("SGD as optimizer or base", lambda config: config.base_name == "sgd")
_OF_ADAM = Rule("Adam or AdamW as optimizer or base", lambda config: config.base_name != "sgd")
_STEPS, _COSINE = when("lr_schedule", "step"), when("lr_schedule", "cosine")
_RHO_WARMUP = _TUNABLE & when("rho_schedule", "warmup")
_RHO_DECAY = _TUNABLE & when("rho_schedule", "cosine", "learning-rate")
_WARMED_UP = Rule("warmup_epochs", lambda config: config.warmup_epochs > 0)
_CORRUPTED = Rule("corruption_rate", lambda config: config.corruption_rate > 0)


@dataclass(frozen=True)
class TrainConfig:
    """Everything the result depends on. Two runs of one config produce the same weights on the same machine."""

    dataset: str = option("digits", f"{', '.join(DATASETS)}, hf/NAME (Hugging Face) or module:function", group="data")
    train_size: PositiveInt | None = option(None, "train on this many images only, the same for every seed")
    val_size: PositiveInt | None = option(None, "hold out so many training images, and choose best.pt on them")
    test_size: PositiveInt | None = option(None, "test on this many images only")
    image_size: PositiveInt | None = option(None, "side in pixels of images from folders; default 224")
    test_resize: Literal["shorter-side", "square"] = option(
        "shorter-side", "the side, or both, of test images from folders resized to 256 / 224 of image_size"
    )
    augment: Literal["standard", "no-cutout", "none"] = option(
        "standard", "standard: the paper's crop, flip and cutout"
    )
    mixup: NonNegativeFloat = option(0.0, "alpha of mixup's Beta(alpha, alpha) distribution; 0 turns it off")
    label_noise: Fraction = option(0.0, "fraction of training labels changed to another class")
    corruption: Literal["mixed", "gaussian-noise", "resolution", "fog", "occlusion"] = option(
        "mixed", "corruption of training images; mixed: all of the others in equal parts", _CORRUPTED
    )
    corruption_rate: Fraction = option(0.0, "fraction of training images that are corrupted")
    model: str = option("small-cnn", f"{', '.join(MODELS)}, timm/NAME or module:function", group="model")
    init_from: str | None = option(None, "initial weights: a run, checkpoint, state_dict (.pt) or .safetensors")
    compile: bool = option(False, "torch.compile the model")
    optimizer: Method = option(
        "ssam-f",
        "sgd, adam and adamw do not perturb; the others wrap `base`; ssam perturbs `layers` or what `budget` allows; "
        "auto: sparsesam.recommended",
        group="optimizer",
    )
    base: Literal["sgd", "adam", "adamw"] = option("sgd", "base optimizer of SAM and SSAM", _PERTURBS)
    lr: NonNegativeFloat = option(0.05, "largest learning rate")
    momentum: float = option(0.9, "momentum of SGD", _OF_SGD)
    nesterov: bool = option(False, "Nesterov momentum of SGD", _OF_SGD)
    betas: tuple[float, float] = option((0.9, 0.999), "betas of Adam and AdamW", _OF_ADAM)
    eps: PositiveFloat = option(1e-8, "epsilon of Adam and AdamW", _OF_ADAM)
    weight_decay: NonNegativeFloat = option(5e-4, "weight decay; the paper uses 5e-4 for SGD, 1e-3 for SAM and SSAM")
    lr_schedule: Literal["cosine", "step", "constant"] = option(
        "cosine", "cosine: to `lr_final`, updated every step; step: times `lr_gamma` at each of `lr_milestones`"
    )
    lr_final: Fraction = option(0.0, "final fraction of the learning rate for the cosine schedule", _COSINE)
    lr_milestones: tuple[float, ...] = option((), "epochs at which the step schedule lowers the learning rate", _STEPS)
    lr_gamma: Fraction = option(0.1, "factor of the step schedule", _STEPS)
    warmup_epochs: NonNegativeFloat = option(0.0, "epochs of linear warm-up of the learning rate")
    warmup_first: Fraction | None = option(None, "fraction of lr in the first step; null: 1 / steps", _WARMED_UP)
    clip_grad_norm: PositiveFloat | None = option(None, "clip the norm of the gradient used for the update")
    rho: NonNegativeFloat = option(0.1, "radius of the perturbation", _PERTURBS, group="perturbation")
    rho_schedule: Literal["constant", "warmup", "cosine", "inverse-sqrt", "learning-rate"] = option(
        "constant", "schedule of rho; learning-rate: proportional to it, as in GSAM's paper", _TUNABLE
    )
    rho_warmup_epochs: NonNegativeFloat = option(1.0, "epochs of the warm-up of rho", _RHO_WARMUP)
    rho_final: NonNegativeFloat = option(0.0, "fraction of rho at the end, or at a learning rate of 0", _RHO_DECAY)
    adaptive: bool | Literal["all", "layer"] = option(
        False, "scale the perturbation by the weights, all: biases too, layer: by their norms; on in asam", _BY_GRADIENT
    )
    eta: float = option(0.01, "eta of the adaptive perturbation", _ADAPTIVE)
    radius: Literal["global", "layer", "element"] = option(
        "global", "the part of the perturbation with norm rho", _BY_GRADIENT
    )
    ascent_steps: PositiveInt = option(1, "steps of the ascent, with a pass each", _BY_GRADIENT)
    alpha: NonNegativeFloat | None = option(
        None, "weight of the gradient's orthogonal part; null: 0.4 for gsam, 0.7 for look-sam", _ORTHOGONAL
    )
    gamma: FractionBelow1 = option(0.9, "weight of the sharpness in wsam; 0.5 without decouple is SAM", _WSAM)
    decouple: bool = option(True, "apply the sharpness of wsam apart from `base`", _WSAM)
    sigma: NonNegativeFloat = option(1.0, "multiple of the mean gradient friendly-sam subtracts; 0 is SAM", _FRIENDLY)
    decay: Fraction = option(0.9, "decay of friendly-sam's average gradient", _FRIENDLY)
    beta: FractionAbove0 = option(0.5, "probability of a tensor to be perturbed by esam; 1 is SAM", _ESAM)
    quantile: Fraction = option(0.95, "fraction of a tensor's entries that zsharp leaves out; 0 is SAM", _ZSHARP)
    sparsity: Fraction | None = option(None, "fraction of unperturbed weights; default 0.5 or the pattern's", _CHOSEN)
    layers: tuple[str, ...] | None = option(None, "parameters that ssam perturbs, such as 'layer4.*,fc.*'", _GIVEN)
    budget: Above1 | None = option(None, "cost of a step, x `base`: ssam perturbs what fits, auto picks", _PRICED)
    pattern: str = option(
        "unstructured", "unstructured, tensor, filter, column, 'tensor reach', 2:4, '2:4 input', '2:4 filters'", _CHOSEN
    )
    norm: Literal["full", "masked"] = option("full", "divide by the norm of the gradient, or its masked part", _NORMED)
    ascent: Literal["explicit", "implicit", "implicit-dense", "momentum", "extrapolation"] = option(
        "explicit", "form of the ascent; momentum and extrapolation need no pass of their own", _TUNABLE
    )
    ascent_fraction: FractionAbove0 = option(1.0, "fraction of each batch used for the perturbation", _BY_GRADIENT)
    ascent_every: PositiveInt = option(1, "perturb only every k-th step", _TUNABLE)
    ascent_start: NonNegativeFloat = option(0.0, "perturb from this epoch on, counted from 0", _TUNABLE)
    engine: bool = option(True, "skip computations of the ascent that the perturbation does not need", _BY_GRADIENT)
    mask_epochs: PositiveInt | None = option(1, "T_m: epochs between masks; null: keep the first", _BY_EPOCHS)
    mask_steps: PositiveInt | None = option(None, "steps between masks, instead of epochs", _REFRESHED)
    fisher_samples: PositiveInt = option(128, "N_F: number of images for the Fisher information", _FISHER_SAMPLES)
    fisher_labels: Literal["data", "sampled"] = option("data", "labels of the Fisher information", _FISHER)
    fisher_augment: bool = option(False, "augment the images of the Fisher information", _FISHER_SAMPLES)
    drop: Literal["flattest", "random", "sharpest", "weight"] = option(
        "flattest", "which weights ssam-d drops: by gradient, at random, or the smallest (weight)", _DYNAMIC
    )
    drop_ratio: Fraction = option(0.5, "initial fraction of the kept weights that ssam-d drops", _DYNAMIC)
    growth: Literal["random", "gradient", "weight"] = option(
        "random", "which weights ssam-d grows: at random, with the largest gradient, or the largest (weight)", _DYNAMIC
    )
    epochs: PositiveInt = option(30, "passes over the training images", group="training")
    max_steps: PositiveInt | None = option(None, "stop after this many steps; schedules still follow `epochs`")
    batch_size: PositiveInt = option(64, "images per step, over all devices together")
    drop_last: bool = option(False, "leave out the last batch of an epoch if it is smaller than the others")
    accumulate: PositiveInt = option(1, "number of micro-batches per step, to save memory")
    label_smoothing: FractionBelow1 = option(0.0, "label smoothing of the training loss")
    ema: FractionBelow1 | None = option(None, "evaluate an exponential moving average of the weights with this decay")
    precision: Literal["fp32", "tf32", "bf16", "fp16"] = option("fp32", "bf16 and fp16 are mixed: weights stay float32")
    seed: NonNegativeInt = option(0, "seed of initial weights, batches, augmentation, noise and masks")

    def __post_init__(self) -> None:
        check_settings(self)
        if self.lr_schedule == "step" and not self.lr_milestones:
            raise ValueError("lr_milestones must be given with lr_schedule step, for example [60, 120, 160], got none")
        if self.batch_size < self.accumulate:
            raise ValueError(f"accumulate must be at most batch_size, {self.batch_size}, got {self.accumulate}")
        if self.optimizer == "ssam" and (self.layers is None) == (self.budget is None):
            raise ValueError(
                "optimizer ssam needs either layers, such as 'layer4.*,fc.*', or a budget, such as 1.2, got layers "
                f"{self.layers} and budget {self.budget}; ssam-f chooses the weights by Fisher information"
            )
        has_no_mask = self.optimizer in ("sam", "asam") and self.ascent in ("implicit", "implicit-dense")
        if has_no_mask or (self.optimizer in VARIANTS and self.ascent != "explicit"):
            raise ValueError(f"ascent must not be {self.ascent!r} for {self.optimizer}; leave it at explicit")
        if self.optimizer == "look-sam" and self.ascent_every == 1:
            raise ValueError("ascent_every must be above 1 with optimizer look-sam, got 1, which is SAM; 5 is usual")
        if self.optimizer in ("sam-on", "ssam"):  # |e| = rho, however few weights are perturbed
            object.__setattr__(self, "norm", "masked")
        as_pattern(self.pattern)

    @property
    def base_name(self) -> str:
        """The optimizer that updates the weights."""
        return self.optimizer if self.is_plain else self.base

    @property
    def has_budget(self) -> bool:
        return self.optimizer == "ssam" and self.budget is not None

    @property
    def is_plain(self) -> bool:
        return self.optimizer in ("sgd", "adam", "adamw")

    def total_steps(self, steps_per_epoch: int) -> int:
        whole = self.epochs * steps_per_epoch
        return min(whole, self.max_steps or whole)

    def steps_between_masks(self, steps_per_epoch: int) -> int:
        """Returns the steps between mask refreshes: those of all ``epochs`` if the first mask is kept."""
        return self.mask_steps or (self.mask_epochs or self.epochs) * steps_per_epoch

    @property
    def identity(self) -> str:
        """The hash without `epochs`, which may grow: the same for all files of a run."""
        return dataclasses.replace(self, epochs=DEFAULTS["epochs"]).content_hash

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
    def variant(self) -> TrainConfig:
        """The canonical config with seed 0: equal for all runs of a variant."""
        return dataclasses.replace(self.canonical, seed=0)

    @property
    def canonical(self) -> TrainConfig:
        """The same run with unused settings (rho of SGD, for example) at their defaults."""
        return dataclasses.replace(self, **{name: DEFAULTS[name] for name in unused(self)})


@dataclass(frozen=True)
class Machine:
    """Where the data set is, and what computes."""

    data_dir: Path | None = option(None, "the data set's files; default the user's cache", group="files and machine")
    download: bool = option(True, "download a data set that is missing")
    accelerator: str = option("auto", "cpu, cuda, mps or auto")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True)
class RunEnvironment(Machine):
    """Where and how a run is executed; nothing in it changes the result beyond rounding."""

    name: str | None = option(None, "name in reports and of the directory, runs/NAME")
    out: Path | None = option(None, "directory of the run; default runs/NAME or runs/DATASET-MODEL-OPTIMIZER-HASH")
    resume: bool = option(False, "continue the run in `out` with its own settings; a larger --epochs extends it")
    workers: NonNegativeInt | None = option(None, "processes for decoding image files; default one per core, at most 4")
    devices: int | str = option(1, "number of devices, or auto for all; several use distributed data parallel")
    num_nodes: PositiveInt = option(1, "machines; start the command on each, with MASTER_ADDR and NODE_RANK set")
    threads: PositiveInt | None = option(None, "torch threads per process; default torch's own")
    checkpoint_steps: PositiveInt | None = option(None, "steps between checkpoints, in addition to one per epoch")
    logger: Literal["tensorboard", "wandb", "mlflow", "none"] = option("tensorboard", "logger of the curves, in `out`")
    record_masks: bool | None = option(None, "write each mask to `out`; null: if all masks take at most 16 MB")
    record_times: bool = option(False, "record the seconds of each step")
    quiet: bool = option(False, "print nothing but the result")

    def directory(self, config: TrainConfig) -> Path:
        if self.out is not None:
            return self.out
        words = [self.name] if self.name else [config.dataset, config.model, config.optimizer, config.content_hash]
        return Path("runs") / "-".join(word.replace(":", ".").replace("/", ".") for word in words)


#: The default of every setting of a run.
DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(TrainConfig)}


def unused(config: TrainConfig) -> dict[str, str]:
    """Returns the settings that do not affect a run, and what would use them."""
    rules = {field.name: field.metadata["used"] for field in dataclasses.fields(TrainConfig)}
    return {name: rule.words for name, rule in rules.items() if rule is not None and not rule.holds(config)}


def check_used(config: TrainConfig, given: Iterable[str]) -> None:
    """Raise ValueError for a setting that the user gave and the run does not use."""
    useless = unused(config)
    for name in given:
        if name in useless:
            why = f"it needs {useless[name]}; leave it out"
            raise ValueError(f"{name} has no effect with optimizer {config.optimizer}: {why}")


def split_settings(values: Mapping[str, Any]) -> tuple[TrainConfig, RunEnvironment]:
    """Build both kinds of settings from one mapping, as in a run's ``config.yaml``."""
    check_names(values, [*DEFAULTS, *(field.name for field in dataclasses.fields(RunEnvironment))])
    config = from_mapping({name: value for name, value in values.items() if name in DEFAULTS})
    return config, RunEnvironment(**{name: values[name] for name in values.keys() - DEFAULTS.keys()})


def from_mapping(values: Mapping[str, Any]) -> TrainConfig:
    """Build the settings of a run; ValueError suggests names for an unknown one.

    `layers` and `budget` are settings of ssam, and imply it.
    """
    check_names(values, DEFAULTS)
    implied = any(values.get(name) is not None for name in ("layers", "budget"))
    return TrainConfig(**{**({"optimizer": "ssam"} if implied else {}), **values})
