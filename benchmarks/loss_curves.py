"""The same training run on the fast path and on the plain one: loss curves, and how far apart they are.

    python benchmarks/loss_curves.py --data PATH --json benchmarks/results/loss_curves.jsonl      on a GPU
    python benchmarks/loss_curves.py --preset digits --steps 40 --every 10 --paths plain          to see that it works
    python benchmarks/loss_curves.py --preset digits --model.name dit --batch 256 \
        --model.options '{"patch": 1, "width": 256, "depth": 8, "heads": 4}'                      a DiT over 64 tokens

Other options are those of `noisewise train`.

Both see the same images, noise and timesteps, which are functions of the seed and the step; only kernels, their order of adding
and dropout's decisions differ. What that does by itself is shown by a third run, the plain path with another seed: the distance
of two runs that agree should be smaller, and not grow in one direction. Held-out losses by noise level end the comparison.
"""

import argparse
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState
from rows import append

from noisewise.metrics.heldout import held_out_losses
from noisewise.training.components import build_parts, open_source
from noisewise.training.options import load_preset
from noisewise.training.parallel import make_accelerator
from noisewise.training.run_folder import environment
from noisewise.training.trainer import Trainer

PATHS = {"fast": ("always", 0), "plain": ("never", 0), "plain, another seed": ("never", 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cifar10-small")
    parser.add_argument("--data", type=Path, help="where the images are, if the preset needs to be told")
    parser.add_argument("--paths", default=";".join(PATHS), help="separated by semicolons")
    parser.add_argument("--sampler", default="uniform")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=int, default=50, help="steps of which a point of the curve is the mean")
    parser.add_argument("--json", type=Path)
    args, args.more = parser.parse_known_args()
    for path in args.paths.split(";"):
        for row in rows(args, path):
            if "loss" in row:
                print(f"{path:20s} step {row['step']:5d} loss {row['loss']:.5f}", flush=True)
            else:
                print(f"{path:20s} held-out loss {row['held_out_mean']:.5f} of the average, {row['told'] or 'plain path'}")
            if args.json:
                append(args.json, row)


def rows(args: argparse.Namespace, path: str) -> Any:
    """A row for each point of the curve, then one for the end."""
    fast, seed = PATHS[path]
    options = [f"--sampler={args.sampler}", f"--fast={fast}", f"--seed={seed}", f"--steps={args.steps}"]
    options += [f"--log.every={args.every}", "--log.trackers=[]"]
    options += [f"--data.path={args.data}"] if args.data else []
    options += args.more
    AcceleratorState._reset_state(True)
    config, told = load_preset(args.preset, *options), []
    trainer = Trainer(config, build_parts(config), make_accelerator(config), told.append)
    about = {"preset": args.preset, "sampler": args.sampler, "path": path, "seed": seed}
    about |= {"options": args.more} if args.more else {}
    for row in trainer.run():
        if row:
            yield {**about, "step": row["step"], "loss": row["loss"], "gradient_norm": row["gradient_norm"]}
    trainer.network.eval()
    with trainer.ema.applied(), trainer.accelerator.autocast():
        found = held_out_losses(trainer.call, trainer.objective, open_source(config, "test"), images=400, device=trainer.device)
    trainer.close()
    end = {"held_out": [round(value, 6) for value in found.loss.tolist()], "held_out_mean": round(found.mean, 6)}
    yield {**about, "step": trainer.step, **end, "told": told, **environment()}


if __name__ == "__main__":
    main()
