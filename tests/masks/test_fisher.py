"""The Fisher information equals a loop over single samples for every kind of layer, and preserves the model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparsesam.masks.fisher import fisher_diagonal
from sparsesam.masks.fisher_problem import sample_categorical
from tests.masks.fisher_oracle import fisher_by_definition

BATCH = 5
LOOP = "sample by sample"


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


def check(model, x, loss_fn=total_square, y=None, path=None):
    y = torch.rand(BATCH) + 0.5 if y is None else y
    expected = fisher_by_definition(model, x, y, loss_fn)
    found = fisher_diagonal(model, [(x, y)], loss_fn)
    assert found.samples == len(y)
    assert set(found.values) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
    if path == LOOP:
        assert all(found.startswith(LOOP) for found in found.paths.values()), found.paths
    elif path is not None:
        assert set(found.paths.values()) == {path}, found.paths
    return found


LAYERS = {
    "linear": (nn.Linear(4, 3), (4,)),
    "linear without bias": (nn.Linear(4, 3, bias=False), (4,)),
    "linear over a sequence": (nn.Linear(4, 3), (6, 4)),
    "linear over a plane": (nn.Linear(4, 3), (2, 3, 4)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1, dilation=2, groups=2), (4, 11)),
    "conv1d same": (nn.Conv1d(2, 3, 4, padding="same"), (2, 7)),
    "conv2d": (nn.Conv2d(3, 4, 3, padding=1), (3, 5, 5)),
    "conv2d of many positions": (nn.Conv2d(3, 4, 3, padding=1), (3, 9, 9)),
    "conv2d strided": (nn.Conv2d(3, 4, 3, stride=2, padding=1), (3, 6, 7)),
    "conv2d with a remainder": (nn.Conv2d(3, 4, 3, stride=3), (3, 7, 8)),
    "conv2d many strided": (nn.Conv2d(2, 4, (3, 2), stride=(1, 2), padding=(2, 0)), (2, 16, 17)),
    "conv2d dilated": (nn.Conv2d(2, 3, 3, dilation=2, padding="same"), (2, 6, 6)),
    "conv2d even same": (nn.Conv2d(2, 3, (2, 4), padding="same"), (2, 10, 10)),
    "conv2d valid": (nn.Conv2d(2, 3, 3, padding="valid", bias=False), (2, 6, 6)),
    "conv2d grouped": (nn.Conv2d(4, 6, 3, groups=2), (4, 5, 5)),
    "conv2d depthwise": (nn.Conv2d(4, 8, 3, groups=4, padding=1), (4, 10, 10)),
    "conv2d pointwise": (nn.Conv2d(4, 3, 1, stride=2), (4, 20, 20)),
    "conv2d of one position": (nn.Conv2d(4, 3, 3), (4, 3, 3)),
    "conv2d reflected": (nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), (2, 5, 6)),
    "conv2d circular": (nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (2, 9, 9)),
    "conv3d": (nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), padding=(0, 1, 1), groups=2), (2, 3, 4, 5)),
    "conv3d replicated": (nn.Conv3d(2, 2, 2, padding=1, padding_mode="replicate"), (2, 2, 3, 3)),
    "batch norm 1d": (nn.BatchNorm1d(4), (4,)),
    "batch norm over a sequence": (nn.BatchNorm1d(4), (4, 3)),
    "batch norm 2d": (nn.BatchNorm2d(4), (4, 3, 3)),
    "batch norm 3d": (nn.BatchNorm3d(4), (4, 2, 3, 2)),
    "layer norm": (nn.LayerNorm(4), (4,)),
    "layer norm over a sequence": (nn.LayerNorm(4), (3, 4)),
    "layer norm of a plane": (nn.LayerNorm((3, 4)), (2, 3, 4)),
    "layer norm without bias": (nn.LayerNorm(4, bias=False), (3, 4)),
    "group norm": (nn.GroupNorm(2, 4), (4, 3, 3)),
    "instance norm": (nn.InstanceNorm2d(3, affine=True), (3, 4, 4)),
    "instance norm with statistics": (
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True), (3, 4),
    ),
    "rms norm": (nn.RMSNorm(4, eps=1e-6), (3, 4)),
}  # fmt: skip


FUNCTIONS = (
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "instance_norm",
    "rms_norm",
)


@pytest.mark.parametrize("name", LAYERS)
def test_layer_rule_equals_loop(name):
    layer, shape = LAYERS[name]
    model = randomize_statistics(nn.Sequential(copy.deepcopy(layer).double()))
    path = f"rule: {next(one for one in FUNCTIONS if name.startswith(one.replace('_', ' ')))}"
    check(model, torch.randn(BATCH, *shape), path=path)


@pytest.mark.parametrize("padding_idx", [None, 2, -1])
def test_embedding_counts_repeated_token_once_per_sample(padding_idx):
    model = nn.Sequential(nn.Embedding(7, 3, padding_idx=padding_idx))
    tokens = torch.randint(7, (BATCH, 9))
    tokens[:, 0], tokens[:, 1], tokens[:, 2] = 2, 6, 3
    check(model, tokens, path="rule: embedding")


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_embedding_with_options_is_exact(options):
    model = nn.Sequential(nn.Embedding(7, 3, **options))
    if "max_norm" in options:
        with torch.no_grad():
            model[0](torch.arange(7))
    check(model, torch.randint(7, (BATCH, 4)), path=LOOP)


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


def test_residual_network_with_in_place_activations_uses_rules_only():
    x, y = images()
    found = check(resnet(), x, F.cross_entropy, y)
    assert all(path.startswith("rule") for path in found.paths.values())


def test_batch_size_does_not_change_result():
    x, y = images()
    model = resnet()
    whole = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    parts = fisher_diagonal(model, [(x[:1], y[:1]), (x[1:4], y[1:4]), (x[4:], y[4:])], F.cross_entropy)
    assert parts.paths == whole.paths
    for name, value in whole.values.items():
        torch.testing.assert_close(parts.values[name], value)


class Model(nn.Module):
    """A model from a function and its parts."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.function = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)


def test_layer_called_twice_adds_its_gradients_before_squaring():
    def forward(self, x):
        x = self.conv(self.conv(x).tanh())
        x = self.norm(self.norm(x).sin())
        return self.linear(self.linear(x).tanh())

    model = Model(forward, conv=nn.Conv2d(3, 3, 3, padding=1), norm=nn.GroupNorm(1, 3), linear=nn.Linear(6, 6))
    found = check(model, torch.randn(BATCH, 3, 6, 6))
    assert all(path.startswith("rule") for path in found.paths.values())


def test_large_convolution_called_on_two_sizes_adds_its_gradients_before_squaring():
    model = Model(
        lambda self, x: self.conv(x).flatten(1).sum(1) + self.conv(x[:, :, ::2, ::2]).flatten(1).sin().sum(1),
        conv=nn.Conv2d(3, 3, 3, padding=1),
    )
    check(model, torch.randn(BATCH, 3, 12, 12), lambda o, y: (o * y).sum() ** 2, path="rule: conv2d")


def test_call_that_does_not_reach_loss_contributes_nothing():
    def forward(self, x):
        self.linear(x.cos())
        return self.linear(x)

    check(Model(forward, linear=nn.Linear(4, 3)), torch.randn(BATCH, 4), path="rule: linear")


def test_embedding_tied_to_output_layer_is_one_parameter():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False))
    model[2].weight = model[0].weight
    found = check(model, torch.randint(7, (BATCH, 6)))
    assert found.paths["0.weight"] == "rule: embedding, linear"
    assert found.paths["1.weight"] == "rule: linear"


def test_tied_pair_adds_its_gradients_before_squaring():
    pair = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    pair[2].weight = pair[0].weight
    check(nn.Sequential(nn.Linear(3, 4), pair), torch.randn(BATCH, 3), path="rule: linear")


def test_weight_used_outside_its_layer_is_exact():
    model = Model(lambda self, x: F.linear(self.layer(x).tanh(), self.layer.weight.t()), layer=nn.Linear(4, 3))
    found = check(model, torch.randn(BATCH, 4), path=LOOP)
    assert found.paths["layer.weight"] == "sample by sample: t has no rule"


def test_reading_shape_or_dtype_of_weight_is_not_use():
    model = Model(lambda self, x: self.layer(x.to(self.layer.weight.dtype)), layer=nn.Linear(4, 3))
    check(model, torch.randn(BATCH, 4), path="rule: linear")


@pytest.mark.parametrize("batch_first", [True, False])
def test_attention_is_exact(batch_first):
    def forward(self, x):
        x = x if batch_first else x.transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 0 if batch_first else 1)

    model = Model(forward, attention=nn.MultiheadAttention(4, 2, batch_first=batch_first))
    check(model, torch.randn(BATCH, 3, 4), path=LOOP)


def test_transformer_layer_is_exact():
    model = nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, 2))
    check(model, torch.randn(BATCH, 3, 4), path=LOOP)


def test_recurrent_layer_with_last_state_is_exact():
    model = Model(lambda self, x: self.rnn(x)[1][-1], rnn=nn.GRU(3, 4, num_layers=2, batch_first=True))
    check(model, torch.randn(BATCH, 5, 3), path=LOOP)


@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU])
def test_recurrent_layer_is_exact(recurrent):
    model = Model(
        lambda self, x: self.head(self.rnn(x)[0][:, -1]),
        rnn=recurrent(3, 4, batch_first=True, bidirectional=True),
        head=nn.Linear(8, 2),
    )
    check(model, torch.randn(BATCH, 5, 3), path=LOOP)


def test_two_outputs_of_module_are_not_counted_twice():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            h = x @ self.scale.t()
            return h, h.tanh() * 2

    model = Model(lambda self, x: torch.cat(self.two(x), 1), two=Two())
    check(model, torch.randn(BATCH, 4), path=LOOP)


def test_weight_normalization_is_exact():
    layer = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    check(nn.Sequential(nn.Linear(4, 4), layer, nn.Tanh()), torch.randn(BATCH, 4), path=LOOP)


def test_module_that_folds_samples_into_positions_is_exact():
    class Folded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(3))

        def forward(self, x):
            return torch.addmm(self.bias, x.flatten(0, 1), self.weight).view(*x.shape[:-1], 3)

    check(nn.Sequential(nn.Linear(4, 4), Folded(), nn.Tanh()), torch.randn(BATCH, 6, 4), path=LOOP)


def test_class_token_position_and_scale_have_rules():
    def forward(self, x):
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        return self.layer(x * self.scale)[:, 0]

    model = Model(forward, layer=nn.Linear(4, 3))
    for name, shape in {"token": (1, 1, 4), "position": (1, 4, 4), "scale": (4,)}.items():
        setattr(model, name, nn.Parameter(torch.randn(shape)))
    found = check(model, torch.randn(BATCH, 3, 4))
    assert found.paths["token"] == "rule: expand"
    assert found.paths["position"] == "rule: add"
    assert found.paths["scale"] == "rule: mul"


@pytest.mark.parametrize(
    "product", [lambda x, w: x @ w, torch.matmul, torch.Tensor.matmul], ids=["@", "matmul", "method"]
)
def test_projection_by_parameter_has_rule(product):
    model = Model(lambda self, x: product(self.layer(x).tanh(), self.projection).sum(1), layer=nn.Linear(4, 3))
    model.projection = nn.Parameter(torch.randn(3, 5))
    found = check(model, torch.randn(BATCH, 2, 4))
    assert found.paths["projection"] == "rule: matmul"


def test_tokens_routed_to_experts_are_kept_separate():
    """Each expert sees some positions of some samples; by chance, it may be as many as there are samples."""

    def forward(self, x):
        flat, result = x.flatten(0, 1), torch.zeros(x.shape[0] * x.shape[1], 3)
        for number, expert in enumerate((self.first, self.second)):
            chosen = (flat[:, 0] > 0) == bool(number)
            result = result.index_put((chosen.nonzero().squeeze(1),), expert(flat[chosen]))
        return result.view(len(x), -1)

    x = torch.randn(BATCH, 2, 4)
    x[:, :, 0] = torch.tensor([1.0, -1.0])
    check(Model(forward, first=nn.Linear(4, 3), second=nn.Linear(4, 3)), x)
    check(Model(forward, first=nn.Linear(4, 3), second=nn.Linear(4, 3)), torch.randn(BATCH, 3, 4))


def test_subclass_uses_rule_of_function_it_calls():
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x * 2).square()

    check(nn.Sequential(Doubled(4, 3), nn.Tanh()), torch.randn(BATCH, 4), path="rule: linear")


def test_user_hook_that_changes_output_or_input_is_respected():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda module, args, output: output * 3)
    model[1].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    check(model, torch.randn(BATCH, 4), path="rule: linear")


def test_parameter_of_model_itself_is_exact():
    model = Model(lambda self, x: self.layer(x + self.position), layer=nn.Linear(4, 3))
    model.position = nn.Parameter(torch.randn(6, 4))
    found = check(model, torch.randn(BATCH, 6, 4))
    assert found.paths["layer.weight"] == "rule: linear"


def test_scale_with_as_many_rows_as_samples_is_exact():
    model = Model(lambda self, x: self.layer(x * self.scale), layer=nn.Linear(4, 3))
    model.scale = nn.Parameter(torch.randn(BATCH, 4))
    found = check(model, torch.randn(BATCH, BATCH, 4))
    assert found.paths["scale"] == "rule: mul"


def test_buffer_with_as_many_rows_as_samples_is_not_per_sample():
    model = Model(lambda self, x: torch.addcmul(x, self.scale, self.table), scale=nn.Parameter(torch.randn(4)))
    model.register_buffer("table", torch.randn(BATCH, 4))
    check(model, torch.randn(BATCH, BATCH, 4), path=LOOP)


def test_table_with_as_many_rows_as_samples_does_not_fit_one_sample():
    model = Model(lambda self, x: torch.addmm(self.bias, x, self.table), bias=nn.Parameter(torch.randn(3)))
    model.register_buffer("table", torch.randn(BATCH, 3))
    check(model, torch.randn(BATCH, BATCH), path=LOOP)


def test_output_not_laid_out_by_samples_is_exact():
    model = Model(lambda self, x: self.layer(x).transpose(0, 1), layer=nn.Linear(4, 3))
    x = torch.randn(BATCH, 6, 4)
    check(model, x, lambda output, target: (output.sin().sum() * target).sum() ** 2, path=LOOP)


def test_position_embedding_shared_by_samples_is_exact():
    model = Model(
        lambda self, x: self.layer(x + self.position(torch.arange(BATCH))),
        layer=nn.Linear(4, 3), position=nn.Embedding(BATCH, 4),
    )  # fmt: skip
    check(model, torch.randn(BATCH, BATCH, 4))


def test_samples_folded_into_positions_are_kept_separate():
    model = Model(lambda self, x: self.layer(x.flatten(0, 1)).view(len(x), -1), layer=nn.Linear(4, 3))
    check(model, torch.randn(BATCH, 3, 4), path=LOOP)


def test_positions_before_samples_are_kept_separate():
    """As many positions as samples: the shapes alone cannot distinguish them."""
    model = Model(lambda self, x: self.layer(x.transpose(0, 1)).transpose(0, 1), layer=nn.Linear(4, 3))
    check(model, torch.randn(BATCH, BATCH, 4))


@pytest.mark.parametrize("track", [True, False])
def test_layers_that_mix_samples_are_measured_one_sample_at_a_time(track):
    mixing = nn.BatchNorm1d(4, track_running_stats=track)
    other = Model(lambda self, x: self.layer(x) - self.layer(x).mean(0, keepdim=True) / 2, layer=nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), other if track else mixing, nn.Linear(4, 3))
    x = torch.randn(BATCH, 4, 3) if not track else torch.randn(BATCH, 4)
    model = model if track else nn.Sequential(nn.Conv1d(4, 4, 1), mixing, nn.Flatten(), nn.Linear(12, 3))
    check(model, x, path=LOOP)


def test_control_flow_that_changes_between_batches_is_exact():
    def forward(self, x):
        x = self.layer(x)
        return F.linear(x.tanh(), self.layer.weight) if x[0, 0] > 0 else x

    model = Model(forward, layer=nn.Linear(3, 3, bias=False))
    x, y = torch.randn(2 * BATCH, 3), torch.rand(2 * BATCH) + 0.5
    expected = fisher_by_definition(model, x, y, total_square)
    singles = [(x[i : i + 1], y[i : i + 1]) for i in range(len(x))]
    found = fisher_diagonal(model, singles, total_square)
    torch.testing.assert_close(found.values["layer.weight"], expected["layer.weight"])


def test_checkpointed_block_is_exact():
    from torch.utils.checkpoint import checkpoint

    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model = Model(lambda self, x: self.head(checkpoint(self.block, x, use_reentrant=False)), block=block)
    model.head = nn.Linear(4, 3)
    check(model, torch.randn(BATCH, 4))


def test_scripted_part_is_exact():
    part = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    check(nn.Sequential(part, nn.Linear(4, 3)), torch.randn(BATCH, 4))


def test_unused_parameter_is_zero():
    model = Model(lambda self, x: self.layer(x), layer=nn.Linear(4, 3), spare=nn.Linear(2, 2))
    found = check(model, torch.randn(BATCH, 4))
    assert found.paths["spare.weight"] == "unused"


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


def test_inputs_may_be_positional_or_keyword_arguments():
    model = Model(lambda self, a, b: self.layer(a * b), layer=nn.Linear(4, 3))
    a, b, y = torch.randn(BATCH, 4), torch.randn(BATCH, 4), torch.rand(BATCH)
    expected = fisher_by_definition(model, (a, b), y, total_square)
    for inputs in [(a, b), [a, b], {"b": b, "a": a}]:
        found = fisher_diagonal(model, [(inputs, y)], total_square)
        torch.testing.assert_close(found.values["layer.weight"], expected["layer.weight"])


def test_outputs_may_be_nested():
    model = Model(lambda self, x: {"logits": self.layer(x), "extra": (x, None)}, layer=nn.Linear(4, 3))
    check(model, torch.randn(BATCH, 4), lambda o, y: total_square(o["logits"], y), path="rule: linear")


def test_model_that_computes_its_own_loss_runs_sample_by_sample():
    x, y = images()
    model = resnet()
    expected = fisher_by_definition(model, x, y, F.cross_entropy)
    found = fisher_diagonal(
        model,
        [{"pixels": x, "labels": y}],
        model_loss=lambda model, batch: F.cross_entropy(model(batch["pixels"]), batch["labels"]),
    )
    assert set(found.paths.values()) == {"sample by sample: model_loss may do anything"}
    for name, value in expected.items():
        torch.testing.assert_close(found.values[name], value)


def test_sampled_labels_average_to_true_fisher():
    """For logits W x the expectation is diag(p)(1 - p) x^2, here over 5,000 draws."""
    model = nn.Sequential(nn.Linear(3, 4, bias=False))
    x = torch.randn(3)
    p = model(x).softmax(0).detach()
    expected = (p * (1 - p)).unsqueeze(1) * x**2
    batch = x.repeat(5_000, 1), torch.zeros(5_000, dtype=torch.long)
    found = fisher_diagonal(
        model, [batch], F.cross_entropy, labels="sampled", generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(found.values["0.weight"], expected, rtol=0.1, atol=0)


@pytest.mark.parametrize("mixing", [False, True])
def test_sampled_labels_are_same_for_rules_and_loop(mixing):
    x, _ = images()
    model = resnet()
    if mixing:
        model.add_module("mix", Model(lambda self, x: x - 0.5 * x.mean(0), scale=nn.Identity()))
    certain = fisher_diagonal(
        model, [(x, None)], F.cross_entropy, labels="sampled", sample_labels=lambda o, g: o.argmax(1)
    )
    y = torch.cat([copy.deepcopy(model).eval()(x[i : i + 1]).argmax(1) for i in range(BATCH)])
    for name, value in fisher_by_definition(model, x, y, F.cross_entropy).items():
        torch.testing.assert_close(certain.values[name], value)


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


def test_non_finite_result_names_parameter():
    model = nn.Sequential(nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"'0\.weight' is not finite"):
        fisher_diagonal(model, [(torch.full((BATCH, 4), torch.inf), torch.rand(BATCH))], total_square)


def test_bad_arguments_raise():
    model = nn.Sequential(nn.Linear(4, 3))
    batch = torch.randn(BATCH, 4), torch.rand(BATCH)
    with pytest.raises(ValueError, match="loss_fn must return one number, got shape"):
        fisher_diagonal(model, [batch], lambda output, target: output)
    with pytest.raises(ValueError, match="pair"):
        fisher_diagonal(model, [batch[0]], total_square)
    with pytest.raises(ValueError, match="exactly one of"):
        fisher_diagonal(model, [batch])
    with pytest.raises(ValueError, match="generator"):
        fisher_diagonal(model, [batch], F.cross_entropy, labels="sampled")
    with pytest.raises(ValueError, match="'nothing'"):
        fisher_diagonal(model, [batch], total_square, parameters={"nothing": batch[0]})
    with pytest.raises(ValueError, match="no parameter"):
        fisher_diagonal(nn.Tanh(), [batch], total_square)
    with pytest.raises(ValueError, match="empty"):
        fisher_diagonal(model, [], total_square)


def test_agrees_with_backpack():
    pytest.importorskip("backpack")
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared

    conv = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)).double()
    x, y = images()
    found = fisher_diagonal(conv, [(x, y)], F.cross_entropy)
    extended, loss = extend(copy.deepcopy(conv)), extend(nn.CrossEntropyLoss(reduction="sum"))
    with backpack(SumGradSquared()):
        loss(extended(x), y).backward()
    for name, parameter in extended.named_parameters():
        torch.testing.assert_close(found.values[name], parameter.sum_grad_squared / BATCH)


@pytest.mark.filterwarnings("ignore")
def test_agrees_with_opacus_on_residual_network():
    pytest.importorskip("opacus")
    from opacus import GradSampleModule

    def residual(self, x):
        return self.norm(x + self.conv2(self.conv1(x).relu())).relu()

    block = Model(residual, norm=nn.GroupNorm(2, 4), conv1=nn.Conv2d(4, 4, 3, padding=1, bias=False))
    block.conv2 = nn.Conv2d(4, 4, 3, padding=1)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), block, nn.Flatten(), nn.Linear(256, 3))
    x, y = images()
    found = fisher_diagonal(model, [(x, y)], F.cross_entropy)
    sampled = GradSampleModule(copy.deepcopy(model), loss_reduction="sum")
    F.cross_entropy(sampled(x), y, reduction="sum").backward()
    for name, parameter in sampled._module.named_parameters():
        torch.testing.assert_close(found.values[name], parameter.grad_sample.square().mean(0))
