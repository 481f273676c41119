import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam import analysis
from sparsesam.analysis import Objective, loss_landscape, select_parameters, sharpness
from tests.analysis.oracles import mean_loss
from tests.cases import convnet, images, mlp, snapshot, vectors


def test_loss_is_mean_over_samples_of_unequal_batches_without_dropout():
    model, batches = nn.Sequential(mlp(), nn.Dropout(0.5)).train(), [vectors(5), vectors(11, seed=2)]
    objective = Objective(model, batches, F.cross_entropy)
    with objective.measuring():
        assert objective.loss() == pytest.approx(mean_loss(model[0], batches).item(), rel=1e-12)


def test_model_loss_accepts_any_batch_structure():
    model, (x, y) = mlp(), vectors(7)
    objective = Objective(model, [{"x": x, "y": y}], model_loss=lambda m, b: F.cross_entropy(m(b["x"]), b["y"]))
    with objective.measuring():
        assert objective.loss() == pytest.approx(mean_loss(model, [(x, y)]).item(), rel=1e-12)
    assert objective.samples == 7


@pytest.mark.parametrize("statistics", ["frozen", "recomputed", "batch"])
def test_model_state_is_preserved(statistics):
    model = convnet().train()
    model[0].bias.requires_grad_(False)
    objective = Objective(model, [images(8), images(6, seed=2)], F.cross_entropy, statistics=statistics)
    before = snapshot(model)
    with objective.measuring(model.parameters()):
        objective.gradient(list(model.parameters()))
    torch.testing.assert_close(snapshot(model), before, rtol=0, atol=0)
    assert model[1].momentum == 0.1


def test_recomputed_statistics_cover_all_batches():
    model, batches = convnet(torch.float64), [images(8, torch.float64), images(8, torch.float64, seed=2)]
    objective = Objective(model, batches, F.cross_entropy, statistics="recomputed")
    with objective.measuring():
        loss = objective.loss()
        features = [model[0](x) for x, _ in batches]
        assert torch.allclose(model[1].running_mean, torch.stack([f.mean((0, 2, 3)) for f in features]).mean(0))
    with Objective(model, batches, F.cross_entropy).measuring() as _, torch.no_grad():
        assert loss != pytest.approx(Objective(model, batches, F.cross_entropy).loss(), rel=1e-3)


def test_random_loss_raises_unless_allowed_and_is_one_draw():
    class Noisy(nn.Linear):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.5)

    model, batches = Noisy(6, 3).double(), [vectors(16), vectors(16, seed=2)]
    with pytest.raises(ValueError, match="not deterministic"):
        loss_landscape(Objective(model, batches, F.cross_entropy), points=3)
    objective = Objective(model, batches, F.cross_entropy, allow_random=True)
    with objective.measuring():
        assert objective.loss() == objective.loss()
    assert "one draw" in objective.summary().random_loss


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "empty"),
        ([(torch.zeros(0, 6), torch.zeros(0))], "empty"),
        ([torch.zeros(3, 6)], "pair"),
        (vectors(4), r"write \[batch\]"),
    ],
)
def test_invalid_batches_raise(batches, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Objective(mlp(), batches, F.cross_entropy)


def test_non_scalar_or_non_finite_loss_raises():
    def each(output, target):
        return F.cross_entropy(output, target, reduction="none")

    with pytest.raises(ValueError, match="one number"), Objective(mlp(), [vectors(4)], each).measuring():
        pass
    model = mlp()
    with torch.no_grad():
        model[0].weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="finite"):
        sharpness(Objective(model, [vectors(4)], F.cross_entropy))


def test_parameters_are_trained_ones_or_selected_by_name():
    model = mlp()
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in select_parameters(model)
    assert list(select_parameters(model, ["0.*"])) == ["0.weight", "0.bias"]
    assert list(select_parameters(model, "4.bias, 0.w*")) == ["0.weight", "4.bias"]
    with pytest.raises(ValueError, match="selects none"):
        select_parameters(model, "conv*")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("generalization_bound", {"n": 1}, "n must be an integer of at least 2"),
        ("generalization_bound", {"delta": 0.0}, r"delta must be in \(0, 1\)"),
        ("gradient_difference", {"rho": 0.0}, "rho must be positive"),
        ("hessian_diagonal", {"probes": 0}, "probes must be an integer of at least 1"),
        ("hessian_eigenvalues", {"count": 0}, "count must be between 1 and the number of weights, 119"),
        ("hessian_trace", {"probes": 1}, "probes must be an integer of at least 2"),
        ("loss_landscape", {"points": 1}, "points must be an integer of at least 2"),
        ("loss_landscape", {"span": (1, 1)}, "span must be"),
        ("loss_landscape", {"directions": [{"x": torch.zeros(1)}]}, "not a parameter"),
        ("loss_landscape", {"directions": [{}]}, "an empty one"),
        ("sharpness", {"masks": {}}, "keep no weight"),
        ("sharpness", {"masks": {"0.bias": torch.ones(3).bool()}}, r"the parameter's shape \(8,\), got \(3,\)"),
        ("sharpness", {"masks": {"0.bias": torch.ones(8)}}, "must be a bool tensor, got torch.float"),
        ("sharpness", {"rho": -1.0}, "rho must be positive and finite"),
        ("sharpness", {"steps": 0}, "steps must be an integer of at least 1"),
        ("spectral_density", {"steps": 0}, "steps must be an integer of at least 1"),
        ("spectral_density", {"points": 1}, "points must be an integer of at least 2"),
        ("spectral_density", {"width": -1.0}, "width must be positive"),
    ],
)
def test_every_analysis_refuses_bad_arguments(name, options, message):
    with pytest.raises(ValueError, match=message):
        getattr(analysis, name)(Objective(mlp(), [vectors(4)], F.cross_entropy), **options)
