"""noisewise compare: the same model, data, noise and time for several samplers.

    noisewise compare --preset digits --samplers "uniform,minsnr,adaptive" --schedules linear,cosine --seeds 2 --budget 30s

Each run is an ordinary run folder and a process of its own; the clock counts training steps alone, the sampler's own cost
included. The command may be stopped or killed at any time: the same command goes on where it was.
"""

import argparse
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from noisewise import distributed
from noisewise.spec import split_specs
from noisewise.study.budget import with_budget
from noisewise.study.launch import Launcher, add_launcher_options, chosen_launcher
from noisewise.study.live import Board
from noisewise.study.outcome import LOG, PLAN, Comparison, Plan, read_comparison, read_outcome
from noisewise.study.preflight import check_all
from noisewise.study.worker import Job, forget_failure
from noisewise.training.config import Config
from noisewise.training.options import config_parser, parse_config, with_files
from noisewise.training.signals import StopRequest
from noisewise.training.writing import writing

LONGEST = 80  # characters of a spec in the name of a folder


def main(arguments: list[str]) -> int:
    """The command line."""
    first = own_options()
    known, rest = first.parse_known_args(arguments)
    words = [word.partition("=")[0] for word in rest]
    if "--sampler" in words or "--seed" in words:
        raise ValueError("compare takes --samplers and --seeds, not --sampler and --seed")
    for word in ("--steps", "--seconds"):
        if word in words:
            raise ValueError(f"compare takes --budget, as in 1000it or 30s, not {word}")
    if known.schedules is not None and "--process" in words:
        raise ValueError("give --process or --schedules, not both")
    own = [option for action in first._actions for option in action.option_strings]
    config = parse_config(config_parser(prog="noisewise compare"), with_files(rest, known.preset), own)
    config = with_budget(config, known.budget)
    folder = known.out or Path("out") / config.name
    samplers, schedules = (
        split_specs(known.samplers),
        split_specs(config.process if known.schedules is None else known.schedules),
    )
    configs = combinations(config, samplers, schedules, known.seeds, folder)
    plan = Plan(
        name=config.name,
        baseline=samplers[0],
        budget=known.budget,
        evaluate_at=shares(known.evaluate_at),
        images=known.images,
        command=("compare", *arguments),
        headline=known.headline,
    )
    launcher = chosen_launcher(known, folder, len(samplers))
    with StopRequest() as stop:
        comparison = conduct(plan, configs, launcher, stop=stop)
    if stop.requested and any(outcome.status == "unfinished" for outcome in comparison.outcomes):
        print(f"{stop.name}: {launcher.farewell()}")
        return 0
    return conclude(comparison)


def own_options() -> argparse.ArgumentParser:
    """The options besides those of the configuration."""
    parser = argparse.ArgumentParser(
        prog="noisewise compare",
        allow_abbrev=False,
        description="Train with several samplers under the same conditions, compare, and write a report. "
        "All settings of noisewise train can follow.",
    )
    parser.add_argument("--preset", action="append", default=[], help="begin with the settings of a preset")
    parser.add_argument(
        "--samplers", default="uniform,minsnr,adaptive", help="specs, separated by commas; the first is the baseline"
    )
    parser.add_argument("--schedules", help="processes, as in linear,cosine,quadratic; default: that of the configuration")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each combination")
    parser.add_argument("--budget", default="25s", help="of each run: seconds (30s) or steps (1000it)")
    parser.add_argument(
        "--evaluate-at", default="0.25,0.5,0.75,1", help="shares of the budget at which each run is measured; the last is 1"
    )
    parser.add_argument(
        "--images", type=int, default=1000, help="generated images of each evaluation; 5000 or more for figures"
    )
    parser.add_argument(
        "--headline", type=int, metavar="IMAGES", help="one more distance at the end of each run, as in 50000; default: none"
    )
    parser.add_argument("--out", type=Path, default=None, help="a folder for runs, results and report")
    add_launcher_options(parser)
    return parser


def shares(text: str) -> tuple[float, ...]:
    """ "0.5,1" as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--evaluate-at {text!r}: give shares of the budget, as in 0.25,0.5,0.75,1") from None


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


def conduct(plan: Plan, configs: list[Config], launcher: Launcher, *, stop: StopRequest | None = None) -> Comparison:
    """Bring all runs to their end, or as far as `stop` lets them, and return what came of them.

    Runs that are finished stay as they are, others go on where they were. In a script, call it under
    ``if __name__ == "__main__":``, as everything that starts processes.
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
            with Board(configs).shown():
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
    with (folder / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(f"another comparison is at work in {folder}: wait for it, or give another --out") from None
        yield


def conclude(comparison: Comparison) -> int:
    """Results, table and report, and what failed; 1 if no run finished."""
    # imported late: they may need more than training does, such as matplotlib
    from noisewise.report import write_report
    from noisewise.study.results import write_results
    from noisewise.study.table import print_table

    failed = [outcome for outcome in comparison.outcomes if outcome.status == "failed"]
    finished = [outcome for outcome in comparison.outcomes if outcome.status == "finished"]
    if finished:
        write_results(comparison)
        print_table(comparison)
    for outcome in failed:
        print(
            f"failed: {outcome.process}, {outcome.sampler}, seed {outcome.seed}: {outcome.failure and outcome.failure.message}"
        )
        print(f"        its log: {outcome.folder / LOG}")
    if failed:
        print("the same command tries again what failed")
    if not finished:
        return 1
    print(f"\nreport: {write_report(comparison.folder)}")
    return 0
