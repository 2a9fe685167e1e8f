"""What the presets take at full size: parameters, memory and time per step, on noise of the shape of their data.

    python benchmarks/preset_cost.py --device cuda --json benchmarks/results/preset_cost.jsonl [--only cifar10,...] [--steps 20]

Each preset runs in a process of its own (memory is a peak over the process); the time is the median of the steps after the
first two. `noisewise train --preset NAME --dry-run` is the same with two steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from rows import append

from noisewise.training.components import build_parts
from noisewise.training.options import load_preset, preset_names
from noisewise.training.parallel import make_accelerator
from noisewise.training.run_folder import environment
from noisewise.training.trainer import Trainer


def measure(name: str, device: str, steps: int, overrides: list[str]) -> dict:
    config = load_preset(name, f"--device={device}", *overrides)
    accelerator = make_accelerator(config)
    trainer = Trainer(config, build_parts(config, synthetic=True), accelerator)
    times = []
    for _ in range(steps + 2):
        before = trainer.seconds
        trainer.timed_step()
        times.append(trainer.seconds - before)
    trainer.close()
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else None
    return {
        "preset": name,
        "parameters": sum(parameter.numel() for parameter in trainer.model.parameters()),
        "batch": config.batch,
        "accumulation": config.accumulation,
        "precision": accelerator.mixed_precision,
        "compile": config.compile,
        "seconds_per_step": round(statistics.median(times[2:]), 5),
        "fastest_and_slowest": [round(min(times[2:]), 5), round(max(times[2:]), 5)],
        "steps": steps,
        "gpu_memory_gib": round(peak, 2) if peak else None,
        "overrides": overrides,
        **environment(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default=",".join(preset_names()))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args, overrides = parser.parse_known_args()
    if args.one:
        print(json.dumps(measure(args.one, args.device, args.steps, overrides)))
        return
    for name in args.only.split(","):
        command = [sys.executable, __file__, "--one", name, "--device", args.device, "--steps", str(args.steps), *overrides]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            print(f"{name:16s} failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        row = json.loads(done.stdout.strip().splitlines()[-1])
        memory = f"{row['gpu_memory_gib']} GiB" if row["gpu_memory_gib"] else ""
        print(f"{name:16s} {row['parameters']:>12,} parameters  {1 / row['seconds_per_step']:8.2f} it/s  {memory}", flush=True)
        if args.json:
            append(args.json, row)


if __name__ == "__main__":
    main()
