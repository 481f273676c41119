"""Models by name."""

from sparsesam.lab.models.registry import MODELS, build_model
from sparsesam.lab.models.resnet import resnet18, wide_resnet
from sparsesam.lab.models.vgg import small_cnn
from sparsesam.lab.models.vit import VisionTransformer

__all__ = ["MODELS", "VisionTransformer", "build_model", "resnet18", "small_cnn", "wide_resnet"]
