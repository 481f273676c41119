"""torch.distributed.checkpoint keeps masks and counters."""

from __future__ import annotations

import copy
from functools import partial

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
from tests.distributed.test_fsdp2 import sharded

pytestmark = pytest.mark.xdist_group("ranks")


BASES = {
    "sgd": cases.sgd,
    "sgd without momentum": lambda model: cases.sgd(model, momentum=0),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
}


def make(kind, base, seed=0):
    model = equal_runs.network(seed)
    return model, equal_runs.optimizer(kind, model, base=BASES[base])


LAYOUTS = {"nested": StateDictOptions(), "flat": StateDictOptions(flatten_optimizer_state_dict=True)}
needs_flat = pytest.mark.skipif(torch.__version__ < "2.10", reason="flattened states with masks need torch 2.10")
NESTED_AND_FLAT = ["nested", pytest.param("flat", marks=needs_flat)]


@pytest.mark.parametrize(
    ("layout", "used"), [("nested", 0), *(pytest.param("flat", steps, marks=needs_flat) for steps in (0, 3))]
)
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("kind", ["sam", "dynamic", "fisher filter"])
def test_round_trip_into_new_or_used_optimizer(kind, base, layout, used):
    model, opt = make(kind, base)
    equal_runs.train(model, opt, steps=range(7))
    options = LAYOUTS[layout]
    weights, state = copy.deepcopy(get_state_dict(model, opt, options=options))
    again, resumed = make(kind, base, seed=1)
    equal_runs.train(again, resumed, steps=range(used))
    set_state_dict(again, resumed, model_state_dict=weights, optim_state_dict=state, options=options)
    assert (resumed.steps, resumed.sparsity) == (7, opt.sparsity)
    equal_runs.train(model, opt, steps=range(7, 15))
    equal_runs.train(again, resumed, steps=range(7, 15))
    assert cases.same_state(model, again)
    cases.assert_same_masks(opt, resumed)


def in_groups(model, perturb, order):
    last, others = [*model[5].parameters()][::order], [*model[:5].parameters()][::order]
    return torch.optim.SGD([{"params": last}, {"params": others, "perturb": perturb}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize("layout", NESTED_AND_FLAT)
@pytest.mark.parametrize("perturb", [True, False])
def test_masks_of_reordered_and_of_unperturbed_parameters_are_kept(perturb, layout):
    model, again = equal_runs.network(), equal_runs.network()
    opt, resumed = (
        equal_runs.optimizer("random", m, base=partial(in_groups, perturb=perturb, order=order))
        for m, order in ((model, 1), (again, -1))
    )
    equal_runs.train(model, opt, steps=range(3))
    state = copy.deepcopy(get_optimizer_state_dict(model, opt, options=LAYOUTS[layout]))
    set_optimizer_state_dict(again, resumed, state, options=LAYOUTS[layout])
    assert len(opt.masks) == (6 if perturb else 2)
    cases.assert_same_masks(opt, resumed)


def test_state_initialization_by_torch_changes_nothing():
    model, opt = make("dynamic", "adamw")
    before = cases.weights_of(model)
    state = get_optimizer_state_dict(model, opt)
    assert cases.same_bits(before, model.parameters())
    assert opt.steps == 0
    assert state["param_groups"][0]["sparsesam"]["steps"] == 0
    model.zero_grad()
    with pytest.raises(RuntimeError, match=r"step\(\) needs a gradient at w \+ e"):
        opt.step()


@pytest.mark.parametrize("base", BASES)
def test_state_is_shared_with_base_optimizer(base):
    model, opt = make("dynamic", base)
    equal_runs.train(model, opt, steps=range(2))
    assert set(opt.state) == set(opt.base.state)
    for parameter, entries in opt.state.items():
        assert all(entries[key] is value for key, value in opt.base.state[parameter].items())
        opt.state[parameter] = dict(entries)
        assert not any(key.startswith("sparsesam") for key in opt.base.state[parameter])


def distribute(way, ranks):
    model = equal_runs.network()
    return DistributedDataParallel(model) if way == "ddp" else sharded(model, ranks)


WAYS = [(way, layout) for way in ("ddp", "fsdp2") for layout in LAYOUTS]
if torch.__version__ < "2.10":
    WAYS = [("ddp", "nested")]


def save(rank, ranks, folder):
    for way, layout in WAYS:
        model = distribute(way, ranks)
        opt = equal_runs.optimizer("dynamic", model)
        equal_runs.train(model, opt, (rank, ranks), range(7))
        weights, state = get_state_dict(model, opt, options=LAYOUTS[layout])
        dcp.save({"model": weights, "opt": state}, checkpoint_id=f"{folder}/{way} {layout}")


def load(rank, ranks, folder):
    found = {}
    for way, layout in WAYS:
        model = distribute(way, ranks)
        opt = equal_runs.optimizer("dynamic", model)
        content = dict(zip(("model", "opt"), get_state_dict(model, opt, options=LAYOUTS[layout]), strict=True))
        dcp.load(content, checkpoint_id=f"{folder}/{way} {layout}")
        weights, state = content.values()
        set_state_dict(model, opt, model_state_dict=weights, optim_state_dict=state, options=LAYOUTS[layout])
        sparsity = opt.sparsity
        equal_runs.train(model, opt, (rank, ranks), range(7, equal_runs.STEPS))
        found[way, layout] = (*equal_runs.reached(model, opt), sparsity)
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    run_ranks(save, 4, 4, str(folder))
    return run_ranks(load, 2, 2, str(folder))[0]


@pytest.mark.parametrize("way", WAYS, ids=" ".join)
def test_two_ranks_resume_from_four(resumed, way):
    equal_runs.assert_equal(resumed[way], "dynamic")
    assert resumed[way][2] == pytest.approx(0.5, abs=2e-3)
