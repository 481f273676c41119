import pytest
import torch
from safetensors.torch import save_file

from sparsesam.lab.experiment.errors import CheckpointError
from sparsesam.lab.experiment.initial_weights import initialize, read_weights
from sparsesam.lab.models import small_cnn
from tests.lab.experiment.runs import same, state, train


def other(num_classes=10):
    torch.manual_seed(5)
    return small_cnn(num_classes)


@pytest.mark.parametrize("form", ["state_dict", "nested", "wrapped", "safetensors"])
def test_weights_are_read_from_the_usual_files(tmp_path, form):
    weights = other().state_dict()
    file = tmp_path / ("a.safetensors" if form == "safetensors" else "a.pt")
    if form == "safetensors":
        save_file(weights, file)
    elif form == "nested":
        torch.save({"epoch": 3, "state_dict": weights}, file)
    else:
        torch.save({("module." if form == "wrapped" else "") + name: value for name, value in weights.items()}, file)
    model = small_cnn()
    assert initialize(model, file) == []
    assert same(dict(model.state_dict()), dict(weights))


def test_a_run_begins_with_the_weights_of_another(tmp_path):
    train(tmp_path / "first", ema=0.9)
    train(tmp_path / "second", init_from=str(tmp_path / "first" / "last.pt"), lr=0.0, weight_decay=0.0, momentum=0.0)
    average = {name: value for name, value in read_weights(tmp_path / "first" / "last.pt").items() if "weight" in name}
    second = state(tmp_path / "second")["training"]["model"]
    assert all(torch.equal(second[name], value) for name, value in average.items())
    assert same(read_weights(tmp_path / "second"), read_weights(tmp_path / "second" / "best.pt"))


def test_a_classifier_of_another_size_keeps_its_random_weights(tmp_path):
    torch.save(other(7).state_dict(), tmp_path / "a.pt")
    model = small_cnn(10)
    before = model[-1].weight.clone()
    assert initialize(model, tmp_path / "a.pt") == ["12.weight", "12.bias"]
    assert torch.equal(model[-1].weight, before)
    assert torch.equal(model[0].weight, other(7)[0].weight)


def test_another_architecture_is_refused(tmp_path):
    torch.save(torch.nn.Linear(3, 4).state_dict(), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"does not fit the model.*the file has weight, bias"):
        initialize(small_cnn(), tmp_path / "a.pt")


def test_files_that_hold_no_weights_are_refused(tmp_path):
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("weights")
    (tmp_path / "text.safetensors").write_text("weights")
    for name, reason in (
        ("list.pt", "must contain a state_dict"),
        ("text.pt", "refused|cannot be read"),
        ("text.safetensors", "not a safetensors file"),
    ):
        with pytest.raises(CheckpointError, match=reason):
            read_weights(tmp_path / name)
    with pytest.raises(ValueError, match=r"has no best\.pt"):
        read_weights(tmp_path)
