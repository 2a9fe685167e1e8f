"""What all samplers share.

A sampler is a density q(u) on [0, 1] (u = 0: least noise), given by its inverse CDF. `sample` draws; a learning sampler learns
from the block inside `observe`, around an optimizer step. Training loops use both through a recipe (recipes.py).
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from noisewise.levels import check_per_sample, check_range, middles, visible
from noisewise.processes import Process, check_process
from noisewise.running import KeepsPrecision, begun_on_cpu
from noisewise.samplers.correction import Correction, effective_sample_size
from noisewise.samplers.draws import Numbers
from noisewise.samplers.histogram import Histogram
from noisewise.streams import checked_seed
from noisewise.weighting import Weighting

LossAt = Callable[[Any, Tensor], Tensor]
"""(rows, u) -> (N,) losses of the batch's rows at those u, not weighted by draw.weight."""

GRID = 4096  # at least so many points for means over u
FORGOTTEN = 1000  # batches without a step after which `observe` was probably forgotten: nobody accumulates so many


@dataclass(frozen=True, eq=False)
class Draw:
    """The noise levels of one batch: one entry per sample."""

    u: Tensor
    """The noise level as a quantile of the process's training density, float32 in (0, 1)."""
    time: Tensor
    """What the model is fed: process.time(u)."""
    weight: Tensor
    """What to multiply the loss by (1 without correction)."""
    density: Tensor
    """q(u), the density the sample was drawn from."""
    x0: Tensor | None = None
    """The data the draw was conditioned on, kept only by samplers that learn from it."""
    rows: int = 0
    """How many of the samples, the last ones, `loss_at` can address: with gradient accumulation those of the last batch."""
    process: Process | None = None
    """Where alpha, sigma and log_snr come from."""
    like: tuple[int, torch.dtype] = (1, torch.float32)
    """How many dimensions x0 has, and its type."""
    r: Tensor | None = None
    """The second level of a pair, as a quantile, never above u; only `pairs` draws it."""
    mean_square: Tensor | None = None
    """Of the data, where the sampler learns from it at this step; 0 if it was given their number alone."""

    @cached_property
    def alpha(self) -> Tensor:
        """The coefficient of the data: x_u = draw.alpha * x0 + draw.sigma * noise."""
        return self._shaped(self._scales[0], self.like[1])

    @cached_property
    def sigma(self) -> Tensor:
        """The coefficient of the noise, shaped and typed to multiply x0."""
        return self._shaped(self._scales[1], self.like[1])

    @cached_property
    def log_snr(self) -> Tensor:
        """ln(alpha^2 / sigma^2), shaped to broadcast against x0, in the precision of u."""
        return self._shaped(self._known_process.log_snr(self.u), self.u.dtype)

    @property
    def r_time(self) -> Tensor:
        """The model's time input for `r`."""
        if self.r is None:
            raise ValueError("this draw is no pair: use the sampler `pairs`, as in pairs:of=(logit_normal:mean=-0.4)")
        return self._known_process.time(self.r)

    @cached_property
    def _scales(self) -> tuple[Tensor, Tensor]:
        return self._known_process.scales(self.u)

    @property
    def _known_process(self) -> Process:
        if self.process is None:
            raise ValueError("this draw knows no process: alpha, sigma and log_snr are of draws that sample() returned")
        return self.process

    def _shaped(self, per_sample: Tensor, dtype: torch.dtype) -> Tensor:
        return per_sample.to(dtype).view(-1, *[1] * (self.like[0] - 1))

    def effective_sample_size(self) -> Tensor:
        """How many equally weighted samples this batch is worth, as a tensor."""
        return effective_sample_size(self.weight)

    @staticmethod
    def cat(draws: Sequence["Draw"]) -> "Draw":
        """The draws of several micro-batches as one."""
        if not all(isinstance(draw, Draw) for draw in draws):
            raise TypeError("observe() takes what sample() returned, a Draw or a list of them, not its tensors")
        if not draws:
            raise ValueError("no draws were handed over; pass the ones sample() returned")
        if len(draws) == 1:
            return draws[0]
        parts = {name: [getattr(draw, name) for draw in draws] for name in ("u", "time", "weight", "density", "x0", "r")}
        joined: dict[str, Any] = dict.fromkeys(parts)
        joined |= {name: torch.cat(part) for name, part in parts.items() if all(one is not None for one in part)}
        if squares := [draw.mean_square for draw in draws if draw.mean_square is not None]:
            joined["mean_square"] = torch.stack(squares).mean()
        return replace(draws[-1], **joined)


def _joined(losses: Any) -> Tensor:
    """The losses of several micro-batches as one tensor."""
    parts = list(losses) if isinstance(losses, Iterable) and not isinstance(losses, str) else []
    if parts and all(isinstance(one, Tensor) for one in parts):
        return torch.cat([torch.atleast_1d(one) for one in parts])
    of = next((f" of {type(one).__name__}" for one in parts if not isinstance(one, Tensor)), "")
    raise TypeError(
        "losses must be a tensor, one loss a sample, or with gradient accumulation a list of such tensors, got "
        f"{type(losses).__name__}{of}: hand over losses.detach(), without .tolist(), .item() or .numpy()"
    )


def fine_grid(process: Process, device: torch.device | str) -> Tensor:
    """Points to take means over u at: evenly spaced, and as many in each timestep as in any other."""
    steps = process.steps or 1
    return middles(steps * -(-GRID // steps), device)


class Sampler(KeepsPrecision):
    """Draws noise levels. `density` and `quantile`, or a `table`, define it; `feedback` lets it learn.

    Args:
        process: the noising process.
        table: the density as a histogram, or as masses of equal intervals of u, instead of `density` and `quantile`.
        correction: "none", "unbiased", "clipped(c)" or "tempered(p)"; "target" too for samplers that learn.
        draws: "independent"; "stratified" (one draw in each n-th of the probability, split over ranks); "antithetic"
            (pairs v and 1 - v). Every single draw has density q in all three.
        seed: determines every draw, together with step, micro-batch and rank.
    """

    constant = True  # the density never changes: no learning, no dependence on the step
    conditional = False  # the density depends on the data
    probes = False  # it evaluates the model, so it needs loss_at
    wants_model = False  # it differentiates the model or looks ahead, so it needs to be shown it
    has_target = False  # it learns what reduces some objective, and knows the weights of that one
    comes_with: type[Weighting] | None = None  # the loss weight of the published method, which a spec takes if it names none
    _looked = False  # at the range of a draw
    _to_enter = False  # observe() was called, and its block has not begun

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "__init__" in vars(cls):
            cls.__init__ = begun_on_cpu(cls.__init__)  # type: ignore[method-assign]

    @begun_on_cpu
    def __init__(
        self,
        process: Process,
        *,
        table: Histogram | Tensor | None = None,
        correction: str | Correction = "none",
        draws: str = "independent",
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_process(process)
        self.process = process
        self.correction = Correction.parse(correction)
        if self.correction.kind == "target" and not self.has_target:
            raise ValueError(f"{type(self).__name__} has no target: correction=target is for samplers that learn, as adaptive")
        self.table = Histogram(table, persistent=False) if isinstance(table, Tensor) else table
        self._numbers = Numbers(draws)
        self.seed = checked_seed(seed)
        self.step = 0  # optimizer steps observed
        self.micro = 0  # batches drawn since the last observed step
        self._mean_weight: Tensor | None = None
        self.register_buffer("_anchor", torch.empty(0, dtype=torch.float32), persistent=False)  # knows the device

    # What a method defines ------------------------------------------------------------------------------------------

    def density(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        """q(u) for each u (given x0, if the density depends on the data)."""
        return self._table().density(u)

    def quantile(self, v: Tensor, x0: Tensor | None = None) -> Tensor:
        """u for uniform numbers v in [0, 1], such that u has the density q."""
        return self._table().draw(v)[0]

    def _table(self) -> Histogram:
        if self.table is None:
            raise NotImplementedError(f"{type(self).__name__} needs density() and quantile(), or a table")
        return self.table

    def marginal(self, u: Tensor, x0: Tensor | None = None) -> Tensor:
        """q(u) averaged over the data `x0`, for plots; equal to `density` if that does not depend on the data."""
        if x0 is None or not self.conditional:
            return self.density(u)
        return torch.stack([self.density(u, row.expand(len(u), *row.shape)) for row in x0[:64]]).mean(0)

    def feedback(self, draw: Draw, losses: Tensor | None, loss_at: LossAt | None) -> AbstractContextManager[None]:
        """A context manager around the optimizer step; learning samplers override it."""
        return nullcontext()

    def wants_mean_square(self) -> bool:
        """Whether `feedback` learns from the data's mean square at this step; by default, whether that of a part does."""
        return any(part.wants_mean_square() for part in self._parts())

    def attach(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> "Sampler":
        """Give the sampler the model and its optimizer, for samplers that differentiate the model or look ahead."""
        for part in self._parts():
            part.attach(model, optimizer)
        return self

    # What the training loop calls -----------------------------------------------------------------------------------

    @torch.inference_mode(False)  # what is moved or made here will be trained with
    @torch.no_grad()
    def sample(self, x0: Tensor | int, *, generator: torch.Generator | None = None) -> Draw:
        """Draw one noise level for each sample of the batch `x0`, or for a number of samples on the sampler's own device."""
        if not isinstance(x0, Tensor | int):
            raise TypeError(
                f"sample() takes the data x0, a tensor, or the number of samples, got {type(x0).__name__}: pick the data out "
                "of the batch first, such as x0 = batch[0] or batch['images']"
            )
        n, device = (x0, self.device) if isinstance(x0, int) else (len(x0) if x0.ndim else 0, x0.device)
        if n < 1:
            raise ValueError("cannot draw timesteps for an empty batch; drop empty batches before sampling")
        data = None if isinstance(x0, int) else x0
        if self._to_enter:
            self._to_enter = False
            raise RuntimeError(
                "observe(...) was called, but not entered, so nothing was learned: write `with sampler.observe(...):` around "
                "optimizer.step()"
            )
        if self.device != device:
            self.to(device)
        u, density, weight = self._draw(self._uniforms(n, device, generator), data)
        if not self._looked:  # at all of them would mean to wait for a GPU at every step
            self.check_drawn(u)
            self._looked = visible(u, wait=True)
        second = self._second(u, generator)
        square = self._mean_square(data, device) if self.wants_mean_square() else None
        self.micro += 1
        if self.micro == FORGOTTEN and not self.constant:
            warnings.warn(
                f"{FORGOTTEN} batches were drawn from {type(self).__name__} and none was observed, so it cannot learn: "
                "attach its recipe to the optimizer, or put `with sampler.observe(draw, losses):` around the step",
                RuntimeWarning,
                stacklevel=2,
            )
        like = (1, torch.float32) if data is None else (data.ndim, data.dtype if data.is_floating_point() else torch.float32)
        return Draw(u, self.process.time(u), weight, density, self._kept(data), n, self.process, like, second, square)

    def observe(
        self, draw: Draw | Sequence[Draw], losses: Tensor | Sequence[Tensor] | None = None, loss_at: LossAt | None = None
    ) -> AbstractContextManager[None]:
        """Put this around `optimizer.step()`, so that the sampler learns from the step.

        Args:
            draw: what `sample` returned; with gradient accumulation a list.
            losses: one loss per sample at draw.u, without draw.weight and without a loss weighting; with gradient
                accumulation a list.
            loss_at: `loss_at(rows, u)` returns losses of rows of the (last) batch at other u.
        """
        self._to_enter = True
        return self._observing(draw, losses, loss_at)

    @contextmanager
    def _observing(
        self, draw: Draw | Sequence[Draw], losses: Tensor | Sequence[Tensor] | None, loss_at: LossAt | None
    ) -> Iterator[None]:
        self._to_enter = False
        one_draw = draw if isinstance(draw, Draw) else Draw.cat(draw)
        one_losses = losses if losses is None or isinstance(losses, Tensor) else _joined(losses)
        if one_losses is not None:
            one_losses = check_per_sample(one_losses, one_draw.u).detach().float()
        with self.feedback(one_draw, one_losses, loss_at):
            yield
        self.advance()

    def advance(self) -> None:
        """Count one optimizer step; `observe` calls it."""
        self.step += 1
        self.micro = 0
        for part in self._parts():
            part.advance()

    # Shared machinery -----------------------------------------------------------------------------------------------

    def _parts(self) -> Iterator["Sampler"]:
        """The samplers that it is made of."""
        return (part for part in self.children() if isinstance(part, Sampler))

    @property
    def draws(self) -> str:
        """How a batch is drawn."""
        return self._numbers.draws

    @property
    def device(self) -> torch.device:
        """Where the sampler's state lives; `sample` moves it to its batch."""
        return self.get_buffer("_anchor").device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Sampler":
        super()._apply(fn, recurse)
        self._mean_weight = None
        return self

    def _uniforms(self, n: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
        """The numbers whose quantiles are drawn."""
        return self._numbers.batch(n, device, generator, self.seed, self.step, self.micro)

    def _draw(self, v: Tensor, x0: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """u, its density and its weight, for uniform numbers v."""
        if x0 is not None:
            self._check_mean_is_known()
        if self.table is not None:  # one look-up gives both
            u, density = self.table.draw(v)
        else:
            u = self.quantile(v, x0)
            density = self.density(u, x0)
        return u, density, self._weight(u, density)

    def _second(self, u: Tensor, generator: torch.Generator | None) -> Tensor | None:
        """The second level of a pair, for samplers that draw pairs."""
        return None

    @staticmethod
    def _mean_square(data: Tensor | None, device: torch.device) -> Tensor:
        return torch.zeros((), dtype=torch.float32, device=device) if data is None else data.detach().float().square().mean()

    def check_drawn(self, u: Tensor) -> None:
        """An error, which names the sampler, if it has left [0, 1]."""
        try:
            check_range(u, wait=True)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__} drew what is no noise level: {error}") from None

    # What `draw.weight` is made of: samplers/correction.py has the formula ----------------------------------------------

    def _weight(self, u: Tensor, density: Tensor, cells: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """`draw.weight` of draws with this density; `cells` are those of `_cells`, if it is not the sampler's own density."""
        return self.correction.weight(
            density,
            target=lambda: self.target_weight(u),
            mean=lambda: self._mean_raw(density.device) if cells is None else self.correction.mean(*cells),
        )

    def target_weight(self, u: Tensor) -> Tensor:
        """t(u) of `correction=target`: w_target / w_loop, scaled so that its product with w_loop keeps w_loop's mean."""
        raise NotImplementedError

    def _mean_raw(self, place: torch.device) -> Tensor:
        if self._mean_weight is None or not self.constant:
            self._mean_weight = self.correction.mean(*self._cells(place))
        return self._mean_weight

    def _cells(self, place: torch.device) -> tuple[Tensor, ...]:
        """Intervals to take the mean weight over: their masses and densities, and what the masses sum to if that is not 1."""
        if self.table is not None:
            return self.table.mass, self.table.rows[:, 4]
        density = self.density(fine_grid(self.process, place))
        return density, density, density.sum()

    def _check_mean_is_known(self) -> None:
        """An error if weights have to be divided by a mean that is another for each sample."""
        if self.conditional and self.correction.needs_mean:
            raise ValueError(
                f"{self.correction} weights are divided by their mean, which {type(self).__name__} does not know for each "
                "sample, and its density depends on the data: use correction=unbiased or none, or policy=global"
            )

    # State ----------------------------------------------------------------------------------------------------------

    def _kept(self, x0: Tensor | None) -> Tensor | None:
        return None

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.step, self.micro, self.seed], dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: Tensor) -> None:
        self.step, self.micro, self.seed = (int(value) for value in state)
        self._mean_weight = None
