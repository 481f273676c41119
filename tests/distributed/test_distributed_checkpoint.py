"""torch.distributed.checkpoint keeps masks and counters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from tests import cases
from tests.distributed import equal_runs
from tests.distributed.processes import run_ranks
from tests.distributed.test_fsdp2 import sharded, whole


def bases():
    return {
        "sgd": cases.sgd,
        "sgd without momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    }


def make(kind, base, seed=0):
    model = equal_runs.network(seed)
    options = {"every": 2, "off_steps": "reuse"} if kind in ("dynamic", "sam") else {}
    return model, equal_runs.optimizer(kind, model, base=bases()[base], **options)


@pytest.mark.parametrize("base", bases())
@pytest.mark.parametrize("kind", ["sam", "dynamic", "fisher filter"])
def test_a_round_trip_into_a_fresh_optimizer(kind, base):
    model, opt = make(kind, base)
    equal_runs.train(model, opt, steps=range(7))
    weights, state = copy.deepcopy(get_state_dict(model, opt))
    again, resumed = make(kind, base, seed=1)
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state)
    assert (resumed.steps, resumed.sparsity) == (7, opt.sparsity)
    equal_runs.train(model, opt, steps=range(7, 15))
    equal_runs.train(again, resumed, steps=range(7, 15))
    assert cases.same_bits(model.parameters(), again.parameters())
    assert all(torch.equal(mask, resumed.masks[name]) for name, mask in opt.masks.items())


def test_what_torch_does_to_make_the_state_leaves_weights_and_counters_alone():
    model, opt = make("dynamic", "adamw")
    before = cases.weights_of(model)
    state = get_optimizer_state_dict(model, opt)
    assert cases.same_bits(before, model.parameters())
    assert opt.steps == 0
    assert state["param_groups"][0]["sparsesam"]["steps"] == 0
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a gradient at w \+ e"):
        opt.step()


def test_masks_that_a_flat_state_dict_loses_are_missed():
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, opt = make("dynamic", "sgd")
    equal_runs.train(model, opt, steps=range(3))
    state = get_optimizer_state_dict(model, opt, options=options)
    again, resumed = make("dynamic", "sgd")
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict"):
        set_optimizer_state_dict(again, resumed, state, options=options)


def spread(way, ranks):
    model = equal_runs.network()
    return DistributedDataParallel(model) if way == "ddp" else sharded(model, ranks)


REUSED = {"every": 2, "off_steps": "reuse"}


def save(rank, ranks, folder):
    for way in ("ddp", "fsdp2"):
        model = spread(way, ranks)
        opt = equal_runs.optimizer("dynamic", model, **REUSED)
        equal_runs.train(model, opt, (rank, ranks), range(7))
        weights, state = get_state_dict(model, opt)
        dcp.save({"model": weights, "opt": state}, checkpoint_id=f"{folder}/{way}")


def load(rank, ranks, folder):
    found = {}
    for way in ("ddp", "fsdp2"):
        model = spread(way, ranks)
        opt = equal_runs.optimizer("dynamic", model, **REUSED)
        weights, state = get_state_dict(model, opt)
        content = {"model": weights, "opt": state}
        dcp.load(content, checkpoint_id=f"{folder}/{way}")
        set_state_dict(model, opt, model_state_dict=content["model"], optim_state_dict=content["opt"])
        sparsity = opt.sparsity
        equal_runs.train(model, opt, (rank, ranks), range(7, equal_runs.STEPS))
        if way == "fsdp2":
            found[way] = (*whole(model, opt), sparsity)
        else:
            found[way] = ({name: p.detach() for name, p in model.module.named_parameters()}, opt.masks, sparsity)
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(save, 4, folder / "4", 4, str(folder))
    return run_ranks(load, 2, folder / "2", 2, str(folder))[0]


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_two_ranks_go_on_where_four_stopped(resumed, way):
    equal_runs.assert_equal(resumed[way], "dynamic", **REUSED)
    assert resumed[way][2] == pytest.approx(0.5, abs=2e-3)
