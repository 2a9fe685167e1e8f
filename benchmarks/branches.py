"""Runs that share a beginning: train once, then go on from a checkpoint with other samplers or settings.

    python benchmarks/branches.py benchmarks/plans/long-1.jsonl --results out/long-1                          on a GPU
    python benchmarks/branches.py benchmarks/plans/tiny.jsonl --preset digits --schedule linear --steps 40 --marks 10,20,40 \
        --images 32 --results out/tiny                                                                        on a CPU

A plan has a line for each run, with `name`, `sampler` and, where they differ, `schedule`, `seed`, `steps`, `marks` (the steps
at which it is evaluated), `settings` (of noisewise train) and `from`: the `NAME@STEP` of another run whose checkpoint it begins
with. The samplers of a run and of what it begins with must keep the same state: all of `adaptive` do.

Each run is `field.py` in a folder of its own, RESULTS/NAME; its rows go to RESULTS/NAME.jsonl. They are begun in the plan's
order, as soon as what they begin with is there and one of `--workers` is free. With `--alone`, the steps a second of a run that
has the GPU to itself, the first run of the plan comes first: the others save and end when it needs the rest of the time.
`--checkout` names another version's `benchmarks/` to run, such as that of a tagged commit. All settings of noisewise train can
follow.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
EVALUATION = 10.0  # seconds of an evaluation along the way


def main() -> None:
    args, rest = options().parse_known_args()
    plan = read_plan(args.plan)
    end, running = time.monotonic() + args.limit_seconds, {}
    args.results.mkdir(parents=True, exist_ok=True)
    waiting, told = list(plan.values()), False
    first = waiting[0]
    while waiting or any(process.poll() is None for process in running.values()):
        ready = next((run for run in waiting if "from" not in run or begins_with(args, run)), None)
        busy = [name for name, process in running.items() if process.poll() is None]
        if args.alone and not told and first["name"] in busy and time.monotonic() + needed(args, first) > end:
            told = True
            waiting.clear()
            for name in busy:
                if name != first["name"]:
                    running[name].terminate()  # it saves
        elif ready is not None and len(busy) < args.workers:
            waiting.remove(ready)
            running[ready["name"]] = start(args, ready, rest, end - time.monotonic())
            continue
        elif waiting and ready is None and not busy:
            raise SystemExit(
                f"branches.py: {', '.join(run['name'] for run in waiting)} cannot begin: see the logs of the others"
            )
        time.sleep(1)


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("plan", type=Path, help="a JSON object a line")
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--schedule", default="quadratic")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32000)
    parser.add_argument("--marks", default="4000,8000,16000,24000,32000", help="evaluate after so many steps")
    parser.add_argument("--images", type=int, default=5000, help="generated for each evaluation")
    parser.add_argument("--workers", type=int, default=6, help="runs at the same time")
    parser.add_argument("--limit-seconds", type=float, default=1e6, help="then save and end")
    parser.add_argument("--alone", type=float, help="steps a second of the first run, if no other runs beside it")
    parser.add_argument("--checkout", type=Path, default=HERE, help="the folder of field.py")
    parser.add_argument("--results", type=Path, default=Path("out/branches"), help="where rows, logs and runs go")
    return parser


def read_plan(path: Path) -> dict[str, dict[str, Any]]:
    runs = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    plan = {run["name"]: run for run in runs}
    for run in runs:
        parent = run.get("from", "").partition("@")[0]
        if parent and parent not in plan:
            raise SystemExit(f"branches.py: {run['name']} begins with {parent}, which {path} does not have")
    return plan


def needed(args: argparse.Namespace, run: dict[str, Any]) -> float:
    """Seconds to the end of a run that has the GPU to itself."""
    steps, done = run.get("steps", args.steps), 0
    for path in (args.results / run["name"] / "runs").glob("*/metrics.jsonl"):
        lines = [line for line in path.read_text().splitlines() if line.endswith("}")]
        done = json.loads(lines[-1])["step"] if lines else 0
    return (steps - done) / args.alone + EVALUATION * sum(done < mark for mark in marks_of(args, run))


def marks_of(args: argparse.Namespace, run: dict[str, Any]) -> list[int]:
    steps = run.get("steps", args.steps)
    return [mark for mark in map(int, run.get("marks", args.marks).split(",")) if mark <= steps]


def begins_with(args: argparse.Namespace, run: dict[str, Any]) -> Path | None:
    """The checkpoint that a run begins with, once it is there."""
    name, _, step = run["from"].partition("@")
    found = (args.results / name / "runs").glob(f"*/checkpoints/step-{int(step):08d}/manifest.json")
    return next((path.parent for path in found), None)


def start(args: argparse.Namespace, run: dict[str, Any], rest: list[str], left: float) -> "subprocess.Popen[bytes]":
    steps, first = run.get("steps", args.steps), int(run.get("from", "@0").partition("@")[2])
    shares = [str(mark / steps) for mark in marks_of(args, run) if first < mark]
    command = [sys.executable, str(args.checkout / "field.py"), "--preset", args.preset]
    command += ["--schedules", run.get("schedule", args.schedule), "--seeds", str(run.get("seed", args.seed))]
    command += ["--methods", run["sampler"], "--steps", str(steps)]
    command += ["--evaluate-at", ",".join(shares), "--images", str(args.images), "--workers", "1"]
    command += ["--limit-seconds", str(max(left, 1)), "--out", str(args.results / run["name"])]
    command += ["--json", str(args.results / f"{run['name']}.jsonl"), *rest, *run.get("settings", [])]
    if "from" in run:
        checkpoint = begins_with(args, run)
        assert checkpoint is not None
        folder = args.results / run["name"] / "runs" / run_name(args, run)
        shutil.copytree(checkpoint, folder / "checkpoints" / checkpoint.name, copy_function=os.link, dirs_exist_ok=True)
    with (args.results / f"{run['name']}.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def run_name(args: argparse.Namespace, run: dict[str, Any]) -> str:
    """The folder that this version of field.py will look into."""
    code = (
        "import sys; from dataclasses import replace; from noisewise.training.options import load_preset\n"
        "try: from noisewise.study.conduct import run_name\n"
        "except ImportError: from noisewise.study.compare import run_name\n"
        "preset, process, sampler, seed = sys.argv[1:]\n"
        "print(run_name(replace(load_preset(preset), process=process, sampler=sampler, seed=int(seed))))"
    )
    process, seed = run.get("schedule", args.schedule), run.get("seed", args.seed)
    asked = [sys.executable, "-c", code, args.preset, process, run["sampler"], str(seed)]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()[-1]


if __name__ == "__main__":
    main()
