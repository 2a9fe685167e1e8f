"""Watches the numbers of training without waiting for the device: means between log points, and steps that went wrong."""

import torch
from torch import Tensor, nn

from noisewise import distributed

BEFORE = "they were before the last checkpoint, so their timesteps are not known"


class Diverged(FloatingPointError):
    """Too many steps in a row had a loss or gradient that is not finite."""


class Guard(nn.Module):
    """Sums since the last log point, and a count of skipped steps; all in buffers, so that a checkpoint holds them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("loss_sum", "norm_sum"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))
        for name in ("good", "skipped", "run", "longest"):
            self.register_buffer(name, torch.zeros((), dtype=torch.int64))
        self.loss_sum: Tensor
        self.norm_sum: Tensor
        self.good: Tensor
        self.skipped: Tensor
        self.run: Tensor
        self.longest: Tensor
        self._last_bad: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def update(self, loss: Tensor, norm: Tensor, finite: Tensor, times: Tensor, losses: Tensor) -> None:
        """Take in one step: the loss, the gradient's norm, whether the step was made, and the samples' times and losses."""
        if finite.device.type == "cpu" and bool(finite):  # the usual step, where looking costs nothing
            self.loss_sum += loss
            self.norm_sum += norm
            self.good += 1
            self.run.zero_()
            return
        self.loss_sum += torch.where(finite, loss, 0.0)
        self.norm_sum += torch.where(finite, norm, 0.0)
        self.good += finite
        self.skipped += ~finite
        self.run.add_(1).mul_(~finite)
        torch.maximum(self.longest, self.run, out=self.longest)
        if self._last_bad is None or self._last_bad[0].shape != times.shape:  # none yet, or a batch of another size
            self._last_bad = (torch.full_like(times, torch.nan, dtype=torch.float64), torch.zeros_like(losses).double())
        for kept, now in zip(self._last_bad, (times, losses), strict=True):
            kept.copy_(torch.where(finite, kept, now.double()))

    def forget(self) -> None:
        """Drop what is known of the last bad step, where it lies."""
        if self._last_bad is not None:
            self._last_bad[0].fill_(torch.nan)

    def means(self) -> tuple[float, float]:
        """Mean loss and gradient norm of the steps since the last call, NaN if there was none; waits for the device."""
        good = int(self.good)
        result = (float(self.loss_sum) / good, float(self.norm_sum) / good) if good else (float("nan"), float("nan"))
        for sums in (self.loss_sum, self.norm_sum, self.good):
            sums.zero_()
        return result

    def check(self, limit: int, what_now: str) -> None:
        """Raise Diverged if `limit` steps in a row were skipped since the last call; waits for the device."""
        longest = int(self.longest)
        self.longest.copy_(self.run)
        if longest >= limit:
            raise Diverged(
                f"{longest} steps in a row had a loss or gradient that is not finite and were skipped "
                f"({int(self.skipped)} in all); {self._culprits()}. {what_now}"
            )

    def _culprits(self) -> str:
        if self._last_bad is None:
            return BEFORE
        times, losses = (distributed.gather_rows(values) for values in self._last_bad)  # all ranks raise at the same step
        if torch.isnan(times).all():
            return BEFORE
        bad = times[~torch.isfinite(losses)].unique().tolist()
        if bad:
            return f"in the last one the loss was not finite at {_listed(bad)} ({len(bad)} of {len(times)} samples)"
        worst = times[losses.argsort(descending=True)[:5]].unique().tolist()
        return f"in the last one all losses were finite and the gradient was not; the largest losses were at {_listed(worst)}"


def _listed(times: list[float], most: int = 12) -> str:
    shown = ", ".join(f"{time:g}" for time in times[:most])
    return f"timestep{'s' * (len(times) > 1)} {shown}" + (", ..." if len(times) > most else "")
