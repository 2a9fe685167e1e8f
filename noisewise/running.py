"""Running losses by noise level, and the checks and precision of what keeps them: the ground of samplers and monitor.

Memory is O(bins) however long training runs; everything is gathered over ranks, so all of them hold the same numbers.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from noisewise import distributed

BAD_STEPS = 100  # in a row, with losses that are not finite, that are worth a warning

CELLS = 2**24  # losses times intervals that are summed at once

LARGEST = 1e15  # of losses: its square is a float32; what is beyond counts as not finite


def wide(tensor: Tensor) -> Tensor:
    """In double precision, where the device has it."""
    return tensor if tensor.device.type == "mps" else tensor.double()


Init = TypeVar("Init", bound=Callable[..., None])


def begun_on_cpu(init: Init) -> Init:
    """An `__init__` that makes its tensors on the CPU, whatever the caller's default device; they follow the batches."""

    @functools.wraps(init)
    def on_cpu(*given: Any, **settings: Any) -> None:
        with torch.device("cpu"):
            init(*given, **settings)

    return cast(Init, on_cpu)


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

    Losses that are not finite are left out, and so are outliers: one far beyond what its interval usually has must not take
    over what is learned. With n > 4 losses seen (decayed), an outlier is beyond f times their root mean square, f^2 =
    (0.08 n)^2 + 500 n (n - 4)^-1.5: ten times and more, and more than what moves the mean by a few per cent. A step with
    outliers raises the interval's second moment by a tenth, and its limit with it, so a level that stays is followed. Where
    fewer were seen, an outlier is beyond 1,000 times the median of its batch.

    Args:
        edges: K + 1 increasing numbers from 0 to 1.
        decay: what the past counts, each time an interval is seen again.
    """

    rise = 1.1
    first = 100  # losses an interval, and calls, for which the batch's median is looked at: later, intervals have enough
    many = 10  # outliers, and more than one in `rare` calls; a few are usual in a long training
    rare = 100

    def __init__(self, edges: Tensor, decay: float = 0.98) -> None:
        super().__init__()
        if not 0 < decay < 1:
            raise ValueError(f"decay must lie in (0, 1), got {decay}")
        bins = len(edges) - 1
        self.register_buffer("edges", edges.float().clone())
        self.register_buffer("sums", torch.zeros(3, bins, dtype=torch.float32))  # decayed: count, weighted loss, loss^2
        self.register_buffer("beyond", torch.zeros(bins, dtype=torch.float32))  # how many outliers there were
        self.register_buffer("bins", torch.arange(bins), persistent=False)
        # numbers that would be tensors anew at every step, each a kernel
        self.register_buffer("numbers", torch.tensor([0.0, 1.0, decay, self.rise], dtype=torch.float32), persistent=False)
        self.edges: Tensor
        self.sums: Tensor
        self.beyond: Tensor
        self.bins: Tensor
        self.numbers: Tensor
        self.calls = 0  # of `update`
        self._warned = False

    def update(self, u: Tensor, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Take in one step's losses of this rank and return what all ranks had: (4, K), the number of losses in each interval,
        their (weighted) sum, the sum of their squares, and how many were not finite. A collective call that does not wait for
        the device.

        A masked sum, not a scatter, so that the bits are the same in every run; and few kernels, since it is made every step.

        Args:
            weights: what the losses are to be multiplied by. Outliers, and so the squares, are of the losses themselves: a
                target may well weigh one timestep a thousand times its neighbours.
        """
        where, squares = self._where(u), losses * losses
        weighted = None if weights is None else weights * losses
        finite, outlier = self._judged(where, squares, weighted)
        self.calls += 1
        zero, one, decay, rise = self.numbers
        ordinary = finite ^ outlier
        values = torch.where(ordinary, torch.stack([losses if weighted is None else weighted, squares]), zero)
        kinds = torch.stack([ordinary, ~finite, outlier]).to(values.dtype)
        rows = torch.cat([kinds[:1], values, kinds[1:]])
        batch = distributed.gather_sum(self._by_interval(where, rows, zero))
        happened = batch[::4] > 0  # ordinary losses, and outliers
        fade = torch.where(happened[0], decay, one)
        torch.addcmul(batch[:3], self.sums, fade, out=self.sums)
        self.sums[2].mul_(torch.where(happened[1], rise, one))
        self.beyond += batch[4]
        return batch[:4]

    def ordinary(self, u: Tensor, losses: Tensor, weights: Tensor | None = None) -> Tensor:
        """Which of these losses `update` would take in."""
        finite, outlier = self._judged(self._where(u), losses * losses, None if weights is None else weights * losses)
        return finite ^ outlier

    def _by_interval(self, where: Tensor, rows: Tensor, zero: Tensor) -> Tensor:
        """The sums of each row in each interval; of large batches part by part, for the memory."""
        size = max(1, CELLS // len(self.bins))
        if len(where) > size:
            halves = zip(where.tensor_split(2), rows.tensor_split(2, 1), strict=True)
            first, second = (self._by_interval(*half, zero) for half in halves)
            return first + second
        return torch.where(where[:, None] == self.bins, rows[:, :, None], zero).sum(1)

    def _where(self, u: Tensor) -> Tensor:
        return torch.bucketize(u, self.edges[1:-1], right=True)

    def _judged(self, where: Tensor, squares: Tensor, weighted: Tensor | None) -> tuple[Tensor, Tensor]:
        """Which losses are finite, also with their weights, and which of those are outliers."""
        count, _, total = self.sums
        limits = (total * (0.0064 * count).add((count - 4) ** -1.5, alpha=500))[where]  # NaN where too few were seen
        n = len(squares)
        if n and self.calls * n < self.first * max(n, len(self.bins)):
            median = squares.sort().values[(n - 1) // 2]  # NaN counts as large; nanmedian would wait for a GPU
            limits = torch.where(limits > 0, limits, 1e6 * median)
        finite = (squares if weighted is None else torch.maximum(squares, weighted * weighted)) < LARGEST**2
        return finite, finite & (squares > limits) & (limits > 0)  # nothing but zeros so far sets no limit

    @property
    def outliers(self) -> Tensor:
        """How many there were."""
        return self.beyond.sum()

    def warn(self) -> None:
        """Say, once, that there were many outliers; for steps that wait for the device anyway."""
        if not self._warned and int(self.outliers) >= max(self.many, self.calls / self.rare):
            self._warned = True
            warnings.warn(
                f"{int(self.outliers)} losses so far were ten times and more above what their noise levels usually have, and "
                "were left out of what is learned. Look at the data, or lower the learning rate",
                RuntimeWarning,
                stacklevel=2,
            )

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        squares, beyond = (state_dict.pop(f"{prefix}usual.{name}", None) for name in ("sums", "counts"))
        if squares is not None and prefix + "sums" in state_dict:  # they were kept apart, and those of `sums` weighted
            state_dict[prefix + "sums"] = torch.cat([state_dict[prefix + "sums"][:2], squares[:1]])
        state_dict.setdefault(prefix + "beyond", torch.zeros_like(self.beyond) if beyond is None else beyond)
        state_dict.setdefault(prefix + "_extra_state", torch.tensor(0, device="cpu"))  # calls were not saved
        super()._load_from_state_dict(state_dict, prefix, *args)

    @property
    def seen(self) -> Tensor:
        """Which intervals have had a loss yet."""
        return self.sums[0] > 0

    def mean(self) -> Tensor:
        """The mean (weighted) loss in each interval (the mean of all where there was none yet)."""
        return self._moment(1)

    def second_moment(self) -> Tensor:
        """The mean squared loss in each interval, without weights."""
        return self._moment(2)

    def _moment(self, row: int) -> Tensor:
        everywhere = self.sums[row].sum() / self.sums[0].sum().clamp(min=1e-30)
        return torch.where(self.seen, self.sums[row] / self.sums[0].clamp(min=1e-30), everywhere)
