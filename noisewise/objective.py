"""Training losses per sample, for everything a diffusion model may predict.

With x_u = alpha x0 + sigma noise and s = sqrt(alpha^2 + sigma^2) the model predicts one of

==========  =================================================================================================
prediction  target
==========  =================================================================================================
eps         noise
x0          x0
v           (alpha noise - sigma x0) / s                               (Salimans & Ho 2022; s = 1 for VP)
flow        noise - x0, the velocity of rectified flow                 (x0 - noise with Flow(data_at=1))
edm         (x0 - c_skip x_u / alpha) / c_out, from inputs c_in x_u    (Karras et al. 2022, Eq. 7 and 8)
==========  =================================================================================================

Each error is a multiple of the eps error that depends only on log SNR: |eps error| = sqrt(k) |prediction error|, with k from
`eps_error_per_prediction_error`. With this factor a weighting means the same for every prediction.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from noisewise.levels import check_floating, check_tensor, over_samples
from noisewise.processes import Process, check_process

Prediction = Literal["eps", "x0", "v", "flow", "edm"]
Word = Literal["epsilon", "sample", "v_prediction"]
WORDS: dict[str, Prediction] = {"epsilon": "eps", "sample": "x0", "v_prediction": "v"}
"""What diffusers calls them."""
LossKind = Literal["mse", "l1", "huber"]
PREDICTIONS: tuple[Prediction, ...] = get_args(Prediction)
LOSS_KINDS: tuple[LossKind, ...] = get_args(LossKind)

LOG_SNR_LIMIT = 30.0
"""log SNR is clamped to +-30 before any exponential, so that weights at zero or infinite SNR are limits, never NaN."""


def bounded(log_snr: Tensor) -> Tensor:
    """log SNR, clamped to where exponentials and their squares stay finite in float32."""
    return log_snr.clamp(-LOG_SNR_LIMIT, LOG_SNR_LIMIT)


def check_prediction(prediction: str) -> None:
    if prediction not in PREDICTIONS:
        raise ValueError(f"unknown prediction {prediction!r}: choose one of {', '.join([*PREDICTIONS, *WORDS])}")


def eps_error_per_prediction_error(log_snr: Tensor, prediction: str, sigma_data: float = 0.5) -> Tensor:
    """k(log SNR) with (squared eps error) = k * (squared error of `prediction`)."""
    check_prediction(prediction)
    lam = bounded(log_snr)
    if prediction == "x0":
        return lam.exp()
    if prediction == "v":
        return torch.sigmoid(lam)
    if prediction == "flow":
        return torch.sigmoid(lam / 2) ** 2
    if prediction == "edm":
        return torch.sigmoid(lam + 2 * math.log(sigma_data))
    return torch.ones_like(lam)


@dataclass(frozen=True)
class Objective:
    """Turns a model's output into one loss per sample, averaged over the sample's elements and not weighted.

    Args:
        process: how noise is added.
        prediction: what the model predicts: "eps", "x0", "v", "flow" or "edm", or diffusers' words (epsilon, sample,
            v_prediction). By default the velocity of a flow, EDM's own output, and the noise of any other process.
        loss: "mse", "l1" or "huber".
        huber_delta: where Huber turns from quadratic to linear.
        sigma_data: the standard deviation of the data, for the "edm" prediction.
    """

    process: Process
    prediction: Prediction | Word = None  # type: ignore[assignment]  # None when it is made, never afterwards
    loss: LossKind = "mse"
    huber_delta: float = 1.0
    sigma_data: float = 0.5

    def __post_init__(self) -> None:
        meant: str | None = self.prediction
        usual = check_process(self.process).usual_prediction
        object.__setattr__(self, "prediction", usual if meant is None else WORDS.get(meant, meant))
        check_prediction(self.prediction)
        if self.loss not in LOSS_KINDS:
            raise ValueError(f"unknown loss {self.loss!r}: choose one of {', '.join(LOSS_KINDS)}")
        if not (self.huber_delta > 0 and self.sigma_data > 0):
            raise ValueError(f"huber_delta and sigma_data must be positive, got {self.huber_delta} and {self.sigma_data}")

    def losses(
        self, model: Callable[..., Any], x0: Tensor, u: Tensor, noise: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Tensor:
        """One loss per sample: add noise to `x0`, call `model(input, time, *args, **kwargs)`, and compare."""
        check_floating(x0)
        check_tensor(u)
        noise = torch.randn_like(x0) if noise is None else noise
        x_u = self.process.add_noise(x0, noise, u)
        output = model(self.model_input(x_u, u), self.process.time(u), *args, **kwargs)
        return self.compare(output, x0, noise, u)

    def compare(self, output: Any, x0: Tensor, noise: Tensor, u: Tensor) -> Tensor:
        """One loss per sample, from the model's output for `add_noise(x0, noise, u)`."""
        output = getattr(output, "sample", output)  # diffusers' models return a dataclass
        if not isinstance(output, Tensor):
            raise TypeError(
                f"the model returned {type(output).__name__}; hand over the predicted tensor (for tuples: output[0])"
            )
        if output.shape != x0.shape:
            raise ValueError(f"the model's output must have the shape of x0, {tuple(x0.shape)}, got {tuple(output.shape)}")
        output, target = output.float(), self.target(x0, noise, u).float()
        if self.loss == "mse":
            errors = F.mse_loss(output, target, reduction="none")
        elif self.loss == "l1":
            errors = F.l1_loss(output, target, reduction="none")
        else:
            errors = F.huber_loss(output, target, reduction="none", delta=self.huber_delta)
        return errors.flatten(1).mean(1) if errors.ndim > 1 else errors

    def target(self, x0: Tensor, noise: Tensor, u: Tensor) -> Tensor:
        """What a perfect model would return."""
        if self.prediction == "eps":
            return noise
        if self.prediction == "x0":
            return x0
        if self.prediction == "flow":
            return x0 - noise if self.process.data_at else noise - x0
        alpha, sigma = self.process.scales(u)  # coefficients in their precision: a square overflows float16 soon
        if self.prediction == "v":
            scale = torch.sqrt(alpha**2 + sigma**2)
            return over_samples(alpha / scale, x0) * noise - over_samples(sigma / scale, x0) * x0
        # (x0 - c_skip x_u / alpha) / c_out, multiplied out: no cancellation at little noise, no division by alpha
        d = self.sigma_data
        scale = torch.sqrt(sigma**2 + d**2 * alpha**2)
        return over_samples(sigma / (d * scale), x0) * x0 - over_samples(d * alpha / scale, x0) * noise

    def model_input(self, x_u: Tensor, u: Tensor) -> Tensor:
        """The network's input: x_u, or x_u scaled to unit variance for "edm"."""
        if self.prediction != "edm":
            return x_u
        alpha, sigma = self.process.scales(u)
        return x_u * over_samples(1 / torch.sqrt(sigma**2 + (self.sigma_data * alpha) ** 2), x_u)

    def denoised(self, output: Tensor, x_u: Tensor, u: Tensor) -> Tensor:
        """The estimate of x0 that the model's output implies."""
        if self.prediction == "x0":
            return output
        alpha, sigma = self.process.scales(u)
        if self.prediction in ("eps", "flow"):
            whole = alpha if self.prediction == "eps" else alpha + sigma
            if self.prediction == "flow" and self.process.data_at:
                sigma = -sigma
            return (x_u - over_samples(sigma, x_u) * output) / over_samples(whole, x_u)
        d = 1.0 if self.prediction == "v" else self.sigma_data
        both = sigma**2 + d**2 * alpha**2
        skip, out = d**2 * alpha / both, d * sigma / torch.sqrt(both)
        if self.prediction == "v":
            out = -out  # v is edm's output for sigma_data = 1, with the other sign
        return over_samples(skip, x_u) * x_u + over_samples(out, x_u) * output

    def per_prediction(self, eps_weight: Tensor, u: Tensor) -> Tensor:
        """Translate a weight of the eps-loss into the weight of this objective's loss.

        Exact for "mse" and "l1" (whose errors scale with sqrt(k)); for "huber" only in the quadratic part.
        """
        check_tensor(u)
        if self.prediction == "eps":
            return eps_weight
        k = eps_error_per_prediction_error(self.process.log_snr(u), self.prediction, self.sigma_data)
        return eps_weight * (k.sqrt() if self.loss == "l1" else k)
