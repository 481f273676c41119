import dataclasses

import pytest

from sparsesam.lab.experiment.config import DEFAULTS
from sparsesam.lab.paper.choices import other_choices, read_choices, settings_of
from sparsesam.lab.paper.recipe import recipe, recipes


def mark_of(label, name, value, scale="full", **overrides):
    settings = settings_of(recipe(label).at(scale, overrides))
    (found,) = [setting for setting in settings if setting.name == name and value in setting.values]
    return found.mark


@pytest.mark.parametrize("label", recipes())
def test_every_setting_of_every_recipe_has_source(label):
    chosen = recipe(label).at("full")
    marked = {(choice.name, value) for choice in settings_of(chosen) for value in choice.values}
    for row, column in chosen.cells:
        config = chosen.config(row, column)
        for name in ("dataset", "model", "optimizer", "lr", "weight_decay", "epochs", "batch_size", "augment"):
            assert (name, str(getattr(config, name))) in marked


@pytest.mark.parametrize(
    ("label", "name", "value", "mark"),
    [
        ("resnet_cifar", "rho", "0.2", "from the paper: Sec. 5.1"),
        ("resnet_cifar", "drop_ratio", "0.5", "from the authors' published settings: their code's alpha"),
        ("resnet_cifar", "drop_last", "False", "ours, because the text does not say; the authors leave out"),
        ("ablation-update-mask", "mask_epochs", "50", "from the paper: Table 14"),  # a rule of the recipe
        ("resnet_cifar", "mask_epochs", "1", "from the authors' published settings: the commands of their README"),
        ("nm_vit", "fisher_samples", "512", "from the paper: Table 16"),  # a rule of the model and value
        ("cifar_structure", "pattern", "tensor reach", "from the paper: Sec. 4.4"),
    ],
)
def test_sources_of_settings(label, name, value, mark):
    assert mark_of(label, name, value).startswith(mark)


def test_choices_beyond_settings_are_listed():
    names = {choice.name for known in recipes().values() for choice in other_choices(known.at("full"))}
    assert names == {choice["name"] for choice in read_choices()["choices"]}


def test_settings_without_effect_are_not_listed():
    settings = {choice.name for choice in settings_of(recipe("rho-imagenet").at("full"))}
    assert "rho" in settings
    assert not settings & {"fisher_samples", "drop", "sparsity", "betas", "corruption", "seed"}


def test_rules_refer_to_existing_settings():
    assert {*read_choices()["full"], *read_choices()["laptop"]} <= {*DEFAULTS, "*"}


def test_value_without_source_raises():
    chosen = recipe("rho-imagenet").at("full")
    full = {**chosen.full, "settings": {**chosen.full["settings"], "nesterov": True}}
    with pytest.raises(ValueError, match="does not say where nesterov=True comes from"):
        settings_of(dataclasses.replace(chosen, full=full))


def test_tuned_settings_of_baseline_are_marked_at_laptop_scale():
    for name, value in (("epochs", "12"), ("weight_decay", "0.03")):
        assert mark_of("table 9", name, value, "laptop") == "ours, because it was tuned on validation images"
    assert mark_of("table 9", "rho", "0.5", "laptop") == "ours, because the laptop scale must take minutes on a CPU"


def test_overridden_settings_are_ours():
    assert mark_of("rho-imagenet", "epochs", "3", epochs=3) == "ours, because --set says so"
