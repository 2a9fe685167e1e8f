"""Show which noise levels a recipe draws (p), how much they count (w), and the product, before you rent a GPU.

The axes are the model's time and log SNR. Nothing is trained.

    noisewise preview --scheduler linear --sampler logit_normal --weighting minsnr:gamma=5 --out preview.png
    noisewise preview --scheduler my-pipeline/ --sampler uniform --compare logit_normal "adaptive+minsnr"
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from noisewise.commands.parser import Parser
from noisewise.looking.recipe_curves import AT, AXES, CURVES, WEIGHT_OF, Axis, Preview, draw_previews, limits, preview
from noisewise.objective import PREDICTIONS, Objective
from noisewise.plain_files import writing
from noisewise.processes import PROCESSES
from noisewise.recipes import recipe
from noisewise.samplers import Sampler
from noisewise.samplers.learning import Learner
from noisewise.spec import SpecError, build_process, build_weighting
from noisewise.weighting import Learned, Weighting

SCHEDULER_SETTINGS = {
    "shift": "shift of a flow-matching scheduler, instead of the configured one",
    "mu": "mu of a flow-matching scheduler with dynamic shifting, as the pipeline computes it",
    "mean": "mean of ln sigma in training, for an EDM scheduler",
    "std": "standard deviation of ln sigma in training, for an EDM scheduler",
}


def add_options(parser: Parser) -> None:
    parser.description = __doc__
    parser.add_argument(
        "--scheduler",
        required=True,
        metavar="PATH_OR_NAME",
        help=f"a process, such as linear or cosine:steps=4000 ({', '.join(PROCESSES)}); or a diffusers "
        "scheduler_config.json, or a folder that holds one, itself or in scheduler/",
    )
    parser.add_argument("--sampler", default="uniform", metavar="SPEC", help="spec of the sampler; may include a weighting")
    parser.add_argument("--weighting", metavar="SPEC", help="spec of the weighting, such as minsnr:gamma=5")
    parser.add_argument(
        "--compare", nargs="+", default=[], metavar="SPEC", help="other recipes, such as speed:k=5+change_aware"
    )
    parser.add_argument("--prediction", choices=PREDICTIONS, help="what the model predicts; by default the scheduler's own")
    parser.add_argument(
        "--weight-of",
        choices=WEIGHT_OF,
        default="model",
        help="which loss w multiplies: the model's own, or the eps-loss, to compare predictions",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="a picture: .png, .svg or .pdf (needs matplotlib)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the curves and numbers")
    for name, what in SCHEDULER_SETTINGS.items():
        parser.add_argument(f"--{name}", type=float, help=what)


def run(args: argparse.Namespace) -> int:
    if args.out is not None and not args.out.suffix:
        raise ValueError(f"--out {args.out}: give the picture an ending, such as {args.out}.png")
    objective = read_objective(args)
    if args.weighting is not None:
        build_weighting(args.weighting)  # for its error, if it names a sampler
    first = args.sampler if args.weighting is None else f"{args.sampler}+{args.weighting}"
    recipes = [recipe(spec, objective) for spec in (first, *args.compare)]
    settings = {"objective": objective, "weight_of": args.weight_of}
    previews = [preview(one.sampler, one.weighting, objective.process, **settings, title=one.spec) for one in recipes]
    notes = [not_yet(one.sampler, one.weighting) for one in recipes]
    heading = f"{args.scheduler}, {objective.prediction} prediction"
    whose = "eps" if args.weight_of == "eps" else f"model's own {objective.prediction}"
    print_all(previews, notes, f"{heading}; w is the weight of the {whose} loss")
    if args.json is not None:
        with writing(f"--json {args.json}", args.json):
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps(as_json(args, objective, previews, notes), allow_nan=False) + "\n")
        print(args.json)
    if args.out is not None:
        try:
            with writing(f"--out {args.out}", args.out):
                print(draw_previews(previews, args.out, heading))
        except ImportError as error:
            print(f"noisewise: no picture: {error}", file=sys.stderr)
            return 1
    return 0


def read_objective(args: argparse.Namespace) -> Objective:
    """The process and what the model predicts."""
    text = args.scheduler
    settings = {name: value for name in SCHEDULER_SETTINGS if (value := getattr(args, name)) is not None}
    is_path = Path(text).exists() or text.endswith(".json") or any(mark in text for mark in {"/", os.sep})
    if text.partition(":")[0].strip() in PROCESSES or not is_path:
        objective = _named(text)
        if settings:
            name, value = next(iter(settings.items()))
            raise ValueError(
                f"--{name} is for diffusers' schedulers, and {text} is none: instead write {_instead(name, value)}"
            )
    else:
        from noisewise.integrations.diffusers import read_scheduler

        objective = read_scheduler(Path(text), **settings)
    return objective if args.prediction is None else replace(objective, prediction=args.prediction)


def _instead(name: str, value: float) -> str:
    """What does the same as a setting of diffusers' schedulers where the process is named."""
    if name in ("mean", "std"):
        return f"--scheduler edm:{name}={value:g}"
    shift = value if name == "shift" else math.exp(min(value, 700.0))
    return f'--sampler "shift:of=(uniform),shift={shift:.4g}"'


def _named(spec: str) -> Objective:
    try:
        process = build_process(spec)
    except SpecError as error:
        raise SpecError(f"{error}; or the path of a diffusers scheduler_config.json, or of a folder with one") from None
    return Objective(process)


def as_json(
    args: argparse.Namespace, objective: Objective, previews: Sequence[Preview], notes: Sequence[list[str]]
) -> dict[str, Any]:
    """The curves and what was printed of them; null where log SNR is infinite."""
    axes: dict[str, Any] = {axis: _finite(getattr(previews[0], axis)) for axis in AXES}
    recipes = [
        {
            "spec": one.title,
            "notes": note,
            **{name: _finite(getattr(one, name)) for name in CURVES},
            "quantiles": {axis: {k: _finite(v) for k, v in one.quantiles(axis=axis).items()} for axis in AXES},
            "thirds": one.shares(3),
            "effective_share": one.effective_share,
        }
        for one, note in zip(previews, notes, strict=True)
    ]
    said = {"scheduler": args.scheduler, "prediction": objective.prediction, "weight_of": args.weight_of}
    return {**said, **axes, "recipes": recipes}


def _finite(values: Sequence[float] | np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]


def print_all(previews: Sequence[Preview], notes: Sequence[list[str]], heading: str) -> None:
    """In characters that the terminal has; the ends of each axis are the same for all recipes."""
    encoding = sys.stdout.encoding or "utf-8"
    blocks = BLOCKS if BLOCKS.encode(encoding, "replace").decode(encoding) == BLOCKS else PLAIN
    lines, between = [heading], [limits(previews, axis) for axis in HEADINGS]
    for one, note in zip(previews, notes, strict=True):
        lines += ["", *description(one, between, note, blocks)]
    print("\n".join(lines).encode(encoding, "replace").decode(encoding))


# In the terminal: three lines of blocks an axis, and a table of quantiles, for those who tune over ssh ----------------


COLUMNS = 60
BLOCKS, PLAIN = " ▁▂▃▄▅▆▇█", " .:-=+*#@"  # the second for terminals that cannot show the first
NAMES = {"p": "p", "w": "w", "pw": "p·w"}
HEADINGS: dict[Axis, str] = {"time": "t", "log_snr": "log SNR"}
FORMS: dict[Axis, str] = {"u": ".3f", "time": ".4g", "log_snr": ".2f"}
FINE = 8  # points in each column


def chart(one: Preview, axis: Axis, between: tuple[float, float], blocks: str = BLOCKS) -> list[str]:
    """p, w and p·w along an axis, least noise on the left; each line has its own scale and ends with what a full block is."""
    low, high = between
    lines = [f"over {HEADINGS[axis]}, {low:.4g} to {high:.4g} (noise →)"]
    for name, label in NAMES.items():
        values = columns(one, axis, name, between)
        top = float(values.max())
        heights = np.ceil(values / max(top, 1e-30) * (len(blocks) - 1) - 0.02).astype(int)  # a trace shows, nothing does not
        lines.append(f"  {label:<4}{''.join(blocks[height] for height in heights)}  max {top:.3g}")
    return lines


def columns(one: Preview, axis: Axis, name: str, between: tuple[float, float]) -> np.ndarray:
    """A curve's mean in equal parts of an axis."""
    low, high = between
    at = low + (np.arange(COLUMNS * FINE) + 0.5) / (COLUMNS * FINE) * (high - low)
    along, curve = getattr(one, axis), one.shown(axis, name)
    finite = np.isfinite(along)
    sign = -1 if axis == "log_snr" else 1  # np.interp wants rising places
    return np.interp(sign * at, sign * along[finite], curve[finite]).reshape(COLUMNS, FINE).mean(1)


def table(one: Preview) -> list[str]:
    """Where shares of the draws and of the objective lie."""
    rows = [["share with less noise", "", *(f"{share:.0%}" for share in AT)]]
    named = {"p": "of the draws", "pw": "of the objective"}
    if np.allclose(one.p, one.pw, rtol=1e-3, atol=1e-3):
        named = {"p": "of draws and objective"}
    for name, label in named.items():
        for axis, form in FORMS.items():
            found = np.array(one.quantiles(AT, axis)[name])
            values = [f"{value:{form}}" for value in (np.round(found, 4) + 0.0 if axis == "time" else found)]  # 0, not -6e-06
            rows.append([label if axis == "u" else "", HEADINGS.get(axis, axis), *values])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    aligned = ["<", "<", *">" * len(AT)]
    return ["  ".join(f"{cell:{a}{w}}" for cell, a, w in zip(row, aligned, widths, strict=True)).rstrip() for row in rows]


def summary(one: Preview) -> list[str]:
    """Thirds of u, and what a batch is worth."""
    shares = {name: " ".join(f"{share:.0%}" for share in values) for name, values in one.shares(3).items()}
    return [
        f"thirds of u, least noise first: draws {shares['p']}, objective {shares['pw']}",
        f"effective sample size: {one.effective_share:.0%} of a batch, for its importance weights",
    ]


def not_yet(sampler: Sampler, weighting: Weighting) -> list[str]:
    """What will change during training, and how to see that."""
    lines = []
    if any(isinstance(part, Learner) for part in sampler.modules()):
        lines.append("this sampler learns: p is what it draws before the first step; noisewise analyze density shows runs")
    elif not sampler.constant:
        lines.append("this sampler changes over training: p is what it draws at the first step")
    if isinstance(sampler, Learner) and sampler.correction.kind == "target" and sampler.target is not weighting:
        target = type(sampler.target).__name__
        lines.append(f"draw.weight holds the weight of its target, {target}, too: p·w is what is trained, w the loop's part")
    if any(isinstance(part, Learned) for part in weighting.modules()):
        lines.append("this weighting is learned: w is what it is before the first step")
    return lines


def description(one: Preview, between: Sequence[tuple[float, float]], notes: Sequence[str], blocks: str = BLOCKS) -> list[str]:
    """All of it, below the recipe's name."""
    parts = [*notes]
    for axis, ends in zip(HEADINGS, between, strict=True):
        parts += chart(one, axis, ends, blocks)
    return [one.title, *(f"  {line}" for line in [*parts, *table(one), *summary(one)])]
