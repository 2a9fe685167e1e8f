"""Running losses by noise level, and the checks and precision of what keeps them: the ground of samplers and monitor.

Memory is O(bins) however long training runs; everything is gathered over ranks, so all of them hold the same numbers.
"""

import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from noisewise import distributed

BAD_STEPS = 100  # in a row, with losses that are not finite, that are worth a warning


def wide(tensor: Tensor) -> Tensor:
    """In double precision, where the device has it."""
    return tensor if tensor.device.type == "mps" else tensor.double()


class KeepsPrecision(nn.Module):
    """A module that moves between devices, and whose numbers `.half()` and `.to(bfloat16)` leave as they are.

    Masses, edges and running means of noise levels need float32: in bfloat16 hundreds of a thousand timesteps become one.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "KeepsPrecision":
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            return result if result.dtype == tensor.dtype else tensor.to(result.device)

        super()._apply(moved, recurse)
        return self


def even_edges(bins: int) -> Tensor:
    """bins + 1 numbers from 0 to 1, evenly spaced."""
    if bins < 1:
        raise ValueError(f"bins must be >= 1, got {bins}")
    return torch.arange(bins + 1, dtype=torch.float64).div(bins).float()


class Skipped(nn.Module):
    """Counts losses that are not finite: `total` of them, in `run` steps in a row. Only `warn` waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.int64))
        self.register_buffer("run", torch.zeros((), dtype=torch.int64))
        self.total: Tensor
        self.run: Tensor
        self._warned = False

    def count(self, bad: Tensor) -> None:
        """Take in one step's number of bad losses (over all ranks)."""
        self.total += bad.long()
        self.run.add_(1).mul_(bad > 0)

    def note(self, bad: Tensor) -> None:
        """Count values that are not finite outside the losses of a step (in a probe, say)."""
        self.total += bad.long()

    def warn(self) -> None:
        """Warn, once, if each of the last `BAD_STEPS` steps had some; for steps that wait for the device anyway."""
        if not self._warned and int(self.run) >= BAD_STEPS:
            self._warned = True
            warnings.warn(
                f"each of the last {int(self.run)} steps had losses that are not finite ({int(self.total)} losses in all): "
                "training has diverged. Lower the learning rate or resume from an earlier checkpoint",
                RuntimeWarning,
                stacklevel=2,
            )


class RunningLoss(KeepsPrecision):
    """Mean and second moment of the loss in intervals of u.

    Args:
        edges: K + 1 increasing numbers from 0 to 1.
        decay: what the past counts, each time an interval is seen again.

    Losses that are not finite are left out.
    """

    def __init__(self, edges: Tensor, decay: float = 0.98) -> None:
        super().__init__()
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie in (0, 1), got {decay}")
        self.decay = decay
        bins = len(edges) - 1
        self.register_buffer("edges", edges.float().clone())
        self.register_buffer("sums", torch.zeros(3, bins, dtype=torch.float32))  # decayed: count, loss, loss^2
        self.register_buffer("bins", torch.arange(bins), persistent=False)
        self.register_buffer("one", torch.ones((), dtype=torch.float32), persistent=False)
        self.edges: Tensor
        self.sums: Tensor
        self.bins: Tensor
        self.one: Tensor

    def update(self, u: Tensor, losses: Tensor) -> Tensor:
        """Take in one step's losses of this rank and return what all ranks had: (4, K), the number of losses in each interval,
        their sum, the sum of their squares, and how many were not finite. A collective call that does not wait for the device.

        A masked sum, not a scatter, so that the bits are the same in every run; and few kernels, since it is made every step.
        """
        finite = torch.isfinite(losses)
        losses = torch.where(finite, losses, 0.0)
        member = torch.bucketize(u, self.edges[1:-1], right=True)[:, None] == self.bins
        rows = torch.stack([finite, losses, losses * losses, ~finite])
        batch = distributed.gather_sum(torch.where(member, rows[:, :, None], 0.0).sum(1))
        fade = torch.where(batch[0] > 0, self.decay, self.one)  # of two numbers it would be in torch's default precision
        torch.addcmul(batch[:3], self.sums, fade, out=self.sums)
        return batch

    @property
    def seen(self) -> Tensor:
        """Which intervals have had a loss yet."""
        return self.sums[0] > 0

    def mean(self) -> Tensor:
        """The mean loss in each interval (the mean of all where there was none yet)."""
        return self._moment(1)

    def second_moment(self) -> Tensor:
        """The mean squared loss in each interval."""
        return self._moment(2)

    def _moment(self, row: int) -> Tensor:
        everywhere = self.sums[row].sum() / self.sums[0].sum().clamp(min=1e-30)
        return torch.where(self.seen, self.sums[row] / self.sums[0].clamp(min=1e-30), everywhere)
