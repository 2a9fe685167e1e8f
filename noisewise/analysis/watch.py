"""What the user sees of an analysis at work: which moment of training it looks at, and how far it is there."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

from noisewise.training.display import Display, clock, line
from noisewise.training.trainer import Trainer


class Watch:
    """Told of the moments of training that are looked at, and of the work there."""

    def __init__(self, console: Console | None = None) -> None:
        self.display = Display(console)
        self.trainer: Trainer | None = None
        self.what, self.done, self.total = "", 0, 0  # of the work at this moment; both 0 while the model trains
        self.began = time.monotonic()

    @contextmanager
    def shown(self) -> Iterator["Watch"]:
        """Show it around a block."""
        with self.display.shown(self._drawn, transient=True):
            yield self

    def tell(self, message: str) -> None:
        """Something that the user should read."""
        self.display.say(message, "yellow")

    @contextmanager
    def moment(self, trainer: Trainer, total: int) -> Iterator[None]:
        """Around the work at one moment, of so many pieces."""
        self.trainer = trainer
        with self.work(f"looking at step {trainer.step}", total, f"step {trainer.step}: looked at"):
            yield

    @contextmanager
    def work(self, what: str, total: int, after: str | None = None) -> Iterator[None]:
        """Around work of so many pieces; a log file gets a line `after` it."""
        self.what, self.done, self.total = what, 0, total
        yield
        self.done = self.total = 0
        if not self.display.terminal:
            self.display.say(f"{after or what}, {clock(time.monotonic() - self.began)} since the start")

    def advance(self, pieces: int = 1) -> None:
        """So many pieces more are done."""
        self.done += pieces

    def _drawn(self) -> Table:
        spent = f"{clock(time.monotonic() - self.began)} spent"
        if self.total:
            return line(self.what, self.done / self.total, spent)
        if self.trainer is None:
            return line("opening data and model", spent)
        return line("training to the next moment", f"step {self.trainer.step}", spent)
