"""The same weights by another solver: distances of a run's checkpoints, a row for each.

    python benchmarks/solvers.py out/long/*/runs/* --json benchmarks/results/cifar10-v2-solvers.jsonl                 on a GPU
    python benchmarks/solvers.py out/tiny/*/runs/* --solver ddpm:steps=20 --images 64 --json out/tiny/solvers.jsonl   on a CPU

Asks `noisewise evaluate` about every checkpoint that is there, or about those of `--steps`, and writes what it says beside
the run's process, spec and seed. Training keeps checkpoints with `--checkpoint.keep_every`. What is in the file already is not
made again. 1000 ancestral steps are the solver of the papers; they take twenty times as long as 50 of DDIM.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml
from rows import append

ABOUT = ("name", "process", "prediction", "sampler", "seed", "steps")


def main() -> None:
    args = options().parse_args()
    known = {label(json.loads(line)) for line in args.json.read_text().splitlines()} if args.json.exists() else set()
    jobs = [
        about | {"step": step} for run in args.runs for about in [described(run, args)] for step in steps_of(run, args.steps)
    ]
    left = [job for job in jobs if label(job) not in known]
    print(f"{len(jobs)} checkpoints, {len(jobs) - len(left)} of them in the file already", flush=True)
    with ThreadPoolExecutor(args.workers) as pool:
        for done in [pool.submit(evaluate, job, args) for job in left]:
            done.result()


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    parser.add_argument("--solver", default="ddpm:steps=1000,variance=fixed_large")
    parser.add_argument("--steps", help="checkpoints, as in 16000,64000; default: all")
    parser.add_argument("--images", type=int, default=5000, help="generated for each distance")
    parser.add_argument("--precision", default="bf16", help="of the network while generating")
    parser.add_argument("--workers", type=int, default=2, help="checkpoints at the same time")
    parser.add_argument("--json", type=Path, required=True, help="append a row for each to this file")
    return parser


def described(run: Path, args: argparse.Namespace) -> dict[str, Any]:
    """What its rows say of a run."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    return {**{name: config[name] for name in ABOUT}, "solver": args.solver, "images": args.images, "run": str(run)}


def steps_of(run: Path, chosen: str | None) -> list[int]:
    """The steps of its checkpoints, of the chosen ones if any were."""
    there = sorted(int(path.parent.name.partition("-")[2]) for path in run.glob("checkpoints/step-*/manifest.json"))
    return there if chosen is None else [step for step in there if step in map(int, chosen.split(","))]


def label(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells a row from others."""
    return tuple(row[name] for name in (*ABOUT, "step", "solver", "images"))


def evaluate(job: dict[str, Any], args: argparse.Namespace) -> None:
    """Ask about one checkpoint, and write its row."""
    run = job.pop("run")
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "noisewise", "evaluate", run, "--step", str(job["step"]), "--solver", args.solver]
        command += ["--count", str(args.images), "--precision", args.precision, "--heldout", "0", "--json", str(found)]
        said = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if said.returncode:
            raise SystemExit(f"solvers.py: step {job['step']} of {run} failed\n{said.stdout}")
        row = {**job, **json.loads(found.read_text())}
    append(args.json, row)
    print(f"{job['process']} {job['sampler']} seed {job['seed']}, step {job['step']}: {distance_of(row):.3f}", flush=True)


def distance_of(row: dict[str, Any]) -> float:
    """FID, or the digits' distance."""
    return next(row[name] for name in ("fid", "digits-frechet") if name in row)


if __name__ == "__main__":
    main()
