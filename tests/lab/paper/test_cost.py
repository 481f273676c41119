import pytest

from sparsesam.lab.experiment.config import TrainConfig
from sparsesam.lab.paper.cost import PAPER_TFLOPS, SHAPES, cost, measured_model, total
from sparsesam.lab.paper.recipe import recipe

CIFAR = TrainConfig(dataset="cifar10", model="resnet18", epochs=2, batch_size=100, fisher_samples=50)


def of(**settings):
    return cost(TrainConfig(**{**CIFAR.__dict__, **settings}))


def test_a_model_is_measured_without_memory():
    found = measured_model("resnet18", SHAPES["cifar10"])
    assert found.parameters == 11_173_962
    assert found.forward_flops == pytest.approx(2 * 555.4e6, rel=1e-3)  # multiplications and additions
    assert 2e6 < found.saved_bytes < 20e6


def test_passes_of_each_optimizer():
    assert (of(optimizer="sgd").steps, of(optimizer="sgd").passes) == (1000, 1000)
    assert of(optimizer="sam").passes == 2000
    assert of(optimizer="sam", ascent_fraction=0.25).passes == 1250
    assert of(optimizer="sam", ascent_every=2).passes == 1500
    assert of(optimizer="sam", ascent="momentum").passes == 1000
    assert of(optimizer="ssam-d").passes == 2000
    assert of(optimizer="ssam-f").passes == 2000 + 2 * 0.5  # two masks of half a batch each
    assert of(optimizer="ssam-f", mask_epochs=None).passes == 2000 + 0.5
    assert of(optimizer="sam", max_steps=10).passes == 20


def test_hours_follow_from_the_stated_throughput():
    one = of(optimizer="sam")
    assert one.flops == pytest.approx(2000 * 3 * 100 * 1.1108e9, rel=1e-3)
    assert one.hours(10) == pytest.approx(one.flops / 1e13 / 3600)


def test_the_stated_throughput_gives_the_time_of_the_paper_s_table_10():
    epoch = of(optimizer="sam", epochs=1, batch_size=128)
    assert 3600 * epoch.hours(PAPER_TFLOPS) == pytest.approx(13.60, rel=0.01)


def test_sums_have_the_largest_memory():
    small, large = of(optimizer="sgd"), of(optimizer="sam", batch_size=200)
    assert total([small, large]).memory == large.memory > small.memory
    assert total([small, large]).steps == small.steps + large.steps


def test_the_timed_vit_fits_one_gpu_of_80_gb():
    one = recipe("nm_vit").at("full")
    memory = [cost(config).memory for config in one.sweep([0]).variants.values()]
    assert 5e9 < max(memory) < 40e9  # an estimate, so with room to spare


def test_data_sets_of_one_s_own_have_no_cost_without_being_loaded():
    with pytest.raises(ValueError, match="dataset must be one of digits, cifar10"):
        cost(TrainConfig(dataset="module:function"))
