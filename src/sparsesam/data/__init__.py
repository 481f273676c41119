"""What the experiments train on."""

from sparsesam.data.digits import load_digits_split
from sparsesam.data.noise import flip_labels

__all__ = ["flip_labels", "load_digits_split"]
