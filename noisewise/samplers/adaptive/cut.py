"""Where the default target of `adaptive` is cut off: Min-SNR's gamma, by the size of the model's error in x0.

Min-SNR counts that error by min(SNR, gamma): the less noise, the more, up to gamma. At less noise than gamma's, an image has
no structure left to find. Card: docs/methods/adaptive.md.
"""

import math

import torch
from torch import Tensor

from noisewise.objective import Objective, bounded
from noisewise.samplers.base import fine_grid

ERROR = 0.07  # of the data's mean square: on CIFAR-10 the SNR of about 3 on every process, at 8 x 8 pixels of about 16
GROW = 2000  # steps before gamma moves
PACE = 0.1  # of the way, in logarithms, at each update
KNOWN = -2.0  # a log SNR at which any model's squared error is below the data's mean square


def followed(
    gamma: float, error: float, power: float, losses: Tensor, seen: Tensor, edges: Tensor, objective: Objective
) -> float:
    """The SNR at which a squared error in x0 is down to this share of the data's; gamma itself, if the losses tell nothing.

    Args:
        power: the data's mean square.
        losses: running losses in the intervals between the edges, with Min-SNR's weight for this gamma.
        seen: which of the intervals have had any.
    """
    u = fine_grid(objective.process, "cpu")
    interval = torch.bucketize(u, edges.cpu()[1:-1], right=True)
    log_snr = bounded(objective.process.log_snr(u)).double()
    count = torch.bincount(interval, minlength=len(losses))
    place, weight = (
        torch.bincount(interval, values, len(losses)) / count for values in (log_snr, log_snr.exp().clamp(max=gamma))
    )
    known = (count > 0) & seen.cpu()
    place, errors = place[known], (losses.cpu().double() / weight)[known]
    if not len(place) or not errors[(place - KNOWN).abs().argmin()] <= power:
        return gamma
    return math.exp(crossing(place, torch.log(errors / (error * power))))


def crossing(place: Tensor, height: Tensor) -> float:
    """Where the height, which rises as the place falls, passes 0: the lowest such place, or the end that is nearest to it."""
    below = (height <= 0).nonzero()
    if len(below) == 0:
        return float(place[0])
    k = int(below[-1])
    if k + 1 == len(place):
        return float(place[-1])
    share = height[k] / (height[k] - height[k + 1])
    return float(place[k] + share * (place[k + 1] - place[k]))
