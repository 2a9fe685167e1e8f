"""U-ViT (Bao et al. 2023, arXiv 2209.12152).

A vision transformer in which time and class are tokens like the patches, and every block of the first half is joined to its
mirror image in the second half by a long skip connection (concatenated, then projected back to the width). Unlike DiT and the
U-Net it has no layer that starts at zero: its first output is small, not nothing.
"""

import torch
from torch import Tensor, nn

from noisewise.models.check import check_inputs, check_settings, check_transformer, fill_labels
from noisewise.models.transformer import MLP, Attention, Patches, TimeEmbedding, sinusoid, unpatch


class UViT(nn.Module):
    """A transformer with long skip connections; the default size is U-ViT-L.

    The paper's sizes (width, depth, heads): S (512, 13, 8), Mid (768, 17, 12), L (1024, 21, 16), H (1152, 29, 16).

    Args:
        shape: (C, H, W) of one sample.
        classes: the number of classes, 0 for an unconditional model.
        patch: the side of a patch, which divides H and W.
        width: the size of a token, a multiple of `heads`.
        depth: the number of blocks, odd: a middle block and as many before as after it.
        heads: the number of attention heads.
        mlp_ratio: hidden size of the MLPs over `width`.
        dropout: after attention and in the MLPs; the paper has none.
        time_mlp: put a two-layer MLP behind the sinusoid of the time; the paper's models have none.
        final_conv: end with a 3 x 3 convolution over the image, as the paper does, to smooth over the patches' edges.
        time_scale: multiplies the time before it is embedded; about 1000 for a process whose time lies in [0, 1].
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int = 0,
        patch: int = 2,
        width: int = 1024,
        depth: int = 21,
        heads: int = 16,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        time_mlp: bool = False,
        final_conv: bool = True,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_settings(shape, classes, dropout, time_scale, patch=patch, width=width, depth=depth, heads=heads)
        check_transformer(shape, patch, width, heads, mlp_ratio)
        if depth % 2 == 0:
            raise ValueError(f"depth must be odd (a middle block between two mirrored halves), got {depth}: try {depth + 1}")
        self.shape, self.classes, self.patch = tuple(shape), classes, patch
        self.grid = (shape[1] // patch, shape[2] // patch)
        self.time = TimeEmbedding(width, width, 4 * width, time_scale) if time_mlp else TimeWaves(width, time_scale)
        self.label = nn.Embedding(classes + 1, width) if classes else None
        self.patches = Patches(shape[0], patch, width)
        self.extras = 1 if self.label is None else 2
        self.position = nn.Parameter(torch.zeros(1, self.extras + self.grid[0] * self.grid[1], width))
        half = depth // 2
        self.first_half = nn.ModuleList(UViTBlock(width, heads, mlp_ratio, dropout) for _ in range(half))
        self.middle = UViTBlock(width, heads, mlp_ratio, dropout)
        self.second_half = nn.ModuleList(UViTBlock(width, heads, mlp_ratio, dropout, skip=True) for _ in range(half))
        self.norm = nn.LayerNorm(width)
        self.project = nn.Linear(width, patch**2 * shape[0])
        self.final = nn.Conv2d(shape[0], shape[0], 3, padding=1) if final_conv else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Truncated N(0, 0.02^2) for linear layers and positions; torch's own for convolutions and labels, as published."""
        nn.init.trunc_normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def embedded(self, x: Tensor, time: Tensor, labels: Tensor | None) -> Tensor:
        """The tokens before the first block: label, time and patches."""
        check_inputs(x, time, self.shape)
        labels = fill_labels(labels, self.classes, x)
        extras = [self.time(time).to(self.position.dtype)]
        if self.label is not None:
            extras.insert(0, self.label(labels))
        return torch.cat([torch.stack(extras, dim=1), self.patches(x)], dim=1) + self.position

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        tokens, skips = self.embedded(x, time, labels), []
        for block in self.first_half:
            tokens = block(tokens)
            skips.append(tokens)
        tokens = self.middle(tokens)
        for block in self.second_half:
            tokens = block(tokens, skips.pop())
        pixels = self.project(self.norm(tokens))[:, self.extras :]
        return self.final(unpatch(pixels, self.grid, self.patch))


class UViTBlock(nn.Module):
    """A pre-norm transformer block, which first takes in the skip connection if it has one."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, dropout: float, skip: bool = False) -> None:
        super().__init__()
        self.join = nn.Linear(2 * width, width) if skip else None
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, bias=False, dropout=dropout)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, mlp_ratio, dropout=dropout)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.join is not None and skip is not None:
            x = self.join(torch.cat([x, skip], dim=2))
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class TimeWaves(nn.Module):
    """The sinusoid of the time and nothing learned."""

    def __init__(self, width: int, scale: float) -> None:
        super().__init__()
        self.width, self.scale = width, scale

    def forward(self, time: Tensor) -> Tensor:
        return sinusoid(time.to(torch.float32) * self.scale, self.width)
