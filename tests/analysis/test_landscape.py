import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparsesam.analysis import Objective, loss_between, loss_landscape, random_directions
from tests.analysis.oracles import objective_of
from tests.cases import convnet, images, mlp, same_bits, vectors, weights_of


def naive_loss(objective, moves):
    """The loss with each parameter moved separately."""
    saved = weights_of(objective.model)
    with objective.measuring(), torch.no_grad():
        for name, parameter in objective.model.named_parameters():
            parameter += sum(scale * direction[name] for scale, direction in moves if name in direction)
        loss = objective.loss()
        for parameter, value in zip(objective.model.parameters(), saved, strict=True):
            parameter.copy_(value)
    return loss


def test_plane_is_loss_at_each_point():
    objective = objective_of(mlp())
    first, second = random_directions(objective.model, 2, seed=3)
    result = loss_landscape(objective, [first, second], points=4)
    expected = [[naive_loss(objective, [(a, first), (b, second)]) for a in result.x] for b in result.y]
    assert np.allclose(result.loss, expected, rtol=1e-12)
    assert result.center_loss == naive_loss(objective, [])
    lengths = [sum(float(v.square().sum()) for v in d.values()) ** 0.5 for d in (first, second)]
    assert result.lengths == pytest.approx(lengths)


def test_number_of_batches_cannot_be_moved():
    """A difference of state dicts has it."""
    model = convnet()
    direction = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    (name,) = [name for name in direction if name.endswith("num_batches_tracked")][:1]
    objective = Objective(model, [images()], F.cross_entropy)
    with pytest.raises(ValueError, match=rf"directions\[0\] has '{name}', which is not a .* that can be moved"):
        loss_landscape(objective, [direction], points=2)


def test_checkpoints_share_random_directions():
    signs = [random_directions(model, 1)[0]["0.weight"].sign() for model in (convnet(), convnet(seed=1))]
    assert torch.equal(*signs)


def test_mismatched_checkpoint_raises_before_computing():
    model = mlp()
    before = weights_of(model)
    with pytest.raises(RuntimeError, match="Missing key"):
        loss_between(objective_of(model), model.state_dict(), {"x": torch.zeros(1)}, points=3)
    assert same_bits(model.parameters(), before)


def test_line_between_checkpoints_starts_and_ends_at_them():
    first, second = convnet(seed=1), convnet(seed=2)
    second[1].running_var.fill_(3)
    batches, before = [images(6), images(4, seed=3)], weights_of(first)
    objective = Objective(first, batches, F.cross_entropy)
    result = loss_between(objective, first.state_dict(), second.state_dict(), points=5)
    backwards = loss_between(objective, second.state_dict(), first.state_dict(), points=5)
    assert np.allclose(backwards.loss[::-1], result.loss, rtol=1e-5)
    for end, position in ((first, 0), (second, -1)):
        objective = Objective(end, batches, F.cross_entropy)
        with objective.measuring():
            assert result.loss[position] == pytest.approx(objective.loss(), rel=1e-5)
    assert "interpolated" in result.notes[0]
    assert same_bits(first.parameters(), before)


def test_infinite_points_are_counted_and_become_none():
    model = nn.Linear(6, 3)
    objective = Objective(model, [vectors(4, torch.float32)], model_loss=lambda m, b: m(b[0]).square().mean())
    result = loss_landscape(objective, random_directions(model, 1), points=3, span=(-1e30, 1e30))
    assert result.not_finite == 2
    assert json.dumps(result.to_dict(), allow_nan=False)
    assert result.to_dict()["loss"][0] is None


def test_frozen_parameters_do_not_move():
    model = mlp()
    model[0].weight.requires_grad_(False)
    assert "0.weight" not in random_directions(model, 1)[0]
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="selects none"):
        loss_landscape(objective_of(model), points=3)
    every = random_directions(model, 2, parameters="*")
    assert loss_landscape(objective_of(model), every, points=3).weights_moved == 103


def test_filters_of_direction_have_norms_of_weights():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 5, 2), nn.Linear(6, 7))
    (direction,) = random_directions(model, 1)
    assert set(direction) == {"0.weight", "2.weight", "3.weight"}  # neither biases nor normalization
    for i in range(4):
        assert direction["0.weight"][i].norm() == pytest.approx(model[0].weight[i].norm().item(), rel=1e-5)
    for i in range(5):
        assert direction["2.weight"][:, i].norm() == pytest.approx(model[2].weight[:, i].norm().item(), rel=1e-5)


# ---- stopped and resumed ----


def test_interrupted_landscape_restores_weights_and_resumes_to_same_result(tmp_path):
    objective, file = objective_of(mlp()), tmp_path / "deep" / "state.txt"
    before = weights_of(objective.model)
    whole = loss_landscape(objective, points=4)

    def stop_at_seven(done, total):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loss_landscape(objective, points=4, state_file=file, progress=stop_at_seven)
    assert same_bits(objective.model.parameters(), before)
    with file.open("a") as state:
        state.write("0.12")  # a killed process may leave an unfinished line
    seen = []
    again = loss_landscape(objective, points=4, state_file=file, progress=lambda *at: seen.append(at))
    assert seen == [(done, 16) for done in range(8, 17)]
    assert np.array_equal(again.loss, whole.loss)
    assert [path.name for path in file.parent.iterdir()] == ["state.txt"]


def test_foreign_state_file_is_rejected_and_kept(tmp_path):
    file = tmp_path / "state.txt"
    loss_landscape(objective_of(mlp()), points=3, state_file=file)
    content = file.read_bytes()
    directions = random_directions(mlp(), 2, seed=1)
    others = [(objective_of(mlp(seed=1)), None), (objective_of(mlp(), statistics="batch"), None)]
    for other, given in [*others, (objective_of(mlp()), directions)]:
        with pytest.raises(ValueError, match="another landscape"):
            loss_landscape(other, given, points=3, state_file=file)
    assert file.read_bytes() == content
    file.write_bytes(b"something else")
    with pytest.raises(ValueError, match="is not a state file"):
        loss_landscape(objective_of(mlp()), points=3, state_file=file)
    assert file.read_bytes() == b"something else"
