from dataclasses import replace

import pytest

from sparsesam.lab.experiment.config import RunEnvironment, TrainConfig, from_mapping

UNUSED = [
    ("sgd", {"rho": 0.7, "sparsity": 0.9, "ascent_every": 3, "base": "adam", "betas": (0.5, 0.9), "mask_epochs": 7}),
    ("adamw", {"momentum": 0.1, "rho": 0.7}),
    ("sam", {"pattern": "filter", "fisher_samples": 3, "drop": "random", "eta": 3.0}),
    ("ssam-f", {"drop_ratio": 0.1, "rho_final": 0.5, "corruption": "fog"}),
    ("ssam-d", {"fisher_labels": "sampled", "lr_gamma": 0.5}),
]
USED = [
    ("sgd", {"momentum": 0.1}),
    ("adamw", {"betas": (0.5, 0.9)}),
    ("sam", {"rho": 0.7}),
    ("asam", {"eta": 3.0}),
    ("ssam-f", {"fisher_samples": 3}),
    ("ssam-d", {"drop_ratio": 0.1}),
]


def test_hash_differs_between_configs_and_equals_for_equal_ones():
    assert TrainConfig().content_hash == TrainConfig().content_hash
    assert TrainConfig(rho=0.2).content_hash != TrainConfig().content_hash
    same = from_mapping({"betas": [0.9, 0.999], "label_noise": 0, "rho": "1e-1"})
    assert same.content_hash == TrainConfig().content_hash


def test_default_directory_describes_run():
    config = replace(TrainConfig(), model="my.module:net")
    assert str(RunEnvironment().directory(config)) == f"runs/digits-my.module.net-ssam-f-{config.content_hash}"


@pytest.mark.parametrize(("optimizer", "settings"), UNUSED + USED)
def test_only_settings_that_the_run_uses_change_its_hash(optimizer, settings):
    plain = TrainConfig(optimizer=optimizer)
    changed = replace(plain, **settings)
    assert (changed.content_hash == plain.content_hash) == ((optimizer, settings) in UNUSED)
    assert (changed.canonical == plain.canonical) == ((optimizer, settings) in UNUSED)
