"""The live view of a comparison: a line for each run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noisewise.training.config import Config
from noisewise.training.progress import Progress, clock, share_and_time_left, sparkline


class Line(Progress):
    """One run's line."""

    def __init__(self, board: "Board", config: Config) -> None:
        self.board, self.config = board, config
        self.now = (0, 0.0)
        self.last: dict[str, Any] = {}
        self.state = ""

    def step(self, step: int, seconds: float) -> None:
        self.now = (step, seconds)
        self.board.tick()

    def row(self, row: dict[str, Any]) -> None:
        self.last = row

    def tell(self, message: str) -> None:
        self.board.say(message)


class Board:
    """All lines, in a terminal; elsewhere a plain line now and then."""

    def __init__(self, configs: list[Config], console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.lines = [Line(self, config) for config in configs]
        self._said = -1

    def progress(self, i: int) -> Progress:
        return self.lines[i]

    def note(self, i: int, state: str) -> None:
        """Say what happens to a run after training."""
        self.lines[i].state = state
        if not self.console.is_terminal:
            self.say(f"{state}: {self.lines[i].config.sampler}, seed {self.lines[i].config.seed}")

    def say(self, message: str) -> None:
        """Print a line as it is."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the view around a block."""
        if not self.console.is_terminal:
            yield
            return
        with Live(console=self.console, refresh_per_second=4, get_renderable=self._drawn):
            yield

    def share_and_left(self) -> tuple[float, float]:
        """How much of all training is done, and the seconds that the rest will take."""
        both = [share_and_time_left(line.config, (0, 0.0), line.now) for line in self.lines]
        known = [left for _, left in both if left is not None]
        missing = len(both) - len(known)
        return sum(share for share, _ in both) / len(both), sum(known) + missing * (max(known) if known else 0.0)

    def tick(self) -> None:
        """Outside a terminal: a line at every tenth of the way."""
        if not self.console.is_terminal:
            share, left = self.share_and_left()
            if int(share * 10) > self._said:
                self._said = int(share * 10)
                self.say(f"training: {share:.0%} done, about {clock(left)} left")

    def _drawn(self) -> Table:
        share, left = self.share_and_left()
        table = Table(box=None, padding=(0, 1), title=f"{share:.0%} trained, about {clock(left)} left", title_justify="left")
        for heading in ("sampler", "seed", "", "steps", "it/s", "loss", "loss by noise level", "draws by noise level", ""):
            table.add_column(heading)
        for line in self.lines:
            row, (step, seconds) = line.last, line.now
            done = share_and_time_left(line.config, (0, 0.0), line.now)[0]
            table.add_row(
                Text(line.config.sampler, "bold"),
                str(line.config.seed),
                ProgressBar(total=1.0, completed=done, width=16),
                str(step),
                f"{step / seconds:.1f}" if seconds else "",
                f"{row['loss']:.4f}" if row and row["loss"] is not None else "",
                sparkline(row["loss_by_level"], low=0.0) if row else "",
                sparkline(row["density_by_level"], low=0.0) if row else "",
                line.state,
            )
        return table
