"""Vision transformers (Dosovitskiy et al. 2021). Every weight matrix is in a plain Linear or Conv2d."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_LayerNorm = partial(nn.LayerNorm, eps=1e-6)


class Attention(nn.Module):
    """Multi-head self-attention over (batch, tokens, dim): softmax(q kᵀ / √(dim / heads)) v, and a projection."""

    def __init__(self, dim: int, heads: int, *, projects: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj: nn.Module = nn.Linear(dim, dim) if projects else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, dim = x.shape
        qkv: Tensor = self.qkv(x)
        query, key, value = qkv.view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value)
        projected: Tensor = self.proj(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return projected


class TransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, dim: int, heads: int, hidden: int, *, projects: bool = True) -> None:
        super().__init__()
        self.norm1 = _LayerNorm(dim)
        self.attention = Attention(dim, heads, projects=projects)
        self.norm2 = _LayerNorm(dim)
        self.mlp = nn.Sequential(OrderedDict(fc1=nn.Linear(dim, hidden), act=nn.GELU(), fc2=nn.Linear(hidden, dim)))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        moved: Tensor = self.mlp(self.norm2(x))
        return x + moved


class VisionTransformer(nn.Module):
    """Patches, class token, positions, ``depth`` blocks, a final normalization and a linear head on the class token.

    ``pool="mean"`` puts the head on the mean over the patches instead, without a class token. ``projects=False``
    leaves out the linear layer after the attention.

    Weights are initialized as in the paper's code (Xavier; 1 / √fan-in for the patches), except for the head: with
    zeros as in that code, the first gradients and Fisher scores of all other weights would be zero.
    """

    def __init__(
        self,
        num_classes: int = 10,
        in_channels: int = 3,
        image_size: int = 32,
        *,
        patch_size: int,
        dim: int,
        depth: int,
        heads: int,
        mlp_ratio: float = 4.0,
        position_std: float = 0.02,
        pool: Literal["class", "mean"] = "class",
        projects: bool = True,
    ) -> None:
        super().__init__()
        if image_size % patch_size:
            raise ValueError(f"image_size must be a multiple of the patch size {patch_size}, got {image_size}")
        blocks = [TransformerBlock(dim, heads, round(mlp_ratio * dim), projects=projects) for _ in range(depth)]
        tokens = (image_size // patch_size) ** 2 + (pool == "class")
        self.patches = nn.Conv2d(in_channels, dim, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.zeros(1, 1, dim)) if pool == "class" else None
        self.positions = nn.Parameter(torch.empty(1, tokens, dim))
        self.blocks = nn.Sequential(*blocks)
        self.norm = _LayerNorm(dim)
        nn.init.normal_(self.positions, std=position_std)
        self.head = nn.Linear(dim, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
            elif isinstance(module, nn.Conv2d):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
            if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, in_channels, side, side) to (batch, num_classes)."""
        tokens: Tensor = self.patches(images).flatten(2).transpose(1, 2)
        if self.class_token is not None:
            tokens = torch.cat([self.class_token.expand(len(tokens), -1, -1), tokens], dim=1)
        tokens = self.norm(self.blocks(tokens + self.positions))
        scores: Tensor = self.head(tokens.mean(dim=1) if self.class_token is None else tokens[:, 0])
        return scores


def vit_tiny_small(num_classes: int = 10, in_channels: int = 3, image_size: int = 32) -> VisionTransformer:
    """Four blocks of 96 dimensions, patches of about an eighth of the side, at least two pixels: for a laptop's CPU.

    Position embeddings start as large as patches, not at 0.02: otherwise they take hundreds of steps to matter.
    """
    sizes = [size for size in range(min(2, image_size), image_size + 1) if image_size % size == 0]
    patch = min(sizes, key=lambda size: abs(size - image_size / 8))
    tiny = partial(VisionTransformer, dim=96, depth=4, heads=3, mlp_ratio=2.0, position_std=1.0)
    return tiny(num_classes, in_channels, image_size, patch_size=patch)
