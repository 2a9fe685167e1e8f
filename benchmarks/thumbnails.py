"""Long trainings without a GPU: CIFAR-10 at 8 x 8 pixels, a U-Net of 0.4 M parameters, 32,000 steps in 20 minutes of one core.

    python benchmarks/thumbnails.py features                                                         first, three minutes
    python benchmarks/thumbnails.py train uniform adaptive --json benchmarks/results/thumbnails.jsonl       two at a time
    python benchmarks/thumbnails.py map out/states/uniform-0-32000.pt --json benchmarks/results/thumbnails-map.jsonl
    python benchmarks/thumbnails.py train uniform --steps 20 --marks 10,20 --images 64                 to see that it works

`features` trains a small classifier (70 % of the test images right), whose 192 features before the last layer stand in for
Inception's. Rows name it by a digest of its weights. Compare distances by one classifier alone: another number of threads or
another machine trains another one, and distances by the two differ by a tenth.
`train` trains with each spec in a process of its own and, at `--marks`, writes a row with the Fréchet distance of the averaged
weights' images (30 steps of DDIM) to all training images, and the held-out loss by noise level; with `--save` it keeps its
state there. `map` goes on from such states for `--branch` steps with half of the batch in one tenth of u, as map.py does with
larger images, and with uniform draws of two seeds. `--also` names a second solver, with rows of its own at some marks.
CIFAR-10 is read from `--data`, in its binary layout.
"""

import argparse
import hashlib
import json
import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rows import append
from torch import Tensor, nn
from torch.nn import functional as F

import noisewise
from noisewise import Objective, Sampler
from noisewise.analysis.moments_of_training import RangeSampler
from noisewise.generation.images import generate
from noisewise.generation.solvers import Solver
from noisewise.metrics.frechet import Moments, moments_distance
from noisewise.models.unet import UNet
from noisewise.samplers.static import Uniform
from noisewise.spec import build_process
from noisewise.training.run_folder import environment

SHAPE, CHANNELS = (3, 8, 8), 24
MARKS = "250,500,1000,2000,4000,8000,12000,16000,24000,32000"
LEVELS, HELD_OUT = 50, 1000  # noise levels of the held-out loss, and test images
WARM_UP, DECAY, SOLVER = 200, 0.999, Solver("ddim", 30)
WIDTH, EPOCHS, BATCH = 96, 12, 256  # of the classifier
TENTHS, MEMORY = 10, 4  # of the map: parts of u, and the branch's length over the time constant of its average


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("features", "train", "map"))
    parser.add_argument("jobs", nargs="*", help="specs of samplers, or states")
    parser.add_argument("--process", default="quadratic")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=32000)
    parser.add_argument("--marks", default=MARKS, help="evaluate after so many steps")
    parser.add_argument("--save", type=Path, help="a folder for states at the marks")
    parser.add_argument("--branch", type=int, default=1000, help="steps from a state")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--images", type=int, default=5000, help="generated for each distance")
    parser.add_argument("--also", help="a second solver, such as ddpm:steps=250,variance=fixed_large")
    parser.add_argument("--also-at", default="2000,8000,16000", help="the marks that it makes images for")
    parser.add_argument("--workers", type=int, default=2, help="runs at the same time, a thread each")
    parser.add_argument("--data", type=Path, default=Path("data/cifar10"))
    parser.add_argument("--classifier", type=Path, default=Path("out/thumbnails.pt"), help="of `features`")
    parser.add_argument("--json", type=Path, help="append a row for each evaluation to this file")
    args = parser.parse_args()
    if args.what == "features":
        train_classifier(args)
        return
    if not args.classifier.exists():
        raise SystemExit(f"thumbnails.py: there is no {args.classifier} yet: run `thumbnails.py features` first")
    jobs: list[tuple[Any, ...]] = [(train, args, spec) for spec in args.jobs]
    if args.what == "map":
        jobs = [
            (branch, args, Path(state), where) for state in args.jobs for where in ("uniform 0", "uniform 1", *range(TENTHS))
        ]
    with ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        for done in [pool.submit(*job) for job in jobs]:
            done.result()


# Data and features ----------------------------------------------------------------------------------------------------


def thumbnails(folder: Path, files: str) -> tuple[Tensor, Tensor]:
    """Images in [-1, 1], each pixel the mean of 4 x 4, and their classes."""
    paths = sorted(folder.glob(f"**/{files}"))
    if not paths:
        raise SystemExit(f"thumbnails.py: no {files} in {folder}: unpack the binary version of CIFAR-10 there, or give --data")
    records = np.concatenate([np.fromfile(path, np.uint8).reshape(-1, 3073) for path in paths])
    pixels = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)).float()
    return F.avg_pool2d(pixels, 4) / 127.5 - 1, torch.from_numpy(records[:, 0].astype(np.int64))


def flipped(images: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen[:, None, None, None], images.flip(3), images)


class Classifier(nn.Module):
    """Four convolutions and the mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, WIDTH, 1), (WIDTH, WIDTH, 1), (WIDTH, 2 * WIDTH, 2), (2 * WIDTH, 2 * WIDTH, 1)]
        blocks = [nn.Sequential(nn.Conv2d(a, b, 3, stride, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b, stride in sizes]
        self.features = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.last = nn.Linear(2 * WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(F.dropout(self.features(images), 0.2, self.training))


def train_classifier(args: argparse.Namespace) -> None:
    torch.manual_seed(0)
    (images, classes), (others, wanted) = (thumbnails(args.data, files) for files in ("data_batch_*.bin", "test_batch.bin"))
    model, count = Classifier(), len(images) // BATCH
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=EPOCHS * count)
    for epoch in range(EPOCHS):
        model.train()
        for part in torch.randperm(len(images))[: count * BATCH].view(count, BATCH):
            loss = F.cross_entropy(model(flipped(images[part], torch.rand(BATCH) < 0.5)), classes[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.no_grad():
            right = (model(others).argmax(1) == wanted).float().mean()
        print(f"epoch {epoch + 1} of {EPOCHS}: {right:.1%} of the test images right", flush=True)
    args.classifier.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), args.classifier)


@torch.no_grad()
def moments_of(classifier: Classifier, images: Tensor) -> Moments:
    return Moments.of(torch.cat([classifier.features(part.clamp(-1, 1)) for part in images.split(1000)]))


# Training -------------------------------------------------------------------------------------------------------------


class Training:
    """The network, its optimizer and an average of its weights, on thumbnails."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.args = args
        (self.images, _), (self.others, _) = (thumbnails(args.data, files) for files in ("data_batch_*.bin", "test_batch.bin"))
        self.classifier = Classifier().eval()
        weights = torch.load(args.classifier, weights_only=True)
        self.classifier.load_state_dict(weights)
        self.judge = hashlib.sha256(b"".join(weights[name].numpy().tobytes() for name in sorted(weights))).hexdigest()[:8]
        self.real = moments_of(self.classifier, self.images)
        torch.manual_seed(args.seed)
        self.objective = Objective(build_process(args.process))  # the usual target: eps, or flow
        self.model = UNet(SHAPE, channels=CHANNELS, multipliers=(1, 2), blocks=1, attention=(), dropout=0.0)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=args.lr)
        self.generator = torch.Generator().manual_seed(args.seed)
        self.start_average()

    def start_average(self) -> None:
        self.average = [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self, recipe: noisewise.Recipe, rate: float, decay: float) -> None:
        chosen = torch.randint(0, len(self.images), (self.args.batch,), generator=self.generator)
        x0 = flipped(self.images[chosen], torch.rand(self.args.batch, generator=self.generator) < 0.5)
        draw = recipe.sample(x0)

        def loss_at(rows: Tensor, u: Tensor) -> Tensor:
            return self.objective.losses(self.model, x0[rows], u)

        recipe.loss(draw, self.objective.losses(self.model, x0, draw.u), loss_at).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(self.average, list(self.model.parameters()), 1 - decay)

    def evaluate(self, about: dict[str, Any], solver: Solver = SOLVER) -> None:
        """Of the average: what it is worth, as a row and a line."""
        exchange(self.model, self.average)
        found = evaluated(self.model, self.objective, self.others[:HELD_OUT], self.args.images, solver)
        distance = float(moments_distance(moments_of(self.classifier, found.pop("images")), self.real))
        exchange(self.model, self.average)
        print(f"{' '.join(str(one) for one in about.values())}: distance {distance:.3f}", flush=True)
        if self.args.json:
            settings = {name: getattr(self.args, name) for name in ("process", "seed", "batch", "lr", "images")}
            row = about | {"distance": distance, **found, "classifier": self.judge} | settings | environment()
            append(self.args.json, json.loads(json.dumps(row)))


def train(args: argparse.Namespace, spec: str) -> None:
    training = Training(args)
    recipe = noisewise.recipe(spec, training.objective)
    recipe.attach(training.optimizer, training.model)
    marks, seconds, begun = {int(mark) for mark in args.marks.split(",")}, 0.0, time.perf_counter()
    for step in range(1, args.steps + 1):
        training.step(recipe, args.lr * min(1.0, step / WARM_UP), min(DECAY, (1 + step) / (10 + step)))
        if step in marks:
            seconds += time.perf_counter() - begun
            about = {"spec": spec, "step": step, "seconds": round(seconds)}
            training.evaluate(about)
            if args.also and step in {int(mark) for mark in args.also_at.split(",")}:
                training.evaluate({**about, "solver": args.also}, Solver.parse(args.also, training.objective.process))
            if args.save:
                args.save.mkdir(parents=True, exist_ok=True)
                parts = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
                torch.save({**parts, "step": step}, args.save / f"{spec}-{args.seed}-{step}.pt")
            begun = time.perf_counter()


def branch(args: argparse.Namespace, state: Path, where: int | str) -> None:
    """More of one tenth of u from a state on, or uniform draws; judged by an average along the branch alone."""
    training = Training(args)
    found = torch.load(state, weights_only=True)
    training.model.load_state_dict(found["model"])
    training.optimizer.load_state_dict(found["optimizer"])
    training.start_average()
    process = training.objective.process
    seed = int(where.split()[1]) if isinstance(where, str) else args.seed
    if isinstance(where, str):
        sampler: Sampler = Uniform(process, seed=seed)
    else:
        sampler = RangeSampler(process, where / TENTHS, (where + 1) / TENTHS, 0.5)
    training.generator.manual_seed(1000 + seed)
    torch.manual_seed(1000 + seed)
    recipe = noisewise.Recipe(sampler, objective=training.objective)
    recipe.attach(training.optimizer, training.model)
    for _ in range(args.branch):
        training.step(recipe, args.lr, 1 - MEMORY / args.branch)
    training.evaluate({"state": state.stem, "from": found["step"], "branch": args.branch, "where": where})


@torch.no_grad()
def exchange(model: nn.Module, average: list[Tensor]) -> None:
    """The weights with their average."""
    for parameter, other in zip(model.parameters(), average, strict=True):
        kept = parameter.clone()
        parameter.copy_(other)
        other.copy_(kept)


@torch.no_grad()
def evaluated(model: nn.Module, objective: Objective, images: Tensor, count: int, solver: Solver) -> dict[str, Any]:
    """Generated images, and the held-out loss at each level; the same noise every time, the caller's left alone."""
    model.eval()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        levels = [(level + 0.5) / LEVELS for level in range(LEVELS)]
        losses = [float(objective.losses(model, images, torch.full((len(images),), u)).mean()) for u in levels]
        made = generate(model, objective, SHAPE, count, solver=solver, batch=500, device="cpu", seed=3)
    model.train()
    return {"images": made, "held_out": [round(loss, 6) for loss in losses]}


if __name__ == "__main__":
    main()
