"""Generate images with a trained model.

Image i depends only on the seed and i, not on the batch or the number of processes (torchrun). An interrupted command
goes on where it stopped.

    noisewise generate runs/first --count 64 --out grid.png
    noisewise generate runs/first --count 50000 --steps 50 --out images
"""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from noisewise import distributed
from noisewise.commands.parser import Parser
from noisewise.generation.images import make_decoder, save_grid
from noisewise.generation.run_samples import evaluation_solver
from noisewise.generation.sets import PRECISIONS, ImageSet, fill, image_set
from noisewise.generation.solvers import Solver
from noisewise.generation.trained import WEIGHTS, Trained, load_trained
from noisewise.plain_files import inside, replacing, writing
from noisewise.training.display import Count

ENDINGS = {"npz": ".npz", "grid": ".png"}
NO_FOLDERS = (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".npy", ".zip")


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.add_argument("run", type=Path, help="the folder of a run, or one of its checkpoints")
    parser.add_argument("--count", type=int, default=64, help="how many images")
    parser.add_argument(
        "--out", type=Path, help="a folder (png), an .npz file, or a .png file for a grid; by default RUN/generated"
    )
    parser.add_argument("--format", choices=["png", "npz", "grid"], help="by default chosen from --out: png for a folder")
    add_model_options(parser)


def add_model_options(parser: Parser) -> None:
    """Those that say which model generates and how; evaluate has them too."""
    parser.add_argument("--step", type=int, help="the checkpoint of this step; the newest by default")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="NAME", help="allow importing the model NAME that the run names"
    )
    parser.add_argument("--model-weights", default="ema", choices=WEIGHTS, help="averaged weights (default) or the last ones")
    parser.add_argument(
        "--solver", help='such as "ddim:steps=50,eta=0" or "heun:steps=18"; default: the run\'s evaluation.solver'
    )
    parser.add_argument("--steps", type=int, help="steps of the solver, instead of a whole --solver")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other images")
    parser.add_argument("--guidance", type=float, default=1.0, help="classifier-free guidance; 1 is none")
    parser.add_argument(
        "--interval", type=float, nargs=2, default=(0.0, 1.0), metavar=("LOW", "HIGH"), help="guide only for u in this range"
    )
    parser.add_argument("--label", type=int, help="the class of all images; by default all classes in turn")
    parser.add_argument("--batch", type=int, default=500, help="images generated at a time")
    parser.add_argument("--device", default="auto", choices=DEVICES, help="auto takes a GPU if there is one")
    parser.add_argument("--precision", default="fp32", choices=list(PRECISIONS), help="precision of the network")
    parser.add_argument(
        "--compile", action="store_true", help="compile the network first; takes a minute, worth it for many images"
    )
    parser.add_argument("--autoencoder", help="folder or hub id; to decode latents with another autoencoder than made them")
    parser.add_argument("--subfolder", help="subfolder of --autoencoder")


def loaded(args: argparse.Namespace, path: Path, device: torch.device) -> Trained:
    """The model that the options name."""
    return load_trained(
        path, step=args.step, weights=args.model_weights, device=device, trust=args.trust, compiled=args.compile
    )


def choose_solver(args: argparse.Namespace, trained: Trained) -> Solver:
    """What --solver and --steps ask for."""
    solver = Solver.parse(args.solver, trained.objective.process) if args.solver else evaluation_solver(trained.config)
    return solver if args.steps is None else replace(solver, steps=args.steps)


def describe_set(args: argparse.Namespace, trained: Trained, folder: Path, count: int, format: str) -> ImageSet:
    """The set of images that the options describe."""
    interval = (args.interval[0], args.interval[1])
    return image_set(
        trained,
        folder,
        count,
        solver=choose_solver(args, trained),
        seed=args.seed,
        label=args.label,
        guidance=args.guidance,
        interval=interval,
        chunk=args.batch,
        format=format,
        precision=args.precision,
        autoencoder=f"{args.autoencoder}/{args.subfolder}" if args.autoencoder and args.subfolder else args.autoencoder,
    )


def make_set(
    args: argparse.Namespace, trained: Trained, images: ImageSet, device: torch.device, what: str | None = None
) -> None:
    """Make what is missing of it; `what` is how the user knows the place, if not by its folder."""
    decoder = None
    if trained.latents is not None:
        decoder = make_decoder(trained.latents, device, args.autoencoder, args.subfolder)
    share = sum(map(len, images.chunks()[distributed.rank() :: distributed.world_size()]))
    with Count("generating", share).shown() as done, writing(what or str(images.folder), images.folder):
        fill(images, trained, device=device, decoder=decoder, batch=args.batch, progress=done.add)


def run(args: argparse.Namespace) -> int:
    if args.count < 1:
        raise ValueError(f"--count must be >= 1, got {args.count}")
    device = prepare_processes(place(args.device))
    trained = loaded(args, args.run, device)
    ending = ENDINGS.get(args.format, "")
    name = f"step-{trained.step:08d}-seed-{args.seed}{ending}"
    out = args.out or inside(trained.folder, trained.folder / "generated" / name)
    format = args.format or {ending: name for name, ending in ENDINGS.items()}.get(out.suffix.lower(), "png")
    if format == "png" and out.suffix.lower() in NO_FOLDERS:
        raise ValueError(f"--out {out.name}: a grid is written as .png, many images into a folder or an .npz file")
    if format in ENDINGS and out.suffix.lower() != ENDINGS[format]:
        raise ValueError(
            f"--format {format} writes a {ENDINGS[format]} file: give --out a name that ends in it, not {out.name}"
        )
    if format in ENDINGS and out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a {ENDINGS[format]} file, as in {out / f'images{ENDINGS[format]}'}")
    folder = out if format == "png" else out.with_name(out.name + ".parts")
    images = describe_set(args, trained, folder, args.count, "png" if format == "png" else "npy")
    named = f"--out {out}" if args.out else str(out)
    make_set(args, trained, images, device, named)
    if distributed.rank() == 0:
        if format != "png":
            everything = torch.cat(list(images.batches()))
            with writing(named, out):
                if format == "npz":
                    pixels = everything.permute(0, 2, 3, 1).numpy()
                    with replacing(out) as file:
                        np.savez_compressed(file, images=pixels)
                else:
                    save_grid(everything, out)
            images.remove()
        print(f"{args.count} images of step {trained.step} ({images.record['solver']}): {out}")
    return 0


# Where a command computes: this machine's device, and the other processes if there are any ----------------------------


DEVICES = ("auto", "cpu", "cuda")


def place(device: str) -> torch.device:
    """The device that "auto", "cpu" or "cuda" means here."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda, but torch finds no GPU; use --device cpu, or install a CUDA build of torch")
    return torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")


def prepare_processes(device: torch.device) -> torch.device:
    """Join the other processes, if torchrun or accelerate launch has started any, and return this one's device."""
    from accelerate import PartialState

    return PartialState(cpu=device.type == "cpu").device
