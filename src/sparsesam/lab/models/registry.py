"""Models by name: ours, timm's, or any importable function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from sparsesam.integrations.extras import required_by
from sparsesam.lab.models.resnet import BasicBlock, Bottleneck, resnet, resnet18, wide_resnet
from sparsesam.lab.models.vgg import small_cnn, vgg
from sparsesam.lab.models.vit import VisionTransformer, vit_tiny_small
from sparsesam.lab.names import accepted, call_function, find_function, look_up
from sparsesam.utils.checks import nearest

_VGGS = {"vgg11": (1, 1, 2, 2, 2), "vgg13": (2, 2, 2, 2, 2), "vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
#: The SSAM paper's model for timing N:M products, one very wide block: 1x1 patches, one head, mlp ratio 1. The paper
#: follows the original design, with a class token and a projection; its text does not exclude the other variants.
_ONE_BLOCK = partial(VisionTransformer, patch_size=1, dim=8192, depth=1, heads=1, mlp_ratio=1.0)

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet34": partial(resnet, BasicBlock, (3, 4, 6, 3)),
    "resnet50": partial(resnet, Bottleneck, (3, 4, 6, 3)),
    "resnet101": partial(resnet, Bottleneck, (3, 4, 23, 3)),
    "resnet152": partial(resnet, Bottleneck, (3, 8, 36, 3)),
    **{f"{name}-bn": partial(vgg, depths) for name, depths in _VGGS.items()},
    **{f"{name}-bn-4096": partial(vgg, depths, published_head=True) for name, depths in _VGGS.items()},
    "wrn-28-10": partial(wide_resnet, 28, 10),
    "wrn-34-10": partial(wide_resnet, 34, 10),
    "vit-b-16": partial(VisionTransformer, patch_size=16, dim=768, depth=12, heads=12),
    "vit-s-16": partial(VisionTransformer, patch_size=16, dim=384, depth=12, heads=6),  # Touvron et al. 2021
    "vit-one-block-8192": _ONE_BLOCK,
    "vit-one-block-8192-mean-no-projection": partial(_ONE_BLOCK, pool="mean", projects=False),
    # Small members of each family, for a laptop's CPU.
    "small-cnn": small_cnn,
    "resnet10-small": partial(resnet, BasicBlock, (1, 1, 1, 1), width=16),
    "vgg-small": partial(vgg, (1, 1, 2, 1), width=16),
    "wrn-10-2": partial(wide_resnet, 10, 2),
    "vit-tiny-small": vit_tiny_small,
}


def build_model(name: str, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """Build the model ``name`` for (batch, in_channels, image_size, image_size) images.

    ``name`` is one of `MODELS`, ``timm/NAME``, or an importable ``module:function``, which must accept ``num_classes``
    and may accept ``in_channels`` and ``image_size``.
    """
    choices = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    if name.startswith("timm/"):
        return _from_timm(name.removeprefix("timm/"), **choices)
    if ":" in name:
        return _from_user(name, choices)
    builder = look_up("model", name, MODELS, others="timm/NAME")
    return builder(**accepted(builder, choices))


def _from_timm(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """Build a timm model without pretrained weights; ``img_size`` is passed if the model accepts it (transformers)."""
    with required_by(f"timm/{name}", "timm"):
        import timm
    if not timm.is_model(name):
        meant = nearest(name, timm.list_models(), otherwise="timm.list_models() lists all")
        raise ValueError(f"model timm/{name} is not known to timm; {meant}")
    options = {"num_classes": num_classes, "in_chans": in_channels}
    try:
        model: nn.Module = timm.create_model(name, img_size=image_size, **options)
    except TypeError:  # models for images of any size have no img_size
        model = timm.create_model(name, **options)
    return model


def _from_user(name: str, choices: dict[str, int]) -> nn.Module:
    function = find_function("model", name)
    taken = {**accepted(function, choices), "num_classes": choices["num_classes"]}
    model = call_function("model", name, function, **taken)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name} must return a torch.nn.Module, got {type(model).__name__}")
    return model
