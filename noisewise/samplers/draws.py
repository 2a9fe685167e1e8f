"""The uniform numbers of a batch, whose quantiles a sampler draws: independent, in strata, or in pairs.

They are functions of (seed, step, micro-batch, rank, index): nothing to advance, save or disturb. All three ways leave the
marginal of every single number uniform.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from noisewise import distributed
from noisewise.streams import bits, stream_key, uniform_of, uniforms

DRAWS = ("independent", "stratified", "antithetic")
AHEAD, MOST = 32, 2**16  # steps whose numbers are made at once, and numbers: a GPU makes as many as fast as a few


@dataclass(frozen=True)
class Ahead:
    """Numbers of some steps, a row each; a copy of the sampler makes its own."""

    whose: tuple[Any, ...] = ()
    steps: range = range(0)
    made: Tensor | None = None

    def __reduce__(self) -> tuple[type["Ahead"], tuple[()]]:
        return Ahead, ()


class Numbers:
    """Uniform numbers, made for some steps at once where batches are of one size.

    Args:
        draws: "independent"; "stratified" (one in each n-th of [0, 1], split over ranks); "antithetic" (pairs v and 1 - v).
    """

    def __init__(self, draws: str) -> None:
        if draws not in DRAWS:
            raise ValueError(f"unknown draws {draws!r}: choose one of {', '.join(DRAWS)}")
        self.draws = draws
        self._ahead = Ahead()

    def batch(
        self, n: int, device: torch.device, generator: torch.Generator | None, seed: int, step: int, micro: int
    ) -> Tensor:
        """n of them: those of the seed, step and micro-batch, or of a generator."""
        steps = range(step, step + 1)
        if generator is not None:
            numbers = torch.rand(2, n, generator=generator, device=generator.device, dtype=torch.float32)
            v, order = numbers.clamp_(min=2.0**-24).to(device)[:, None]
            return self._arranged(v, order, seed, steps, micro)[0]
        traced = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None  # numbers may not be real
        if micro or traced:  # accumulated or for validation
            return self._made(n, device, seed, steps, micro)[0]
        ahead, whose = self._ahead, (n, device, seed, distributed.rank(), distributed.world_size())
        if ahead.whose != whose or step not in ahead.steps:
            if ahead.whose == whose:  # not in buckets of several sizes
                steps = range(step, step + max(1, min(AHEAD, MOST // n)))
            self._ahead = ahead = Ahead(whose, steps, self._made(n, device, seed, steps, micro))
        assert ahead.made is not None
        return ahead.made[step - ahead.steps.start].clone()  # the caller's to change

    def _made(self, n: int, device: torch.device, seed: int, steps: range, micro: int) -> Tensor:
        rank = distributed.rank()
        keys = [stream_key(seed, step, micro, rank, 0) for step in steps]
        random = bits(keys, 2 * n if self._together(n) else n, device)
        return self._arranged(uniform_of(random[:, :n]), random[:, n:], seed, steps, micro)

    def _together(self, n: int) -> bool:
        """Whether they are made with an eye on each other."""
        alone = n == 1 and (self.draws != "stratified" or distributed.world_size() == 1)
        return self.draws != "independent" and not alone

    def _arranged(self, v: Tensor, order: Tensor, seed: int, steps: range, micro: int) -> Tensor:
        """Independent numbers, a row for each step, spread as `draws` says and shuffled by the ranks of others."""
        rank, world, n = distributed.rank(), distributed.world_size(), v.shape[1]
        if not self._together(n):
            return v
        if self.draws == "antithetic":
            half = n // 2
            v = torch.cat([v[:, :half], 1 - v[:, :half], v[:, 2 * half :]], 1)
        else:
            if world > 1:  # interval i of n is cut into one part a rank; which rank gets which is drawn alike on all ranks
                keys = [stream_key(seed, step, micro, -1, 1) for step in steps]
                turn = (uniforms(keys, n, v.device) * world).long()
                v = ((turn + rank) % world + v) / world
            v = ((torch.arange(n, device=v.device) + v) / n).clamp(2.0**-24, 1 - 2.0**-24)
        return v.gather(1, order.argsort(1))
