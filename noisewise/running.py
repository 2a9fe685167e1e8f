"""Running losses by noise level, and the checks and precision of what keeps them: the ground of samplers and monitor.

Memory is O(bins) however long training runs; everything is gathered over ranks, so all of them hold the same numbers.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from noisewise import distributed

BAD_STEPS = 100  # in a row, with losses that are not finite, that are worth a warning

LARGEST = 1e15  # of losses: its square is a float32; what is beyond counts as not finite


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


class Usual(nn.Module):
    """How large an interval's losses usually are, so that one far beyond them cannot take over what is learned.

    With n > 4 losses seen (decayed), an outlier is beyond f times their root mean square. f is the root of (0.08 n)^2 +
    100 n / (n - 4) + 400 n / (n - 4)^2: what is less moves their mean by about 10 % at most, or is nothing unusual. Outliers
    are counted, and those of a step together count as a rise by 10 %; so a level that stays is followed. An interval
    with fewer than 8 losses takes what is beyond 1,000 times the batch's typical loss as 10 times that.

    What is judged are losses before any weight: a target may well weigh one timestep a thousand times its neighbours.

    Args:
        bins: the number of intervals.
    """

    rise = 1.1
    first = 100  # calls that look for this: later, intervals have more losses

    def __init__(self, bins: int) -> None:
        super().__init__()
        self._calls = 0  # of this process; not saved, since it changes no ordinary result
        self.register_buffer("sums", torch.zeros(2, bins, dtype=torch.float32))  # decayed: loss^2, count
        self.register_buffer("counts", torch.zeros(bins, dtype=torch.float32))  # of outliers
        self.register_buffer("factors", torch.tensor([1.0, self.rise], dtype=torch.float32), persistent=False)
        self.sums: Tensor
        self.counts: Tensor
        self.factors: Tensor
        self._warned = False

    def tamed(self, where: Tensor, losses: Tensor) -> Tensor:
        """The losses of a batch, each in its interval; where few were seen, those beyond all measure as what is typical."""
        if self._calls >= self.first:
            return losses
        self._calls += 1
        size = torch.where(losses.abs() < LARGEST, losses.abs(), 0.0)
        common = size <= 2 * size.mean()
        typical = torch.where(common, size, 0.0).sum() / common.sum()
        strange = (size > 1000 * typical) & (self.sums[1] < 8)[where]
        return torch.where(strange, losses.sign() * 10 * typical, losses)

    def beyond(self, where: Tensor, squares: Tensor) -> Tensor:
        """Which of a batch's squared losses are outliers in their intervals."""
        total, count = self.sums
        inverse = 1 / (count - 4).clamp(min=0)  # infinite where too few were seen, and so is the limit (or nothing, NaN)
        return squares > (total * (0.0064 * count + inverse * (100 + 400 * inverse)))[where]

    def learn(self, seen: Tensor, outliers: Tensor, fade: Tensor) -> Tensor:
        """Take in what a step had in each interval, on all ranks: the sum of squared losses and their number, (2, K), and
        outliers; `fade` is what the past counts. Returns by what an interval's moments rise."""
        one, rise = self.factors
        raised = torch.where(outliers > 0, rise, one)
        torch.addcmul(seen, self.sums, fade, out=self.sums)
        self.sums[0] *= raised * raised
        self.counts += outliers
        return raised

    @property
    def outliers(self) -> Tensor:
        """How many there were."""
        return self.counts.sum()

    def warn(self) -> None:
        """Say, once, that there were outliers; for steps that wait for the device anyway."""
        if not self._warned and int(self.outliers) > 0:
            self._warned = True
            warnings.warn(
                f"{int(self.outliers)} losses so far were ten times and more above what their noise levels usually have: they "
                "count as a rise by 10 % at most. Look at the data, or lower the learning rate",
                RuntimeWarning,
                stacklevel=2,
            )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name, fresh in Usual(self.sums.shape[1]).state_dict().items():  # saved before there was a limit: start anew
            state_dict.setdefault(prefix + name, fresh)
        super()._load_from_state_dict(state_dict, prefix, *args)


class RunningLoss(KeepsPrecision):
    """Mean and second moment of the loss in intervals of u.

    Args:
        edges: K + 1 increasing numbers from 0 to 1.
        decay: what the past counts, each time an interval is seen again.

    Losses that are not finite are left out, and outliers bounded (`usual`).
    """

    def __init__(self, edges: Tensor, decay: float = 0.98) -> None:
        super().__init__()
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie in (0, 1), got {decay}")
        self.decay = decay
        bins = len(edges) - 1
        self.register_buffer("edges", edges.float().clone())
        self.register_buffer("sums", torch.zeros(3, bins, dtype=torch.float32))  # decayed: count, loss, loss^2
        self.usual = Usual(bins)
        self.register_buffer("bins", torch.arange(bins), persistent=False)
        self.register_buffer("one", torch.ones((), dtype=torch.float32), persistent=False)
        self.edges: Tensor
        self.sums: Tensor
        self.bins: Tensor
        self.one: Tensor

    def update(self, u: Tensor, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Take in one step's losses of this rank and return what all ranks had: (4, K), the number of losses in each interval,
        their sum, the sum of their squares, and how many were not finite. A collective call that does not wait for the device.

        A masked sum, not a scatter, so that the bits are the same in every run; and few kernels, since it is made every step.

        Args:
            weights: what the losses are to be multiplied by; outliers are told by the losses themselves.
        """
        where = torch.bucketize(u, self.edges[1:-1], right=True)
        losses = self.usual.tamed(where, losses)
        squares = losses * losses
        weighted = losses if weights is None else weights * losses
        weighted_squares = squares if weights is None else weighted * weighted
        finite = (squares if weights is None else torch.maximum(squares, weighted_squares)) < LARGEST**2
        outlier = self.usual.beyond(where, squares) & finite
        ordinary = finite ^ outlier
        values = torch.where(ordinary, torch.stack([weighted, weighted_squares, squares]), 0.0)
        rows = torch.stack([outlier, values[2]]), torch.stack([ordinary, values[0], values[1], ~finite])
        member = where[:, None] == self.bins
        sums = [torch.where(member, one[:, :, None], 0.0).sum(1) for one in rows]  # apart: how a GPU adds depends on the size
        everything = distributed.gather_sum(torch.cat(sums))
        batch = everything[2:]
        fade = torch.where(batch[0] > 0, self.decay, self.one)  # of two numbers it would be in torch's default precision
        raised = self.usual.learn(everything[1:3], everything[0], fade)
        torch.addcmul(batch[:3], self.sums, fade, out=self.sums)
        self.sums[1:] *= raised
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
