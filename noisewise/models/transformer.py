"""Parts that the transformers share: embeddings of time and position, attention, the MLP, patches."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def sinusoid(values: Tensor, width: int, max_period: float = 10_000.0) -> Tensor:
    """(N,) numbers as (N, width) [cos, sin] waves with periods from 2 pi to 2 pi max_period, geometrically spaced.

    Always in float32: in bfloat16 the timesteps 0 to 999 are only 384 different numbers.
    """
    half = width // 2
    frequencies = torch.exp(-math.log(max_period) / half * torch.arange(half, dtype=torch.float32, device=values.device))
    angles = values.to(torch.float32)[:, None] * frequencies
    waves = torch.cat([angles.cos(), angles.sin()], dim=1)
    return F.pad(waves, (0, width % 2))


def positions_2d(rows: int, columns: int, width: int) -> Tensor:
    """(rows * columns, width) fixed sin-cos position embedding: the column in the first half, the row in the second."""
    if width % 4:
        raise ValueError(f"a 2-D sin-cos position embedding needs a width that is a multiple of 4, got {width}")

    def axis(index: Tensor) -> Tensor:
        return torch.cat(sinusoid(index, width // 2).chunk(2, dim=1)[::-1], dim=1)  # [sin, cos], as published

    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    return torch.cat([axis(column.flatten()), axis(row.flatten())], dim=1)


class TimeEmbedding(nn.Module):
    """Sinusoid and a two-layer MLP: (B,) times to (B, width)."""

    def __init__(self, width: int, waves: int = 256, hidden: int | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.waves, self.scale = waves, scale
        self.expand = nn.Linear(waves, hidden or width)
        self.project = nn.Linear(hidden or width, width)

    def forward(self, time: Tensor) -> Tensor:
        waves = sinusoid(time.to(torch.float32) * self.scale, self.waves).to(self.expand.weight.dtype)
        return self.project(F.silu(self.expand(waves)))


class Attention(nn.Module):
    """Multi-head self-attention over (B, N, width); one fused projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, bias: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.project = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, tokens, width)))


class MLP(nn.Module):
    """Linear, GELU, linear; `approximate` is GELU's ("tanh" in DiT, "none" in U-ViT)."""

    def __init__(self, width: int, ratio: float, approximate: str = "none", dropout: float = 0.0) -> None:
        super().__init__()
        hidden = int(width * ratio)
        self.expand = nn.Linear(width, hidden)
        self.act = nn.GELU(approximate=approximate)
        self.project = nn.Linear(hidden, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.project(self.dropout(self.act(self.expand(x)))))


class Patches(nn.Module):
    """Images to tokens, (B, C, H, W) to (B, H/patch * W/patch, width), row by row."""

    def __init__(self, channels: int, patch: int, width: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(channels, width, kernel_size=patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x).flatten(2).transpose(1, 2)


def unpatch(tokens: Tensor, grid: tuple[int, int], patch: int) -> Tensor:
    """Tokens of patch * patch * C numbers (channels fastest) to (B, C, H, W)."""
    rows, columns = grid
    channels = tokens.shape[2] // patch**2
    pixels = tokens.reshape(-1, rows, columns, patch, patch, channels)
    return pixels.permute(0, 5, 1, 3, 2, 4).reshape(-1, channels, rows * patch, columns * patch)
