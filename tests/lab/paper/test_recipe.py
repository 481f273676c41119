import json

import pytest
import torch

from sparsesam.lab.data import DATASETS
from sparsesam.lab.models import MODELS, build_model
from sparsesam.lab.paper.comparison import RecipeRuns
from sparsesam.lab.paper.recipe import TIMES, recipe, recipes
from sparsesam.masks.patterns import as_pattern
from tests.lab.experiment.runs import result_with

SCALES = ("laptop", "full")


@pytest.mark.parametrize("label", recipes())
@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_is_valid_run(label, scale):
    one = recipe(label).at(scale)
    for row, column in one.cells:
        assert len(one.rows[row]["paper"]) <= len(one.at("full").columns)
        assert column.relative_to is None or column.relative_to in one.row_labels
        config = one.config(row, column)
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


def test_papers_numbers():
    assert recipe("resnet_cifar").rows["SSAM-F 50 %"]["paper"] == [96.81, 81.24, 97.71, 85.16]
    assert recipe("mask-strategy").rows["SSAM-D drop the sharpest"]["paper"] == [76.68]
    assert recipe("ablation-num-samples").rows["90 % N_F 4096"]["paper"] == [96.59, 110.65]


def test_columns_that_measure_same_runs_add_none():
    one = recipe("smallbsz4ga")
    variants = one.sweep([0]).variants
    assert len(variants) == 12  # time and speed are of the same six runs
    assert len(one.timed()) == 6


@pytest.mark.parametrize("label", recipes())
def test_times_come_from_separate_short_runs(label):
    for one in (recipe(label).at(scale) for scale in SCALES):
        timed = one.timed()
        assert all(config.max_steps is not None for config in timed)
        others = {one.config(row, column) for row, column in one.cells if column.measure not in TIMES}
        assert not timed & others


def results_of(tmp_path, label, values, measure="test_accuracy", settings=None, chosen=lambda config: True):
    """A recipe whose runs have finished with ``values`` by (optimizer, seed)."""
    one = recipe(label).at("laptop", settings)
    jobs = one.sweep(sorted({seed for _, seed in values})).jobs(tmp_path)
    for job in jobs:
        found = values.get((job.config.optimizer, job.config.seed))
        if found is not None and chosen(job.config):
            job.directory.mkdir()
            made = {"cpu": "a CPU", "threads": 1, "torch": "2.x"}
            content = {"result": result_with(**{measure: found}), "provenance": made}
            (job.directory / "result.json").write_text(json.dumps(content))
    return one, jobs


def test_ours_are_mean_over_seeds_with_interval(tmp_path):
    one, jobs = results_of(tmp_path, "mask-strategy", {("sam", 0): 0.5, ("sam", 1): 0.7, ("sam", 2): 0.6})
    values = RecipeRuns(one, jobs).numbers()["SAM", "digits"]
    assert values == {0: 0.5, 1: 0.7, 2: 0.6}
    assert one.columns[0].show(values) == "60.00 ± 24.84"


def test_speed_is_time_of_reference_divided_by_own(tmp_path):
    values = {("sam", 0): 3.0, ("ssam-f", 0): 1.5}
    one, jobs = results_of(tmp_path, "nm_vit", values, "warm_seconds_per_step")
    seconds, speed = one.columns
    numbers = RecipeRuns(one, jobs).numbers()
    assert seconds.show(numbers["SSAM-F implicit 2:4", seconds.label]) == "1.5"
    assert speed.show(numbers["SSAM-F implicit 2:4", speed.label]) == "×2.00"
    assert one.rows["SSAM-F implicit 2:4"]["paper"] == [3.53, 1.2]


def test_table_4_has_rows_for_both_units_of_text():
    """Whole tensors cannot reach every sparsity, filters can."""
    one = recipe("cifar_structure").at("full")
    assert {one.config(row, one.columns[0]).pattern for row in one.row_labels[2:]} == {"filter", "tensor reach"}
    assert one.rows["SSAM-F explicit 98 %, by filter"]["paper"] == one.rows["SSAM-F explicit 98 %, by tensor"]["paper"]
    worst = {"filter": 0.0, "tensor": 0.0, "tensor reach": 0.0}
    shapes = {name: p.shape for name, p in build_model("resnet18").named_parameters()}
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        scores = {name: torch.rand(shape, generator=generator) for name, shape in shapes.items()}
        for unit in worst:
            masks = as_pattern(unit).select(scores, sparsity=0.5)
            kept = sum(int(mask.sum()) for mask in masks.values())
            missed = 0.5 - kept / sum(mask.numel() for mask in masks.values())
            worst[unit] = max(worst[unit], missed, key=abs)
    assert abs(worst["filter"]) < 1e-3
    assert worst["tensor"] > 1e-2  # fewer weights than asked are perturbed
    assert worst["tensor reach"] < -1e-2  # more


def test_sparsity_acc_has_only_rows_of_papers_tables():
    one = recipe("sparsity-acc").at("full")
    assert [row for row in one.row_labels if row.startswith("SSAM-F")] == [
        f"SSAM-F {share} %" for share in (50, 80, 90, 95, 98, 99)
    ]
    on_imagenet = {row for row, column in one.cells if "ImageNet" in column.label}
    assert on_imagenet == {"SAM", *(f"SSAM-{kind} {share} %" for kind in "FD" for share in (50, 80, 90))}
    resnet = recipe("resnet_cifar")
    for row in one.row_labels:
        assert one.rows[row]["paper"][:2] == resnet.rows[row]["paper"][2:]


def test_timed_vit_uses_precision_of_sparse_tensor_cores():
    for label in ("nm_vit", "speedup"):
        one = recipe(label).at("full")
        assert {one.config(row, column).precision for row, column in one.cells} == {"bf16"}


def test_vit_training_matches_its_table():
    one = recipe("nm_vit").at("full")
    config = one.config("SAM", one.columns[0])
    assert (config.epochs, config.batch_size, config.base, config.lr) == (10, 16, "adam", 1e-3)
    assert (config.weight_decay, config.betas, config.rho, config.fisher_samples) == (0.0, (0.9, 0.999), 0.2, 512)


@pytest.mark.parametrize(
    ("name", "label"),
    [
        ("hessian", "hessian"),
        ("fig:hessian", "hessian"),
        ("Figure 7", "hessian"),
        ("fig7", "hessian"),
        ("landscape", "vis-landscape"),
        ("vis-landscape", "vis-landscape"),
        ("train-curve", "train-curve"),
        ("grad_diff", "grad-diff"),
        ("speedup", "speedup"),
        ("corruption", "corruption"),
        ("tab:corruption", "corruption"),
        ("table 4", "cifar_structure"),
        ("Tab. 13", "ablation-num-samples"),
    ],
)
def test_recipes_are_found_by_common_names(name, label):
    assert recipe(name).label == label


def test_names_of_recipes_are_unique():
    names = [name for one in recipes().values() for name in one.names]
    assert len(names) == len(set(names))
    for one in recipes().values():
        assert all(recipe(name) is one for name in one.names)


def test_unknown_name_suggests_nearest():
    with pytest.raises(ValueError, match="did you mean nm_cifar"):
        recipe("nm_cfar")
    with pytest.raises(ValueError, match="did you mean hessian"):
        recipe("hesian")


@pytest.mark.parametrize(
    ("label", "name", "words"),
    [
        ("rho-imagenet", "rho", "must not change rho: .* differ in it"),
        ("resnet_cifar", "model", "differ in it"),
        ("label-noise", "optimizer", "differ in it"),
        ("mask-strategy", "seed", "use --seeds for the number"),
    ],
)
def test_settings_varied_by_rows_or_columns_cannot_be_set(label, name, words):
    with pytest.raises(ValueError, match=words):
        recipe(label).at("laptop", {name: 0.5}).check_overrides()
    recipe(label).at("laptop", {"epochs": 2}).check_overrides()


def test_settings_of_sgd_alone_can_be_set_for_all_runs():
    one = recipe("table 9").at("laptop", {"epochs": 2})
    one.check_overrides()
    assert {one.config(row, column).epochs for row, column in one.cells} == {2}
    assert recipe("table 9").config("SGD", recipe("table 9").columns[0]).epochs == 12


def test_figures_that_need_same_networks_share_them():
    assert recipe("hessian").directory == recipe("landscape").directory
    assert recipe("hessian").at("full").sweep([0]).variants == recipe("landscape").at("full").sweep([0]).variants
    assert recipe("sparsity-acc").at("full").directory.parts[-2:] == ("sparsity-acc", "full")


@pytest.mark.parametrize(
    ("label", "name", "value"), [("rho-imagenet", "optimizer", "sgd"), ("ablation-update-mask", "mask_steps", 2)]
)
def test_setting_that_makes_rows_identical_raises(label, name, value):
    with pytest.raises(ValueError, match="several cells would show the same run"):
        recipe(label).at("laptop", {name: value}).check_overrides()


def test_figure_and_table_of_one_label_differ_by_prefix():
    assert recipe("fig:corruption").place == "Figure 3"
    assert recipe("tab:corruption").place == recipe("corruption").place == "Table 8"


def test_notes_about_full_scale_are_printed_only_there():
    assert any("4096" in note for note in recipe("vgg_cifar").at("full").remarks)
    assert not any("4096" in note for note in recipe("vgg_cifar").remarks)
