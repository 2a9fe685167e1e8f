"""Where a training step of the CPU demo goes: forward, backward and update (clip, Adam) of the model, and everything else.

    python benchmarks/trainer_profile.py [--steps 300] [--sampler adaptive] [--json benchmarks/results/trainer_profile.jsonl]

The share of everything else (data, timesteps, noise, loss, average, statistics) should stay below 5 %. Each part is timed
on its own; on a CPU nothing runs in the background.
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rows import append

from noisewise.training import optimizer as optimization
from noisewise.training.components import build_parts
from noisewise.training.options import load_preset
from noisewise.training.parallel import make_accelerator
from noisewise.training.run_folder import environment
from noisewise.training.trainer import Trainer

MODEL = ("forward", "backward", "clip gradients", "optimizer step")


def timed(parts: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            parts[name] += time.perf_counter() - start

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--sampler", default="adaptive")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    config = load_preset("digits", f"--sampler={args.sampler}", "--device=cpu", "--log.trackers=[]")
    trainer = Trainer(config, build_parts(config), make_accelerator(config))
    parts: dict[str, float] = defaultdict(float)
    trainer.arithmetic.call = timed(parts, "forward", trainer.arithmetic.call)
    trainer.accelerator.backward = timed(parts, "backward", trainer.accelerator.backward)
    optimization.gradient_norm = timed(parts, "clip gradients", optimization.gradient_norm)
    optimization.clip_gradients = timed(parts, "clip gradients", optimization.clip_gradients)
    trainer.optimizer.step = timed(parts, "optimizer step", trainer.optimizer.step)
    trainer.batches.get = timed(parts, "data", trainer.batches.get)
    trainer.sampler.sample = timed(parts, "timesteps", trainer.sampler.sample)
    trainer.ema.blend = timed(parts, "EMA", trainer.ema.blend)
    trainer.monitor.update = timed(parts, "monitor", trainer.monitor.update)
    trainer.guard.update = timed(parts, "guard", trainer.guard.update)
    rows: list[dict[str, float]] = []
    for _ in range(20 + args.steps):
        parts.clear()
        before = trainer.seconds
        trainer.timed_step()
        rows.append({**parts, "step": trainer.seconds - before})
    rows = rows[20:]
    names = [name for name in rows[0] if name != "step"]
    median = {name: statistics.median(row[name] for row in rows) for name in [*names, "step"]}
    outside = statistics.median(1 - sum(row[name] for name in MODEL) / row["step"] for row in rows)
    for name in sorted(names, key=lambda name: -median[name]):
        print(f"{name:16s} {median[name] * 1e3:8.3f} ms  {median[name] / median['step']:6.1%}")
    print(f"{'step':16s} {median['step'] * 1e3:8.3f} ms; outside the model's forward, backward and update: {outside:.1%}")
    if args.json:
        row = {"sampler": args.sampler, "steps": args.steps, "outside": round(outside, 4)}
        row |= {"milliseconds": {name: round(value * 1e3, 4) for name, value in median.items()}, **environment()}
        append(args.json, row)


if __name__ == "__main__":
    main()
