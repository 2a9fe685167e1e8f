"""What pictures want, and when: uniform training to its end, and from some moments on more of one tenth of u at a time.

    python benchmarks/map.py --schedule quadratic --seed 6 --results out/map                          on a GPU, half an hour
    python benchmarks/map.py --preset digits --schedule linear --seed 0 --steps 60 --marks 20,60 --branch-steps 10 --images 32 \
        --results out/tiny                                                                            on a CPU

Runs `field.py` with uniform sampling and keeps its checkpoints; as soon as one of `--marks` is there, `strata.py` makes its
branches beside it. Rows of the training go to RESULTS/runs.jsonl, those of the branches to RESULTS/map-MARK.jsonl.
The last mark is also judged with `--also`, and goes on with a second seed while `--limit-seconds` lasts. All settings of
noisewise train can follow.
"""

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
SHARES = (0.0625, 0.125, 0.25, 0.5, 1)


def main() -> None:
    args, args.rest = options().parse_known_args()
    begun, marks = time.monotonic(), sorted(int(mark) for mark in args.marks.split(","))
    args.results.mkdir(parents=True, exist_ok=True)
    training = start(args.results / "training.log", training_command(args))
    branches: dict[int, subprocess.Popen[bytes]] = {}
    while len(branches) < len(marks) and not (training.poll() is not None and newest(args, marks, branches) is None):
        mark, busy = newest(args, marks, branches), sum(one.poll() is None for one in branches.values())
        if mark is not None and busy < args.workers:
            last, left = mark == marks[-1], args.limit_seconds - (time.monotonic() - begun)
            branches[mark] = start(args.results / f"map-{mark}.log", branch_command(args, mark, last, left))
        time.sleep(1)
    for process in (training, *branches.values()):
        process.wait()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--schedule", default="quadratic")
    parser.add_argument("--seed", type=int, default=6)
    parser.add_argument("--steps", type=int, default=64000)
    parser.add_argument("--marks", default="4000,16000,32000,64000", help="steps to branch from")
    parser.add_argument("--branch-steps", type=int, default=600)
    parser.add_argument("--images", type=int, default=5000, help="generated for each distance")
    parser.add_argument("--also", default="ddpm:steps=250,variance=fixed_large", help="a second solver for the last mark")
    parser.add_argument("--workers", type=int, default=2, help="marks whose branches are made at the same time")
    parser.add_argument("--limit-seconds", type=float, default=1e9, help="begin no branch that might end later than this")
    parser.add_argument("--results", type=Path, default=Path("out/map"), help="where rows, logs and runs go")
    return parser


def training_command(args: argparse.Namespace) -> list[str]:
    every = min(int(mark) for mark in args.marks.split(","))
    command = [str(HERE / "field.py"), "--preset", args.preset, "--schedules", args.schedule, "--seeds", str(args.seed)]
    command += ["--methods", "uniform", "--steps", str(args.steps), "--evaluate-at", ",".join(map(str, SHARES))]
    command += ["--images", str(args.images), "--workers", "1", "--limit-seconds", str(args.limit_seconds)]
    command += ["--out", str(args.results / "runs"), "--json", str(args.results / "runs.jsonl")]
    return [*command, *args.rest, f"--checkpoint.every={every}", f"--checkpoint.keep_every={every}"]


def branch_command(args: argparse.Namespace, mark: int, last: bool, left: float) -> list[str]:
    command = [str(HERE / "strata.py"), "--preset", args.preset, "--steps", str(mark), "--from", str(start_folder(args, mark))]
    command += ["--branch-steps", str(args.branch_steps), "--images", str(args.images), "--seeds", "2", "--skip-start"]
    command += ["--stratum-seeds", "2" if last else "1", "--limit-seconds", str(left)]
    command += ["--json", str(args.results / f"map-{mark}.jsonl")]
    if last and args.also:
        command += ["--also", args.also, "--also-images", str(args.images // 2)]
    return [*command, *args.rest, f"--process={args.schedule}", f"--seed={args.seed}"]


def newest(args: argparse.Namespace, marks: list[int], begun: dict[int, subprocess.Popen[bytes]]) -> int | None:
    """The first mark whose checkpoint is there and whose branches are not begun."""
    return next((mark for mark in marks if mark not in begun and checkpoint_of(args, mark) is not None), None)


def checkpoint_of(args: argparse.Namespace, mark: int) -> Path | None:
    return next(iter((args.results / "runs" / "runs").glob(f"*/checkpoints/step-{mark:08d}")), None)


def start_folder(args: argparse.Namespace, mark: int) -> Path:
    """A run folder that holds this checkpoint alone, by links, so that branches begin there."""
    found, folder = checkpoint_of(args, mark), args.results / f"start-{mark}"
    assert found is not None
    if not folder.exists():
        shutil.copytree(found, folder / "checkpoints" / found.name, copy_function=os.link)
    return folder


def start(log: Path, command: list[str]) -> subprocess.Popen[bytes]:
    with log.open("ab") as file:
        return subprocess.Popen([sys.executable, *command], stdout=file, stderr=subprocess.STDOUT)


if __name__ == "__main__":
    main()
