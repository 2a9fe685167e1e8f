"""The live view of a comparison: a line for each run, read from the runs' folders, whoever executes them."""

import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noisewise.study.outcome import read_failure
from noisewise.study.status import Status
from noisewise.training.config import Config
from noisewise.training.progress import clock, coarser, share_and_time_left, sparkline

REFRESH = 0.5  # seconds
AROUND = 4  # lines of a terminal that are not runs
ORDER = ("evaluating", "training", "waiting", "failed", "finished")  # what is shown where there is no room for all


class Tail:
    """The rows that a JSONL file has got since the last look."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def rows(self) -> list[dict[str, Any]]:
        """New rows; all of them if the file has been cut since."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:  # not begun, or just being replaced
            return []
        with file:
            if file.seek(0, os.SEEK_END) < self._read:
                self._read = 0
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + 1 if whole else 0
        found = []
        for line in whole.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:  # cut off by a kill, or the middle of a row of a file that was cut and has grown
                continue
        return [row for row in found if isinstance(row, dict)]


class Line:
    """What is known of one run."""

    def __init__(self, config: Config) -> None:
        self.config, self.folder = config, Path(config.out or "")
        self.now = (0, 0.0)  # step and seconds
        self.row: dict[str, Any] = {}  # of training
        self.evaluation: dict[str, Any] = {}
        self.state, self.reason = "waiting", ""
        self._tail = Tail(self.folder / "metrics.jsonl")

    def look(self) -> None:
        """Read what is new."""
        for row in self._tail.rows():
            if row.get("kind") == "evaluation":
                self.evaluation = row
            elif "kind" not in row:
                self.row = row
            self.now = (row.get("step", 0), row.get("seconds", 0.0))
        status, failure = Status.read(self.folder), read_failure(self.folder)
        self.state, self.reason = "waiting" if status is None else status.state, ""
        if status is not None:
            self.now = (status.step, status.seconds)
        if self.evaluation.get("share") == 1:
            self.state = "finished"
        elif failure is not None:
            self.state, self.reason = "failed", failure.message

    @property
    def name(self) -> str:
        return f"{self.config.process}, {self.config.sampler}, seed {self.config.seed}"

    def share_and_left(self) -> tuple[float, float | None]:
        """How much of the budget is spent, and the seconds that the rest will take."""
        if self.state == "finished":
            return 1.0, 0.0
        share, left = share_and_time_left(self.config, (0, 0.0), self.now)
        return share, 0.0 if self.state == "failed" else left


class Board:
    """All lines, in a terminal; elsewhere a plain line at every tenth of the way and for each run that fails."""

    def __init__(self, configs: Sequence[Config], console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.lines = [Line(config) for config in configs]
        self.share = 0.0  # of all training that is done
        self._said = -1
        self._failed: set[str] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the view around a block."""
        if self.console.is_terminal:
            with Live(console=self.console, refresh_per_second=1 / REFRESH, get_renderable=self.drawn):
                yield
            return
        over = threading.Event()
        watching = threading.Thread(target=self._watch, args=(over,), daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
            self.tick()

    def _watch(self, over: threading.Event) -> None:
        while not over.wait(REFRESH):
            self.tick()

    def tick(self) -> None:
        """Look, and say what is new."""
        summary = self.look()
        for line in self.lines:
            if line.state == "failed" and line.name not in self._failed:
                self._failed.add(line.name)
                self.say(f"failed: {line.name}: {line.reason}")
        if int(self.share * 10) > self._said:
            self._said = int(self.share * 10)
            self.say(summary)

    def say(self, message: str) -> None:
        """Print a line as it is."""
        self.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def look(self) -> str:
        """Read what is new, and sum it up: how much of all training is done, and the time that the rest will take."""
        for line in self.lines:
            line.look()
        steps, seconds = (sum(line.now[i] for line in self.lines) for i in (0, 1))
        self.share = sum(line.share_and_left()[0] for line in self.lines) / len(self.lines)
        left = 0.0
        for line in self.lines:
            own = line.share_and_left()[1]
            if own is None and not steps:
                return f"{self.share:.0%} trained"
            left += line.config.steps * seconds / steps if own is None else own  # one that has not begun is like the others
        return f"{self.share:.0%} trained, about {clock(left)} of training left"

    def drawn(self) -> Table:
        """The view as it is now."""
        table = Table(box=None, padding=(0, 1), title=self.look(), title_justify="left")
        for heading in ("schedule", "sampler", "seed", "", "steps", "it/s", "loss", "by level", "draws", "distance", ""):
            table.add_column(heading, no_wrap=heading not in ("sampler", ""), overflow="fold")
        room = max(self.console.height - AROUND, 1)
        shown = self.lines
        if len(shown) > room:
            first = sorted(range(len(shown)), key=lambda i: ORDER.index(self.lines[i].state))[: room - 1]
            shown = [self.lines[i] for i in sorted(first)]
        for line in shown:
            table.add_row(*_cells(line))
        if len(shown) < len(self.lines):
            table.add_row("", Text(f"and {len(self.lines) - len(shown)} more", "dim"))
        return table


def _cells(line: Line) -> list[Any]:
    row, (step, seconds) = line.row, line.now
    distance = line.evaluation.get("distance")
    return [
        line.config.process,
        Text(line.config.sampler, "bold"),
        str(line.config.seed),
        ProgressBar(total=1.0, completed=line.share_and_left()[0], width=12),
        str(step),
        f"{step / seconds:.1f}" if seconds else "",
        f"{row['loss']:.4f}" if row.get("loss") is not None else "",
        sparkline(row["loss_by_level"], low=0.0) if row else "",
        sparkline(coarser(row["density_by_level"]), low=0.0) if row else "",
        f"{distance:.4g}" if distance is not None else "",
        Text(f"failed: {line.reason}"[:60], "red") if line.state == "failed" else line.state,
    ]
