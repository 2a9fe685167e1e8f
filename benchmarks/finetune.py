"""A short fine-tune: a U-Net trained on all digits, then taught only some of them through low-rank adapters.

    python benchmarks/finetune.py --base /tmp/base.pt --json benchmarks/results/finetune_digits.jsonl      on a CPU

The base is trained once, with uniform draws, and is the same for all. A seed means the same adapters at the start, the same
batches and the same noise for every method. Reported at each mark, of the weights as they are (no average): the Fréchet
distance of generated images to the images of those digits in the features of the digits classifier, and the plain loss
of held-out images of them by thirds of the timesteps. The row of step 0 is the base itself.
"""

import argparse
from pathlib import Path

import numpy as np
import rows
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import noisewise
from noisewise import DDPM, Objective
from noisewise.data.digits import Digits
from noisewise.generation.images import generate
from noisewise.metrics.digits_features import digits_features
from noisewise.metrics.frechet import features_distance
from noisewise.models import build_model

METHODS = {"uniform": "uniform", "logit_normal": "logit_normal", "minsnr": "minsnr:gamma=5", "adaptive": "adaptive"}
OPTIONS = {"channels": 16, "multipliers": [1, 2], "blocks": 1, "attention": [], "dropout": 0.0}  # of the preset `digits`
SHAPE, LEVELS = (1, 8, 8), 30
OBJECTIVE = Objective(DDPM.linear())


class LowRank(nn.Module):
    """W + B A: nothing at the start, as B is zero."""

    def __init__(self, weight: Tensor, rank: int) -> None:
        super().__init__()
        rows, columns = len(weight), weight[0].numel()
        rank = min(rank, rows, columns)
        self.a = nn.Parameter(torch.randn(rank, columns) / columns**0.5)
        self.b = nn.Parameter(torch.zeros(rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (self.b @ self.a).view_as(weight)


def adapt(model: nn.Module, rank: int) -> list[nn.Parameter]:
    """Freeze the model, give every convolution and linear layer an adapter, and return what is to be trained."""
    model.requires_grad_(False)
    for layer in [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]:
        parametrize.register_parametrization(layer, "weight", LowRank(layer.weight, rank))
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def images_of(split: str, digits: list[int] | None) -> Tensor:
    source = Digits(split)
    values, labels = source.read(np.arange(len(source)))
    assert labels is not None
    kept = torch.ones(len(source), dtype=torch.bool) if digits is None else torch.isin(labels, torch.tensor(digits))
    return source.decode(values[kept])


def train_on(
    model: nn.Module, parameters: list[nn.Parameter], images: Tensor, spec: str, args: argparse.Namespace, **loop: int
):
    """Yields after every step, to look at the model."""
    optimizer = torch.optim.Adam(parameters, lr=args.lr)
    recipe = noisewise.recipe(spec, OBJECTIVE, seed=loop["seed"]).attach(optimizer)
    order = torch.Generator().manual_seed(loop["seed"])
    for step in range(loop["steps"]):
        x0 = images[torch.randint(len(images), (loop["batch"],), generator=order)]
        torch.manual_seed(loop["seed"] * 1_000_003 + step)
        draw = recipe.sample(x0)
        recipe.loss(draw, OBJECTIVE.losses(model, x0, draw.u)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step + 1


def made_base(args: argparse.Namespace) -> dict[str, Tensor]:
    """The weights of the base, trained the first time."""
    if not args.base.exists():
        torch.manual_seed(0)
        model = build_model("unet", OPTIONS, shape=SHAPE)
        settings = argparse.Namespace(lr=3e-3)
        average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.995))
        for _ in train_on(
            model,
            list(model.parameters()),
            images_of("train", None),
            "uniform",
            settings,
            seed=0,
            steps=args.base_steps,
            batch=64,
        ):
            average.update_parameters(model)
        torch.save(average.module.state_dict(), args.base)
    return torch.load(args.base, weights_only=True)


@torch.no_grad()
def look(model: nn.Module, held_out: Tensor, reference: Tensor, count: int) -> dict[str, object]:
    """Distance of generated images, and the plain loss by thirds of the timesteps."""
    model.eval()
    losses = []
    for level in range(LEVELS):
        noise = torch.randn(held_out.shape, generator=torch.Generator().manual_seed(level))
        u = torch.full((len(held_out),), (level + 0.5) / LEVELS)
        losses.append(OBJECTIVE.losses(model, held_out, u, noise).mean())
    thirds = torch.stack(losses).view(3, -1).mean(1)
    distance = features_distance(digits_features(generate(model, OBJECTIVE, SHAPE, count)), reference)
    model.train()
    return {"distance": round(distance, 4), "loss": [round(value, 6) for value in thirds.tolist()]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="where the base is, or will be")
    parser.add_argument("--base-steps", type=int, default=2000)
    parser.add_argument("--digits", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--rank", type=int, default=8, help="of the adapters; 0 trains all weights")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--marks", type=int, nargs="+", default=[250, 500, 1000, 2000])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4, 5])
    parser.add_argument("--count", type=int, default=500, help="generated images at each mark")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    base = made_base(args)
    train, held_out = images_of("train", args.digits), images_of("test", args.digits)
    reference = digits_features(images_of("all", args.digits))
    settings = {
        "digits": args.digits,
        "rank": args.rank,
        "lr": args.lr,
        "batch": args.batch,
        "images": len(train),
        "count": args.count,
    }
    settings |= {"base_steps": args.base_steps, "torch": torch.__version__, "noisewise": noisewise.__version__}

    def report(method: str, seed: int, step: int, model: nn.Module) -> None:
        row = {"method": method, "seed": seed, "step": step, **look(model, held_out, reference, args.count), **settings}
        print(f"{method:13s} seed {seed}  step {step:5d}  distance {row['distance']:8.4f}  loss {row['loss']}", flush=True)
        if args.json:
            rows.append(args.json, row)

    for seed in args.seeds:
        for method in args.methods:
            model = build_model("unet", OPTIONS, shape=SHAPE)
            model.load_state_dict(base)
            if seed == 0 and method == "uniform":
                report("base", seed, 0, model)
            torch.manual_seed(seed)
            parameters = adapt(model, args.rank) if args.rank else list(model.parameters())
            for step in train_on(
                model, parameters, train, METHODS[method], args, seed=seed, steps=max(args.marks), batch=args.batch
            ):
                if step in args.marks:
                    report(method, seed, step, model)


if __name__ == "__main__":
    main()
