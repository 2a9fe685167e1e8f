"""Train with several samplers under the same conditions (model, data, noise and time), and write a report.

Settings of noisewise train may follow. Each run has its own folder and process. The clock counts only training steps,
including the sampler's cost. The same command continues where it was stopped.

    noisewise compare --preset digits --samplers "uniform,minsnr,adaptive" --schedules linear,cosine --seeds 2 --budget 30s
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from noisewise.commands.parser import Parser
from noisewise.data import Source, open_named
from noisewise.generation.run_samples import quick_solver
from noisewise.models import with_labels
from noisewise.spec import split_specs
from noisewise.study.conduct import combinations, conduct
from noisewise.study.job import with_budget
from noisewise.study.launch import add_launcher_options, chosen_launcher
from noisewise.study.measure import CPU_IMAGES, about, evaluation_seconds, needs_inception, said_fewer
from noisewise.study.outcome import LOG, PLAN, Comparison, Outcome, Plan
from noisewise.training.components import build_parts, device_of, open_source, said_picked, usual_on_cpu, with_network
from noisewise.training.config import Config
from noisewise.training.ema import mostly_initial
from noisewise.training.options import parse_fitting, read_mapping, with_files
from noisewise.training.run import check_name
from noisewise.training.signals import StopRequest
from noisewise.words import printable

OF_THE_CONFIGURATION = -1  # images of --headline without a number


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.set_defaults(settings=[])
    parser.add_argument("--preset", action="append", default=[], help="settings to start from")
    parser.add_argument(
        "--samplers", default="uniform,minsnr,adaptive", help="specs, separated by commas; the first is the baseline"
    )
    parser.add_argument("--schedules", help="processes, such as linear,cosine,quadratic; default: the configuration's")
    parser.add_argument("--seeds", type=int, default=2, help="runs of each combination")
    parser.add_argument("--budget", default="25s", help="of each run: seconds (30s) or steps (1000it)")
    parser.add_argument(
        "--evaluate-at", default="0.25,0.5,0.75,1", help="when to measure each run, as shares of the budget; the last is 1"
    )
    parser.add_argument("--images", type=int, help="images to generate for each evaluation; default: evaluation.quick_images")
    parser.add_argument(
        "--headline",
        type=int,
        nargs="?",
        const=OF_THE_CONFIGURATION,
        metavar="IMAGES",
        help="measure each run once more at the end, with this many images (default: evaluation.images) and evaluation.solver",
    )
    parser.add_argument(
        "--data", help="real images to compare with, as SOURCE:PATH; needed for latents; default: the run's own"
    )
    parser.add_argument(
        "--data-options", type=read_mapping, default={}, help="settings of that source as YAML, such as {size: 256}"
    )
    parser.add_argument("--out", type=Path, default=None, help="folder for runs, results and report")
    add_launcher_options(parser)


def run(args: argparse.Namespace) -> int:
    words = [word.partition("=")[0] for word in args.settings]
    if "--sampler" in words or "--seed" in words:
        raise ValueError("compare takes --samplers and --seeds, not --sampler and --seed")
    for word in ("--steps", "--epochs", "--seconds"):
        if word in words:
            raise ValueError(f"compare takes --budget, as in 1000it or 30s, not {word}")
    if args.schedules is not None and "--process" in words:
        raise ValueError("give --process or --schedules, not both")
    if args.data_options and not args.data:
        raise ValueError("--data-options are settings of --data, which is not given")
    usual = (lambda config: {}) if args.preset else usual_on_cpu
    config, picked = parse_fitting(with_files(args.settings, args.preset), args.parser.flags(), usual)
    if "batch" in picked:
        print(said_picked({"batch": config.batch}))
    config = with_network(with_budget(config, args.budget))
    check_name(config.name)
    planned = config.evaluation
    if args.data:
        config = replace(config, evaluation=replace(planned, data=args.data, data_options=args.data_options))
    if args.headline == OF_THE_CONFIGURATION or (planned.at_end and args.headline is None):
        args.headline = planned.images
    folder = args.out or Path("out") / config.name
    samplers = split_specs(args.samplers)
    schedules = split_specs(config.process if args.schedules is None else args.schedules)
    configs = combinations(config, samplers, schedules, args.seeds, folder)
    images, fewer = args.images, ""
    if images is None and (folder / PLAN).is_file():
        images = Plan.read(folder).images
    elif images is None:
        images, real = planned.quick_images, real_of(config)
        if real is not None and needs_inception(real, device_of(config)) and args.headline is None and images > CPU_IMAGES:
            fewer = said_fewer(CPU_IMAGES, images, len(real), "--images")
            images = CPU_IMAGES
    plan = Plan(
        name=config.name,
        baseline=samplers[0],
        budget=args.budget,
        evaluate_at=shares(args.evaluate_at),
        images=images,
        command=args.words,
        headline=args.headline,
    )
    launcher = chosen_launcher(args, folder, len(samplers))
    if fewer:
        print(fewer)
    with StopRequest() as stop:
        comparison = conduct(plan, configs, launcher, stop=stop, foretell=lambda jobs: foretold(config, plan, jobs))
    ended = [outcome for outcome in comparison.outcomes if outcome.status != "unfinished"]
    if stop.requested and len(ended) < len(comparison.plan.runs):
        print(f"{stop.name}: {launcher.farewell()}")
        return 0
    return conclude(comparison)


def real_of(config: Config) -> Source | None:
    """The real images that runs will be compared with, if there are any."""
    planned = config.evaluation
    source = open_named(planned.data, options=planned.data_options) if planned.data else open_source(config)
    return source if source.image else None


def foretold(config: Config, plan: Plan, runs: int) -> float:
    """Say how long all of it will take; returns the seconds of an evaluation, 0 where that is known only when one was made."""
    evaluations = runs * len(plan.evaluate_at)
    training = "" if config.seconds is None else f": {about(runs * config.seconds)} of training"
    counts = f"{runs} runs{training}, measured {evaluations} times in all with {plan.images:,} images each"
    if device_of(config).type != "cpu":
        print(counts)
        return 0.0
    parts = build_parts(config)
    source = real_of(config) or parts.source
    call = with_labels(parts.model.eval())
    if source.shape != parts.source.shape:  # of latents, decoding is not known beforehand
        print(counts)
        return 0.0
    each, once = evaluation_seconds(call, source, parts.classes, plan.images, quick_solver(config).steps)
    print(f"{counts}: {about(evaluations * each + once)} of measuring on this CPU, if it stays as busy as it is")
    return each


def shares(text: str) -> tuple[float, ...]:
    """ "0.5,1" as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"--evaluate-at {text!r}: give shares of the budget, as in 0.25,0.5,0.75,1") from None


def doubts(outcomes: Sequence[Outcome]) -> list[str]:
    """What should be known before anybody believes the figures: budgets that were too short for them."""
    found = []
    for outcome in outcomes:
        steps = [one.step for one in outcome.evaluations]
        if len(set(steps)) < len(steps):
            found.append(
                f"the budget is too short to be measured {len(steps)} times: {outcome.sampler}, seed {outcome.seed}, made "
                f"{steps[-1]} step{'s' * (steps[-1] != 1)}, so some evaluations are one and the same; give a larger --budget"
            )
        elif (average := mostly_initial(outcome.config.ema, steps[-1])) is not None:
            found.append(f"{outcome.sampler}, seed {outcome.seed}: {average}")
    return [found[0], *([f"and {len(found) - 1} more runs like that"] if len(found) > 1 else [])] if found else []


def conclude(comparison: Comparison) -> int:
    """Results, table and report, and what failed; 1 if no run finished."""
    # imported late: they may need more than training does, such as matplotlib
    from noisewise.report import write_report
    from noisewise.study.results import write_results
    from noisewise.study.table import print_table

    failed = [outcome for outcome in comparison.outcomes if outcome.status == "failed"]
    finished = [outcome for outcome in comparison.outcomes if outcome.status == "finished"]
    if finished:
        write_results(comparison)
        print_table(comparison)
        for doubt in doubts(finished):
            print(printable(f"warning: {doubt}"))
    for outcome in failed:
        why = outcome.failure.message if outcome.failure is not None else ""
        print(printable(f"failed: {outcome.process}, {outcome.sampler}, seed {outcome.seed}: {why}"))
        print(f"        its log: {outcome.folder / LOG}")
    if failed:
        print("the same command tries again what failed")
    if not finished:
        return 1
    print(f"\nreport: {write_report(comparison.folder)}")
    return 0
