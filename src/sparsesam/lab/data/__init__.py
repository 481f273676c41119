"""Data sets, corruptions and augmentation."""

from sparsesam.lab.data.augment import Augment, standard_augmentation
from sparsesam.lab.data.corruption import CORRUPTIONS, corrupt, flip_labels
from sparsesam.lab.data.download import cache_dir
from sparsesam.lab.data.image_folder import FolderSplits, ImageFolder
from sparsesam.lab.data.registry import DATASETS, load_dataset
from sparsesam.lab.data.splits import DataError, Labelled, Splits

__all__ = [
    "CORRUPTIONS", "DATASETS", "Augment", "DataError", "FolderSplits", "ImageFolder", "Labelled", "Splits",
    "cache_dir", "corrupt", "flip_labels", "load_dataset", "standard_augmentation",
]  # fmt: skip
