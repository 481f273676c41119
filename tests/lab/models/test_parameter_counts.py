"""Published numbers of parameters. Models are built on the meta device."""

import pytest
import torch

from sparsesam.lab.models import build_model


@pytest.mark.parametrize(
    ("name", "num_classes", "image_size", "published"),
    [
        ("resnet18", 10, 32, 11_173_962),
        ("resnet18", 1000, 224, 11_689_512),
        ("resnet34", 1000, 224, 21_797_672),
        ("resnet50", 10, 32, 23_520_842),
        ("resnet50", 1000, 224, 25_557_032),
        ("resnet101", 1000, 224, 44_549_160),
        ("resnet152", 1000, 224, 60_192_808),
        ("wrn-28-10", 10, 32, 36_479_194),
        ("wrn-34-10", 10, 32, 46_160_474),
        ("vgg11-bn", 10, 32, 9_231_114),
        ("vgg11-bn-4096", 10, 32, 28_149_514),
        ("vgg11-bn", 1000, 224, 132_868_840),
        ("vgg13-bn", 1000, 224, 133_053_736),
        ("vgg16-bn", 1000, 224, 138_365_992),
        ("vgg19-bn", 1000, 224, 143_678_248),
        ("vit-s-16", 1000, 224, 22_050_664),
        ("vit-b-16", 1000, 224, 86_567_656),
    ],
)
def test_number_of_parameters_matches_publication(name, num_classes, image_size, published):
    with torch.device("meta"):
        model = build_model(name, num_classes, 3, image_size)
    assert sum(p.numel() for p in model.parameters()) == published


@pytest.mark.parametrize("end", ["", "-mean-no-projection"])
def test_papers_one_block_vit_has_sizes_of_its_table(end):
    with torch.device("meta"):
        parameters = {name: tuple(p.shape) for name, p in build_model(f"vit-one-block-8192{end}").named_parameters()}
    assert {name: shape for name, shape in parameters.items() if "blocks" in name and len(shape) == 2} == {
        "blocks.0.attention.qkv.weight": (3 * 8192, 8192),
        **({} if end else {"blocks.0.attention.proj.weight": (8192, 8192)}),
        "blocks.0.mlp.fc1.weight": (8192, 8192),
        "blocks.0.mlp.fc2.weight": (8192, 8192),
    }
    assert ("class_token" in parameters) == (end == "")
    assert parameters["positions"] == (1, 32 * 32 + (end == ""), 8192)
