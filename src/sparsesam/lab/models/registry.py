"""Models by name: ours, those of timm, or any importable function."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from torch import nn

from sparsesam.integrations.extras import required_by
from sparsesam.lab.models.resnet import resnet10_small, resnet18, resnet50, wide_resnet
from sparsesam.lab.models.vgg import small_cnn, vgg11_bn, vgg11_bn_4096, vgg_small
from sparsesam.lab.models.vit import vit_b_16, vit_one_block_8192, vit_s_16, vit_tiny_small
from sparsesam.lab.names import accepted, call_function, find_function, look_up, nearest

MODELS: dict[str, Callable[..., nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "vgg11-bn": vgg11_bn,
    "vgg11-bn-4096": vgg11_bn_4096,
    "wrn-28-10": partial(wide_resnet, 28, 10),
    "vit-b-16": vit_b_16,
    "vit-s-16": vit_s_16,
    "vit-one-block-8192": vit_one_block_8192,
    "vit-one-block-8192-mean": partial(vit_one_block_8192, pool="mean"),
    "vit-one-block-8192-no-projection": partial(vit_one_block_8192, projects=False),
    "vit-one-block-8192-mean-no-projection": partial(vit_one_block_8192, pool="mean", projects=False),
    "small-cnn": small_cnn,
    "resnet10-small": resnet10_small,
    "vgg-small": vgg_small,
    "wrn-10-2": partial(wide_resnet, 10, 2),
    "vit-tiny-small": vit_tiny_small,
}


def build_model(name: str, num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> nn.Module:
    """The model called ``name`` for (batch, in_channels, image_size, image_size) images.

    ``name`` is one of `MODELS`, ``timm/NAME``, or ``module:function`` of anything importable, which is given those of
    ``num_classes``, ``in_channels`` and ``image_size`` that it takes; ``num_classes`` it must take.
    """
    choices = {"num_classes": num_classes, "in_channels": in_channels, "image_size": image_size}
    for argument, value in choices.items():
        if value < 1:
            raise ValueError(f"{argument} must be at least 1, got {value}")
    if name.startswith("timm/"):
        return _from_timm(name.removeprefix("timm/"), **choices)
    if ":" in name:
        return _from_user(name, choices)
    builder = look_up("model", name, MODELS, others="timm/NAME")
    return builder(**accepted(builder, choices))


def _from_timm(name: str, num_classes: int, in_channels: int, image_size: int) -> nn.Module:
    """A model of timm, without its trained weights; ``img_size`` is given to those that take it (transformers)."""
    with required_by(f"timm/{name}", "timm"):
        import timm
    if not timm.is_model(name):
        meant = nearest(name, timm.list_models(), otherwise="timm.list_models() lists all")
        raise ValueError(f"model timm/{name} is not known to timm; {meant}")
    options = {"num_classes": num_classes, "in_chans": in_channels}
    try:
        model: nn.Module = timm.create_model(name, img_size=image_size, **options)
    except TypeError:  # networks that take images of any size
        model = timm.create_model(name, **options)
    return model


def _from_user(name: str, choices: dict[str, int]) -> nn.Module:
    function = find_function("model", name)
    taken, parameters = accepted(function, choices), inspect.signature(function).parameters
    if "num_classes" not in taken:
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
            raise ValueError(
                f"model {name} must take num_classes, the number of its outputs; it takes {', '.join(parameters)}"
            )
        taken["num_classes"] = choices["num_classes"]
    model = call_function("model", name, function, **taken)
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name} must return a torch.nn.Module, got {type(model).__name__}")
    return model
