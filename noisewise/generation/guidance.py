"""From a model to the estimate of x0 that the solvers ask for, with or without classifier-free guidance.

Guidance (Ho & Salimans 2022) of strength w replaces the model's output by null + w (conditional - null): 1 is none, 0 ignores
the label. Every prediction is linear in x0 for given x, so guiding the output and guiding the estimate are the same.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from noisewise.levels import over_samples
from noisewise.objective import Objective

Call = Callable[[Any, Tensor, Tensor, Tensor | None], Any]
"""(model, x, time, labels or None) -> output, for models that want their arguments in another way."""


def denoiser(
    model: Any,
    objective: Objective,
    labels: Tensor | None = None,
    *,
    guidance: float = 1.0,
    null_label: int | None = None,
    interval: tuple[float, float] = (0.0, 1.0),
    call: Call | None = None,
) -> Callable[[Tensor, Tensor], Tensor]:
    """(x, u) -> the estimate of x0.

    Args:
        model: called as model(x, time, labels), or model(x, time) without labels; x and a continuous time are float32.
        objective: what the model was trained to predict.
        labels: one an image of the batches to come.
        guidance: its strength w; other than 1 it costs two evaluations, made in one batch of twice the size.
        null_label: the label that means none.
        interval: the u in which to guide (Kynkäänniemi et al. 2024); outside, the label alone counts.
        call: how to call the model, if not as above.
    """
    guided = guidance != 1
    if guided and (labels is None or null_label is None):
        raise ValueError("guidance needs labels and the null_label the model was trained with; without them leave guidance=1")
    check_interval(interval)
    ask = call or _call

    def estimate(x: Tensor, u: Tensor) -> Tensor:
        if labels is not None and len(labels) != len(x):
            raise ValueError(f"there are {len(labels)} labels for a batch of {len(x)}: make one denoiser a batch")
        here = None if labels is None else labels.to(x.device)
        inside = (u >= interval[0]) & (u <= interval[1])
        twice = guided and bool(inside.any())
        u = _one_a_sample(u, x)
        inputs, time = objective.model_input(x, u).float(), objective.process.time(u)
        time = time.float() if time.is_floating_point() else time
        if twice and here is not None and null_label is not None:
            both = torch.cat([here, torch.full_like(here, null_label)])
            output = _tensor(ask(model, torch.cat([inputs, inputs]), torch.cat([time, time]), both), 2 * len(x), x)
            conditional, null = output.chunk(2)
            strength = _one_a_sample(torch.where(inside, guidance, 1.0), x)
            output = null + over_samples(strength, x) * (conditional - null)
        else:
            output = _tensor(ask(model, inputs, time, here), len(x), x)
        return _x0(objective, output, x, u)

    return estimate


def check_interval(interval: tuple[float, float]) -> None:
    """An error if guidance cannot be within these u."""
    if not 0 <= interval[0] <= interval[1] <= 1:
        raise ValueError(f"interval must be two values of u with 0 <= low <= high <= 1, got {interval}")


def _one_a_sample(values: Tensor, x: Tensor) -> Tensor:
    """On the device of x; a single value goes there with the kernel that writes it, since a copy would make the host wait."""
    if values.ndim == 0 and values.device.type == "cpu" and x.device.type == "cuda":
        return torch.full((len(x),), values.item(), dtype=values.dtype, device=x.device)
    return values.to(x.device).expand(len(x))


def _call(model: Any, x: Tensor, time: Tensor, labels: Tensor | None) -> Any:
    return model(x, time) if labels is None else model(x, time, labels)


def _tensor(output: Any, rows: int, x: Tensor) -> Tensor:
    """The output in the type of x, of the expected shape."""
    output = getattr(output, "sample", output)  # diffusers' models return a dataclass
    if not isinstance(output, Tensor):
        raise TypeError(f"the model returned {type(output).__name__}; pass call=... that hands over the predicted tensor")
    if output.shape != (rows, *x.shape[1:]):
        raise ValueError(f"the model's output must have the shape {(rows, *x.shape[1:])}, got {tuple(output.shape)}")
    return output.to(x.dtype)


def _x0(objective: Objective, output: Tensor, x: Tensor, u: Tensor) -> Tensor:
    """The estimate of x0; zero where x is pure noise and the model predicts just that, which says nothing about x0."""
    estimate = objective.denoised(output, x, u)
    if objective.prediction != "eps":
        return estimate
    pure_noise = over_samples(objective.process.scales(u)[0], x) == 0
    return torch.where(pure_noise, torch.zeros_like(estimate), estimate)
