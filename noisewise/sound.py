"""Whether a recipe makes sense, looked at once when it is made: settings can be legal one by one and nonsense together."""

import torch
from torch import Tensor

from noisewise.levels import interval, middles, visible
from noisewise.objective import Objective
from noisewise.processes import Process
from noisewise.samplers.base import GRID, Sampler, fine_grid
from noisewise.samplers.combine import Combined
from noisewise.samplers.histogram import Histogram
from noisewise.samplers.learning import Learner
from noisewise.weighting import NoWeight, Weighting

AMISS = 0.01  # what the integral of a density may be away from 1: rounding and our grid make far less
COUNTED = 0.2  # at least this share of the draws must have a weight above 0
LEAST = 2.0**-23  # beyond it samplers keep what float32 cannot tell from 0 and 1
MEANS = (1e-12, 1e15)  # of weights: below, Adam's epsilon hides every gradient; above, float32 overflows


@torch.inference_mode(False)
@torch.no_grad()
def check_sound(sampler: Sampler, weighting: Weighting, objective: Objective, spec: str) -> None:
    """An error, in one line, if the density is not one or the weights leave nothing to train on."""
    if not visible(middles(1, sampler.device), wait=True):
        return
    if not _usable(sampler.process, sampler.device):
        raise ValueError(f"{spec!r} cannot train on {sampler.process}: its scales or its log SNR are not numbers everywhere")
    for part in sampler.modules():
        if isinstance(part, Sampler):
            _check_density(part, f"{spec!r}: the density of {type(part).__name__}")
    u = _draws(sampler)
    _check_weights(weighting, objective, u, f"{spec!r}: the loss weights")
    for part in sampler.modules():
        if isinstance(part, Learner) and part.target not in (None, weighting):
            assert part.target is not None
            _check_weights(part.target, part.objective, u, f"{spec!r}: the weights of the target")


def _check_density(sampler: Sampler, whose: str) -> None:
    """An error if it is not one, or not that of the draws."""
    if sampler.table is not None:
        _check_table(sampler, whose)
        return
    if sampler.conditional:
        return
    combined = isinstance(sampler, Combined)  # a combination of densities is one
    total, apart = (_inside(sampler), 0.0) if combined else integral(sampler, whose)
    if not abs(total - 1) <= AMISS:
        raise ValueError(
            f"{whose} integrates to {total:.3g}, not 1: its draws lie where float32 cannot tell noise levels apart "
            "(less extreme settings help), or it is not the density of its draws"
        )
    if not apart <= 2 * AMISS:
        raise ValueError(
            f"{whose} is not that of its draws: their shares below a noise level differ by up to {apart:.3g}. Let "
            "quantile() be the inverse of the density's integral from 0"
        )


def _check_table(sampler: Sampler, whose: str) -> None:
    """An error if methods of its own, which nobody asks when a batch is drawn, say something else than the table."""
    kind = type(sampler)
    if kind._draw is not Sampler._draw or (kind.quantile, kind.density) == (Sampler.quantile, Sampler.density):
        return
    u, density, _ = sampler._draw(middles(GRID, sampler.device), None)
    if not (torch.equal(_draws(sampler), u) and torch.equal(sampler.density(u), density)):
        raise ValueError(
            f"{whose} is a table, and drawn from it, but quantile() or density() says something else: leave out these two, or "
            "the table"
        )


def integral(sampler: Sampler, whose: str = "the density") -> tuple[float, float]:
    """Of the density, by the midpoint rule, over intervals that are fine where the sampler draws; and how far the share of the
    draws below a noise level is from the integral up to there, at most. Where in a timestep they lie does not matter."""
    steps = sampler.process.steps
    bins = steps or 1000
    even = (torch.arange(bins + 1, device=sampler.device, dtype=torch.float32) / bins).clamp(LEAST, 1 - LEAST)
    tables = [part.edges for part in sampler.modules() if isinstance(part, Histogram)]
    draws = _draws(sampler).to(even).clamp(LEAST, 1 - LEAST).sort().values
    edges = torch.cat([even, draws, *tables]).clamp(LEAST, 1 - LEAST).sort().values
    between = (edges[1:] + edges[:-1]) / 2
    density = _asked(sampler, "density", between)
    if bool((density < 0).any()):
        raise ValueError(f"{whose} is negative at u = {float(between[density.argmin()]):.3g}: {float(density.min()):.3g}")
    below = torch.cat([density.new_zeros(1).double(), (density.double() * edges.double().diff()).cumsum(0)])
    if steps:
        at, counts = even[1:], torch.bincount(interval(draws, steps), minlength=steps).cumsum(0)
    else:
        at, counts = draws, torch.arange(len(draws), device=draws.device) + 0.5
    apart = below[torch.searchsorted(edges, at)] - counts / len(draws)
    return float(below[-1]), float(apart.abs().max())


def _inside(sampler: Sampler) -> float:
    """The share of draws that are not kept at one of the ends."""
    u = _draws(sampler)
    return float(((u > LEAST) & (u < 1 - LEAST)).double().mean())


def _draws(sampler: Sampler) -> Tensor:
    """Noise levels as it draws them, evenly spread; of all levels alike where they depend on the data."""
    v = middles(GRID, sampler.device)
    if sampler.conditional and sampler.table is None:
        return v
    u = _asked(sampler, "quantile", v)
    sampler.check_drawn(u)
    return u


def _asked(sampler: Sampler, name: str, values: Tensor) -> Tensor:
    """What its density or quantile says of these numbers, asked as for a batch whose data it does not look at."""
    argument = "u" if name == "density" else "v"
    said = f"{type(sampler).__name__}.{name}({argument}, x0)"
    try:
        found = getattr(sampler, name)(values, None)
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"{said} fails without data, x0=None: {error}; if it looks at the data, set conditional = True"
        ) from error
    if not isinstance(found, Tensor) or found.shape != values.shape:
        raise TypeError(f"{said} must be a tensor of the shape of {argument}, got {getattr(found, 'shape', found)}")
    return found


def _usable(process: Process, device: torch.device) -> bool:
    u = fine_grid(process, device)
    return bool(torch.isfinite(torch.cat(process.scales(u))).all()) and not bool(torch.isnan(process.log_snr(u)).any())


def _check_weights(weighting: Weighting, objective: Objective, u: Tensor, whose: str) -> None:
    """At the levels that are drawn, `u`, and on the process's grid."""
    if isinstance(weighting, NoWeight):
        return
    weighting = weighting.to(u.device)
    grid = torch.cat([u, fine_grid(objective.process, u.device)]).split(1024)  # a learned weight has a row for each
    everywhere = torch.cat([weighting.weights(objective, part) for part in grid]).double()
    drawn = everywhere[: len(u)]
    mean, counted = float(drawn.mean()), float((drawn > 0).double().mean())
    if not bool(torch.isfinite(everywhere).all()):
        raise ValueError(f"{whose} are not finite at every noise level of {objective.process}: choose less extreme settings")
    if not counted >= COUNTED:
        raise ValueError(f"{whose} are 0 for {1 - counted:.1%} of the draws on {objective.process}: nearly nothing is trained")
    if not MEANS[0] <= mean <= MEANS[1]:
        raise ValueError(f"{whose} have a mean of {mean:.2g} on {objective.process}: choose less extreme settings")
