"""Options that no other test uses: each trains for a few steps, or is rejected with a reason."""

import math

import pytest

from tests.lab.experiment.runs import train

TRAINS = [
    {"ema": 0.99, "label_smoothing": 0.1, "warmup_epochs": 0.5},
    {"optimizer": "asam", "rho": 0.5},
    {"adaptive": "all", "eta": 0.0},
    {"base": "adamw", "lr": 0.001},
    {"pattern": "filter", "ascent": "implicit", "norm": "masked"},
    {"pattern": "2:4", "ascent": "implicit-dense"},
    {"optimizer": "sam", "ascent": "extrapolation", "rho": 0.02, "rho_schedule": "warmup"},
    {"optimizer": "ssam-d", "ascent": "extrapolation"},
    {"optimizer": "sam-on", "norm": "masked"},
    {"optimizer": "ssam-g", "ascent": "momentum"},
    {"ascent_every": 2, "ascent_fraction": 0.5, "ascent_start": 0.2},
    {"rho_schedule": "cosine", "rho_final": 0.1},
    {"mask_epochs": None, "fisher_labels": "sampled"},
    {"optimizer": "ssam-d", "mask_steps": 1, "growth": "gradient"},
    {"precision": "bf16", "pattern": "filter", "ascent": "implicit", "norm": "masked"},
    {"precision": "fp16"},
    {"mixup": 0.2, "label_smoothing": 0.1, "ascent_fraction": 0.5},
    {"clip_grad_norm": 0.1, "accumulate": 4, "precision": "fp16"},
    {"optimizer": "gsam", "alpha": 0.2, "rho_schedule": "learning-rate", "rho_final": 0.1},
    {"optimizer": "wsam", "gamma": 0.5, "decouple": False, "precision": "fp16"},
    {"optimizer": "friendly-sam", "sigma": 0.5, "decay": 0.6},
    {"optimizer": "look-sam", "ascent_every": 2, "radius": "layer", "adaptive": "layer"},
    {"optimizer": "esam", "beta": 0.8, "accumulate": 2},
    {"optimizer": "zsharp", "quantile": 0.5},
]
REJECTED = [
    ({"pattern": "filter", "ascent": "implicit"}, 'norm must be "masked" with ascent="implicit"'),
    ({"optimizer": "sam", "ascent": "implicit"}, "ascent must not be 'implicit' for sam"),
    ({"optimizer": "gsam", "ascent": "momentum"}, "ascent must not be 'momentum' for gsam"),
    ({"optimizer": "gsam", "ascent_fraction": 0.5}, "ascent_fraction must be 1.0 with GSAM"),
    ({"optimizer": "look-sam"}, "ascent_every must be above 1"),
    ({"optimizer": "friendly-sam", "precision": "fp16"}, "precision must not be fp16 with optimizer friendly-sam"),
    ({"pattern": "fliter"}, "pattern must be a Pattern or one of .*did you mean filter"),
    ({"pattern": "2:4", "sparsity": 0.9}, "sparsity must be left out"),
    ({"lr_schedule": "step"}, "lr_milestones must be given"),
    ({"accumulate": 100}, "accumulate must be at most batch_size, 16"),
    ({"val_size": 1000}, "val_size must be below the number of training images, 1000"),
    ({"image_size": 32}, "image_size must be null for digits"),
    ({"model": "vit-s-16"}, "image_size"),
]


def named(settings):
    return " ".join(f"{name}={value}" for name, value in settings.items())


@pytest.mark.parametrize("settings", TRAINS, ids=named)
def test_trains(tmp_path, settings):
    result = train(tmp_path, **{"optimizer": "ssam-f", "max_steps": 4, **settings})
    assert result.steps == 4
    assert math.isfinite(result.test_loss)


@pytest.mark.parametrize(
    ("settings", "reason"), REJECTED, ids=lambda value: named(value) if isinstance(value, dict) else ""
)
def test_is_rejected_with_reason(tmp_path, settings, reason):
    with pytest.raises(ValueError, match=reason):
        train(tmp_path / "run", **{"optimizer": "ssam-f", **settings})
    assert not (tmp_path / "run").exists()
