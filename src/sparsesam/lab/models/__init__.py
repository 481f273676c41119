"""Networks, by name."""

from sparsesam.lab.models.registry import MODELS, build_model
from sparsesam.lab.models.resnet import resnet10_small, resnet18, resnet50, wide_resnet
from sparsesam.lab.models.vgg import small_cnn, vgg11_bn, vgg11_bn_4096, vgg_small
from sparsesam.lab.models.vit import vit, vit_b_16, vit_one_block_8192, vit_s_16, vit_tiny_small

__all__ = [
    "MODELS", "build_model", "resnet10_small", "resnet18", "resnet50", "small_cnn", "vgg11_bn", "vgg11_bn_4096",
    "vgg_small", "vit", "vit_b_16", "vit_one_block_8192", "vit_s_16", "vit_tiny_small", "wide_resnet",
]  # fmt: skip
