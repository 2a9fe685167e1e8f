"""How far a command is: a bar in a terminal, lines in a log."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from noisewise import distributed


@contextmanager
def bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Progress in the first process, a bar in a terminal and a line at each tenth elsewhere.

    The block is given a function that adds to what is done.
    """
    console = Console(stderr=True)
    if distributed.rank() > 0 or not console.is_terminal:
        yield _Tenths(what, total).add if distributed.rank() == 0 else lambda count: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.update(task, advance=count)


class _Tenths:
    """Prints a line at each tenth of the way, for log files; nothing for work that is done in one piece."""

    def __init__(self, what: str, total: int) -> None:
        self.what, self.total, self.done, self.said = what, total, 0, 0

    def add(self, count: int) -> None:
        self.done += count
        tenth = 10 * self.done // max(self.total, 1)
        if tenth > self.said and count < self.total:
            self.said = tenth
            print(f"{self.what}: {self.done} of {self.total}", file=sys.stderr, flush=True)
