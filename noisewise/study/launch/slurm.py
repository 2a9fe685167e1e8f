"""Jobs of a Slurm cluster, submitted by submitit: one for each run, on a file system that all nodes share.

OUT/slurm/jobs.json remembers the job of each run, so that the command started again goes on watching what is queued or running
instead of submitting it twice. What came of a run is read from its folder; Slurm is asked only whether a job is still there,
and why one died that left no word.
"""

import argparse
import getpass
import json
import math
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from noisewise.plain_files import replace_file
from noisewise.study.job import Job, Launcher, record_failure
from noisewise.training.signals import StopRequest

GENERAL = ("timeout_min", "mem_gb", "nodes", "cpus_per_task", "gpus_per_node", "tasks_per_node")  # names of submitit's own
PAUSE = 5.0  # seconds between two questions to Slurm
SETTLING = 10.0  # seconds in which what a node wrote last may reach this machine


class Warned(StopRequest):
    """Also asked by the signal that submitit lets Slurm send before the time limit."""

    warning = signal.SIGUSR2

    def __enter__(self) -> "Warned":
        super().__enter__()
        self._before[self.warning] = signal.signal(self.warning, self._note)
        return self


@dataclass(frozen=True)
class Submitted:
    """What runs on a node."""

    job: Job

    def __call__(self) -> str:
        from noisewise.study.worker import logged, work  # only the node needs what trains and measures

        with logged(self.job.folder), Warned() as stop:
            end = work(self.job, stop=stop)
        if stop.name == Warned.warning.name and end == "stopped":
            signal.raise_signal(Warned.warning)  # all is saved: now submitit may requeue it
        return end

    def checkpoint(self) -> Any:
        """How submitit goes on with it after a requeue."""
        return Launcher.package("submitit", "slurm").helpers.DelayedSubmission(self)


@dataclass(frozen=True)
class Slurm(Launcher):
    """The jobs on a cluster.

    Args:
        folder: of the comparison.
        settings: partition, timeout_min, gpus_per_node, mem_gb, cpus_per_task and whatever else sbatch and submitit know.
        cluster: "slurm", or "local" for submitit's processes on this machine.
        pause: seconds between two looks at the queue.
    """

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    cluster: str = "slurm"
    pause: float = PAUSE

    options = ("slurm",)

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--slurm",
            action="append",
            metavar="KEY=VALUE",
            help="slurm: partition, timeout_min, gpus_per_node, mem_gb, cpus_per_task, ...; repeatable",
        )

    @classmethod
    def from_options(cls, options: argparse.Namespace, folder: Path, samplers: int) -> "Slurm":
        made = cls(folder, dict(map(parsed_setting, options.slurm or ())))
        made._executor(timeout=1)  # complains now about what it does not know
        return made

    def launch(self, jobs: Sequence[Job], stop: StopRequest) -> None:
        watched = self._submit(jobs, stop)
        while watched and not stop.requested:
            alive = IN_QUEUE[self.cluster](watched)
            for number in [number for number in watched if number not in alive]:
                self._note(number, watched.pop(number))
            end = time.monotonic() + self.pause
            while watched and not stop.requested and time.monotonic() < end:
                time.sleep(0.1)

    def farewell(self) -> str:
        numbers = " ".join(read_jobs(self.folder).values())
        cancel = "scancel" if self.cluster == "slurm" else "kill"
        return (
            f"the jobs go on without this command: start it again to go on watching them, or end them with {cancel} {numbers}"
        )

    def _submit(self, jobs: Sequence[Job], stop: StopRequest) -> dict[str, Job]:
        """The job number of each run; those that are still in the queue from an earlier start are not submitted again."""
        known = read_jobs(self.folder)
        alive = IN_QUEUE[self.cluster](known.values())
        watched: dict[str, Job] = {}
        for job in jobs:
            number = known.get(job.folder.name)
            if number is None or number not in alive:
                if stop.requested:
                    break
                number = self._executor(timeout_for(job)).submit(Submitted(job)).job_id
                known[job.folder.name] = str(number)
                replace_file(self.folder / "slurm" / "jobs.json", json.dumps(known, indent=1) + "\n")
            watched[str(number)] = job
        return watched

    def _executor(self, timeout: int) -> Any:
        submitit = self.package("submitit", "slurm")
        folder = (self.folder / "slurm").resolve()
        settings = {"timeout_min": timeout, "name": f"noisewise-{self.folder.name}", **self.settings}
        named = {key if key in (*GENERAL, "name") else f"slurm_{key}": value for key, value in settings.items()}
        try:
            executor = submitit.AutoExecutor(folder, cluster=self.cluster)
            executor.update_parameters(**named)
        except (RuntimeError, ValueError, TypeError, NameError, AssertionError) as error:
            raise ValueError(f"--launcher slurm: {error}") from error
        return executor

    def _note(self, number: str, job: Job) -> None:
        """A job has left the queue: leave the reason in its run's folder if it could not say so itself."""
        end = time.monotonic() + SETTLING
        while (status := job.status) == "unfinished" and time.monotonic() < end and self.cluster == "slurm":
            time.sleep(0.5)
        if status == "unfinished":
            reason = f"job {number} ended before its run did: {state_of(number, self.cluster)}"
            said = self.folder / "slurm" / f"{number}_0_log.err"  # what submitit, Slurm and the system had to say
            record_failure(job, reason, log=said)


def read_jobs(folder: Path) -> dict[str, str]:
    """The number of each run's last job."""
    path = folder / "slurm" / "jobs.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def parsed_setting(text: str) -> tuple[str, Any]:
    """ "timeout_min=60" as a name and a number, or a word."""
    key, equals, value = text.partition("=")
    if not key or not equals or not value:
        raise ValueError(f"--slurm {text!r}: give a name and a value, as in --slurm partition=gpu --slurm timeout_min=60")
    for kind in (int, float):
        try:
            return key, kind(value)
        except ValueError:
            continue
    return key, value


def timeout_for(job: Job) -> int:
    """Minutes that a run surely needs less than, unless its budget is in steps: then it is requeued where it was cut off."""
    seconds = job.config.seconds
    return 12 * 60 if seconds is None else 60 + math.ceil(seconds / 30)


def in_slurm(numbers: Collection[str]) -> set[str]:
    """Those that are queued or running; all of them if Slurm does not answer."""
    asked = _output("squeue", "--noheader", "--format=%i", f"--user={getpass.getuser()}")
    return set(numbers) if asked is None else set(numbers) & set(asked.split())


def in_processes(numbers: Collection[str]) -> set[str]:
    """The same for submitit's processes on this machine, whose numbers are theirs."""
    states = {number: Path(f"/proc/{number}/stat") for number in numbers}
    return {
        number for number, file in states.items() if file.is_file() and file.read_text().rpartition(")")[2].split()[0] != "Z"
    }


IN_QUEUE: dict[str, Callable[[Collection[str]], set[str]]] = {"slurm": in_slurm, "local": in_processes}
"""Which jobs are still there, by cluster."""


def state_of(number: str, cluster: str) -> str:
    """Why a job is gone, in Slurm's words: TIMEOUT, OUT_OF_MEMORY, NODE_FAIL, CANCELLED, ..."""
    if cluster != "slurm":
        return "its process is gone"
    shown = _output("scontrol", "show", "job", number) or ""  # knows it for a while; the accounting, if there is one, for ever
    words = dict(word.partition("=")[::2] for word in shown.split())
    if "JobState" in words:
        reason = words.get("Reason", "None")
        return words["JobState"] + (f" ({reason})" if reason not in ("None", words["JobState"]) else "")
    return (_output("sacct", "-n", "-X", "-o", "State", "-j", number) or "").strip() or "Slurm does not remember why"


def _output(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
