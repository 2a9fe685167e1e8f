"""The loss of a perfect model of the training data at each noise level, and what a run has left to learn (arXiv 2506.13763).

The estimators and their bounds are those of `noisewise.metrics.optimal_loss`. For a run the result is kept in its folder, where
reports find it; if the run has been evaluated, its held-out loss stands beside.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from noisewise.analysis.moments_of_training import chosen_config
from noisewise.analysis.output import Analysis, Watch, new_figure, noise_axis, plain_axis
from noisewise.looking.palette import COLOURS, GREY, PALE
from noisewise.metrics.optimal_loss import (
    COLLAPSED,
    DRAWS,
    FILE,
    REFERENCES,
    OptimalLoss,
    kept_optimal_loss,
    remembered,
    save_optimal_loss,
)
from noisewise.plain_files import writing
from noisewise.study.outcome import read_outcome
from noisewise.training.components import classes_of, device_of, open_source
from noisewise.training.config import Config
from noisewise.training.run_folder import RunFolder

APART = 0.05  # a distance of the bounds, as a share of the loss, that is worth a word


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--run", type=Path, help="the folder of a run, for its training data; the result is kept there too")
    parser.add_argument("--preset", action="append", default=[], help="or a preset, for its data and process")
    parser.add_argument("--levels", type=int, default=50, help="noise levels, in the middle of equal intervals of u")
    parser.add_argument("--images", type=int, default=DRAWS, help="noised samples, the same at each level")
    parser.add_argument(
        "--references", type=int, default=REFERENCES, help="how many samples to take of a larger data set; 0 for all"
    )
    parser.add_argument("--cache", type=Path, help="folder for results; by default the user's cache folder")
    parser.set_defaults(of_preset={})


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    for name, least in (("levels", 1), ("images", 2), ("references", 0)):
        if getattr(options, name) < least:
            raise ValueError(f"--{name} must be >= {least}, got {getattr(options, name)}")
    config = chosen_config(options, rest)
    found = compute(options, config)
    says = findings(found)
    held_out = None if options.run is None else last_held_out(options.run, found)
    if held_out is not None:
        says.append(left_to_learn(found, *held_out))
    if options.run is not None:
        with writing(f"--run {options.run}", options.run):
            save_optimal_loss(found, options.run / FILE)
        says.append(f"Kept in {options.run / FILE}, where noisewise report finds it.")
    return Analysis("optimal", draw(found, config, held_out), rows_of(found, held_out), says)


def compute(options: argparse.Namespace, config: Config) -> OptimalLoss:
    """The optimal loss of the data that a configuration trains on, mirror images and classes as it trains them."""
    objective, source = config.objective(), open_source(config)
    classes = classes_of(config, source)
    with Watch().shown() as watch, watch.work("optimal loss", options.images * options.levels):
        return kept_optimal_loss(
            objective,
            source,
            options.levels,
            classes=bool(classes),
            flip=config.data.flip,
            references=options.references or None,
            draws=options.images,
            device=device_of(config),
            folder=options.cache,
            progress=watch.advance,
        )


def last_held_out(folder: Path, found: OptimalLoss) -> tuple[int, Tensor] | None:
    """The step and the held-out losses of a run's last evaluation that has them at the same levels."""
    known = [(one.step, one.held_out) for one in read_outcome(folder).evaluations]
    measured = [row for row in RunFolder(folder).metrics() if row.get("kind") == "evaluation" and "heldout" in row]
    known += [(row.get("step", 0), row["heldout"]["loss_by_level"]) for row in measured if at_levels(row["heldout"], found)]
    known = [(step, losses) for step, losses in known if losses and len(losses) == len(found.u)]
    if not known:
        return None
    step, losses = max(known, key=lambda one: one[0])
    return step, torch.tensor(losses, dtype=torch.float64)


def at_levels(heldout: dict[str, Any], found: OptimalLoss) -> bool:
    """Whether losses were measured at these levels; of older rows only their number is known."""
    return "u_by_level" not in heldout or heldout["u_by_level"] == found.u.tolist()


def rows_of(found: OptimalLoss, held_out: tuple[int, Tensor] | None) -> list[dict[str, Any]]:
    """A row for each level."""
    process, u = found.objective.process, found.u.float()
    columns: dict[str, list[Any]] = {"u": found.u.tolist(), "time": process.time(u).tolist(), "log_snr": found.log_snr.tolist()}
    columns |= {name: getattr(found, name).tolist() for name in ("loss", "error", "low", "high", "collapse", "effective")}
    columns["memorised"] = found.memorised.tolist()
    if held_out is not None:
        columns |= {"held_out": held_out[1].tolist(), "reducible": (held_out[1] - found.loss).tolist()}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def findings(found: OptimalLoss) -> list[str]:
    counts = "all references" if found.exact else f"{found.references:,} of them references at a time"
    trusted = ~found.memorised
    errors = (found.error / found.loss)[trusted].tolist()
    says = [
        f"Optimal {found.objective.prediction}-loss of {found.samples:,} samples ({counts}), {found.draws:,} draws at each "
        f"level: mean {float(found.loss.mean()):.5f} over u, largest at u = {float(found.u[found.loss.argmax()]):.3f}"
        + (f"; standard errors up to {max(errors):.1%} where it can be trusted." if errors else ".")
    ]
    says += remembered(found)
    wide = found.u[(found.high - found.low > APART * found.high) & ~found.memorised].tolist()
    if wide:
        says.append(
            f"The optimal loss of new data lies between low and high, which at {len(wide)} of the other levels, up to "
            f"u = {max(wide):.3f}, are more than {APART:.0%} apart."
        )
    return says


def left_to_learn(found: OptimalLoss, step: int, held_out: Tensor) -> str:
    """What a run has left, where that means something."""
    trusted = ~found.memorised
    if not trusted.any():
        return f"Step {step}: what is left to learn cannot be told, since a perfect model remembers its data at all levels."
    left = (held_out - found.loss)[trusted]
    share = float(left.sum() / held_out[trusted].sum())
    most = int(left.argmax())
    return (
        f"Step {step}: {share:.1%} of the held-out loss at the other levels can be learned at most, the largest part of it, "
        f"{float(left[most]):.5f}, at u = {float(found.u[trusted][most]):.3f}."
    )


def draw(found: OptimalLoss, config: Config, held_out: tuple[int, Tensor] | None) -> Figure:
    """The optimal loss with what new data may have, and how many samples are possible; levels that are memorised in grey."""
    figure = new_figure(10.5, 4.4)
    left, right = figure.subplots(1, 2)
    u, process = found.u.numpy(), found.objective.process
    known = found.loss[~found.memorised] if not found.memorised.all() else found.high
    bottom = max(float(known.min()) / 3, 1e-12)
    loss, high = (np.maximum(curve.numpy(), bottom / 10) for curve in (found.loss, found.high))
    left.fill_between(u, loss, high, color=COLOURS[0], alpha=0.18, linewidth=0, label="of new data: in between")
    left.plot(u, loss, color=COLOURS[0], linewidth=1.6, label="of the training data")
    if held_out is not None:
        left.plot(u, held_out[1], color=COLOURS[1], linewidth=1.6, label=f"held-out loss, step {held_out[0]:,}")
    left.set(yscale="log", ylim=(bottom, None), ylabel=f"{found.objective.prediction}-loss, mean over elements")
    right.plot(u, found.effective, color=COLOURS[2], linewidth=1.6)
    right.axhline(1 / COLLAPSED, color=GREY, linestyle=":", linewidth=1)
    right.set(yscale="log", ylabel="training samples that x_t leaves possible")
    half = 0.5 / len(u)
    for axis in (left, right):
        for at in found.u[found.memorised].tolist():
            axis.axvspan(at - half, at + half, color=PALE, alpha=0.3, linewidth=0)
        noise_axis(axis, process)
        plain_axis(axis)
    left.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{config.name}: the loss of a perfect model  (grey: it remembers its data)", fontsize=11)
    return figure
