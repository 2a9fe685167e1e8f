"""What is measured of a run along the way: the distance of its images to the data, its held-out loss by noise level; and how
long that takes."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from noisewise.data import Source, open_named
from noisewise.generation.images import BATCH, make_decoder, save_grid, to_uint8
from noisewise.generation.replay import Replay
from noisewise.generation.run_samples import headline_solver, quick_solver, run_samples
from noisewise.generation.solvers import Solver
from noisewise.looking.validation import Validation
from noisewise.metrics.distances import Network, choose_network, compare_images, real_statistics
from noisewise.metrics.features import features
from noisewise.metrics.heldout import held_out_losses
from noisewise.metrics.reference import Reference
from noisewise.plain_files import inside
from noisewise.processes import DDPM
from noisewise.study.outcome import Evaluation
from noisewise.training.components import open_source
from noisewise.training.run import Run
from noisewise.weighting import VLB

LEVELS, HELD_OUT = 50, 400  # noise levels of the held-out loss, and test images at each
CPU_IMAGES, CPU_REAL_IMAGES = 250, 1000  # where Inception runs on a CPU and nobody asks for more
SHOWN, COLUMNS = 64, 8  # samples in a picture
DECODED = 512  # latents at a time, as images are much larger: 50,000 of 256x256 would take 39 GB


Made = TypeVar("Made")
Watch = Callable[[str, float], None]  # told what is being done, and which share of it is; may raise to end an evaluation


def nothing(what: str, share: float) -> None:
    """Let an evaluation go on."""


def evaluate(
    run: Run,
    share: float,
    images: int,
    *,
    headline: int | None = None,
    tell: Callable[[str], None] = print,
    check: Watch = nothing,
) -> Evaluation:
    """Measure a run as it is, with its averaged weights, and draw a few samples into its folder; training is not touched.

    Images are made by the quick solver. With `headline` the distance of that many images of the headline's solver is measured
    as well; if the two are one, the first images are the same. `check` is called again and again meanwhile, with what is being
    done and how far it is, and may raise to end it.
    """
    trainer, objective = run.trainer, run.trainer.objective
    held_out = held_out_of(run, check=check)
    quick, full = quick_solver(run.config), headline_solver(run.config)
    samples = run_samples(run, images, watched(check, "generating", quick.steps * -(-images // BATCH)), solver=quick)
    real = CPU_REAL_IMAGES if trainer.device.type == "cpu" and images <= CPU_IMAGES else None
    metric, distance, error = distance_to_data(run, [samples], tell, check, error=share == 1, real=real, tf32=share < 1)
    more = None
    if headline is not None and metric is not None:
        made = [samples] if full == quick else []
        _, more, _ = distance_to_data(run, continued(run, made, headline, full, check, size=images), tell, check)
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()  # other runs may share the device, and recordings took gigabytes
    return Evaluation(
        share=share,
        step=trainer.step,
        seconds=trainer.seconds,
        images=images,
        metric=metric,
        distance=distance,
        held_out=held_out.loss.tolist(),
        vlb=held_out.weighted(VLB(), objective) if isinstance(objective.process, DDPM) else None,
        picture=draw(run, samples[:SHOWN]),
        headline_images=None if more is None else headline,
        headline=more,
        error=error,
    )


def continued(run: Run, made: Sequence[Tensor], count: int, solver: Solver, check: Watch, *, size: int) -> Iterator[Tensor]:
    """Samples that are there, if any, and the ones that follow them, `count` in all, in parts of `size` to save memory."""
    yield from made
    look = watched(check, f"generating {count:,}", solver.steps * -(-(count - sum(map(len, made))) // min(size, BATCH)))
    for first in range(sum(map(len, made)), count, size):
        yield run_samples(run, min(size, count - first), look, first=first, solver=solver)


def watched(check: Watch, what: str, pieces: int) -> Callable[[int], None]:
    """Counts the pieces that it is told of, and passes on which share of all is done."""
    done = 0

    def look(more: int) -> None:
        nonlocal done
        done += more
        check(what, min(1.0, done / max(pieces, 1)))

    return look


def held_out_of(run: Run, images: int = HELD_OUT, check: Watch = nothing) -> Validation:
    """Held-out losses of a run as it is, with its averaged weights; an error if they are not finite."""
    trainer, source = run.trainer, open_source(run.config, "test")
    with run.averaged():
        found = held_out_losses(
            Replay(trainer.call, trainer.network),
            trainer.objective,
            source,
            levels=LEVELS,
            images=images,
            classes=trainer.parts.classes,
            device=trainer.device,
            progress=watched(check, "held-out loss", LEVELS * min(images, len(source))),
        )
    if not math.isfinite(found.mean):
        raise FloatingPointError(f"the held-out loss of the averaged weights is {found.mean} at step {trainer.step}")
    return found


def draw(run: Run, samples: Tensor) -> str | None:
    """A picture of samples in the run's folder, if they are images or can be decoded; its path from there."""
    if not run.trainer.parts.source.image and real_images(run) is None:
        return None
    place = inside(run.folder.path, run.folder.samples / f"step-{run.trainer.step:08d}.png")
    path = save_grid(as_images(run, samples), place, COLUMNS)
    return str(path.relative_to(run.folder.path))


# loading Inception takes seconds, as does telling by the data's fingerprint which statistics are theirs; both are needed again
_KEPT: dict[Any, Any] = {}
_REAL: WeakKeyDictionary[Source, dict[int | None, Reference]] = WeakKeyDictionary()  # by how many of its images


def kept(key: object, make: Callable[[], Made]) -> Made:
    """What was made for this key before in this process."""
    if key not in _KEPT:
        _KEPT[key] = make()
    made: Made = _KEPT[key]
    return made


def real_images(run: Run) -> Source | None:
    """What a run's images are compared with: `evaluation.data`, or what it is trained on if those are images."""
    planned, own = run.config.evaluation, run.trainer.parts.source
    if planned.data is None:
        return own if own.image else None
    key = json.dumps([planned.data, planned.data_options], sort_keys=True)
    return kept(("named", key), partial(open_named, planned.data, options=planned.data_options))


def as_images(run: Run, samples: Tensor) -> Tensor:
    """Samples in [-1, 1]; latents are decoded by the autoencoder that made them."""
    latents, device = run.trainer.parts.latents, run.trainer.device
    if latents is None:
        return samples
    key = json.dumps([latents, str(device)], sort_keys=True)
    return kept(("decoder", key), lambda: make_decoder(latents, device))(samples)


def distance_to_data(
    run: Run,
    samples: Iterable[Tensor],
    tell: Callable[[str], None],
    check: Watch = nothing,
    *,
    error: bool = False,
    real: int | None = None,
    tf32: bool = False,
) -> tuple[str | None, float | None, float | None]:
    """Name, value and, with `error`, standard error of the distance of samples in parts: FID, or its like for the digits.

    Nothing if they are no images, or without Inception's weights. `real` is how many of the real images count, where that is
    Inception's work; all by default. `tf32` is faster, and lets features of the samples be a little off.
    """
    source, device = real_images(run), run.trainer.device
    if source is None:
        if run.trainer.parts.latents is not None:
            tell("no FID: these are latents, name the real images to compare with by --data, as in --data folder:images")
        return None, None, None
    try:
        network = kept((source.name, source.shape, str(device)), lambda: choose_network(source, str(device)))
    except FileNotFoundError as missing:
        tell(f"no FID: {missing}")
        return None, None, None
    count, known = real if network.metric == "fid" else None, _REAL.setdefault(source, {})
    if count not in known:
        known[count] = real_statistics(
            source,
            network,
            device,
            count=count,
            progress=lambda done: check("real images", done / min(count or len(source), len(source))),
        )
    images = (to_uint8(as_images(run, few)) for part in samples for few in part.split(DECODED))
    wanted = ("fid", "error") if error else ("fid",)
    found = compare_images(
        images, known[count], network, device, wanted, tf32=tf32, progress=lambda done: check(f"features of {done}", 1.0)
    )
    return network.metric, float(found[network.metric]), found.get(f"{network.metric}_error")


# How long measuring takes, said before it begins; and fewer images where Inception would keep a CPU busy for hours -----


TRIED = 8  # images in a measurement
ENOUGH = 0.5  # seconds of such measurements
SMALL = 512  # numbers of an image, of which more are tried


def needs_inception(source: Source | None, device: torch.device) -> bool:
    """Whether images like these are measured by Inception on a CPU."""
    return source is not None and source.image and source.name != "digits" and device.type == "cpu"


def said_fewer(images: int, planned: int, real: int, option: str) -> str:
    """That fewer images are measured than was planned, against how many of the real ones, and what that means."""
    some = f"{CPU_REAL_IMAGES:,} real ones, not of {planned:,} and all"
    every = f"the {real:,} real ones, not of {planned:,}"
    return (
        f"FID of {images} images and {some if real > CPU_REAL_IMAGES else every}: Inception is slow on a CPU. "
        f"Such figures are far too high and compare with each other alone; {option} {planned} asks for all"
    )


def seconds_of(call: Callable[[], object]) -> float:
    """The shortest of several calls: the first one also allocates, and others may have the machine for a moment."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < ENOUGH:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def forward_seconds(call: Callable[..., Tensor], shape: Sequence[int], classes: int = 0) -> float:
    """What an evaluation of the network takes for one image; small ones are quicker in large batches."""
    tried = TRIED if math.prod(shape) > SMALL else 16 * TRIED
    x, times = torch.zeros(tried, *shape), torch.full((tried,), 0.5)
    labels = torch.zeros(tried, dtype=torch.int64) if classes else None
    with torch.no_grad():
        return seconds_of(lambda: call(x, times, labels)) / tried


def feature_seconds(network: Network, shape: Sequence[int]) -> float:
    """What the features of one image take."""
    images = torch.full((TRIED, *shape), 128, dtype=torch.uint8)
    return seconds_of(lambda: features(images, network.module, network.preprocessing, "cpu", batch=TRIED)) / TRIED


def evaluation_seconds(
    call: Callable[..., Tensor], source: Source, classes: int, images: int, solver_steps: int
) -> tuple[float, float]:
    """On a CPU: what each evaluation of a comparison takes, and the statistics of real images, made once."""
    forward = forward_seconds(call, source.shape, classes)
    each = forward * (images * solver_steps + LEVELS * HELD_OUT)
    if not source.image:
        return each, 0.0
    try:
        feature = feature_seconds(choose_network(source, "cpu"), source.shape)
    except FileNotFoundError:  # without Inception's weights there is no FID
        return each, 0.0
    real = len(source) if images > CPU_IMAGES else min(len(source), CPU_REAL_IMAGES)
    return each + images * feature, real * feature * (source.name != "digits")


def about(seconds: float) -> str:
    """A time in words."""
    for size, name in ((3600, "hour"), (60, "minute")):
        if seconds >= 1.5 * size:
            return f"about {math.ceil(seconds / size)} {name}s"
    return f"about {max(math.ceil(seconds), 1)} s"
