"""What the user sees of work that takes long, on stderr: a view that renews itself in a terminal, plain lines in a log file."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noisewise import distributed
from noisewise.training.config import Config
from noisewise.words import printable

BARS = "▁▂▃▄▅▆▇█"


class Display:
    """A terminal or a log file; by default stderr, of the first process alone."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, quiet=distributed.rank() > 0)
        self.terminal = self.console.is_terminal and not self.console.quiet
        self._tenth = -1

    @contextmanager
    def shown(self, draw: Callable[[], RenderableType], *, every: float = 0.25, transient: bool = False) -> Iterator[None]:
        """A terminal shows what `draw` returns around the block, anew `every` so many seconds; a log file shows nothing."""
        if not self.terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=1 / every, get_renderable=draw, transient=transient):
            yield

    def say(self, message: str, style: str | None = None) -> None:
        """A message as it is, above the view."""
        self.console.print(printable(message), style=style, markup=False, highlight=False, soft_wrap=True)

    def say_tenth(self, share: float, message: str) -> None:
        """For log files: the message, once in each tenth of the way."""
        if not self.terminal and int(10 * share) > self._tenth:
            self._tenth = int(10 * share)
            self.say(message)


FAR_OFF = 1.5  # times what was said to be left: too much to go on saying it


class Pace:
    """When the rest will be done, by the clock on the wall since work began to move: programs start and compile before."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._clock = now
        self._found: float | None = None  # the share at the first look, of earlier work
        self._moved: tuple[float, float] | None = None  # moment and share when it had grown for the first time
        self._least = math.inf  # of what was said to be left: it never counts up

    def time_left(self, share: float, to_do: float | None = None) -> float | None:
        """Seconds until `to_do` (by default the rest) is done; None where that is not known, or what was said was far off."""
        to_do = 1 - share if to_do is None else to_do
        if self._found is None:
            self._found = share
        if self._moved is None and share > self._found:
            self._moved = self._clock(), share
        if self._moved is None or share <= self._moved[1] or not to_do:
            return None
        left = to_do * (self._clock() - self._moved[0]) / (share - self._moved[1])
        self._least = min(self._least, left)
        return self._least if left < FAR_OFF * self._least else None


class Count:
    """So many of `total` pieces are done: a bar in a terminal, a line at each tenth elsewhere."""

    def __init__(self, what: str, total: int, console: Console | None = None) -> None:
        self.what, self.total, self.done = what, total, 0
        self.display, self.pace = Display(console), Pace()

    @contextmanager
    def shown(self) -> Iterator["Count"]:
        """Show it around a block."""
        with self.display.shown(self._drawn):
            yield self

    def add(self, pieces: int = 1) -> None:
        """So many more are done."""
        self.done += pieces
        if pieces < self.total and self._share >= 0.1:  # work that is done in one piece is not worth a line
            self.display.say_tenth(self._share, f"{self.what}: {self.done} of {self.total}")

    def reach(self, done: int) -> None:
        """So many are done in all."""
        self.add(done - self.done)

    @property
    def _share(self) -> float:
        return self.done / max(self.total, 1)

    def _drawn(self) -> Table:
        left = self.pace.time_left(self._share)
        return line(self.what, self._share, f"{self.done}/{self.total}", "" if left is None else f"{clock(left)} left")


def line(*cells: str | Text | float) -> Table:
    """Cells side by side; a number is a share of the way, as a bar."""
    table = Table.grid(padding=(0, 2))
    bars = [ProgressBar(total=1.0, completed=cell, width=30) if isinstance(cell, float) else cell for cell in cells]
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in bars))
    return table


def clock(seconds: float) -> str:
    """h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


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


# A training run -------------------------------------------------------------------------------------------------------


class Progress:
    """Told what happens in a run; this one shows nothing."""

    @contextmanager
    def running(self, config: Config, step: int) -> Iterator[None]:
        """Around a run that begins at this step."""
        yield

    def step(self, step: int, seconds: float) -> None:
        """A step is done."""

    def row(self, row: dict[str, Any]) -> None:
        """A row of metrics."""

    def tell(self, message: str) -> None:
        """Something that the user should read."""


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
        said = left is not None and left < FAR_OFF * self._left
        times = f"{clock(seconds)} spent" + (f", {clock(self._left)} left" if said else "")
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
