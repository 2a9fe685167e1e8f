"""The runs of a comparison: a configuration for each, and what brings all of them to their end, however often it is stopped."""

import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from noisewise import distributed
from noisewise.study.job import Job, forget_failure
from noisewise.study.launch import Launcher
from noisewise.study.live import Board
from noisewise.study.outcome import PLAN, Comparison, Plan, read_comparison, read_outcome
from noisewise.study.preflight import check_all
from noisewise.training.config import Config
from noisewise.training.plain_files import open_own
from noisewise.training.run_folder import sweep
from noisewise.training.signals import StopRequest
from noisewise.training.writing import writing

Foretell = Callable[[int], float]
LONGEST = 80  # characters of a spec in the name of a folder


def combinations(config: Config, samplers: Sequence[str], schedules: Sequence[str], seeds: int, out: Path) -> list[Config]:
    """A configuration for each schedule, seed and sampler; bad specs are found before anything is trained."""
    if seeds < 1:
        raise ValueError(f"--seeds must be >= 1, got {seeds}")
    for name, specs in (("--samplers", samplers), ("--schedules", schedules)):
        if len(set(specs)) < len(specs):
            raise ValueError(f"{name} names the same one twice")
    log = replace(config.log, trackers=[], samples_every=0)
    made = [
        replace(config, process=process, sampler=sampler, seed=config.seed + k, log=log)
        for process in schedules
        for k in range(seeds)
        for sampler in samplers
    ]
    for one in made:
        one.check()
    return [replace(one, out=str(out / "runs" / run_name(one))) for one in made]


def run_name(config: Config) -> str:
    """PROCESS-SAMPLER-SEED, fit for a file name; it depends on these three alone, and no two have the same."""
    return f"{_file_name(config.process)}-{_file_name(config.sampler)}-{config.seed}"


def _file_name(spec: str) -> str:
    """A spec with a - for each : and comma; what has brackets, or is very long, is told apart by a few digits of its hash."""
    plain = re.sub(r"[:,]", "-", spec)
    if re.fullmatch(r"[A-Za-z0-9._=+-]+", plain) and len(plain) <= LONGEST:
        return plain
    short = re.sub(r"[^A-Za-z0-9._=+-]+", "-", plain)[:LONGEST].strip("-")
    return f"{short}-{hashlib.sha256(spec.encode()).hexdigest()[:6]}"


def conduct(
    plan: Plan, configs: list[Config], launcher: Launcher, *, stop: StopRequest | None = None, foretell: Foretell | None = None
) -> Comparison:
    """Bring all runs to their end, or as far as `stop` lets them, and return what came of them.

    Runs that are finished stay as they are, others go on where they were. In a script, call it under
    ``if __name__ == "__main__":``, as everything that starts processes. `foretell` is told how many
    runs there will be, says how long they take, and returns the seconds of an evaluation, 0 if they are not known.
    """
    if distributed.world_size() > 1 or int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("compare is one process: start it without torchrun")
    stop = stop or StopRequest()
    folder = Path(configs[0].out or "").parent.parent
    check_all(folder, plan, configs)
    with alone(folder):
        jobs = [Job(config, plan.evaluate_at, plan.images, plan.headline) for config in configs]
        jobs = [job for job in jobs if not is_finished(job)]
        merged(plan, configs, folder, [job.folder.name for job in jobs]).write(folder)
        for job in jobs:
            forget_failure(job.folder)
        if jobs:
            seconds = 0.0 if foretell is None else foretell(len(jobs))
            with Board(configs, evaluations=len(plan.evaluate_at), seconds=seconds).shown():
                launcher.launch(jobs, stop)
    return read_comparison(folder)


def is_finished(job: Job) -> bool:
    """Whether nothing is left to do."""
    return (job.folder / "config.yaml").is_file() and read_outcome(job.folder).status == "finished"


def merged(plan: Plan, configs: Sequence[Config], folder: Path, launched: Sequence[str]) -> Plan:
    """The plan with the names of its runs, after those that an earlier command had; more of them never take any away.

    The baseline is the first sampler of the latest command that names the earlier baseline. `launched` are the runs that are
    trained now.
    """
    runs = [Path(config.out or "").name for config in configs]
    now = (tuple(launched),) if launched else ()
    if not (folder / PLAN).exists():
        return replace(plan, runs=tuple(runs), launches=now)
    before = Plan.read(folder)
    named = {config.sampler for config in configs}
    return replace(
        plan,
        baseline=plan.baseline if before.baseline in named else before.baseline,
        runs=tuple(dict.fromkeys([*before.runs, *runs])),
        earlier=tuple(dict.fromkeys(one for one in (*before.earlier, before.command) if one and one != plan.command)),
        launches=(*(before.launches or (before.runs,)), *now),  # an earlier version did not write them down
    )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other comparison works in the folder within the block."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--out {folder} is a file: name a folder")
    with writing(f"--out {folder}", folder):
        folder.mkdir(parents=True, exist_ok=True)
    with open(open_own(folder / ".lock", os.O_RDWR | os.O_CREAT), "r+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another comparison is at work in {folder}: wait for it, or give another --out") from None
        sweep(folder)
        yield
