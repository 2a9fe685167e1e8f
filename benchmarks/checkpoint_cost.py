"""What a checkpoint costs training: the time that the steps lose, and the memory of the copy.

    python benchmarks/checkpoint_cost.py --millions 60 --json benchmarks/results/checkpoint_cost.jsonl

A DiT of about so many million parameters trains on tiny noise, so that nearly all of its state is weights, averages and Adam's
moments. `stopped` is how long the loop stands still for a save (the copy), `stopped_cpu` the part of it in which it had a
core (others may use the machine: `load`), `lost` what all steps until the file is there take beyond their usual time, `written`
how long a save takes for one that waits for it. Medians over the saves after the first, for which the copy is also allocated
(`first`).
"""

import argparse
import os
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import append

from noisewise.training.config import CheckpointConfig, Config, DataConfig, LogConfig, ModelConfig
from noisewise.training.run import Run
from noisewise.training.run_folder import environment

DEPTH, HEADS = 12, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=60.0, help="of parameters, about")
    parser.add_argument("--saves", type=int, default=4, help="in the background; one more waits")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        row = measure(args, Path(place))
    print(row)
    if args.json:
        append(args.json, row)


def config_of(args: argparse.Namespace, place: Path) -> Config:
    """A DiT of about so many parameters: a block has 18 times its width squared."""
    np.save(place / "noise.npy", np.random.default_rng(0).standard_normal((16, 4, 8, 8), np.float32))
    width = HEADS * 4 * max(1, round((args.millions * 1e6 / (18 * DEPTH)) ** 0.5 / (HEADS * 4)))
    return Config(
        out=str(place / "run"),
        sampler="uniform",
        steps=10**6,
        batch=args.batch,
        device=args.device,
        data=DataConfig(source="array", path=str(place / "noise.npy")),
        model=ModelConfig(name="dit", options={"width": width, "depth": DEPTH, "heads": HEADS, "patch": 2}),
        checkpoint=CheckpointConfig(every=10**9, keep=1),
        log=replace(LogConfig(), every=10**9, trackers=[]),
    )


def measure(args: argparse.Namespace, place: Path) -> dict[str, Any]:
    run = Run(config_of(args, place))
    run.trainer.warm_up()
    step(run)
    usual = statistics.median(step(run) for _ in range(6))
    before = resident()
    saves = [background(run, usual) for _ in range(args.saves)]
    copy = resident() - before
    start = time.perf_counter()
    path = run.save()
    written = time.perf_counter() - start
    size = sum(file.stat().st_size for file in path.iterdir())
    run.close()
    return {
        "parameters": sum(parameter.numel() for parameter in run.trainer.model.parameters()),
        "bytes": size,
        "step": round(usual, 4),
        "first": round(saves[0]["stopped"], 3),
        **{name: round(statistics.median(save[name] for save in saves[1:]), 3) for name in ("stopped", "stopped_cpu", "lost")},
        "written": round(written, 3),
        "copy_bytes": copy,
        "saves": len(saves) - 1,
        "date": datetime.now(UTC).date().isoformat(),
        **environment(),
        "device": str(run.trainer.device),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }


def step(run: Run) -> float:
    """A step, waited for."""
    start = time.perf_counter()
    run.trainer.timed_step()
    return time.perf_counter() - start


def background(run: Run, usual: float) -> dict[str, float]:
    """A save in the background, and steps until it is written."""
    step(run)  # a checkpoint of the same step would be there already
    start, work = time.perf_counter(), time.thread_time()
    run.save(wait=False)
    run.trainer.arithmetic.wait()
    stopped, worked, steps = time.perf_counter() - start, time.thread_time() - work, 0
    while run._saver.busy:
        step(run)
        steps += 1
    run.settle(wait=True)
    lost = time.perf_counter() - start - steps * usual
    run._prune()
    return {"stopped": stopped, "stopped_cpu": worked, "lost": max(lost, stopped)}


def resident() -> int:
    """Bytes of this process in memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmRSS:"))) * 1024


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
