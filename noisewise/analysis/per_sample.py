"""The variance of a single sample's gradient, Var[g] = E|g - E g|^2 (the trace of its covariance), in two unbiased ways.

per_sample     n gradients, one a sample, by torch.func (vmap of grad): sum_i |g_i - mean|^2 / (n - 1). Exact, with the norms
               of single gradients; holds n gradients at once.
micro_batches  b gradients of the mean loss of m independent samples each, whose variance is Var[g] / m:
               m sum_j |g_j - mean|^2 / (b - 1), summed as they come (Welford). Holds three gradients, works for any model.

Both cost n = b m samples forward and backward. |E g|^2 is estimated by |mean|^2 - Var[g] / n, without bias as well: where the
gradients cancel it may come out below zero.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

METHODS = ("auto", "per_sample", "micro_batches")
MEMORY = 2**30  # bytes of single gradients that `auto` is willing to hold
AT_ONCE = 64  # samples whose activations are held at once


@dataclass(frozen=True)
class Samples:
    """Independent samples, each with its noise and its noise level."""

    x0: Tensor
    noise: Tensor
    u: Tensor
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.u)

    def part(self, rows: slice) -> "Samples":
        """Some of them."""
        return Samples(self.x0[rows], self.noise[rows], self.u[rows], None if self.labels is None else self.labels[rows])


Losses = Callable[[nn.Module, Samples], Tensor]
"""(model, samples) -> (n,) losses."""


@dataclass(frozen=True)
class GradientStatistics:
    """Of the gradient of one sample's loss; errors are standard errors, None where there is too little to tell."""

    variance: float
    variance_error: float | None
    squared_mean: float  # |E g|^2
    norm: float | None  # E|g|; only single gradients know it
    loss: float
    loss_error: float
    samples: int

    @property
    def root_mean_square(self) -> float:
        """sqrt(E|g|^2), which both methods know."""
        return math.sqrt(max(self.variance + self.squared_mean, 0.0))


def choose_method(method: str, model: nn.Module, rows: int) -> str:
    """`auto` holds single gradients if they take at most 1 GiB."""
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if method != "auto":
        return method
    size = 4 * rows * sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return "per_sample" if size <= MEMORY else "micro_batches"


class _Holder(nn.Module):
    """A module whose forward is the losses of a model, for functional_call."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model, self.losses = model, losses

    def forward(self, samples: Samples) -> Tensor:
        return self.losses(self.model, samples)


def single_gradients(model: nn.Module, losses: Losses, samples: Samples) -> tuple[list[Tensor], Tensor]:
    """(n, ...) gradients for each parameter, and the n losses. Raises RuntimeError if the model cannot be vectorised."""
    holder = _Holder(model, losses)
    parameters = {name: value.detach() for name, value in holder.named_parameters() if value.requires_grad}

    def loss(values: dict[str, Tensor], x0: Tensor, noise: Tensor, u: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor]:
        one = Samples(x0[None], noise[None], u[None], None if labels is None else labels[None])
        value = functional_call(holder, values, (one,)).squeeze(0)
        return value, value

    told = samples.labels
    over_samples = (None, 0, 0, 0, None if told is None else 0)
    vectorised = vmap(grad(loss, has_aux=True), in_dims=over_samples, randomness="different", chunk_size=AT_ONCE)
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels have no rule for vmap and would run sample by sample
        gradients, values = vectorised(parameters, samples.x0, samples.noise, samples.u, told)
    return list(gradients.values()), values.detach()


def by_single_gradients(model: nn.Module, losses: Losses, samples: Samples) -> GradientStatistics:
    """From one gradient a sample."""
    n = len(samples)
    if n < 2:
        raise ValueError(f"a variance needs at least 2 samples, got {n}: raise --rows")
    gradients, values = single_gradients(model, losses, samples)
    deviations = torch.zeros(n, dtype=torch.float64)  # |g_i - mean|^2
    squares, squared_mean = torch.zeros(n, dtype=torch.float64), 0.0
    for gradient in gradients:
        gradient = gradient.flatten(1)
        mean = gradient.mean(0, dtype=torch.float64)
        deviations += (gradient - mean).square().sum(1).cpu()
        squares += gradient.square().sum(1, dtype=torch.float64).cpu()
        squared_mean += float(mean.square().sum())
    variance = float(deviations.sum()) / (n - 1)
    return GradientStatistics(
        variance,
        float(deviations.std()) / math.sqrt(n) if n > 2 else None,
        squared_mean - variance / n,
        float(squares.sqrt().mean()),
        *_mean_and_error(values),
        n,
    )


def by_micro_batches(model: nn.Module, losses: Losses, samples: Samples, size: int) -> GradientStatistics:
    """From the gradients of batches of `size` samples; the error comes from pairs of them, and is on the safe side."""
    n = len(samples)
    count = n // size if size >= 1 else 0
    if count < 2 or count * size != n:
        raise ValueError(
            f"a variance needs at least 2 whole micro-batches, but {n} rows do not make them at {size} rows each: "
            "choose --rows as a multiple of --micro-batch, at least twice as large"
        )
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    mean = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    before: tuple[Tensor, ...] = ()
    deviation, pairs, values = 0.0, [], []
    for i in range(count):
        with torch.enable_grad():
            part = losses(model, samples.part(slice(i * size, (i + 1) * size)))
            gradient = torch.autograd.grad(part.mean(), parameters, allow_unused=True, materialize_grads=True)
        values.append(part.detach())
        steps = [new - old for new, old in zip(gradient, mean, strict=True)]
        torch._foreach_add_(mean, steps, alpha=1 / (i + 1))
        # (g - old mean)(g - new mean) = |g - old mean|^2 i / (i + 1)
        deviation += _square(steps) * i / (i + 1)
        if i % 2:
            pairs.append(size / 2 * _square([new - old for new, old in zip(gradient, before, strict=True)]))
        before = gradient
    variance = size * deviation / (count - 1)
    error = float(torch.tensor(pairs).std()) / math.sqrt(len(pairs)) if len(pairs) > 1 else None
    return GradientStatistics(variance, error, _square(mean) - variance / n, None, *_mean_and_error(torch.cat(values)), n)


def _square(tensors: list[Tensor]) -> float:
    return sum(float(tensor.square().sum(dtype=torch.float64)) for tensor in tensors)


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    values = values.double()
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))
