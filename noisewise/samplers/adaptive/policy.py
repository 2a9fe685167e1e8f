"""The sampling policy pi(x0): a small network that gives each sample its own Beta(a, b) over u (arXiv 2411.09998, Eq. 11)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from noisewise.feedback import preserved_random_state

BOUNDS = (0.05, 50.0)
"""What a and b are kept within: outside, nearly all of a Beta's mass sits on one end or one point."""


class BetaPolicy(nn.Module):
    """Data of one shape to (a, b), both about 0.974 before training: almost uniform.

    Images, sequences and volumes go through three convolutions (32, 64, 128 channels, 3 wide, ReLU, max-pooled by 2 while
    there is something to pool) and are then reduced to 4 a side at most; vectors go straight into the MLP. All in float32,
    whatever torch's default is when the first batch is seen.

    Args:
        shape: of one sample, channels first; None for a policy that ignores the data and has two parameters.
        hidden: width of the MLP.
        depth: hidden layers of the MLP.
        seed: of the initial weights, so that all ranks start alike and the caller's random state is not touched.
    """

    def __init__(self, shape: Sequence[int] | None, hidden: int = 128, depth: int = 2, seed: int = 0) -> None:
        super().__init__()
        self.shape = None if shape is None else tuple(shape)
        with preserved_random_state(seed), torch.device("cpu"):
            self.body = nn.Identity() if shape is None else _body(self.shape or (), hidden, depth)
            self.head = nn.Linear(1 if shape is None else hidden, 2, dtype=torch.float32)
        self.requires_grad_(False)  # but where it is trained
        self.reset()

    def reset(self) -> None:
        """Back to almost uniform; what the body has learned stays."""
        nn.init.zeros_(self.head.weight)
        nn.init.constant_(self.head.bias, 0.5)

    def forward(self, x0: Tensor) -> Tensor:
        """(B, 2): a and b, within bounds; at a bound the gradient still passes, so that it can come back."""
        features = x0.new_zeros(len(x0), 1, dtype=torch.float32) if self.shape is None else self.body(x0.float())
        free = F.softplus(self.head(features)) + 1e-5
        return free + (free.clamp(*BOUNDS) - free).detach()


def _body(shape: tuple[int, ...], hidden: int, depth: int) -> nn.Module:
    convolution, pool, reduce = {
        1: (nn.Conv1d, nn.MaxPool1d, nn.AdaptiveMaxPool1d),
        2: (nn.Conv2d, nn.MaxPool2d, nn.AdaptiveMaxPool2d),
        3: (nn.Conv3d, nn.MaxPool3d, nn.AdaptiveMaxPool3d),
    }.get(len(shape) - 1, (None, None, None))
    layers: list[nn.Module] = []
    features = math.prod(shape)
    if convolution is None or pool is None or reduce is None:
        layers.append(nn.Unflatten(0, (-1, 1)) if not shape else nn.Flatten())
    else:
        channels, size = shape[0], list(shape[1:])
        for width in (32, 64, 128):
            layers += [convolution(channels, width, 3, padding=1, dtype=torch.float32), nn.ReLU()]
            if min(size) >= 2:
                layers.append(pool(2))
                size = [side // 2 for side in size]
            channels = width
        size = [min(side, 4) for side in size]
        layers += [reduce(tuple(size) if len(size) > 1 else size[0]), nn.Flatten()]
        features = channels * math.prod(size)
    for _ in range(depth):
        layers += [nn.Linear(features, hidden, dtype=torch.float32), nn.ReLU()]
        features = hidden
    if depth == 0:
        layers.append(nn.Linear(features, hidden, dtype=torch.float32))
    return nn.Sequential(*layers)


def beta_masses(ab: Tensor, edges: Tensor) -> Tensor:
    """(B, K) masses of Beta(a, b) in the intervals, from its density at their middles: finite at both ends too."""
    middles = (edges[1:] + edges[:-1]) / 2
    a, b = ab.unbind(1)
    log_density = (a[:, None] - 1) * torch.log(middles) + (b[:, None] - 1) * torch.log1p(-middles)
    return torch.softmax(log_density + torch.log(edges[1:] - edges[:-1]), 1)


class Adam(nn.Module):
    """Adam for a handful of tensors, its state in buffers: saved and moved with the policy, as torch's optimizers are not."""

    def __init__(self, parameters: Sequence[Tensor], lr: float, clip: float = 1.0) -> None:
        super().__init__()
        size = sum(parameter.numel() for parameter in parameters)
        self.lr, self.clip = lr, clip
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float32))
        self.register_buffer("square", torch.zeros(size, dtype=torch.float32))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.mean: Tensor
        self.square: Tensor
        self.count: Tensor

    @torch.no_grad()
    def step(self, parameters: Sequence[Tensor], gradient: Tensor) -> None:
        """One step along a flat gradient, whose norm is cut to `clip` first; none if it is not finite."""
        usable = torch.isfinite(gradient).all()
        gradient = torch.where(usable, gradient * (self.clip / gradient.norm().clamp(min=self.clip)), 0.0)
        share = usable.to(self.mean)
        self.count += usable
        count = self.count.float()  # a power of a whole number would be in torch's default precision
        self.mean.lerp_(gradient, 0.1 * share)
        self.square.lerp_(gradient**2, 0.001 * share)
        update = self.mean / (1 - 0.9**count) / ((self.square / (1 - 0.999**count)).sqrt() + 1e-8)
        update = torch.where(usable, self.lr * update, 0.0)
        for parameter, part in zip(parameters, update.split([parameter.numel() for parameter in parameters]), strict=True):
            parameter.sub_(part.view_as(parameter))

    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()
