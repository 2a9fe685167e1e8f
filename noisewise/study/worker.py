"""One run of a comparison, in a process of its own: trains, is evaluated at shares of its budget, and leaves all in its folder.

At each share the run is saved first, then measured off the clock, then a row goes into metrics.jsonl. A run that is resumed
drops the rows after its checkpoint, so an evaluation whose row is there is never made twice, and a missing one is made at once.
"""

import os
import sys
import time
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from noisewise.generation.run_samples import draw_samples
from noisewise.plain_files import FolderInUse, open_own
from noisewise.study.job import Job, Status, explained, forget_status, record_failure
from noisewise.study.measure import evaluate
from noisewise.study.outcome import FAILURE, LOG
from noisewise.training.display import Progress, summary
from noisewise.training.run import Run
from noisewise.training.signals import StopRequest
from noisewise.words import printable

End = Literal["finished", "stopped", "failed"]
PATIENCE = 60.0  # seconds to wait for a folder that another process is about to leave


class Interrupted(Exception):
    """An evaluation was asked to end; it will be made when the run goes on."""


class Notes(Progress):
    """What a worker tells the world: lines in its log, and its status for whoever watches."""

    def __init__(self, folder: Path, pause: float = 1.0) -> None:
        self.folder, self.pause = folder, pause
        self._next = 0.0

    def step(self, step: int, seconds: float) -> None:
        self.now_and_then("training", step, seconds)

    def now_and_then(self, state: str, step: int, seconds: float, note: str = "") -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + self.pause
            self.state(state, step, seconds, note)

    def state(self, state: str, step: int, seconds: float, note: str = "") -> None:
        Status(state, step, seconds, note).write(self.folder)

    def row(self, row: dict[str, Any]) -> None:
        print(f"step {row['step']}  {summary(row)}", flush=True)

    def tell(self, message: str) -> None:
        print(printable(message), flush=True)


def work(job: Job, turns: Iterable[float] = (1.0,), stop: StopRequest | None = None) -> End:
    """Do a job as far as `turns` (increasing shares of the budget, each done before the next is asked for) and `stop` let it.

    Whatever goes wrong is written into the run's folder, and is no reason for others to fail.
    """
    stop = stop or StopRequest()
    notes, run = Notes(job.folder), None
    try:
        run = _opened(job, notes, stop)
        if run is None:
            return "stopped"
        finished = _follow(run, job, turns, stop, notes)
        if finished:
            (job.folder / FAILURE).unlink(missing_ok=True)  # of an earlier try
            return "finished"
        run.save()
        print(f"{stop.name}: saved at step {run.trainer.step}", flush=True)
        return "stopped"
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        record_failure(job, explained(error), run.trainer.step if run is not None else None)
        return "failed"
    finally:
        forget_status(job.folder)
        if run is not None:
            run.close()


def _opened(job: Job, notes: Notes, stop: StopRequest) -> Run | None:
    """The run; None if asked to stop before another process, which may be saving it just now, has left its folder."""
    end = time.monotonic() + PATIENCE
    while not stop.requested:
        try:
            return Run(job.config, resume=True, progress=notes, draw=draw_samples)
        except FolderInUse:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
    return None


def _follow(run: Run, job: Job, turns: Iterable[float], stop: StopRequest, notes: Notes) -> bool:
    """Train and evaluate in turns; whether the end was reached."""
    trainer, walk = run.trainer, run.advance(stop)
    made = {row["share"] for row in run.folder.metrics() if row.get("kind") == "evaluation" and "share" in row}
    pending = [share for share in job.evaluate_at if share not in made]
    for turn in turns:
        notes.state("training", trainer.step, trainer.seconds)
        while pending and pending[0] <= turn:
            _train(run, walk, pending[0])
            if stop.requested:  # what is due now will be measured when the run goes on
                return False
            due = [share for share in pending if share <= turn and reached(run, share)]
            notes.state("evaluating", trainer.step, trainer.seconds)
            try:
                _evaluate(run, due, job, stop, notes)
            except Interrupted:
                return False
            pending = pending[len(due) :]
        if not pending:
            return True
        _train(run, walk, turn)
        if stop.requested:
            return False
        notes.state("waiting", trainer.step, trainer.seconds)
    return False


def _train(run: Run, walk: Iterator[int], share: float) -> None:
    """Train to a share of the budget, or until `walk` ends because it was asked to; the device is idle afterwards."""
    while (share == 1 or not reached(run, share)) and next(walk, None) is not None:  # the end has a row of metrics of its own
        pass
    run.trainer.settle()


def _evaluate(run: Run, shares: list[float], job: Job, stop: StopRequest, notes: Notes) -> None:
    """Save, measure, and write down; shares that a single slow step has reached have one measurement in common."""

    def check(what: str, done: float) -> None:
        if stop.requested:
            raise Interrupted
        notes.now_and_then("evaluating", run.trainer.step, run.trainer.seconds, f"{what} {done:.0%}" if done < 1 else what)

    run.save()
    began = time.monotonic()
    headline = job.headline if shares[-1] == 1 else None
    found = evaluate(run, shares[-1], job.images, headline=headline, check=check)
    for share in shares:
        run.folder.log({**replace(found, share=share).row(), "took": round(time.monotonic() - began, 2)}, durable=True)
    print(f"step {found.step}  evaluated at {shares[-1]:.0%} of the budget: {found.metric} {found.distance}", flush=True)
    if found.headline is not None:
        print(f"step {found.step}  {found.metric} of {headline:,} images: {found.headline}", flush=True)


def reached(run: Run, share: float) -> bool:
    """Whether a run has spent this share of its budget."""
    config, trainer = run.config, run.trainer
    if config.seconds is None:
        return trainer.step >= round(share * config.steps, 6)
    return trainer.seconds >= share * config.seconds or trainer.step >= config.steps


@contextmanager
def logged(folder: Path) -> Iterator[None]:
    """All that this process prints in the block, also from C, goes into log.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    sys.stdout.flush()
    sys.stderr.flush()
    kept = {number: os.dup(number) for number in (1, 2)}
    descriptor = open_own(folder / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    with open(descriptor, "a", buffering=1) as file, redirect_stdout(file), redirect_stderr(file):
        try:
            for number in kept:
                os.dup2(file.fileno(), number)
            yield
        finally:
            for number, copy in kept.items():
                os.dup2(copy, number)
                os.close(copy)


def work_alone(job: Job) -> End:
    """Do a whole job in this process, with its log in its folder; signals that ask to stop make it save and end."""
    with logged(job.folder), StopRequest() as stop:
        return work(job, stop=stop)
