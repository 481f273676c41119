"""The Fisher information equals its definition for every kind of model, and preserves the model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparsesam.masks.fisher import fisher_diagonal, sample_categorical
from tests.oracles import fisher_by_definition

BATCH = 5


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def total_square(output, target):
    """A loss without structure: every output counts, differently for every sample."""
    return ((output.flatten(1).sin() * target.view(-1, 1)).sum(1) ** 2).sum()


def randomize_statistics(model):
    for module in model.modules():
        if getattr(module, "running_mean", None) is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model


def check(model, x, loss_fn=total_square, y=None, **options):
    y = torch.rand(BATCH) + 0.5 if y is None else y
    expected = fisher_by_definition(model, x, y, loss_fn)
    found = fisher_diagonal(model, [(x, y)], loss_fn, **options)
    assert found.samples == len(y)
    torch.testing.assert_close(found.values, expected, rtol=1e-9, atol=1e-12)


class Model(nn.Module):
    """A model from a function and its parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        y += x
        return self.relu(y)


def resnet():
    stem = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)]
    return randomize_statistics(nn.Sequential(*stem, Block(4), nn.MaxPool2d(2), Block(4), *head))


def images(classes=3):
    return torch.randn(BATCH, 3, 10, 10), torch.randint(classes, (BATCH,))


class Square(torch.autograd.Function):
    """Has no rule for vmap."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad * ctx.saved_tensors[0]


def tied(first, *others):
    model = nn.Sequential(first, *others)
    model[-1].weight = first.weight
    return model


def by_first_value(self, x):
    x = self.layer(x)
    return F.linear(x.tanh(), self.layer.weight, None) if x[0, 0] > 0 else x


def residual_scale(self, x):
    return self.layer(x).mul_(self.scale).add_(x)


MODELS = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear over a sequence": (lambda: nn.Linear(4, 3), (6, 4)),
    "convolution": (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, groups=2), (4, 6, 7)),
    "transposed convolution": (lambda: nn.ConvTranspose2d(2, 3, 3, stride=2), (2, 4, 4)),
    "batch norm": (lambda: nn.BatchNorm2d(4), (4, 3, 3)),
    "batch norm without statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4, 3)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3, 3)),
    "residual network in place": (resnet, (3, 10, 10)),
    "in-place operations on a parameter's result": (
        lambda: Model(residual_scale, layer=nn.Linear(4, 4), scale=nn.Parameter(torch.randn(4))),
        (4,),
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 3)), (4,)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), (3, 4)),
    "recurrent": (
        lambda: Model(lambda self, x: self.rnn(x)[0][:, -1], rnn=nn.LSTM(3, 4, batch_first=True, bidirectional=True)),
        (5, 3),
    ),
    "called twice": (lambda: Model(lambda self, x: self.layer(self.layer(x).tanh()), layer=nn.Linear(4, 4)), (4,)),
    "tied": (lambda: tied(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), (4,)),
    "control flow on values": (lambda: Model(by_first_value, layer=nn.Linear(3, 3)), (3,)),
    "mixing samples": (
        lambda: Model(lambda self, x: self.layer(x) - self.layer(x).mean(0) / 2, layer=nn.Linear(4, 4)),
        (4,),
    ),
    "own autograd function": (
        lambda: Model(lambda self, x: Square.apply(self.layer(x)), layer=nn.Linear(4, 3)),
        (4,),
    ),
    "weight norm": (lambda: torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (4,)),
    "checkpointed": (
        lambda: Model(lambda self, x: checkpoint(self.block, x, use_reentrant=False), block=nn.Linear(4, 3)),
        (4,),
    ),
    "scripted": (lambda: torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())), (4,)),
    "compiled": (lambda: nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Tanh()), (4,)),
    "unused parameter": (lambda: Model(lambda self, x: self.a(x), a=nn.Linear(4, 3), b=nn.Linear(2, 2)), (4,)),
    "complex": (lambda: Model(lambda self, x: (x * self.w).abs(), w=nn.Parameter(torch.randn(4) * 1j)), (4,)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_equals_definition(name):
    make, shape = MODELS[name]
    check(randomize_statistics(make()), torch.randn(BATCH, *shape))


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"max_norm": 1.0}, {"sparse": True}], ids=str)
def test_embedding_counts_repeated_token_once_per_sample(options):
    model = nn.Sequential(nn.Embedding(7, 3, **options))
    with torch.no_grad():
        model[0](torch.arange(7))  # max_norm changes the weights at their first use
    check(model, torch.randint(7, (BATCH, 9)))


def test_batch_size_does_not_change_result():
    x, y = images()
    model = resnet()
    whole = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    parts = fisher_diagonal(model, [(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])], F.cross_entropy)
    assert parts.samples == whole.samples
    torch.testing.assert_close(parts.values, whole.values)


def test_memory_is_that_of_one_sample():
    """The model never sees a batch."""
    sizes = []
    model = Model(lambda self, x: sizes.append(len(x)) or self.layer(x), layer=nn.Linear(4, 3))
    fisher_diagonal(model, [(torch.randn(BATCH, 4), torch.rand(BATCH))], total_square)
    assert sizes == [1] * BATCH


def test_parameter_used_by_loss_is_exact():
    model = nn.Sequential(nn.Linear(4, 3))
    weight = model[0].weight
    y = torch.rand(BATCH)
    expected = torch.zeros_like(weight)
    x = torch.randn(BATCH, 4)

    def loss_fn(output, target):
        return total_square(output, target) + weight.pow(3).sum()

    for i in range(BATCH):
        expected += torch.autograd.grad(loss_fn(model(x[i : i + 1]), y[i : i + 1]), weight)[0] ** 2 / BATCH
    torch.testing.assert_close(fisher_diagonal(model, [(x, y)], loss_fn).values["0.weight"], expected)


def test_frozen_parameters_are_excluded_unless_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    batch = torch.randn(BATCH, 4), torch.rand(BATCH)
    assert set(fisher_diagonal(model, [batch], total_square).values) == {"1.weight", "1.bias"}
    named = {"0.weight": model[0].weight}
    found = fisher_diagonal(model, [batch], total_square, parameters=named)
    model[0].requires_grad_(True)
    expected = fisher_by_definition(model, *batch, total_square)
    assert set(found.values) == {"0.weight"}
    torch.testing.assert_close(found.values["0.weight"], expected["0.weight"])


@pytest.mark.parametrize(
    "loss_fn",
    [
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 5.0]).double()),
        nn.CrossEntropyLoss(label_smoothing=0.1),
    ],
    ids=["sum", "none", "class weights", "label smoothing"],
)
def test_loss_of_sample_is_loss_of_batch_of_one(loss_fn):
    x, y = images()
    check(resnet(), x, loss_fn, y)


def from_dictionary(model, batch):
    return total_square(model(**batch["inputs"])["logits"], batch["y"])


@pytest.mark.parametrize("form", ["positional", "list", "keyword", "model_loss"])
def test_inputs_and_outputs_may_be_nested(form):
    model = Model(lambda self, a, b: {"logits": self.layer(a * b), "extra": (a, None)}, layer=nn.Linear(4, 3))
    a, b, y = torch.randn(BATCH, 4), torch.randn(BATCH, 4), torch.rand(BATCH)
    expected = fisher_by_definition(model, (a, b), y, lambda output, y: total_square(output["logits"], y))
    if form == "model_loss":
        found = fisher_diagonal(model, [{"inputs": {"a": a, "b": b}, "y": y}], model_loss=from_dictionary)
    else:
        inputs = {"positional": (a, b), "list": [a, b], "keyword": {"b": b, "a": a}}[form]
        found = fisher_diagonal(model, [(inputs, y)], lambda output, y: total_square(output["logits"], y))
    torch.testing.assert_close(found.values, expected)


def test_sampled_labels_average_to_true_fisher():
    """For logits W x the expectation is diag(p)(1 - p) x^2, here over 2,000 draws."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    x = torch.randn(3)
    p = model(x).softmax(0).detach()
    expected = (p * (1 - p)).unsqueeze(1) * x**2
    batch = x.repeat(2_000, 1), torch.zeros(2_000, dtype=torch.long)
    found = fisher_diagonal(
        model, [batch], F.cross_entropy, labels="sampled", generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(found.values["0.weight"], expected, rtol=0.15, atol=0)


def test_classes_are_sampled_for_every_pixel():
    logits = torch.full((2, 3, 4, 4), -100.0)
    logits[:, 1] = 0
    assert torch.equal(sample_categorical(logits, torch.Generator()), torch.ones(2, 4, 4, dtype=torch.long))


def snapshot(model):
    return (
        [module.training for module in model.modules()],
        [p.requires_grad for p in model.parameters()],
        [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()],
        [b.clone() for b in model.buffers()],
        [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()],
        torch.random.get_rng_state(),
        torch.backends.mha.get_fastpath_enabled(),
    )


@pytest.mark.parametrize("fails", [False, True])
def test_model_state_is_preserved(fails):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return F.dropout(x, 0.0)

    model = nn.Sequential(Counter(), *resnet(), nn.Dropout())
    model.train()
    model[2].eval()
    model[1].bias.requires_grad_(False)
    model[1].weight.grad = torch.randn_like(model[1].weight)
    x, y = images()
    before = snapshot(model)
    calls = []

    def loss_fn(output, target):
        calls.append(1)
        if fails and len(calls) > 4:
            raise RuntimeError("the user's loss")
        return F.cross_entropy(output, target)

    if fails:
        with pytest.raises(RuntimeError, match="the user's loss"):
            fisher_diagonal(model, [(x, y)], loss_fn)
    else:
        fisher_diagonal(model, [(x, y)], loss_fn)
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_works_where_gradients_are_disabled(mode):
    x, y = images()
    model = resnet()
    expected = fisher_by_definition(model, x, y, F.cross_entropy)
    with mode():
        found = fisher_diagonal(model, [(x.clone(), y.clone())], F.cross_entropy)
    torch.testing.assert_close(found.values["0.weight"], expected["0.weight"])


def test_pending_graph_is_not_disturbed():
    x, y = images()
    model = resnet()
    twin = copy.deepcopy(model)
    waiting = F.cross_entropy(model(x), y)
    fisher_diagonal(model, [(x, y)], F.cross_entropy)
    waiting.backward()
    F.cross_entropy(twin(x), y).backward()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("half", [False, True])
def test_low_precision_is_accumulated_in_float32(half):
    model = resnet()
    x, y = images()
    expected = fisher_by_definition(model, x, y, F.cross_entropy)
    model, x = (model.bfloat16(), x.bfloat16()) if half else (model.float(), x.float())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not half):
        found = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    assert {value.dtype for value in found.values.values()} == {torch.float32}
    relative = (found.values["0.weight"] - expected["0.weight"]).norm() / expected["0.weight"].norm()
    assert relative < 0.2


BATCHES = [(torch.randn(BATCH, 4), torch.rand(BATCH))]


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
        ([(torch.full((BATCH, 4), torch.inf), torch.rand(BATCH))], total_square, {}, r"'0\.weight' is not finite"),
    ],
)
def test_bad_arguments(batches, loss_fn, options, words):
    model = nn.Sequential(nn.Linear(4, 3, dtype=torch.float32))
    with pytest.raises(ValueError, match=words):
        fisher_diagonal(model, batches, loss_fn, **options)
