"""What the experiments train."""

from sparsesam.models.resnet import resnet18
from sparsesam.models.small_cnn import small_cnn

__all__ = ["resnet18", "small_cnn"]
