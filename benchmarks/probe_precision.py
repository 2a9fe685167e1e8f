"""How much of the published reward survives bfloat16: rewards of one step, probed in bf16 autocast, against float32; on a GPU
those in TF32 too. And how far rewards spread if the noise before the step is not that after it.

Trains a preset with uniform sampling. At some steps the decrease of c_t ||eps - eps_theta||^2 over one optimizer step is
measured for every sample of the batch at evenly spaced timesteps, with the same noise, in both precisions. Rows go to
results/probe_precision.jsonl. Needs no GPU; `--device cuda` takes one.

    python benchmarks/probe_precision.py
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from rows import append

from noisewise.analysis.moments_of_training import opened
from noisewise.analysis.predictor import spearman
from noisewise.feedback import KeptParameters, at_precision, evaluate
from noisewise.samplers.adaptive.selection import by_grid
from noisewise.samplers.base import LossAt
from noisewise.training.options import load_preset
from noisewise.training.trainer import Trainer
from noisewise.weighting import VLB

CHOSEN = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--moments", default="20,200,600", help="steps to look at")
    parser.add_argument("--lrs", default="0.003,0.0002", help="learning rates: the preset's, and that of arXiv 2411.09998")
    parser.add_argument("--fast", default="auto", choices=("auto", "never"), help="never: without waiting for the compiler")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "probe_precision.jsonl")
    args = parser.parse_args()
    moments = [int(one) for one in args.moments.split(",")]
    for lr in (float(one) for one in args.lrs.split(",")):
        preset = load_preset(args.preset)
        config = replace(preset, device=args.device, steps=max(moments) + 1, optimizer=replace(preset.optimizer, lr=lr))
        with opened(replace(config, sampler="uniform", fast=args.fast)) as trainer:
            for moment in moments:
                while trainer.step < moment:
                    trainer.training_step()
                row = {"preset": args.preset, "lr": lr, "step": moment, "device": args.device, **compared(trainer)}
                print(row, flush=True)
                append(args.out, row)


def compared(trainer: Trainer) -> dict[str, float]:
    """The next step's rewards in both precisions."""
    x0, labels = trainer.batches.get(trainer.step)
    loss_at = trainer.loss_at(x0, labels if trainer.parts.classes else None)
    kept = KeptParameters(trainer.network)
    trainer.training_step()
    kinds = ("float32", "bf16", "tf32") if x0.device.type == "cuda" else ("float32", "bf16")
    after = {kind: losses(trainer, loss_at, x0, kind) for kind in kinds}
    with kept.put_back():
        change = {kind: losses(trainer, loss_at, x0, kind) - after[kind] for kind in after}
        change["fresh"] = losses(trainer, loss_at, x0, "float32", seed=8) - after["float32"]
    rewards = {kind: one.view(CHOSEN, len(x0)).mean(0) for kind, one in change.items()}
    exact = rewards.pop("float32")
    found = {"reward_spread": float(exact.std()), "fresh_spread": float(rewards.pop("fresh").std())}
    for kind, rounded in rewards.items():
        prefix = "" if kind == "bf16" else f"{kind}_"
        found[f"{prefix}pearson"] = float(torch.corrcoef(torch.stack([exact, rounded]))[0, 1])
        found[f"{prefix}spearman"] = float(spearman(exact[:, None], rounded[:, None])[0])
        found[f"{prefix}rounding_spread"] = float((rounded - exact).std())
    return found


@torch.no_grad()
def losses(trainer: Trainer, loss_at: LossAt, x0: torch.Tensor, kind: str, seed: int = 7) -> torch.Tensor:
    """Weighted losses of all samples at the chosen timesteps, with one noise."""
    process = trainer.objective.process
    levels = (by_grid(torch.zeros(2, process.steps, device=x0.device), CHOSEN) + 0.5) / process.steps
    u, rows = levels.repeat_interleave(len(x0)), torch.arange(len(x0), device=x0.device).repeat(CHOSEN)
    model = trainer.network
    found = evaluate(at_precision(loss_at, kind, model), rows, u, most=8 * len(x0), seed=seed, model=model)
    return (VLB(normalise=False).weights(trainer.objective, u) * found).double()


if __name__ == "__main__":
    main()
