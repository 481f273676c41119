import pytest

from sparsesam.lab.data import DATASETS
from sparsesam.lab.models import MODELS
from sparsesam.lab.paper.recipe import TIMES, recipe, recipes
from sparsesam.masks.patterns import as_pattern

SCALES = ("laptop", "full")


@pytest.mark.parametrize("label", recipes())
@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_is_valid_run(label, scale):
    chosen = recipe(label).at(scale)
    for row, column in chosen.cells:
        assert len(chosen.rows[row]["paper"]) <= len(chosen.at("full").columns)
        assert column.relative_to is None or column.relative_to in chosen.row_labels
        config = chosen.config(row, column)
        assert config.dataset in DATASETS
        assert config.model in MODELS
        as_pattern(config.pattern)
        assert scale == "full" or config.dataset == "digits"


def test_papers_hyperparameters_at_full_scale():
    resnet = recipe("resnet_cifar").at("full")
    c10, c100, *_ = resnet.columns
    sam = resnet.config("SAM", c100)
    assert (sam.epochs, sam.batch_size, sam.lr, sam.momentum) == (200, 128, 0.05, 0.9)
    assert (sam.weight_decay, sam.rho, sam.augment) == (1e-3, 0.2, "standard")
    assert resnet.config("SGD", c10).weight_decay == 5e-4
    assert resnet.config("SSAM-F 50 %", c10).rho == 0.1
    imagenet = recipe("imagenet-experiments").at("full")
    sgd = imagenet.config("SGD", imagenet.columns[0])
    assert (sgd.batch_size, sgd.lr, sgd.weight_decay) == (256, 0.1, 1e-4)
    noise = recipe("label-noise").at("full")
    assert noise.config("SAM", noise.columns[0]).augment == "no-cutout"
    for vit in recipe("nm_vit").at("full").configs:  # sparse tensor cores need 16 bits
        assert (vit.epochs, vit.batch_size, vit.base, vit.lr, vit.precision) == (10, 16, "adam", 1e-3, "bf16")
        assert (vit.weight_decay, vit.betas, vit.rho, vit.fisher_samples) == (0.0, (0.9, 0.999), 0.2, 512)
    units = {config.pattern for config in recipe("cifar_structure").at("full").configs}
    assert units == {"unstructured", "filter", "tensor reach"}  # the text names both


def test_columns_that_measure_same_runs_add_none():
    chosen = recipe("smallbsz4ga")
    variants = chosen.sweep([0]).variants
    assert len(variants) == 12  # time and speed are of the same six runs
    assert len(chosen.timed()) == 6


@pytest.mark.parametrize("label", recipes())
def test_times_come_from_separate_short_runs(label):
    for chosen in (recipe(label).at(scale) for scale in SCALES):
        timed = chosen.timed()
        assert all(config.max_steps is not None for config in timed)
        others = {chosen.config(row, column) for row, column in chosen.cells if column.measure not in TIMES}
        assert not timed & others


def test_sparsity_acc_has_only_rows_of_papers_tables():
    chosen = recipe("sparsity-acc").at("full")
    assert [row for row in chosen.row_labels if row.startswith("SSAM-F")] == [
        f"SSAM-F {share} %" for share in (50, 80, 90, 95, 98, 99)
    ]
    on_imagenet = {row for row, column in chosen.cells if "ImageNet" in column.label}
    assert on_imagenet == {"SAM", *(f"SSAM-{kind} {share} %" for kind in "FD" for share in (50, 80, 90))}
    resnet = recipe("resnet_cifar")
    for row in chosen.row_labels:
        assert chosen.rows[row]["paper"][:2] == resnet.rows[row]["paper"][2:]


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("fig:hessian", "hessian"),
        ("Figure 7", "hessian"),
        ("fig7", "hessian"),
        ("landscape", "vis-landscape"),
        ("grad_diff", "grad-diff"),
        ("tab:corruption", "corruption"),
        ("fig:corruption", "corruption-images"),
        ("Tab. 13", "ablation-num-samples"),
    ],
)
def test_recipes_are_found_by_common_names(name, label):
    assert recipe(name).label == label


def test_names_of_recipes_are_unique():
    for chosen in recipes().values():
        assert all(recipe(name) is chosen for name in chosen.names)


def test_unknown_name_suggests_nearest():
    with pytest.raises(ValueError, match="did you mean hessian"):
        recipe("hesian")


@pytest.mark.parametrize(
    ("label", "name", "value"),
    [
        ("rho-imagenet", "rho", 0.5),
        ("rho-imagenet", "optimizer", "sgd"),  # which does not use what the rows vary
        ("resnet_cifar", "model", "small-cnn"),
        ("label-noise", "label_noise", 0.5),
        ("label-noise", "optimizer", "sam"),
        ("ablation-update-mask", "mask_steps", 2),
        ("mask-strategy", "seed", 1),
    ],
)
def test_setting_that_makes_cells_identical_raises(label, name, value):
    with pytest.raises(ValueError, match=f"must not change {name}"):
        recipe(label).at("laptop", {name: value}).check_overrides()
    recipe(label).at("laptop", {"epochs": 2}).check_overrides()


def test_settings_of_sgd_alone_can_be_set_for_all_runs():
    chosen = recipe("table 9").at("laptop", {"epochs": 2})
    chosen.check_overrides()
    assert {chosen.config(row, column).epochs for row, column in chosen.cells} == {2}
    assert recipe("table 9").config("SGD", recipe("table 9").columns[0]).epochs == 12


def test_figures_that_need_same_networks_share_them():
    assert recipe("hessian").directory == recipe("landscape").directory
    assert recipe("hessian").at("full").sweep([0]).variants == recipe("landscape").at("full").sweep([0]).variants
    assert recipe("sparsity-acc").at("full").directory.parts[-2:] == ("sparsity-acc", "full")
