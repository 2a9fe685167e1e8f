"""The live view of a comparison: a line for each run, read from the runs' folders, whoever executes them."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from noisewise.study.job import Status
from noisewise.study.outcome import read_failure
from noisewise.training.config import Config
from noisewise.training.display import Display, Pace, clock, coarser, share_and_time_left, sparkline
from noisewise.words import in_lines

REFRESH = 0.5  # seconds
SPEC_WIDTH = 24  # characters of a spec in a line
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
        self.state, self.reason = "waiting", ""  # why it failed, or how far it is
        self.evaluated: dict[float, float] = {}  # shares of the budget, and the seconds that measuring took
        self._tail = Tail(self.folder / "metrics.jsonl")

    def look(self) -> None:
        """Read what is new."""
        for row in self._tail.rows():
            if row.get("kind") == "evaluation":
                self.evaluation = row
                self.evaluated |= {row["share"]: row.get("took") or 0.0} if "share" in row else {}
            elif "kind" not in row:
                self.row = row
            self.now = (row.get("step", 0), row.get("seconds", 0.0))
        status, failure = Status.read(self.folder), read_failure(self.folder)
        self.state, self.reason = "waiting" if status is None else status.state, ""
        if status is not None:
            self.now, self.reason = (status.step, status.seconds), status.note
        if self.evaluation.get("share") == 1:
            self.state, self.reason = "finished", ""
        elif failure is not None:
            self.state, self.reason = "failed", failure.message

    @property
    def name(self) -> str:
        return f"{self.config.process}, {self.config.sampler}, seed {self.config.seed}"

    @property
    def share(self) -> float:
        """How much of the budget is spent."""
        return 1.0 if self.state == "finished" else share_and_time_left(self.config, (0, 0.0), self.now)[0]


class Board:
    """All lines, in a terminal; elsewhere a plain line at every tenth of the way and for each run that fails.

    Args:
        configs: of the runs.
        console: where to; by default stderr.
        now: a clock.
        evaluations: of each run.
        seconds: that one of them takes, as far as is known beforehand.
    """

    def __init__(
        self,
        configs: Sequence[Config],
        console: Console | None = None,
        now: Callable[[], float] = time.monotonic,
        *,
        evaluations: int = 0,
        seconds: float = 0.0,
    ) -> None:
        self.display, self.pace = Display(console), Pace(now)
        self.evaluations, self.seconds = evaluations, seconds
        self.lines = [Line(config) for config in configs]
        self.share = 0.0  # of all training that is done
        self._failed: set[str] = set()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the view around a block."""
        if self.display.terminal:
            with self.display.shown(self.drawn, every=REFRESH):
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
                self.display.say(f"failed: {line.name}: {line.reason}")
        self.display.say_tenth(self.share, summary)

    def look(self) -> str:
        """Read what is new, and sum it up: how much of all training is done, and when the rest will be, evaluations and all."""
        for line in self.lines:
            line.look()
        self.share = sum(line.share for line in self.lines) / len(self.lines)
        each = self._evaluation()
        whole = len(self.lines) * (1 + each * self.evaluations)
        made = [line.share + each * min(len(line.evaluated), self.evaluations) for line in self.lines]
        failed = sum(line.state == "failed" for line in self.lines)
        lost = sum(one for one, line in zip(made, self.lines, strict=True) if line.state == "failed")
        to_do = 1 - (sum(made) - lost) / whole - failed / len(self.lines)
        done, left = f"{self.share:.0%} trained", self.pace.time_left(sum(made) / whole, max(to_do, 0.0))
        return done if left is None else f"{done}, about {clock(left)} left"

    def _evaluation(self) -> float:
        """What an evaluation takes, over what training a run takes; 0 if neither is known."""
        took = [seconds for line in self.lines for seconds in line.evaluated.values() if seconds]
        runs = [line.now[1] / line.share for line in self.lines if line.share and line.now[1]]
        return (sum(took) / len(took) if took else self.seconds) / (sum(runs) / len(runs)) if runs else 0.0

    def drawn(self) -> Table:
        """The view as it is now."""
        table = Table(box=None, padding=(0, 1), title=self.look(), title_justify="left")
        for heading in ("schedule", "sampler", "seed", "", "steps", "it/s", "loss", "by level", "draws", "distance", ""):
            table.add_column(heading, no_wrap=heading not in ("sampler", ""), overflow="fold")
        room = max(self.display.console.height - AROUND, 1)
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
        Text(in_lines(line.config.sampler, SPEC_WIDTH), "bold"),
        str(line.config.seed),
        ProgressBar(total=1.0, completed=line.share, width=12),
        str(step),
        f"{step / seconds:.1f}" if seconds else "",
        f"{row['loss']:.4f}" if row.get("loss") is not None else "",
        sparkline(row["loss_by_level"], low=0.0) if row else "",
        sparkline(coarser(row["density_by_level"]), low=0.0) if row else "",
        f"{distance:.4g}" if distance is not None else "",
        Text(f"failed: {line.reason}"[:60], "red") if line.state == "failed" else f"{line.state} {line.reason}".strip(),
    ]
