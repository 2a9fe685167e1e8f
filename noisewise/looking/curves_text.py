"""A preview in the terminal: three lines of blocks an axis, and a table of quantiles, for those who tune over ssh."""

from collections.abc import Sequence

import numpy as np

from noisewise.looking.curves_picture import limits
from noisewise.looking.recipe_curves import AT, Axis, Preview
from noisewise.samplers import Sampler
from noisewise.samplers.learning import Learner
from noisewise.weighting import Learned, Weighting

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


def columns(one: Preview, axis: Axis, name: str, between: tuple[float, float], count: int = COLUMNS) -> np.ndarray:
    """A curve's mean in equal parts of an axis."""
    low, high = between
    at = low + (np.arange(count * FINE) + 0.5) / (count * FINE) * (high - low)
    along, curve = getattr(one, axis), one.shown(axis, name)
    finite = np.isfinite(along)
    sign = -1 if axis == "log_snr" else 1  # np.interp wants rising places
    return np.interp(sign * at, sign * along[finite], curve[finite]).reshape(count, FINE).mean(1)


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


def common_limits(previews: Sequence[Preview]) -> list[tuple[float, float]]:
    """The ends of each axis, the same for all recipes."""
    return [limits(previews, axis) for axis in HEADINGS]
