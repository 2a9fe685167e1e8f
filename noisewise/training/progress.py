"""What a run tells while it trains, and how the user sees it."""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from noisewise.training.config import Config
from noisewise.training.display import Display, clock, coarser, line, sparkline


class Progress(ABC):
    """Told what happens in a run, and shows it."""

    @contextmanager
    def running(self, config: Config, step: int) -> Iterator[None]:
        """Around a run that begins at this step."""
        yield

    @abstractmethod
    def step(self, step: int, seconds: float) -> None:
        """A step is done."""

    @abstractmethod
    def row(self, row: dict[str, Any]) -> None:
        """A row of metrics."""

    @abstractmethod
    def tell(self, message: str) -> None:
        """Something that the user should read."""


class Quiet(Progress):
    """Shows nothing."""

    def step(self, step: int, seconds: float) -> None: ...

    def row(self, row: dict[str, Any]) -> None: ...

    def tell(self, message: str) -> None: ...


class Shown(Progress):
    """A live bar with time left, loss, and loss and density by noise level; in a log file a line at each log point.

    Args:
        console: where to; by default stderr. Lines for log files go to stdout.
        pause: seconds between two lines of a log file, at the least.
    """

    def __init__(self, console: Console | None = None, pause: float = 5.0) -> None:
        self.display, self.pause = Display(console), pause
        self._config = Config()
        self._row: dict[str, Any] = {}
        self._start = self._now = (0, 0.0)  # step and seconds, when this process began and now
        self._left = float("inf")  # the least time that was said to be left: it never counts up
        self._last = float("-inf")  # when the last line was printed

    @contextmanager
    def running(self, config: Config, step: int) -> Iterator[None]:
        self._config, self._start, self._now, self._left = config, (step, -1.0), (step, 0.0), float("inf")
        with self.display.shown(self._drawn):
            yield

    def step(self, step: int, seconds: float) -> None:
        if self._start[1] < 0:
            self._start = (step, seconds)  # the first step may have compiled something
        self._now = (step, seconds)

    def row(self, row: dict[str, Any]) -> None:
        self._row, now = row, time.monotonic()
        if not self.display.terminal and (now - self._last >= self.pause or row["step"] == self._config.steps):
            self._last = now
            print(f"step {row['step']}/{self._config.steps}  {summary(row)}", flush=True)

    def tell(self, message: str) -> None:
        self.display.say(message, "yellow")

    def _drawn(self) -> Group:
        (step, seconds), config = self._now, self._config
        share, left = share_and_time_left(config, self._start, self._now)
        self._left = self._left if left is None else min(self._left, left)
        times = f"{clock(seconds)} spent" + (f", {clock(self._left)} left" if left is not None else "")
        first = line(Text(config.sampler, style="bold"), share, f"step {step}/{config.steps}", times)
        return Group(first, Text(summary(self._row) if self._row else "first log point to come"))


def summary(row: dict[str, Any]) -> str:
    """The most important numbers of a row of metrics."""
    speed = row["steps_per_second"]
    parts = [
        f"loss {row['loss']:.4f}" if row["loss"] is not None else "no step was made",
        f"by noise level {sparkline(row['loss_by_level'], low=0.0)}",
        f"drawn {sparkline(coarser(row['density_by_level']), low=0.0)}",
        f"{speed:.1f} it/s" if speed else "",
        f"{row['skipped']} skipped" if row["skipped"] else "",
        f"{row['outliers']} outliers" if row.get("outliers") else "",
    ]
    return "  ".join(part for part in parts if part)


def share_and_time_left(config: Config, start: tuple[int, float], now: tuple[int, float]) -> tuple[float, float | None]:
    """How much of the budget is spent, and the seconds that the rest will take (None before that can be known)."""
    steps, seconds = now[0] - start[0], now[1] - max(start[1], 0.0)
    share, left = now[0] / config.steps, None
    if steps > 0 and seconds > 0:
        left = (config.steps - now[0]) * seconds / steps
    if config.seconds is not None:
        by_clock = max(config.seconds - now[1], 0.0)
        left = by_clock if left is None else min(left, by_clock)
        share = max(share, now[1] / config.seconds)
    return min(share, 1.0), left
