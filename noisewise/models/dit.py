"""DiT with adaLN-Zero (Peebles & Xie 2023, arXiv 2212.09748).

A vision transformer over patches. Time and class, embedded and summed, set the shift, the scale and the gate of every residual
branch. All gates and the last layer start at zero, so that the blocks start as the identity and the model's output as zero.
"""

from torch import Tensor, nn
from torch.nn import functional as F

from noisewise.models.check import check_inputs, check_settings, check_transformer, fill_labels
from noisewise.models.transformer import MLP, Attention, Patches, TimeEmbedding, positions_2d, unpatch


class DiT(nn.Module):
    """A diffusion transformer; the default size is DiT-S.

    The paper's sizes (width, depth, heads): S (384, 12, 6), B (768, 12, 12), L (1024, 24, 16), XL (1152, 28, 16).

    Args:
        shape: (C, H, W) of one sample.
        classes: the number of classes, 0 for an unconditional model.
        patch: the side of a patch, which divides H and W.
        width: the size of a token, a multiple of 4 and of `heads`.
        depth: the number of blocks.
        heads: the number of attention heads.
        mlp_ratio: hidden size of the MLPs over `width`.
        dropout: after attention and in the MLPs; the paper has none.
        out_channels: channels of the output, C unless told (2 C for a learned variance).
        time_scale: multiplies the time before it is embedded; about 1000 for a process whose time lies in [0, 1].
    """

    position: Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int = 0,
        patch: int = 2,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        out_channels: int | None = None,
        time_scale: float = 1.0,
    ) -> None:
        super().__init__()
        counts = {"patch": patch, "width": width, "depth": depth, "heads": heads, "out_channels": out_channels}
        check_settings(shape, classes, dropout, time_scale, **counts)
        check_transformer(shape, patch, width, heads, mlp_ratio)
        self.shape, self.classes, self.patch = tuple(shape), classes, patch
        self.grid = (shape[1] // patch, shape[2] // patch)
        self.patches = Patches(shape[0], patch, width)
        self.register_buffer("position", positions_2d(*self.grid, width), persistent=False)
        self.time = TimeEmbedding(width, scale=time_scale)
        self.label = nn.Embedding(classes + 1, width) if classes else None
        self.blocks = nn.ModuleList(DiTBlock(width, heads, mlp_ratio, dropout) for _ in range(depth))
        self.last = LastLayer(width, patch**2 * (out_channels or shape[0]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier for linear layers and patches, N(0, 0.02^2) for the embeddings, zero for gates and the last layer."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_uniform_(module.weight.flatten(1))  # a view: the patches' convolution is a linear map as well
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.time.expand.weight, std=0.02)
        nn.init.normal_(self.time.project.weight, std=0.02)
        if self.label is not None:
            nn.init.normal_(self.label.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, DiTBlock | LastLayer):
                nn.init.zeros_(module.modulation.weight)
        nn.init.zeros_(self.last.project.weight)

    def embedded(self, x: Tensor, time: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        """The tokens before the first block, and the condition of all blocks."""
        check_inputs(x, time, self.shape)
        labels = fill_labels(labels, self.classes, x)
        condition = self.time(time)
        if self.label is not None:
            condition = condition + self.label(labels)
        return self.patches(x) + self.position, F.silu(condition)

    def forward(self, x: Tensor, time: Tensor, labels: Tensor | None = None) -> Tensor:
        tokens, condition = self.embedded(x, time, labels)
        for block in self.blocks:
            tokens = block(tokens, condition)
        return unpatch(self.last(tokens, condition), self.grid, self.patch)


class DiTBlock(nn.Module):
    """Attention and MLP, each normalised, shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int, mlp_ratio: float, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.attention = Attention(width, heads, dropout=dropout)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.mlp = MLP(width, mlp_ratio, approximate="tanh", dropout=dropout)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(condition)[:, None].chunk(6, dim=2)
        x = x + gate1 * self.attention(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class LastLayer(nn.Module):
    """Normalised, shifted and scaled by the condition, then projected to pixels."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.project = nn.Linear(width, outputs)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.modulation(condition)[:, None].chunk(2, dim=2)
        return self.project(self.norm(x) * (1 + scale) + shift)
