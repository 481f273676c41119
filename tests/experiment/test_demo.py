from dataclasses import replace

import pytest
import torch

from sparsesam.experiment import DemoConfig, run_demo

SHORT = DemoConfig(epochs=2, seeds=1, fisher_samples=8, refresh_epochs=1, batch_size=250)


def without_times(results):
    return [replace(result, seconds=[]) for result in results]


@pytest.fixture(scope="module")
def results():
    return {result.optimizer: result for result in run_demo(SHORT)}


def test_runs_every_optimizer_for_every_epoch(results):
    assert list(results) == ["SGD", "SAM", "SSAM-F", "SSAM-D"]
    assert all(len(result.losses) == len(result.seconds) == 2 for result in results.values())


def test_reports_the_sparsity_reached(results):
    assert results["SGD"].sparsity is None
    assert results["SAM"].sparsity == 0
    assert results["SSAM-F"].sparsity == pytest.approx(0.5, abs=1e-4)
    assert results["SSAM-D"].sparsity == pytest.approx(0.5, abs=1e-4)


def test_all_start_from_the_same_weights_and_batches():
    still = replace(SHORT, rho=0.0)
    sgd, *others = without_times(run_demo(still))
    for other in others:
        assert other.losses == sgd.losses
        assert other.test_accuracy == sgd.test_accuracy


def test_a_seed_repeats_and_another_differs():
    once, again, other = (without_times(run_demo(replace(SHORT, seed=seed))) for seed in (5, 5, 6))
    assert once == again
    assert once != other


def test_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    run_demo(replace(SHORT, epochs=1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_tells_of_every_epoch():
    told = []
    run_demo(SHORT, lambda result: told.append((result.optimizer, len(result.losses))))
    assert sorted(told) == sorted(
        (name, epoch) for name in ("SGD", "SAM", "SSAM-F", "SSAM-D") for epoch in (1, 2)
    )


def test_refuses_no_epochs():
    with pytest.raises(ValueError, match="epochs must be at least 1, got 0"):
        DemoConfig(epochs=0)
