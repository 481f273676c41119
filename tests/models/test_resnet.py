import torch

from sparsesam.models import resnet18


def test_has_the_published_number_of_parameters():
    assert sum(p.numel() for p in resnet18(10).parameters()) == 11_173_962


def test_maps_cifar_images_to_class_scores():
    assert resnet18(100)(torch.zeros(2, 3, 32, 32)).shape == (2, 100)


def test_stem_keeps_the_resolution():
    stem = resnet18()[:3]
    assert stem(torch.zeros(1, 3, 32, 32)).shape == (1, 64, 32, 32)


def test_every_parameter_receives_a_gradient():
    model = resnet18()
    model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
