"""What a step undoes, whatever happens in it: the weights, random states, and what a second pass writes to."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import sparsesam
from tests import cases

# ---- weights -----------------------------------------------------------------------------------------------------


def test_weights_in_half_precision_are_perturbed_and_restored():
    found, expected = (
        cases.perturbation_of(
            cases.ssam(model, cases.half_masks(model)), model, *cases.images(dtype=model[0].bias.dtype)
        )
        for model in (cases.convnet(torch.bfloat16), cases.convnet())
    )
    torch.testing.assert_close([e.float() for e in found], expected, rtol=0.1, atol=0.02)
    assert any(e.any() for e in found)


class TokenModel(nn.Module):
    """A forward scales rows of its embeddings in place."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(20, 8, max_norm=0.5)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.embedding(x).mean(1))


@pytest.mark.parametrize("embedding_is_perturbed", [True, False])
def test_renormalized_embeddings_are_restored(embedding_is_perturbed):
    model = TokenModel()
    opt = cases.ssam(model, cases.half_masks(model) if embedding_is_perturbed else "head.*")
    x, y = torch.arange(16).view(8, 2), torch.arange(8) % 3
    F.cross_entropy(model(x), y).backward()
    before = cases.weights_of(model)
    with opt.perturbed():
        F.cross_entropy(model(x), y).backward()
        model(torch.arange(20).view(10, 2))  # rows that the first pass did not scale
    assert cases.same_bits(before, cases.weights_of(model))


def test_sparse_embedding_gradients():
    model, dense = (
        nn.Sequential(nn.Embedding(9, 4, sparse=sparse), nn.Flatten(), nn.Linear(8, 3)) for sparse in (True, False)
    )
    dense.load_state_dict(model.state_dict())
    tokens, y = torch.randint(0, 9, (8, 2)), torch.randint(0, 3, (8,))
    for m in (model, dense):
        opt = sparsesam.SAM(torch.optim.SGD(m.parameters(), lr=0.1), m, rho=0.2)
        cases.with_closure(opt, m, tokens, y)
    torch.testing.assert_close(cases.weights_of(model), cases.weights_of(dense))


def test_graph_kept_from_first_pass_raises():
    model = cases.mlp()
    opt = sparsesam.SAM(cases.sgd(model), model, rho=0.1)
    loss = F.cross_entropy(model(cases.vectors()[0]), cases.vectors()[1])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="inplace"), opt.perturbed():
        loss.backward()


# ---- running statistics ------------------------------------------------------------------------------------------


def instance_norm(channels, **options):
    return nn.InstanceNorm1d(channels, track_running_stats=True, **options)


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("layer", [nn.BatchNorm1d, instance_norm])
def test_statistics_are_those_of_the_first_pass(layer, momentum):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(2, 4, 3), layer(4, momentum=momentum), nn.Flatten(), nn.Linear(16, 3))
    twin = copy.deepcopy(model)
    opt = sparsesam.SAM(cases.sgd(model, lr=0.0), model, rho=0.5)
    for _ in range(3):
        x, y = torch.randn(8, 2, 6), torch.randint(0, 3, (8,))
        cases.with_closure(opt, model, x, y)
        twin(x)
    assert cases.same_bits(model.buffers(), twin.buffers())


def normalized():
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()


@pytest.mark.parametrize("step", [cases.with_closure, cases.in_two_phases])
@pytest.mark.parametrize(
    "method",
    [
        sparsesam.SAM,
        partial(sparsesam.SAM, every=2),
        sparsesam.MomentumSAM,
        partial(sparsesam.ExtrapolatedSAM, rho=0.025),
    ],
)
def test_statistics_are_updated_once_per_step(method, step):
    model = normalized()
    opt = method(cases.sgd(model), model)
    for count in range(1, 5):
        step(opt, model, *cases.vectors())
        assert model[1].num_batches_tracked == count


def test_statistics_are_kept_in_a_one_pass_step_after_a_skipped_one():
    model = normalized().float()
    opt = sparsesam.MomentumSAM(cases.sgd(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    x, y = cases.vectors(dtype=torch.float32)
    for count, factor in enumerate((1.0, torch.inf, 1.0), start=1):
        with opt.perturbed():
            scaler.scale(F.cross_entropy(model(x), y) * factor).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert model[1].num_batches_tracked == count


def test_lazy_layers_get_their_statistics_in_the_first_pass():
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 3)).double()
    opt = sparsesam.SAM(cases.sgd(model), model)
    for count in range(1, 3):
        cases.by_minimize(opt, model, *cases.vectors())
        assert model[1].num_batches_tracked == count


@pytest.mark.parametrize("buffer", [torch.ones(1).expand(6), torch.ones(6, dtype=torch.complex128).conj().imag])
def test_buffers_that_cannot_be_written_are_left_alone(buffer):
    model = cases.mlp()
    model.register_buffer("scale", buffer)
    mask = sparsesam.fisher_mask(cases.vectors(), F.cross_entropy, sparsity=0.5, samples=2)
    cases.by_minimize(sparsesam.SSAM(cases.sgd(model), model, mask=mask), model, *cases.vectors())


# ---- random states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [cases.by_minimize, cases.with_closure, cases.in_two_phases])
def test_random_numbers_are_the_same_in_both_passes(step):
    model, drawn = cases.mlp(), []
    model.register_forward_pre_hook(lambda *_: drawn.append(torch.rand(3)))
    opt = sparsesam.SAM(cases.sgd(model), model)
    for _ in range(2):
        step(opt, model, *cases.vectors())
        with pytest.raises(KeyError):
            step(opt, lambda x: model(x) + {}["no more data"], *cases.vectors())
    first, again, _, third, fourth, _ = drawn
    assert torch.equal(first, again)
    assert torch.equal(third, fourth)  # also after an error
    assert not torch.equal(first, third)
