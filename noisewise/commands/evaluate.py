"""Measure the distance of generated images to real ones (FID and others), held-out loss by noise level, bits per dimension.

The results of a run are appended to its metrics.jsonl.

    noisewise evaluate runs/first
    noisewise evaluate images --data cifar10:data/cifar10 --metrics fid,kid
"""

import argparse
import json
import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from noisewise import distributed
from noisewise.commands.generate import (
    add_model_options,
    choose_solver,
    describe_set,
    loaded,
    make_set,
    place,
    prepare_processes,
)
from noisewise.commands.parser import Parser
from noisewise.data import Source, leaving_out_corrupt, open_data, open_named
from noisewise.generation.sets import ImageSet
from noisewise.generation.trained import Trained
from noisewise.looking.validation import Levels, is_even, level_grid
from noisewise.metrics import distances
from noisewise.metrics.features import OF_INCEPTION
from noisewise.metrics.heldout import check_classes, held_out_losses
from noisewise.metrics.likelihood import VARIANCES, variational_bound
from noisewise.metrics.optimal_loss import (
    DRAWS,
    FILE,
    REFERENCES,
    OptimalLoss,
    kept_optimal_loss,
    remembered,
    save_optimal_loss,
)
from noisewise.plain_files import inside, writing
from noisewise.precision import full_float32
from noisewise.processes import Process
from noisewise.study.measure import (
    CPU_IMAGES,
    CPU_REAL_IMAGES,
    about,
    feature_seconds,
    forward_seconds,
    needs_inception,
    said_fewer,
)
from noisewise.training.checkpoint import NAME
from noisewise.training.components import open_source
from noisewise.training.config import Config
from noisewise.training.display import Count
from noisewise.training.options import read_mapping
from noisewise.training.run_folder import COMPARISON, RunFolder, environment, settings_of
from noisewise.weighting import VLB


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.add_argument("target", type=Path, help="a run, one of its checkpoints, a folder of images, or an .npy/.npz file")
    parser.add_argument(
        "--data", help="real images, as SOURCE:PATH (cifar10:data/cifar10, folder:images, digits); the run's own by default"
    )
    parser.add_argument(
        "--data-options", type=read_mapping, default={}, help="settings of that source as YAML, such as {size: 64}"
    )
    parser.add_argument("--split", default="train", help="split of the real images")
    parser.add_argument("--count", type=int, help="images that a run generates; default: its evaluation.images")
    parser.add_argument(
        "--metrics", default="fid", help=f"comma-separated, of {', '.join(distances.METRICS)}; none for no images"
    )
    parser.add_argument(
        "--preprocessing", default="pytorch-fid", choices=OF_INCEPTION, help="how images are resized for Inception"
    )
    parser.add_argument(
        "--features",
        default="inception",
        choices=distances.FEATURES,
        help="the feature network; dinov2 (FD-DINOv2) needs --weights",
    )
    parser.add_argument("--weights", type=Path, help="weights of the feature network; not needed for Inception with [fid]")
    parser.add_argument("--heldout", type=int, default=1000, help="held-out images for the loss by noise level; 0 for none")
    parser.add_argument(
        "--levels",
        default="50",
        help="noise levels of the held-out loss: a number, mlperf, log_snr(20), quantiles(50), or values of u as 0.1,0.5,0.9",
    )
    parser.add_argument(
        "--optimal",
        action="store_true",
        help="also compute the loss of a perfect model of the training data, and what is left to learn",
    )
    parser.add_argument("--vlb", type=int, default=0, help="images for the bound in bits per dimension; 0 for none")
    parser.add_argument("--variance", default="fixed_small", choices=VARIANCES, help="variance of the model in the bound")
    parser.add_argument("--tf32", action="store_true", help="features of generated images in TF32; changes FID by 0.001")
    parser.add_argument("--skip-corrupt", action="store_true", help="skip image files that cannot be read")
    parser.add_argument("--feature-batch", type=int, default=128, help="images at a time in the feature network")
    parser.add_argument("--cache", type=Path, help="folder for statistics of real images; by default the user's cache folder")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    add_model_options(parser)


def run(args: argparse.Namespace) -> int:
    device = prepare_processes(place(args.device))
    metrics = () if args.metrics == "none" else distances.check_metrics(name.strip() for name in args.metrics.split(","))
    args.target = args.target.absolute()
    if not args.target.exists():
        raise FileNotFoundError(f"{args.target} does not exist: give a run, a folder of images, or an .npy/.npz file")
    if (args.target / COMPARISON).is_file():  # its pictures are grids of samples
        settings_of(args.target)
    is_run = (args.target / "config.yaml").is_file() or bool(NAME.fullmatch(args.target.name))
    check_options(args, is_run)
    if metrics and args.count is not None and args.count < 2:
        raise ValueError(f"--count must be >= 2 for a distance, got {args.count}")
    if not is_run and (not metrics or args.vlb):
        raise ValueError(f"{args.target} is no run with a model: only the distances of its images (--metrics) can be measured")
    trained, asked = None, args.count is not None
    if is_run:
        trained = loaded(args, args.target, device)
        args.grid = read_levels(args.levels, trained.objective.process)
        planned = trained.config.evaluation
        args.count = args.count if asked else planned.images
        if not args.data:
            args.data, args.data_options = planned.data, planned.data_options
    result: dict[str, Any] = {"kind": "evaluation", "target": args.target.name}
    real = real_source(args, trained, args.split) if metrics else None  # what is missing should be missed at once
    args.real_count = None
    if real is not None:
        if trained is not None and not asked and args.count > CPU_IMAGES and needs_inception(real, device):
            print(said_fewer(CPU_IMAGES, args.count, len(real), "--count"))
            args.count, args.real_count = CPU_IMAGES, CPU_REAL_IMAGES
        network = distances.choose_network(real, device, args.preprocessing, args.weights, args.features)
        images = chosen_images(args, trained, metrics, real, network)
        if trained is not None and device.type == "cpu" and distributed.rank() == 0:
            foretell(args, trained, real, network)
    if trained is not None:
        result |= {"step": trained.step, "weights": trained.weights, "weights_sha256": trained.digest}
        if (args.heldout or args.vlb) and distributed.rank() == 0:
            with full_float32():
                result |= predictions(args, trained, device, needed=real is None)
    if real is not None:
        result |= image_distances(args, trained, images, metrics, real, network, device)
    if real is None and not {"heldout", "vlb"} & set(result) and distributed.rank() == 0:
        raise ValueError("nothing was measured: ask for --metrics, --heldout or --vlb")
    result["environment"] = environment()
    if distributed.rank() == 0:
        if trained is not None:
            RunFolder(trained.folder).log(result, durable=True)
        show(result)
        if args.json:
            with writing(f"--json {args.json}", args.json):
                args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def foretell(args: argparse.Namespace, trained: Trained, real: Source, network: distances.Network) -> None:
    """Say how long it will take on this CPU, at most: what was made or measured before is not done again."""
    forward = forward_seconds(trained.call, trained.shape, trained.classes)
    generating = args.count * choose_solver(args, trained).steps * forward
    measuring = (args.count + min(args.real_count or len(real), len(real))) * feature_seconds(network, real.shape)
    held_out = 0.0
    with suppress(FileNotFoundError, ValueError):  # there may be no such data
        held_out = min(args.heldout, len(open_own(args, trained.config, "test"))) * len(args.grid) * forward
    said = {f"{args.count:,} images": generating, "their features and those of real ones": measuring, "held-out loss": held_out}
    each = ", ".join(f"{what} {about(seconds)}" for what, seconds in said.items() if seconds)
    print(f"on this CPU, if it stays as busy as it is, {about(sum(said.values()))} at most: {each}")


def check_options(args: argparse.Namespace, is_run: bool) -> None:
    """What would be ignored, or found wrong when all the work is done."""
    for name in ("feature_batch", "batch"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be >= 1, got {getattr(args, name)}")
    for name in ("heldout", "vlb"):
        if getattr(args, name) < 0:
            raise ValueError(f"--{name} must be >= 0, got {getattr(args, name)}")
    if args.json and not args.json.absolute().parent.is_dir():
        raise FileNotFoundError(f"--json {args.json}: there is no folder {args.json.parent}")
    if args.optimal and not args.heldout:
        raise ValueError("--optimal is for the held-out loss, which --heldout 0 leaves out")
    if args.data_options and not args.data:
        raise ValueError("--data-options are settings of --data, which is not given")
    given = [f"--{name}" for name in ("count", "step", "solver", "steps", "label") if getattr(args, name) is not None]
    if given and not is_run:
        raise ValueError(f"{given[0]} is for images that a run generates: of {args.target.name} all are measured, as they are")


def read_levels(words: str, process: Process) -> Tensor:
    """The levels that --levels asks for: a number, values of u, or a name."""
    levels: Levels = words
    with suppress(ValueError):
        levels = [float(word) for word in words.split(",")]
    with suppress(ValueError):
        levels = int(words)
    try:
        return level_grid(levels, process)
    except ValueError as error:
        raise ValueError(f"--levels {words}: {error}") from None


def real_source(args: argparse.Namespace, trained: Trained | None, split: str) -> Source:
    """The real images: --data, or what the run was trained on."""
    if args.data:
        name = args.data.partition(":")[0]
        options = leaving_out_corrupt(name, args.data_options) if args.skip_corrupt else args.data_options
        return open_named(args.data, split=split, options=options)
    if trained is None:
        raise ValueError("name the real images to compare with, as in --data cifar10:data/cifar10")
    return open_own(args, trained.config, split)


def open_own(args: argparse.Namespace, config: Config, split: str) -> Source:
    """The data that a run was trained on, or held-out ones beside them."""
    if args.skip_corrupt:
        data = replace(config.data, options=leaving_out_corrupt(config.data.source, config.data.options))
        config = replace(config, data=data)
    return open_source(config, split)


def chosen_images(
    args: argparse.Namespace, trained: Trained | None, metrics: tuple[str, ...], real: Source, network: distances.Network
) -> ImageSet | Source:
    """The images to be measured, those of a run still to be made; what cannot be measured is refused before any work."""
    distances.check_real(real)
    if trained is not None:
        images = describe_set(args, trained, trained.folder / "generated", args.count, "npy")
        images.folder /= f"step-{trained.step:08d}-seed-{args.seed}-{images.key}"  # a folder for each way to generate
        inside(trained.folder, images.folder)
        distances.check_counts(metrics, network, args.count, len(real))
        return images
    resized = network.preprocessing != "digits"
    source = open_target(args.target, args.skip_corrupt, 3 if resized else real.shape[0])
    if not resized and source.shape != real.shape:
        raise ValueError(f"the images are {source.shape} and the real ones {real.shape}: they must be of one shape")
    distances.check_counts(metrics, network, len(source), len(real))
    return source


def image_distances(
    args: argparse.Namespace,
    trained: Trained | None,
    images: ImageSet | Source,
    metrics: tuple[str, ...],
    real: Source,
    network: distances.Network,
    device: torch.device,
) -> dict[str, Any]:
    """Generate what is missing of the images, and measure."""
    keep = any(metric in distances.NEED_REAL_FEATURES for metric in metrics)
    world = distributed.world_size()
    with Count("real images", math.ceil(min(args.real_count or len(real), len(real)) / world)).shown() as done:
        statistics = distances.real_statistics(
            real,
            network,
            device,
            keep_features=keep,
            cache=args.cache,
            batch=args.feature_batch,
            progress=done.reach,
            count=args.real_count,
        )
    about: dict[str, Any] = {"data": real.name, "split": args.split, "data_fingerprint": real.fingerprint()}
    batches: Iterable[Tensor]
    if isinstance(images, Source):
        batches, count = distances.source_images(images, args.feature_batch), len(images)
        about["files"] = {"name": images.name, "count": count, "fingerprint": images.fingerprint()}
    else:
        assert trained is not None, "images are generated by a run"
        make_set(args, trained, images, device)
        batches = (images.read(chunk) for chunk in images.chunks()[distributed.rank() :: world])
        about["generation"], count = images.record, args.count
    pixels = None
    if "sliced" in metrics:
        pixels = torch.cat(list(distances.source_images(real, count=distances.SLICED_IMAGES, mine=False)))
    with Count("features", math.ceil(count / world)).shown() as done:
        found = distances.compare_images(
            batches,
            statistics,
            network,
            device,
            metrics,
            real_pixels=pixels,
            batch=args.feature_batch,
            seed=args.seed,
            tf32=args.tf32,
            progress=done.reach,
        )
    return {**found, "network": network.id, "preprocessing": network.preprocessing, "tf32": args.tf32, **about}


def open_target(path: Path, skip_corrupt: bool, channels: int = 3) -> Source:
    """A folder of images or a file of arrays, as a source."""
    if path.is_dir():
        return open_data("folder", str(path), options={"skip_corrupt": skip_corrupt, "channels": channels})
    source = open_data("array", str(path))
    if not source.image:
        raise ValueError(f"{path} does not hold 8-bit images of 1 or 3 channels: save them as uint8 from 0 to 255")
    return source


def predictions(args: argparse.Namespace, trained: Trained, device: torch.device, needed: bool) -> dict[str, Any]:
    """What the model itself is worth, on held-out data: loss by noise level and, if asked, bits per dimension.

    Without such data there is no loss, which is an error if it is `needed`.
    """
    if args.vlb and trained.classes:
        raise ValueError("bits per dimension are for models without classes")
    try:
        source = open_own(args, trained.config, "test")
        check_classes(source, trained.classes)
    except (FileNotFoundError, ValueError) as error:
        if args.vlb or needed:
            raise
        print(f"no held-out loss: {error}")
        return {}
    result: dict[str, Any] = {"heldout_data": {"name": source.name, "split": "test", "fingerprint": source.fingerprint()}}
    if args.heldout:
        result["heldout"] = held_out_loss(args, trained, source, device)
    if args.vlb:
        result["vlb"] = bits_per_dimension(args, trained, source, device)
    return result


def held_out_loss(args: argparse.Namespace, trained: Trained, source: Source, device: torch.device) -> dict[str, Any]:
    """The loss by noise level, beside the optimal one if that is asked for."""
    optimal = best_possible(args, trained, device) if args.optimal else None
    with Count("held-out loss", min(args.heldout, len(source)) * len(args.grid)).shown() as done:
        losses = held_out_losses(
            trained.call,
            trained.objective,
            source,
            levels=args.grid,
            images=args.heldout,
            classes=trained.classes,
            device=device,
            batch=args.batch,
            progress=done.add,
            optimal=optimal,
        )
    if optimal is not None or not losses.even:
        print("\n".join([*losses.lines(), *([] if optimal is None else remembered(optimal))]))
    found = {
        "images": losses.samples,
        "noise_seed": 0,
        "loss": losses.mean,
        "levels": len(losses.u) if losses.even else args.levels,
        "u_by_level": losses.u.tolist(),
        "loss_by_level": losses.loss.tolist(),
        "error_by_level": losses.error.tolist(),
    }
    if trained.objective.process.steps and losses.even:
        found["vlb_weighted"] = losses.weighted(VLB(), trained.objective)
    if optimal is not None:
        found |= {
            "reducible": float(losses.reducible.mean()),
            "optimal_by_level": optimal.loss.tolist(),
            "memorised_by_level": optimal.memorised.tolist(),
        }
    return found


def bits_per_dimension(args: argparse.Namespace, trained: Trained, source: Source, device: torch.device) -> dict[str, Any]:
    """The bound on the likelihood."""
    evaluations = min(args.vlb, len(source)) * (trained.objective.process.steps or 1000)
    with Count("bits per dimension", evaluations).shown() as done:
        bound = variational_bound(
            trained.denoiser(),
            trained.objective.process,
            source,
            images=args.vlb,
            variance=args.variance,
            device=device,
            batch=args.batch,
            progress=done.add,
        )
    return {
        "bits_per_dimension": bound.total,
        "error": bound.error if math.isfinite(bound.error) else None,
        "noise_seed": 0,
        "prior": bound.prior,
        "by_level": bound.terms.tolist(),
        "images": bound.images,
        "variance": args.variance,
    }


def best_possible(args: argparse.Namespace, trained: Trained, device: torch.device) -> OptimalLoss:
    """The optimal loss of the run's training data; at levels even in u it is kept in its folder for reports too."""
    source, data = open_own(args, trained.config, "train"), trained.config.data
    with Count("optimal loss", DRAWS * len(args.grid)).shown() as done:
        found = kept_optimal_loss(
            trained.objective,
            source,
            args.grid,
            classes=bool(trained.classes),
            flip=data.flip,
            references=REFERENCES,
            draws=DRAWS,
            device=device,
            folder=args.cache,
            progress=done.add,
        )
    if is_even(args.grid):
        save_optimal_loss(found, trained.folder / FILE)
    return found


def show(result: dict[str, Any]) -> None:
    """The numbers, one a line."""
    for name, value in result.items():
        if isinstance(value, float):
            print(f"{name:22s} {value:.4f}")
        elif isinstance(value, dict) and name not in ("generation", "environment", "files", "heldout_data"):
            numbers = {key: inner for key, inner in value.items() if isinstance(inner, int | float)}
            print(f"{name:22s} " + "  ".join(f"{key} {inner:.5g}" for key, inner in numbers.items() if key != "noise_seed"))
        elif isinstance(value, int | str):
            print(f"{name:22s} {value}")
