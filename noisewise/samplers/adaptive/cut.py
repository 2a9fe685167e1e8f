"""Where the default target of `adaptive` is cut off: Min-SNR's gamma, by the size of the model's error in x0.

Min-SNR counts that error by min(SNR, gamma): the less noise, the more, up to gamma. At less noise than gamma's, an image has
no structure left to find. Card: docs/methods/adaptive.md.
"""

import math

import torch
from torch import Tensor

from noisewise.objective import Objective, bounded
from noisewise.running import RunningLoss
from noisewise.samplers.base import fine_grid

ERROR = 0.07  # of the data's mean square: on CIFAR-10 the SNR of about 3 on every process, at 8 x 8 pixels of about 16
GROW = 2000  # steps before gamma moves
PACE = 0.1  # of the way, in logarithms, at each update
SLACK = 1.2  # of the check whether losses are means of squared errors


def followed(running: RunningLoss, objective: Objective, gamma: float, error: float, power: float) -> float:
    """The SNR at which a squared error in x0 is down to this share of the data's; gamma itself, if the losses tell nothing.

    Scaling x_u alone leaves power / (1 + power SNR), and no model that has learned anything is off by more. Larger losses are
    no means of squared errors, but sums for example; and the place where this is the share bounds what is found.

    Args:
        running: losses with Min-SNR's weight for this gamma.
        objective: what they measure.
        gamma: where Min-SNR is cut off now.
        error: the share.
        power: the data's mean square.
    """
    u = fine_grid(objective.process, "cpu")
    interval = torch.bucketize(u, running.edges.cpu()[1:-1], right=True)
    count = torch.bincount(interval, minlength=len(running.bins))
    known = (count > 0) & running.seen.cpu()
    if not bool(known.any()):
        return gamma
    log_snr = bounded(objective.process.log_snr(u)).double()
    snr = log_snr.exp()
    counted = snr.clamp(max=gamma)
    place, weight, most = (
        (torch.bincount(interval, values, len(running.bins)) / count)[known]
        for values in (log_snr, counted, counted * power / (1 + power * snr))
    )
    losses = running.mean().cpu().double()[known]
    # checked at this log(SNR x power): in more noise a slight error in eps is large in x0; others predict nearly x0 there
    checked = (place + math.log(power) + (3.4 if objective.prediction == "eps" else 6.4)).abs().argmin()
    if not losses[checked] <= SLACK * most[checked]:
        return gamma
    height = torch.log((losses / weight / (error * power)).clamp(min=1e-9))  # a loss of 0 has no logarithm
    return min(math.exp(crossing(place, height)), (1 / error - 1) / power)


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
