"""The draws and losses since the last optimizer step, and whether they came in the right order."""

from typing import Any

from torch import Tensor

from noisewise.levels import check_per_sample
from noisewise.samplers import Draw, LossAt, Sampler


class StepSkipped(Exception):
    """Leaves the sampler's block without teaching it anything: the optimizer made no step in it (fp16 overflowed)."""


class Pending:
    """What micro-batches hand over until the optimizer steps: each `drawn` is followed by one `add`, `take` empties it.

    Args:
        hand_over: the line that the user has to write after each draw, for errors.
    """

    def __init__(self, hand_over: str) -> None:
        self.hand_over = hand_over
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.waiting: Draw | None = None  # drawn, its losses not yet known
        self.latest: Draw | None = None  # the same, and still there when its losses are
        self.draws: list[Draw] = []
        self.losses: list[Tensor] = []
        self.probes: list[LossAt | None] = []

    def check_may_draw(self) -> None:
        """An error if the losses of the last draw were never handed over."""
        if self.waiting is not None:
            raise RuntimeError(
                "sample() was called again before the losses of the last draw were handed over, so the sampler could never "
                f"learn from them: write {self.hand_over} once for each sample(), also when gradients are accumulated. "
                "If that batch is not to be trained on, call drop() first"
            )

    def drawn(self, draw: Draw) -> None:
        """Remember a draw until its losses are known."""
        self.waiting = self.latest = draw

    def drop(self) -> None:
        """Forget the last draw, and its losses if they were handed over: its batch is not trained on."""
        if self.waiting is None and self.draws and self.draws[-1] is self.latest:
            del self.draws[-1], self.losses[-1], self.probes[-1]
        self.waiting = self.latest = None

    def add(self, draw: Draw, losses: Tensor, loss_at: LossAt | None) -> None:
        """Take the losses of the last draw."""
        check_per_sample(losses, draw.u)
        if self.waiting is None:
            raise RuntimeError(
                f"losses were handed over without a draw: call draw = ...sample(x0) first, then {self.hand_over}, once each"
            )
        if draw is not self.waiting:
            raise ValueError("this is not the draw of the last sample(): hand over the losses of each draw before the next one")
        self.waiting = None
        self.draws.append(draw)
        self.losses.append(losses.detach().float())
        self.probes.append(loss_at)

    def take(self) -> tuple[list[Draw], list[Tensor], LossAt | None]:
        """All that was handed over since the last call, and the last batch's `loss_at`."""
        taken = self.draws, self.losses, self.probes[-1] if self.probes else None
        self.clear()
        return taken


def check_sampler(sampler: Any) -> Sampler:
    """The sampler, or an error that says what was handed over instead."""
    if isinstance(sampler, Sampler):
        return sampler
    wrapped = getattr(sampler, "module", None)
    if isinstance(wrapped, Sampler):
        raise TypeError(
            f"the sampler is wrapped in {type(sampler).__name__}: leave it out of accelerator.prepare() and DDP. It has no "
            "gradients, and keeps itself equal on all ranks"
        )
    if isinstance(getattr(sampler, "sampler", None), Sampler):
        raise TypeError("a Recipe was handed over: pass its sampler, recipe.sampler")
    raise TypeError(f"expected a Sampler, such as AdaptiveSampler(objective), got {type(sampler).__name__}")
