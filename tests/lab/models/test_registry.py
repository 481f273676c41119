import sys

import pytest
import torch
from torch import nn

from sparsesam.lab.models import MODELS, build_model

SMALL = ["small-cnn", "resnet10-small", "vgg-small", "wrn-10-2", "vit-tiny-small"]
LARGE = sorted(set(MODELS) - set(SMALL))


def mine(num_classes, image_size):
    """A user-defined model, referred to by name below."""
    return nn.Sequential(nn.Flatten(), nn.Linear(image_size**2, num_classes))


def mine_with_anything(**choices):
    assert list(choices) == ["num_classes"]
    return nn.Linear(1, choices["num_classes"])


def without_classes(width):
    return nn.Linear(width, width)


def failing(num_classes):
    raise RuntimeError("no memory\nin two lines")


def no_model(num_classes):
    return num_classes


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize(("in_channels", "image_size"), [(1, 8), (1, 28), (3, 32)])
def test_small_models_accept_every_small_data_set(name, in_channels, image_size):
    model = build_model(name, 7, in_channels, image_size)
    scores = model(torch.randn(2, in_channels, image_size, image_size, generator=torch.Generator().manual_seed(0)))
    assert scores.shape == (2, 7)
    scores.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert sum(p.numel() for p in model.parameters()) < 400_000


@pytest.mark.parametrize("name", LARGE)
@pytest.mark.parametrize("image_size", [32, 224])
def test_large_models_accept_cifar_and_imagenet(name, image_size):
    with torch.device("meta"):
        assert build_model(name, 100, 3, image_size)(torch.empty(2, 3, image_size, image_size)).shape == (2, 100)


def test_names_accept_underscores():
    assert isinstance(build_model("Small_CNN", in_channels=1), nn.Sequential)


def test_importable_function_is_accepted():
    assert build_model("tests.lab.models.test_registry:mine", 5, 1, 8)(torch.zeros(2, 1, 8, 8)).shape == (2, 5)
    assert build_model("tests.lab.models.test_registry:mine_with_anything", 5).out_features == 5


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:function", "model must be an importable module:function, got 'no_such_module:function'"),
        (f"{__name__}:no_such", "model must be an importable module:function, got"),
        (f"{__name__}:without_classes", "without_classes raised TypeError: .*num_classes"),
        (f"{__name__}:failing", "failing raised RuntimeError: no memory in two lines$"),
        (f"{__name__}:SMALL", "SMALL must be a function, got list"),
        (f"{__name__}:no_model", r"no_model must return a torch\.nn\.Module, got int"),
    ],
)
def test_name_that_builds_no_classifier_is_rejected(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(name)


def test_timm_models_are_built_by_name():
    pytest.importorskip("timm")
    assert build_model("timm/resnet18", 7, 1, 32)(torch.zeros(2, 1, 32, 32)).shape == (2, 7)
    assert build_model("timm/vit_tiny_patch16_224", 7, 3, 32)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)
    with pytest.raises(ValueError, match="did you mean resnet18"):
        build_model("timm/resnet_18")


def test_missing_timm_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ImportError, match="timm/resnet18 needs timm: pip install timm"):
        build_model("timm/resnet18")
