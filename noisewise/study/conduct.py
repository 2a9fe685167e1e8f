"""The runs of a comparison: a configuration for each, what can be found out before anything is trained, and what brings all of
them to their end, however often it is stopped."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from noisewise import distributed
from noisewise.data import open_named
from noisewise.generation.images import make_decoder
from noisewise.generation.run_samples import headline_solver, quick_solver
from noisewise.metrics.heldout import check_classes
from noisewise.plain_files import locked, read_plain, sweep, writing
from noisewise.study.job import Job, forget_failure, is_false_start
from noisewise.study.launch import Launcher
from noisewise.study.live import Board
from noisewise.study.outcome import PLAN, Comparison, Plan, read_comparison, read_outcome
from noisewise.training import checkpoint
from noisewise.training.components import Parts, build_parts, open_source
from noisewise.training.config import FREE_WITHIN, Config
from noisewise.training.options import flat
from noisewise.training.signals import StopRequest

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
        jobs = [job for job in jobs if job.status != "finished"]
        merged(plan, configs, folder, [job.folder.name for job in jobs]).write(folder)
        for job in jobs:
            forget_failure(job.folder)
        if jobs:
            seconds = 0.0 if foretell is None else foretell(len(jobs))
            with Board(configs, evaluations=len(plan.evaluate_at), seconds=seconds).shown():
                launcher.launch(jobs, stop)
    return read_comparison(folder)


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
        lock = locked(folder)
    with lock:
        sweep(folder)
        yield


# What can be found out before anything is trained ---------------------------------------------------------------------


LATE = 20  # steps, at their mean time, that a run may have gone beyond its budget: the last one may be slow
APART = ("name", "out", "seed", "sampler", "process", "steps", "epochs", "seconds", "checkpoint", "log", "evaluation")
"""Settings in which the runs of a comparison may differ, or that do not matter for it."""
MEASURED = ("log.sample_steps", *(f"evaluation.{name}" for name in ("solver", "quick_solver", "data", "data_options")))
"""But for these: how images are generated for its evaluations, and what they are compared with."""


def check_all(folder: Path, plan: Plan, configs: list[Config]) -> None:
    """Raise an error that says what to do if the comparison cannot be made, or gone on with, in this folder."""
    shares = plan.evaluate_at
    if list(shares) != sorted(set(shares)) or not all(0 < share <= 1 for share in shares) or 1 not in shares:
        raise ValueError(f"--evaluate-at must be increasing shares of the budget, the last one 1, got {list(shares)}")
    if plan.images < 2:
        raise ValueError(f"--images must be >= 2, got {plan.images}")
    solvers = [(headline_solver(config), quick_solver(config)) for config in configs]
    if plan.headline is not None and plan.headline < 2:
        raise ValueError(f"--headline must be >= 2, got {plan.headline}")
    if plan.headline is not None and plan.headline <= plan.images and any(full == quick for full, quick in solvers):
        raise ValueError(f"--headline is for more than the {plan.images} images of every evaluation, got {plan.headline}")
    if configs[0].parallel == "fsdp":
        raise ValueError("compare trains each run in one process: use parallel=ddp")
    parts = build_parts(configs[0])
    try:
        check_classes(open_source(configs[0], "test"), parts.classes)
    except (FileNotFoundError, ValueError) as error:
        raise ValueError(f"compare needs held-out data, to measure the loss of every run on them: {error}") from error
    planned = configs[0].evaluation
    if planned.data is not None:
        from noisewise.metrics.distances import check_real  # late: all else that it imports is for those who measure

        check_real(open_named(planned.data, options=planned.data_options))
        if parts.latents is not None:
            make_decoder(parts.latents, "cpu")
    check_plan(folder, plan)
    for path in sorted((folder / "runs").glob("*/config.yaml")):
        if not is_false_start(path.parent):
            check_run(path.parent, configs[0], parts)


def check_plan(folder: Path, plan: Plan) -> None:
    """A comparison that began with another budget or other evaluations cannot go on with these."""
    if not (folder / PLAN).exists():
        if (folder / "config.yaml").exists():
            raise ValueError(f"{folder} holds a run of noisewise train: give another --out")
        return
    before = Plan.read(folder)
    for name in ("budget", "evaluate_at", "images", "headline"):
        old, new = getattr(before, name), getattr(plan, name)
        if old != new:
            option = f"--{name.replace('_', '-')}"
            raise ValueError(f"{folder} holds a comparison with {option} {said(old)}, not {said(new)}: give another --out")


def said(value: object) -> str:
    """As on the command line."""
    if value is None:
        return "none"
    return ",".join(f"{share:g}" for share in value) if isinstance(value, tuple) else str(value)


def check_run(folder: Path, config: Config, parts: Parts) -> None:
    """A run that is there already must be comparable with the new ones, made with the same data, and within their budget."""
    before, after = flat(read_outcome(folder).config), flat(config)
    free = {f"data.{name}" for name in FREE_WITHIN["data"]}
    names = [
        name
        for name in {**before, **after}
        if (name.partition(".")[0] not in APART or name.startswith(MEASURED)) and name not in free
    ]
    differences = [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names if before.get(name) != after.get(name)]
    if differences:
        raise ValueError(f"{folder} was made with other settings: {'; '.join(differences)}. Give another --out")
    step, state = newest_state(folder)
    seconds = float(state.get("seconds", 0.0))
    if step > config.steps:
        raise ValueError(f"{folder} has made {step} steps, more than --budget: give another --out")
    if config.seconds is not None and seconds > config.seconds + LATE * seconds / max(step, 1):
        raise ValueError(f"{folder} has trained for {seconds:.0f} s, more than --budget: give another --out")
    if found := parts.other_data(state["data"]) if "data" in state else {}:
        raise ValueError(f"{folder} was made with other data: {', '.join(found.values())}. Give another --out")


def newest_state(folder: Path) -> tuple[int, dict[str, Any]]:
    """Step and state of the newest checkpoint, the state empty if it is broken: then the run falls back to an earlier one.

    An error if another version of noisewise wrote it.
    """
    steps = checkpoint.steps_in(folder / "checkpoints")
    if not steps:
        return 0, {}
    path = folder / "checkpoints" / checkpoint.name_of(steps[-1])
    try:
        made = json.loads(read_plain(path / "manifest.json"))["format"]
        state: dict[str, Any] = json.loads(read_plain(path / "state.json"))
        float(state["seconds"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return steps[-1], {}
    if made != checkpoint.FORMAT:
        raise ValueError(
            f"{path} has format {made}, this version of noisewise reads {checkpoint.FORMAT}: go on with the version that wrote "
            "it, or give another --out"
        )
    return steps[-1], state
