import json

import pytest

from sparsesam.lab.commands.paper import comparison
from sparsesam.lab.data import DATASETS
from sparsesam.lab.experiment.paper import finished_results, recipe, recipes, show_ours
from sparsesam.lab.models import MODELS
from sparsesam.masks.patterns import as_pattern

SCALES = ("laptop", "full")


@pytest.mark.parametrize("label", recipes())
@pytest.mark.parametrize("scale", SCALES)
def test_every_cell_is_a_run_that_exists(label, scale):
    one = recipe(label)
    for row in one.rows(scale):
        assert len(one.paper(row)) <= len(one.columns("full"))
        for column in one.columns(scale):
            config = one.config(row, column, {})
            assert config.dataset in DATASETS
            assert config.model in MODELS
            as_pattern(config.pattern)
            assert scale == "full" or config.dataset == "digits"


def test_the_paper_s_hyper_parameters_at_full_scale():
    resnet = recipe("resnet_cifar")
    c10, c100, *_ = resnet.columns("full")
    sam = resnet.config("SAM", c100, {})
    assert (sam.epochs, sam.batch_size, sam.lr, sam.momentum) == (200, 128, 0.05, 0.9)
    assert (sam.weight_decay, sam.rho, sam.augment) == (1e-3, 0.2, "standard")
    assert resnet.config("SGD", c10, {}).weight_decay == 5e-4
    assert resnet.config("SSAM-F 50 %", c10, {}).rho == 0.1
    imagenet = recipe("imagenet-experiments")
    sgd = imagenet.config("SGD", imagenet.columns("full")[0], {})
    assert (sgd.batch_size, sgd.lr, sgd.weight_decay) == (256, 0.1, 1e-4)
    noise = recipe("label-noise")
    assert noise.config("SAM", noise.columns("full")[0], {}).augment == "no-cutout"


def test_the_paper_s_numbers():
    assert recipe("resnet_cifar").paper("SSAM-F 50 %") == [96.81, 81.24, 97.71, 85.16]
    assert recipe("mask-strategy").paper("SSAM-D drop the sharpest") == [76.68]
    assert recipe("ablation-num-samples").paper("90 % N_F 4096") == [96.59, 110.65]


def test_columns_that_measure_the_same_runs_add_none():
    assert len(recipe("smallbsz4ga").sweep("laptop", [0], {}).variants) == 6


def test_ours_stand_beside_the_paper_s_with_mean_and_spread(tmp_path):
    one = recipe("mask-strategy")
    jobs = one.sweep("laptop", [0, 1], {}).jobs(tmp_path)
    for job, accuracy in zip([job for job in jobs if job.config.optimizer == "sam"], (0.5, 0.7), strict=True):
        job.directory.mkdir()
        (job.directory / "result.json").write_text(json.dumps({"result": {"test_accuracy": accuracy}}))
    cell = one.cell("SAM", one.columns("laptop")[0], finished_results(jobs), {})
    assert (cell.mean, cell.seeds) == (0.6, 2)
    assert show_ours(cell, "test_accuracy") == "60.00 ± 14.14"
    drawn = comparison(one, "laptop", jobs, {})
    assert list(drawn.columns[1].cells)[:3] == ["–", "60.00 ± 14.14", "–"]
    assert list(drawn.columns[2].cells)[:3] == ["76.67", "77.25", "77.08"]
    assert drawn.caption == "ours: small-cnn on digits; laptop scale, 2 of 14 runs, 2 seed(s) each"


def test_an_unknown_table_suggests_the_nearest():
    with pytest.raises(ValueError, match="did you mean nm_cifar"):
        recipe("nm_cfar")
