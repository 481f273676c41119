"""The Fisher information equals its definition for every kind of model, and preserves the model."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsesam.masks.fisher import fisher_diagonal, sample_categorical
from tests import cases
from tests.oracles import fisher_by_definition

BATCH = 5


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def total_square(output, target):
    """A loss without structure: every output counts, differently for every sample."""
    return ((output.flatten(1).sin() * target.view(-1, 1)).sum(1) ** 2).sum()


def randomize(model):
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def convnet():
    return randomize(cases.convnet(torch.float64))


def images():
    return cases.images(BATCH, torch.float64)


class Model(nn.Module):
    """A model from a function and its parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def tied():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[-1].weight = model[0].weight
    return model


def centered(self, x):
    return self.layer(x) - self.layer(x).mean(0) / 2


MODELS = {
    "batch norm": (cases.convnet, (1, 6, 6)),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4, 3)),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.ReLU(inplace=True)), (4,)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (3, 4)),
    "tied": (tied, (4,)),
    "mixing samples": (lambda: Model(centered, layer=nn.Linear(4, 4)), (4,)),
    "compiled": (lambda: nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Tanh()), (4,)),
    "unused parameter": (lambda: Model(lambda self, x: self.a(x), a=nn.Linear(4, 3), b=nn.Linear(2, 2)), (4,)),
    "sparse gradient": (
        lambda: Model(lambda self, x: self.table((3 * x).long() % 7), table=nn.Embedding(7, 3, sparse=True)),
        (9,),
    ),
    "complex": (lambda: Model(lambda self, x: (x * self.w).abs(), w=nn.Parameter(torch.randn(4) * 1j)), (4,)),
}


@pytest.mark.parametrize("name", MODELS)
def test_equals_definition(name):
    make, shape = MODELS[name]
    model, x, y = make(), torch.randn(BATCH, *shape), torch.rand(BATCH)
    model = randomize(model if name == "complex" else model.double())
    expected = fisher_by_definition(model, x, y, total_square)
    torch.testing.assert_close(fisher_diagonal(model, [(x, y)], total_square).values, expected, rtol=1e-9, atol=1e-12)


def test_model_sees_one_sample_at_a_time_whatever_the_batches():
    sizes = []
    model = Model(lambda self, x: sizes.append(len(x)) or self.layer(x), layer=nn.Linear(4, 3))
    x, y = torch.randn(BATCH, 4), torch.rand(BATCH)
    whole = fisher_diagonal(model, [(x, y)], total_square)
    parts = fisher_diagonal(model, [(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])], total_square)
    assert sizes == [1] * 2 * BATCH
    assert parts.samples == whole.samples == BATCH
    torch.testing.assert_close(parts.values, whole.values)


def test_frozen_parameters_are_excluded_unless_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    batch = torch.randn(BATCH, 4), torch.rand(BATCH)
    expected = fisher_by_definition(model, *batch, total_square)
    model[0].requires_grad_(False)
    assert set(fisher_diagonal(model, [batch], total_square).values) == {"1.weight", "1.bias"}
    for given in (model[0].weight, model.state_dict()["0.weight"]):  # a detached tensor has no gradient of its own
        found = fisher_diagonal(model, [batch], total_square, parameters={"0.weight": given})
        torch.testing.assert_close(found.values, {"0.weight": expected["0.weight"]})


def logits_loss(output, y):
    return total_square(output["logits"], y)


def test_inputs_and_outputs_may_be_nested():
    model = Model(lambda self, a, b: {"logits": self.layer(a * b), "extra": (a, None)}, layer=nn.Linear(4, 3))
    a, b, y = torch.randn(BATCH, 4), torch.randn(BATCH, 4), torch.rand(BATCH)
    expected = fisher_by_definition(model, (a, b), y, logits_loss)
    for inputs in ((a, b), [a, b], {"b": b, "a": a}):
        found = fisher_diagonal(model, [(inputs, y)], logits_loss)
        torch.testing.assert_close(found.values, expected)
    loss = lambda model, batch: logits_loss(model(**batch["inputs"]), batch["y"])  # noqa: E731
    found = fisher_diagonal(model, [{"inputs": {"a": a, "b": b}, "y": y}], model_loss=loss)
    torch.testing.assert_close(found.values, expected)


def test_sampled_labels_average_to_true_fisher():
    """For logits W x the expectation is diag(p)(1 - p) x^2, here over 2,000 draws."""
    model, x = nn.Sequential(nn.Linear(3, 4, bias=False)), torch.randn(3)
    p = model(x).softmax(0).detach()
    batch = x.repeat(2_000, 1), torch.zeros(2_000, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    found = fisher_diagonal(model, [batch], F.cross_entropy, labels="sampled", generator=generator)
    torch.testing.assert_close(found.values["0.weight"], (p * (1 - p)).unsqueeze(1) * x**2, rtol=0.15, atol=0)


def test_classes_are_sampled_for_every_pixel():
    logits = torch.full((2, 3, 4, 4), -100.0)
    logits[:, 1] = 0
    assert torch.equal(sample_categorical(logits, torch.Generator()), torch.ones(2, 4, 4, dtype=torch.long))


@pytest.mark.parametrize("fails", [False, True])
def test_model_state_is_preserved(fails):
    model = nn.Sequential(*convnet(), nn.Dropout())
    model[1].eval()
    model[0].bias.requires_grad_(False)
    model[0].weight.grad = torch.randn_like(model[0].weight)
    before, calls = cases.snapshot(model), []

    def loss_fn(output, target):
        calls.append(1)
        if fails and len(calls) > 4:
            raise RuntimeError("the user's loss")
        return F.cross_entropy(output, target)

    with pytest.raises(RuntimeError, match="the user's loss") if fails else nullcontext():
        fisher_diagonal(model, [images()], loss_fn)
    torch.testing.assert_close(cases.snapshot(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_disabled(mode):
    model = convnet()
    expected = fisher_by_definition(model, *images(), F.cross_entropy)
    with mode():
        found = fisher_diagonal(model, [images()], F.cross_entropy)
    torch.testing.assert_close(dict(found.values), expected)


@pytest.mark.parametrize("half", [False, True])
def test_low_precision_is_accumulated_in_float32(half):
    model, (x, y) = convnet(), images()
    expected = fisher_by_definition(model, x, y, F.cross_entropy)["0.weight"]
    model, x = (model.bfloat16(), x.bfloat16()) if half else (model.float(), x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not half):
        found = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    assert {value.dtype for value in found.values.values()} == {torch.float32}
    assert (found.values["0.weight"] - expected).norm() / expected.norm() < 0.2


BATCHES = [(torch.randn(BATCH, 4).double(), torch.rand(BATCH))]


@pytest.mark.parametrize(
    ("batches", "loss_fn", "options", "words"),
    [
        (BATCHES, lambda output, target: output, {}, "loss_fn must return one number, got shape"),
        ([BATCHES[0][0]], total_square, {}, "pair"),
        (BATCHES, None, {}, "exactly one of"),
        (BATCHES, F.cross_entropy, {"labels": "sampled"}, "generator"),
        (BATCHES, total_square, {"parameters": {"nothing": torch.zeros(1)}}, "'nothing'"),
        (BATCHES, total_square, {"parameters": {}}, "no parameter"),
        ([], total_square, {}, "empty"),
        ([(BATCHES[0][0] * torch.inf, BATCHES[0][1])], total_square, {}, r"'0\.weight' is not finite"),
    ],
)
def test_bad_arguments(batches, loss_fn, options, words):
    with pytest.raises(ValueError, match=words):
        fisher_diagonal(nn.Sequential(nn.Linear(4, 3)), batches, loss_fn, **options)
