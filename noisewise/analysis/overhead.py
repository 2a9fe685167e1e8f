"""What a sampler costs: predicted by the cost model, counted, and measured, as the model, the batch and T grow.

One setting is varied at a time, around the middle one of each list. On each model single steps of uniform and of the sampler
take turns, so that clocks, caches and neighbours are the same for both. Step times have long tails, so all numbers are medians:
of the steps between updates, and of steps with an update, which count for as much as they are frequent; the range holds 90 % of
what resampling the times gives. Samples through the model are counted exactly, by a hook.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from matplotlib.figure import Figure

from noisewise.analysis.moments_of_training import opened
from noisewise.analysis.output import Analysis
from noisewise.analysis.step_cost import WIDTHS, configured, measure
from noisewise.looking.palette import COLOURS, GREY
from noisewise.spec import split_specs
from noisewise.training.options import config_parser, parse_config, with_files

WIDE = 0.25  # a range of the ratio that says little
AXES = {"parameters": "parameters of the model", "batch": "samples in a batch", "T": "timesteps T of the process"}


def draw(rows: list[dict[str, Any]]) -> Figure:
    """The overhead along each axis, and predicted against measured."""
    figure = Figure(figsize=(9.6, 7.2), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True)
    samplers = list(dict.fromkeys(row["sampler"] for row in rows))
    for place, sampler in enumerate(samplers):
        look = {"color": COLOURS[place % len(COLOURS)], "marker": "o", "markersize": 5, "linestyle": "", "capsize": 3}
        aside = 1.04 ** (place - (len(samplers) - 1) / 2)  # so that ranges do not cover each other
        own = [row for row in rows if row["sampler"] == sampler]
        for axis, name in zip(axes.flat, AXES, strict=False):
            along = sorted((row for row in own if row["varied"] in (name, "none")), key=lambda row: row[name])
            places = [row[name] * aside for row in along]
            axis.plot(places, [row["predicted"] for row in along], color=look["color"], linestyle="--", linewidth=1)
            axis.errorbar(places, *_measured(along), **look, label=sampler)
        axes[1, 1].errorbar([row["predicted"] for row in own], *_measured(own), **look, alpha=0.8)
    for axis, (name, words) in zip(axes.flat, AXES.items(), strict=False):
        axis.axhline(1, color=GREY, linewidth=0.8)
        ticks = sorted({row[name] for row in rows})
        axis.set(xscale="log", xlabel=words, ylabel="time of a step over uniform's")
        axis.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axis.minorticks_off()
    ends = (0.97, 1.03 * max(row["predicted"] for row in rows))
    axes[1, 1].plot(ends, ends, color=GREY, linewidth=1, label="identity")
    axes[1, 1].legend(frameon=False)
    axes[1, 1].set(xlabel="predicted by the cost model", ylabel="measured", xlim=ends)
    axes[0, 0].plot([], [], color="black", linestyle="--", linewidth=1, label="predicted")
    axes[0, 0].plot([], [], color="black", linestyle="", marker="o", markersize=5, label="measured, with a 90 % range")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=2, frameon=False, fontsize=9)
    return figure


def _measured(rows: list[dict[str, Any]]) -> tuple[list[float], list[list[float]]]:
    values = [row["measured"] for row in rows]
    below = [max(row["measured"] - row["low"], 0.0) for row in rows]
    return values, [below, [max(row["high"] - row["measured"], 0.0) for row in rows]]


def sentence(row: dict[str, Any]) -> str:
    """One row in words."""
    same = "as predicted" if abs(row["counted"] - row["predicted"]) < 1e-9 else f"predicted were {row['predicted']:.3f}"
    return (
        f"{row['sampler']}: predicted {row['predicted']:.3f}, "
        f"measured {row['measured']:.3f} ({row['low']:.3f} to {row['high']:.3f}) "
        f"times uniform's step at {row['parameters']:,} parameters, batch {row['batch']}, T = {row['T']}; "
        f"an update, every {row['every']} steps, sent {row['forward']} samples forward "
        f"and {row['trained']} forward and back, {same}; "
        f"a plain step took {row['step_in_forwards']:.1f} forward passes (the model takes 3)"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `noisewise analyze overhead`."""
    samplers = "adaptive,adaptive:estimator=lookahead,strata=4,horizon=2,gradient_variance,paper_cifar10"
    parser.add_argument("--preset", action="append", default=[], help="settings of the model and the data; default: digits")
    parser.add_argument("--samplers", default=samplers, help="specs, separated by commas")
    parser.add_argument("--widths", default="8,16,32", help="of the model; one list is varied at a time")
    parser.add_argument("--batches", default="16,32,64", help="samples in a batch")
    parser.add_argument("--steps-of-process", default="100,300,1000", help="T of a discrete process")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each measurement, about")


def whole_numbers(option: str, text: str) -> list[int]:
    """ "16,32" as numbers, in order."""
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        found = [0]
    if found[0] < 1:
        raise ValueError(f"{option} {text!r}: give whole numbers of at least 1, separated by commas, as in 16,32")
    return found


def settings(lists: dict[str, list[int]]) -> Iterator[tuple[str, dict[str, int]]]:
    """Every setting once, one list varied at a time around its middle; with the name of what was varied ("none": nothing)."""
    base = {name: values[len(values) // 2] for name, values in lists.items()}
    yield "none", base
    for name, values in lists.items():
        yield from ((name, {**base, name: value}) for value in values if value != base[name])


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    """Measure every sampler at every setting."""
    if not options.seconds > 0:
        raise ValueError(f"--seconds must be positive, got {options.seconds}")
    texts = {"parameters": options.widths, "batch": options.batches, "T": options.steps_of_process}
    names = {"parameters": "--widths", "batch": "--batches", "T": "--steps-of-process"}
    lists = {name: whole_numbers(names[name], text) for name, text in texts.items()}
    for word, instead in (("--batch", "--batches"), ("--sampler", "--samplers")):
        if word in (given.partition("=")[0] for given in rest):
            raise ValueError(f"analyze overhead takes {instead}, which may be a single one, not {word}")
    samplers = split_specs(options.samplers)
    config = parse_config(
        config_parser(prog="noisewise analyze"), with_files(rest, options.preset or ["digits"]), [*names.values()]
    )
    plan = [(varied, configured(config, *sizes.values())) for varied, sizes in settings(lists)]
    for _, one in plan:
        for spec in samplers:
            replace(one, sampler=spec).check()
    rows = []
    for place, (varied, one) in enumerate(plan, 1):
        print(
            f"{place} of {len(plan)}: width {one.model.options[WIDTHS[one.model.name]]}, batch {one.batch}, {one.process}",
            flush=True,
        )
        with opened(replace(one, sampler="uniform", log=replace(one.log, trackers=[], samples_every=0))) as trainer:
            trainer.warm_up()
            rows += [{"varied": varied, **measure(trainer, spec, options.seconds)} for spec in samplers]
    says = [sentence(row) for row in rows if row["varied"] == "none"]
    if any(row["high"] - row["low"] > WIDE for row in rows):
        says.append("some of the ranges are wide: is the machine busy? More --seconds, or OMP_NUM_THREADS=1, may help")
    return Analysis("overhead", draw(rows), rows, says)
