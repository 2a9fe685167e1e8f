"""What is measured of a run along the way: the distance of its images to the data, and its held-out loss by noise level."""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from noisewise.data import Source, open_named
from noisewise.generation.images import BATCH, Decoder, make_decoder, save_grid, to_uint8
from noisewise.generation.replay import Replay
from noisewise.generation.run_samples import headline_solver, quick_solver, run_samples
from noisewise.generation.solvers import Solver
from noisewise.looking.validation import Validation
from noisewise.metrics.distances import Network, choose_network, compare_images, real_statistics
from noisewise.metrics.heldout import held_out_losses
from noisewise.metrics.reference import Reference
from noisewise.processes import DDPM
from noisewise.study.outcome import Evaluation
from noisewise.training.components import open_source
from noisewise.training.plain_files import inside
from noisewise.training.run import Run
from noisewise.weighting import VLB

LEVELS, HELD_OUT = 50, 400  # noise levels of the held-out loss, and test images at each
CPU_IMAGES, CPU_REAL_IMAGES = 250, 1000  # where Inception runs on a CPU and nobody asks for more
SHOWN, COLUMNS = 64, 8  # samples in a picture


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
    few = trainer.device.type == "cpu" and images <= CPU_IMAGES and headline is None
    wanted = ("fid", "error") if share == 1 else ("fid",)
    real = CPU_REAL_IMAGES if few else None
    metric, distance, error = distance_and_error(run, [samples], tell, check, wanted, real=real, tf32=share < 1)
    more = None
    if headline is not None and metric is not None:
        made = [samples] if full == quick else []
        _, more = distance_to_data(run, continued(run, made, headline, full, check, size=images), tell, check)
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
_NETWORKS: dict[tuple[str, tuple[int, ...], str], Network] = {}
_NAMED: dict[str, Source] = {}
_DECODERS: dict[str, Decoder] = {}
_REAL: WeakKeyDictionary[Source, Reference] = WeakKeyDictionary()


def _network(source: Source, device: str) -> Network:
    key = (source.name, source.shape, device)
    if key not in _NETWORKS:
        _NETWORKS[key] = choose_network(source, device)
    return _NETWORKS[key]


def real_images(run: Run) -> Source | None:
    """What a run's images are compared with: `evaluation.data`, or what it is trained on if those are images."""
    planned, own = run.config.evaluation, run.trainer.parts.source
    if planned.data is None:
        return own if own.image else None
    key = json.dumps([planned.data, planned.data_options], sort_keys=True)
    if key not in _NAMED:
        _NAMED[key] = open_named(planned.data, options=planned.data_options)
    return _NAMED[key]


def as_images(run: Run, samples: Tensor) -> Tensor:
    """Samples in [-1, 1]; latents are decoded by the autoencoder that made them."""
    latents, device = run.trainer.parts.latents, run.trainer.device
    if latents is None:
        return samples
    key = json.dumps([latents, str(device)], sort_keys=True)
    if key not in _DECODERS:
        _DECODERS[key] = make_decoder(latents, device)
    return _DECODERS[key](samples)


def distance_to_data(
    run: Run, samples: Iterable[Tensor], tell: Callable[[str], None], check: Watch = nothing, *, real: int | None = None
) -> tuple[str | None, float | None]:
    """FID, or its like for the digits, of samples in parts; nothing if they are no images, or without Inception's weights.

    `real` is how many of the real images count, where that is Inception's work; all by default.
    """
    return distance_and_error(run, samples, tell, check, metrics=("fid",), real=real)[:2]


def distance_and_error(
    run: Run,
    samples: Iterable[Tensor],
    tell: Callable[[str], None],
    check: Watch = nothing,
    metrics: tuple[str, ...] = ("fid", "error"),
    *,
    real: int | None = None,
    tf32: bool = False,
) -> tuple[str | None, float | None, float | None]:
    """The same, with the distance's standard error; `tf32` is faster, and lets features of the samples be a little off."""
    source, device = real_images(run), run.trainer.device
    if source is None:
        if run.trainer.parts.latents is not None:
            tell("no FID: these are latents, name the real images to compare with by --data, as in --data folder:images")
        return None, None, None
    try:
        network = _network(source, str(device))
    except FileNotFoundError as error:
        tell(f"no FID: {error}")
        return None, None, None
    if source not in _REAL:
        count = real if network.metric == "fid" else None
        _REAL[source] = real_statistics(
            source,
            network,
            device,
            count=count,
            progress=lambda done: check("real images", done / min(count or len(source), len(source))),
        )
    images = (to_uint8(as_images(run, part)) for part in samples)
    found = compare_images(
        images, _REAL[source], network, device, metrics, tf32=tf32, progress=lambda done: check(f"features of {done}", 1.0)
    )
    return network.metric, float(found[network.metric]), found.get(f"{network.metric}_error")
