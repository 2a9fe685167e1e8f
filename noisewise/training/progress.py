"""What the user sees of a running training: a live line in a terminal, plain lines in a log file."""

import math
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noisewise.printable import printable
from noisewise.training.config import Config

BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None], low: float | None = None, high: float | None = None) -> str:
    """Numbers as a row of bars, from `low` to `high` (by default their own range); a dot where there is none."""
    values = [value if value is not None and math.isfinite(value) else None for value in values]
    known = [value for value in values if value is not None]
    if not known:
        return "·" * len(values)
    low, high = (min(known) if low is None else low), (max(known) if high is None else high)
    span = (high - low) or 1.0
    places = [None if value is None else min(max((value - low) / span, 0.0), 1.0) for value in values]
    return "".join("·" if place is None else BARS[round(place * (len(BARS) - 1))] for place in places)


def coarser(values: Sequence[float], most: int = 10) -> list[float]:
    """The means of neighbours, so that at most so many are left."""
    size = -(-len(values) // most)
    return [sum(part) / len(part) for part in (values[i : i + size] for i in range(0, len(values), size))]


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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


class Lines(Progress):
    """One plain line at each log point, at most one in `pause` seconds: for log files."""

    def __init__(self, pause: float = 5.0) -> None:
        self.pause = pause
        self._last = float("-inf")
        self._total = 0

    @contextmanager
    def running(self, config: Config, step: int) -> Iterator[None]:
        self._total = config.steps
        yield

    def step(self, step: int, seconds: float) -> None: ...

    def row(self, row: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - self._last >= self.pause or row["step"] == self._total:
            self._last = now
            print(f"step {row['step']}/{self._total}  {summary(row)}", flush=True)

    def tell(self, message: str) -> None:
        print(printable(message), file=sys.stderr, flush=True)


def summary(row: dict[str, Any]) -> str:
    """The most important numbers of a row of metrics."""
    speed = row["steps_per_second"]
    parts = [
        f"loss {row['loss']:.4f}" if row["loss"] is not None else "no step was made",
        f"by noise level {sparkline(row['loss_by_level'], low=0.0)}",
        f"drawn {sparkline(coarser(row['density_by_level']), low=0.0)}",
        f"{speed:.1f} it/s" if speed else "",
        f"{row['skipped']} skipped" if row["skipped"] else "",
    ]
    return "  ".join(part for part in parts if part)


class Bar(Progress):
    """A live bar in a terminal, with time left, loss, and loss and density by noise level."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._config = Config()
        self._row: dict[str, Any] = {}
        self._start = (0, 0.0)  # step and seconds when this process began
        self._now = (0, 0.0)

    @contextmanager
    def running(self, config: Config, step: int) -> Iterator[None]:
        self._config, self._start, self._now = config, (step, -1.0), (step, 0.0)
        with Live(console=self.console, refresh_per_second=4, get_renderable=self._drawn):
            yield

    def step(self, step: int, seconds: float) -> None:
        if self._start[1] < 0:
            self._start = (step, seconds)  # the first step may have compiled something
        self._now = (step, seconds)

    def row(self, row: dict[str, Any]) -> None:
        self._row = row

    def tell(self, message: str) -> None:
        self.console.print(printable(message), style="yellow", highlight=False, markup=False)

    def _drawn(self) -> Group:
        step, seconds = self._now
        share, left = share_and_time_left(self._config, self._start, self._now)
        table = Table.grid(padding=(0, 2))
        table.add_row(
            Text(self._config.sampler, style="bold"),
            ProgressBar(total=1.0, completed=share, width=30),
            f"step {step}/{self._config.steps}",
            f"{clock(seconds)} spent" + (f", {clock(left)} left" if left is not None else ""),
        )
        return Group(table, Text(summary(self._row) if self._row else "first log point to come"))


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


def suitable_progress(main: bool = True) -> Progress:
    """A bar in a terminal, lines elsewhere, nothing in processes other than the first."""
    if not main:
        return Quiet()
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines()
