"""Gradient variance and loss at each noise level as training goes on (arXiv 2411.09998, Fig. 2; with --objective vlb, Fig. 6).

At each of `--levels` noise levels, `--rows` independent samples (training data drawn with replacement, fresh noise) give the
variance of a single sample's gradient, by one of the two unbiased estimators of `per_sample`. Samples and noise are the same at
every moment of training, so the curves differ by the parameters alone. The weights are those being trained, not their average.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from noisewise.analysis.moments_of_training import add_subject, level_middles, moments, read
from noisewise.analysis.output import Analysis, Watch, lines_over_noise, name_moments, new_figure, noise_axis, plain_axis
from noisewise.feedback import preserved_buffers, preserved_random_state
from noisewise.looking.validation import evaluation_mode
from noisewise.models import with_labels
from noisewise.processes import Process
from noisewise.spec import build_weighting
from noisewise.streams import normals, stream_key, uniforms
from noisewise.training.trainer import Trainer
from noisewise.weighting import VLB, Learned, NoWeight, Weighting, WeightProduct

# The variance of a single sample's gradient, Var[g] = E|g - E g|^2 (the trace of its covariance), without bias --------


# per_sample     n gradients, one a sample, by torch.func (vmap of grad): sum_i |g_i - mean|^2 / (n - 1). Exact, with the norms
#                of single gradients; holds n gradients at once.
# micro_batches  b gradients of the mean loss of m independent samples each, whose variance is Var[g] / m:
#                m sum_j |g_j - mean|^2 / (b - 1), summed as they come (Welford). Holds three gradients, works for any model.
#
# Both cost n = b m samples forward and backward. |E g|^2 is estimated by |mean|^2 - Var[g] / n, without bias as well: where the
# gradients cancel it may come out below zero.
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
    return float(torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float64)).square().sum())  # waits once


def _mean_and_error(values: Tensor) -> tuple[float, float]:
    values = values.double()
    return float(values.mean()), float(values.std()) / math.sqrt(len(values))


# The analysis ---------------------------------------------------------------------------------------------------------


STREAM = 0x6772616469656E74  # "gradient": the samples of this analysis
Tell = Callable[[str], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_subject(parser, budget="800it", points=4)
    parser.add_argument("--levels", type=int, default=20, help="noise levels, in the middle of equal intervals of u")
    parser.add_argument("--rows", type=int, default=128, help="samples at each level")
    parser.add_argument("--objective", default="plain", help="weight of the loss: plain, vlb, or a weighting's spec")
    parser.add_argument("--method", choices=METHODS, default="auto", help="auto: per_sample if its gradients take <= 1 GiB")
    parser.add_argument("--micro-batch", type=int, help="rows of each gradient with micro_batches; by default a 16th of --rows")
    parser.add_argument("--dropout", action="store_true", help="keep dropout, as in training; by default evaluation mode")


def chosen_weighting(spec: str) -> Weighting:
    """The weighting that --objective or --target names."""
    if spec in ("plain", "vlb"):
        return NoWeight() if spec == "plain" else VLB()
    weighting = build_weighting(spec)
    factors = weighting.factors if isinstance(weighting, WeightProduct) else [weighting]
    if any(isinstance(factor, Learned) for factor in factors):
        raise ValueError(f"{spec!r} is learned in training and has no value of its own here: choose a fixed weighting")
    return weighting


def analyse(options: argparse.Namespace, rest: list[str]) -> Analysis:
    weighting, rows, size = chosen_weighting(options.objective), options.rows, options.micro_batch
    size = next(part for part in range(max(1, rows // 16), 0, -1) if rows % part == 0) if size is None else size
    u = level_middles(options.levels)
    if rows < 2:
        raise ValueError(f"a variance needs at least 2 samples a level, got --rows {rows}")
    found: list[tuple[int, str, list[GradientStatistics]]] = []
    notes: list[str] = []
    with Watch().shown() as watch:
        for trainer in moments(options, rest, watch.tell):
            process, parameters = trainer.objective.process, sum(p.numel() for p in trainer.model.parameters())
            method = found[-1][1] if found else choose_method(options.method, trainer.model, rows)
            with watch.moment(trainer, len(u)):
                measure = partial(measure_levels, trainer, u, rows, weighting, size=size, dropout=options.dropout)
                try:
                    levels = measure(method, watch.advance)
                except RuntimeError as error:
                    if method == "micro_batches" or options.method == "per_sample":
                        raise
                    method = "micro_batches"
                    reason = str(error).strip().partition("\n")[0]
                    notes.append(f"This model gives no single gradients ({reason}): micro-batches of {size} rows instead.")
                    levels = measure(method, watch.advance)
            found.append((trainer.step, method, levels))
    figure = draw(
        u, [(step, levels) for step, _, levels in found], process, objective=options.objective, name=trainer.config.name
    )
    table = [
        row_of(step, method, process, level, one) for step, method, all_ in found for level, one in zip(u, all_, strict=True)
    ]
    return Analysis(
        "gradients", figure, table, [*findings(u, found), *notes, cost(len(u), rows, len(found), method, parameters)]
    )


def samples_at(trainer: Trainer, u: float, rows: int, stream: int) -> Samples:
    """Independent samples of the training data (with replacement) and noise: a function of `stream` alone."""
    source = trainer.parts.source
    chosen = (uniforms(stream_key(STREAM, stream), rows).double() * len(source)).long().clamp(max=len(source) - 1)
    x0, labels = read(source, chosen, trainer)
    noise = normals(STREAM, torch.arange(rows), stream, tuple(x0.shape[1:]), trainer.device)
    return Samples(x0, noise, torch.full((rows,), u, device=trainer.device), labels)


def weighted_losses(trainer: Trainer, weighting: Weighting) -> Losses:
    """The losses whose gradients are looked at."""
    objective = trainer.objective

    def losses(model: nn.Module, samples: Samples) -> Tensor:
        values = objective.losses(with_labels(model), samples.x0, samples.u, samples.noise, samples.labels)
        return weighting.weights(objective, samples.u).detach() * values

    return losses


def measure_levels(
    trainer: Trainer,
    u: Tensor,
    rows: int,
    weighting: Weighting,
    method: str,
    advance: Callable[[], None] = lambda: None,
    *,
    size: int = 8,
    dropout: bool = False,
) -> list[GradientStatistics]:
    """The statistics at each of these noise levels; the trainer stays as it was."""
    losses, model, found = weighted_losses(trainer, weighting.to(trainer.device)), trainer.model, []
    with preserved_random_state(STREAM % 2**31), preserved_buffers(model), evaluation_mode(model):
        model.train(dropout)
        for i, level in enumerate(u.tolist()):
            samples = samples_at(trainer, level, rows, i)
            if method == "per_sample":
                found.append(by_single_gradients(model, losses, samples))
            else:
                found.append(by_micro_batches(model, losses, samples, size))
            advance()
    return found


def row_of(step: int, method: str, process: Process, u: Tensor, found: GradientStatistics) -> dict[str, Any]:
    return {
        "step": step,
        "u": round(float(u), 6),
        "time": float(process.time(u[None])[0]),
        "log_snr": float(process.log_snr(u[None])[0]),
        "variance": found.variance,
        "variance_error": found.variance_error,
        "squared_mean_gradient": found.squared_mean,
        "mean_norm": found.norm,
        "rms_norm": found.root_mean_square,
        "loss": found.loss,
        "loss_error": found.loss_error,
        "method": method,
        "samples": found.samples,
    }


def findings(u: Tensor, found: list[tuple[int, str, list[GradientStatistics]]]) -> list[str]:
    says = []
    for step, _, levels in (found[0], found[-1])[: len(found)]:
        variance = torch.tensor([level.variance for level in levels])
        low, high = int(variance.argmin()), int(variance.argmax())
        says.append(
            f"Step {step}: the gradient's variance is largest at u = {float(u[high]):.3f} ({float(variance[high]):.3g}), "
            f"{float(variance[high] / variance[low].clamp(min=1e-30)):.3g} times that at u = {float(u[low]):.3f}."
        )
    return says


def cost(levels: int, rows: int, count: int, method: str, parameters: int) -> str:
    how = "one gradient a sample" if method == "per_sample" else "gradients of independent micro-batches"
    return (
        f"Cost: {levels} levels x {rows} samples x {count} moments = {levels * rows * count:,} samples forward and backward "
        f"({how}; {parameters:,} parameters)."
    )


def draw(
    u: Tensor, found: list[tuple[int, list[GradientStatistics]]], process: Process, *, objective: str = "plain", name: str = ""
) -> Figure:
    """Variance and loss over the noise level, a line for each moment."""
    steps = [step for step, _ in found]
    what = {"plain": "loss", "vlb": "VLB-weighted loss"}.get(objective, f"loss weighted by {objective}")
    figure = new_figure(10.5, 4.4)
    left, right = figure.subplots(1, 2)
    for axis, field, label in (
        (left, "variance", "gradient variance E|g − E g|², one sample"),
        (right, "loss", f"{what}, mean over elements"),
    ):
        curves = [[getattr(level, field) for level in levels] for _, levels in found]
        errors = [[getattr(level, f"{field}_error") or 0.0 for level in levels] for _, levels in found]
        lines_over_noise(axis, u.tolist(), curves, errors, steps)
        axis.set(yscale="log", ylabel=label)
        noise_axis(axis, process)
        plain_axis(axis)
    name_moments(figure, left, [left, right], steps)
    title = f"{name}: gradient variance and {what} at each noise level during training".removeprefix(": ")
    figure.suptitle(f"{title}  (bands: one standard error)", fontsize=11)
    return figure
