from dataclasses import replace

import pytest

from sparsesam.lab.experiment.config import TrainConfig

UNUSED = [
    ("sgd", {"rho": 0.7, "sparsity": 0.9, "ascent_every": 3, "base": "adam", "betas": (0.5, 0.9), "mask_epochs": 7}),
    ("adamw", {"momentum": 0.1, "rho": 0.7}),
    ("sam", {"pattern": "filter", "fisher_samples": 3, "drop": "random", "eta": 3.0}),
    ("ssam-f", {"drop_ratio": 0.1, "rho_final": 0.5, "ascent_off_steps": "reuse", "corruption": "fog"}),
    ("ssam-d", {"fisher_labels": "sampled", "lr_gamma": 0.5, "randaugment_magnitude": 1.0}),
]
USED = [
    ("sgd", {"momentum": 0.1}),
    ("adamw", {"betas": (0.5, 0.9)}),
    ("sam", {"rho": 0.7}),
    ("asam", {"eta": 3.0}),
    ("ssam-f", {"fisher_samples": 3}),
    ("ssam-d", {"drop_ratio": 0.1}),
]


@pytest.mark.parametrize(("optimizer", "settings"), UNUSED)
def test_settings_that_a_run_does_not_use_do_not_tell_runs_apart(optimizer, settings):
    plain = TrainConfig(optimizer=optimizer)
    assert replace(plain, **settings).content_hash == plain.content_hash
    assert replace(plain, **settings).canonical == plain.canonical


@pytest.mark.parametrize(("optimizer", "settings"), USED)
def test_settings_that_a_run_uses_do(optimizer, settings):
    plain = TrainConfig(optimizer=optimizer)
    assert replace(plain, **settings).content_hash != plain.content_hash
