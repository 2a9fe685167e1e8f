"""What the user sees of an analysis at work: a live line in a terminal, a plain line a moment elsewhere; all on stderr."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from noisewise.training.progress import clock
from noisewise.training.trainer import Trainer


class Watch:
    """Told of the moments of training that are looked at, and of the work there."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.trainer: Trainer | None = None
        self.what, self.done, self.total = "", 0, 0  # of the work at this moment; both 0 while the model trains
        self.began = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator["Watch"]:
        """Show it around a block."""
        if not self.console.is_terminal:
            yield self
            return
        with Live(console=self.console, refresh_per_second=4, get_renderable=self._drawn, transient=True):
            yield self

    def tell(self, message: str) -> None:
        """Something that the user should read."""
        self.console.print(message, style="yellow", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def moment(self, trainer: Trainer, total: int) -> Iterator[None]:
        """Around the work at one moment, of so many pieces."""
        self.trainer, self.done, self.total = trainer, 0, total
        self.what = f"looking at step {trainer.step}"
        yield
        self.done = self.total = 0
        if not self.console.is_terminal:
            spent = clock(time.monotonic() - self.began)
            self.console.print(f"step {trainer.step}: looked at, {spent} since the start", markup=False, highlight=False)

    @contextmanager
    def work(self, what: str, total: int) -> Iterator[None]:
        """Around work of so many pieces that needs no model."""
        self.what, self.done, self.total = what, 0, total
        yield
        if not self.console.is_terminal:
            self.console.print(f"{what}: {clock(time.monotonic() - self.began)}", markup=False, highlight=False)

    def advance(self, pieces: int = 1) -> None:
        """So many pieces more are done."""
        self.done += pieces

    def _drawn(self) -> Table:
        table = Table.grid(padding=(0, 2))
        spent = f"{clock(time.monotonic() - self.began)} spent"
        if self.total:
            table.add_row(self.what, ProgressBar(total=self.total, completed=self.done, width=30), spent)
        elif self.trainer is None:
            table.add_row("opening data and model", spent)
        else:
            table.add_row("training to the next moment", f"step {self.trainer.step}", spent)
        return table
